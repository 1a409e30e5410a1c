"""Progress: the state of a run, from its events as they arrive. `views/live.py` draws it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvtrace import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvtrace.summary import RequestState


@dataclass(slots=True)
class RequestProgress:
    """One request."""

    seq_id: int
    prompt_len: int
    max_tokens: int
    num_tokens: int = 0  # generated
    state: RequestState = "waiting"
    reason: str | None = None  # why it ended


@dataclass(slots=True)
class Progress:
    """A run that is going on.

    Attributes:
        step: the last engine step that ended; 0 before the first.
        free_blocks: free KV blocks; None before the engine is ready.
        began_ns, now_ns: trace time of the first step's beginning and of the last event.
    """

    requests: dict[int, RequestProgress] = field(default_factory=dict)
    step: int = 0
    phase: str | None = None
    waiting_len: int = 0
    running_len: int = 0
    free_blocks: int | None = None
    num_tokens: int = 0
    began_ns: int | None = None
    now_ns: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens by the time since the first step began; None before any."""
        if self.began_ns is None or self.now_ns <= self.began_ns or not self.num_tokens:
            return None
        return self.num_tokens * 1e9 / (self.now_ns - self.began_ns)

    def apply(self, events: Iterable[ev.Event]) -> None:
        """Update from events, given in their order."""
        for event in events:
            self.now_ns = event.ts_ns
            if event.step is not None and self.began_ns is None:
                self.began_ns = event.ts_ns
            self._apply(event)

    def _apply(self, event: ev.Event) -> None:
        match event:
            case ev.EngineReady():
                self.free_blocks = event.num_kvcache_blocks
            case ev.RequestEnqueue():
                self.requests[event.seq_id] = RequestProgress(
                    event.seq_id, event.prompt_len, event.max_tokens
                )
                self.waiting_len += 1
            case ev.SchedulePrefill() | ev.ScheduleDecode() | ev.ScheduleMixed():
                self._schedule(event)
            case ev.SampleTokens():
                self.num_tokens += len(event.seq_ids)
                for seq_id in event.seq_ids:
                    self.requests[seq_id].num_tokens += 1
            case ev.StateTransition():
                self._move(event)
            case ev.StepEnd():
                self.step, self.phase = event.step or self.step, event.batch_phase
                self.waiting_len, self.running_len = event.waiting_len, event.running_len
                self.free_blocks = event.free_blocks
            case ev.EngineReset():
                for seq_id in event.seq_ids:
                    self.requests[seq_id].state = "ended"
                    self.requests[seq_id].reason = "aborted"
                self.waiting_len = self.running_len = 0

    def _schedule(self, event: ev.SchedulePrefill | ev.ScheduleDecode | ev.ScheduleMixed) -> None:
        batch, prefills = set(event.seq_ids), _prefills(event)
        for request in self.requests.values():
            if request.seq_id in batch:
                request.state = "prefill" if request.seq_id in prefills else "decode"
            elif request.state in {"prefill", "decode"}:
                request.state = "idle"

    def _move(self, event: ev.StateTransition) -> None:
        request = self.requests[event.seq_id]
        if event.status == "FINISHED":
            request.state, request.reason = "ended", event.reason
        elif event.status == "WAITING":
            request.state = "preempted"


def _prefills(event: ev.SchedulePrefill | ev.ScheduleDecode | ev.ScheduleMixed) -> set[int]:
    """The requests of a batch whose prompt, or after a preemption whose tokens, are computed."""
    match event:
        case ev.SchedulePrefill():
            return set(event.seq_ids)
        case ev.ScheduleMixed():  # the decodes come first
            return set(event.seq_ids[event.num_decodes :])
    return set()
