"""Origins: the fold, with the request that computed each hashed block and those that share it.

Requests that have ended are forgotten, so that a long trace is followed in bounded memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nvtrace import events as ev
from nvtrace.replay import InconsistentTraceError, StepFold, inconsistency

if TYPE_CHECKING:
    from nvtrace.replay import State


class NotInTraceError(ValueError):
    """The trace does not have the request or the step that is asked for."""


@dataclass(slots=True)
class Sources:
    """Where a request's blocks came from at its admission."""

    num_shared: int = 0
    shared_with: set[int] = field(default_factory=set)
    num_revived: int = 0
    left_by: set[int] = field(default_factory=set)
    num_new: int = 0
    event_ids: list[int] = field(default_factory=list)


class BlockOrigins(StepFold):
    """The state after each event, and the requests that computed or share a block.

    Attributes:
        released: of the last BLOCKS_RELEASE, for each request: how many blocks it released, and the
            requests that still use some of them.
    """

    def __init__(self) -> None:
        super().__init__(forgets_ended=True)
        self.released: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._hashed_by: dict[int, int] = {}  # hashed block -> the request that computed it

    @override
    def apply(self, event: ev.AnyEvent) -> None:
        """Take in one event.

        Raises:
            InconsistentTraceError: it cannot follow from those before it.
        """
        super().apply(event)
        match event:
            case ev.BlocksHash():
                for seq_id, block_ids in zip(event.seq_ids, event.block_ids, strict=True):
                    self._hashed_by.update(dict.fromkeys(block_ids, seq_id))
            case ev.BlocksRelease():
                self.released = {}
                for seq_id, held, freed in zip(
                    event.seq_ids, event.block_ids, event.freed, strict=True
                ):
                    kept = self._holders({*held} - {*freed})
                    self.released[seq_id] = len(held), tuple(sorted(kept))

    def note_sources(self, event: ev.AnyEvent, seq_id: int, sources: Sources) -> None:
        """Add the blocks that `seq_id` gets by an event that is not yet applied."""
        if not isinstance(event, ev.BlocksShare | ev.BlocksRevive | ev.BlocksAllocate):
            return
        if seq_id not in event.seq_ids:
            return
        block_ids = event.block_ids[event.seq_ids.index(seq_id)]
        sources.event_ids.append(event.event_id)
        match event:
            case ev.BlocksShare():
                sources.num_shared += len(block_ids)
                sources.shared_with |= self._holders(set(block_ids))
            case ev.BlocksRevive():
                sources.num_revived += len(block_ids)
                hashed_by = self._hashed_by
                sources.left_by |= {hashed_by[block] for block in block_ids if block in hashed_by}
            case ev.BlocksAllocate():
                sources.num_new += len(block_ids)

    def _holders(self, block_ids: set[int]) -> set[int]:
        """The running requests that hold any of the blocks."""
        return {
            seq_id
            for seq_id in self.state.running
            if not block_ids.isdisjoint(self.state.sequences[seq_id].block_table)
        }


def rows_of(schedule: ev.Schedule) -> tuple[list[int], list[int]]:
    """The batch in two: requests that decode, and those that compute (a chunk of) a prompt."""
    match schedule:
        case ev.ScheduleDecode():
            return schedule.seq_ids, []
        case ev.ScheduleMixed():
            num_decodes = schedule.num_decodes
            return schedule.seq_ids[:num_decodes], schedule.seq_ids[num_decodes:]
    return [], schedule.seq_ids


def whole_need(stop: ev.AdmissionStop, state: State) -> int | None:
    """What the queue's head would need without the prefix cache.

    None if the cache has nothing of it, or if it needs neither blocks nor tokens.
    """
    num_tokens = len(state.sequences[stop.seq_id].token_ids)
    match stop.reason:
        case "no_blocks":
            whole = -(-num_tokens // max(state.block_size, 1))
        case "token_budget" | "chunk_not_first":
            whole = num_tokens
        case _:
            return None
    return whole if whole > stop.need else None


def given_back(event: ev.Preempt, released: tuple[int, tuple[int, ...]] | None) -> dict[str, Any]:
    """The fields about blocks of a link about a preemption.

    Args:
        event: the preemption.
        released: the preempted request's entry in `BlockOrigins.released`.
    """
    num_held, kept_by = released or (event.num_blocks_freed, ())
    num_freed = event.num_blocks_freed
    return {"num_blocks_held": num_held, "num_blocks_freed": num_freed, "kept_by": kept_by}


def idle_reason(schedule: ev.Schedule) -> str:
    """Why a running request is not in the batch."""
    return "prefills_first" if isinstance(schedule, ev.SchedulePrefill) else "token_budget"


class EventErrors:
    """Turns an error in a `with` block about an event into an InconsistentTraceError.

    (A generator with @contextmanager would take four times as long, for each event of a trace.)
    """

    def __init__(self, event: ev.Event) -> None:
        self._event = event

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, InconsistentTraceError):
            return
        if isinstance(error, KeyError | IndexError | ValueError):
            raise InconsistentTraceError(inconsistency(self._event, error)) from error
