"""Snapshots: start the fold of a large trace near any step, not at its beginning.

The state at step 90,000 is a fold over all events before it. To do this only once, the first call
writes an index beside a large trace: a snapshot of the state every few megabytes, and its offset in
the file. Each later call folds from the last snapshot before its step.

    trace.jsonl              1 GB
    trace.jsonl.nvindex      see `nvindex.py`

An index is used if its digest is right and if the trace still has the size and modification time
that the index records; else it is written again. A trace smaller than SPACING_BYTES needs none. A
compressed trace, or one in a folder that cannot be written to, is read from its start each time.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import OrderedDict
from io import BufferedReader, FileIO
from typing import TYPE_CHECKING, cast

import msgspec
from typing_extensions import override

from nvtrace import events as ev
from nvtrace.at import StepPoint, matches, moments
from nvtrace.envelope import decode
from nvtrace.nvindex import SnapshotEntry, SnapshotIndex, pack, read_index, unpack, write_index
from nvtrace.reader import UnreadableTraceError, read_trace
from nvtrace.replay import SequenceState, State
from nvtrace.unpack import is_packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from nvtrace.at import Moment, Point
    from nvtrace.envelope import Header, Record
    from nvtrace.query import Condition

SPACING_BYTES = 4 * 2**20
_SNAPSHOTS_APART = 4  # times their own size, so that the index stays smaller than the trace


class NoSuchStepError(ValueError):
    """The trace does not have the step, or not this moment of it."""


class _Saved(msgspec.Struct, frozen=True):
    """A state between two steps, as an index keeps it. Ended requests are left out."""

    engine_step: int
    block_size: int
    num_blocks: int
    waiting: list[int]
    running: list[int]
    ref_counts: list[int]
    free_blocks: list[int]
    block_hashes: dict[int, str]
    sequences: list[SequenceState]


def save_state(state: State) -> bytes:
    """A state between two steps as bytes; ended requests are left out."""
    return msgspec.msgpack.encode(
        _Saved(
            state.engine_step,
            state.block_size,
            state.num_blocks,
            state.waiting,
            state.running,
            state.ref_counts,
            list(state.free_blocks),
            state.block_hashes,
            [seq for seq in state.sequences.values() if seq.status != "FINISHED"],
        )
    )


def load_state(data: bytes) -> State:
    """The state that `save_state` encoded."""
    saved = msgspec.msgpack.decode(data, type=_Saved)
    state = State()
    state.engine_step, state.block_size = saved.engine_step, saved.block_size
    state.num_blocks, state.ref_counts = saved.num_blocks, saved.ref_counts
    state.waiting, state.running = saved.waiting, saved.running
    state.free_blocks = OrderedDict.fromkeys(saved.free_blocks)
    state.block_hashes = saved.block_hashes
    state.cached_blocks = {chain_hash: block for block, chain_hash in saved.block_hashes.items()}
    state.sequences = {seq.seq_id: seq for seq in saved.sequences}
    return state


class SeekableTrace:
    """A trace whose state at any step can be asked for.

    Args:
        path: of the trace.
        warn: called with each warning when the whole trace is read.
        watch: called with the number of bytes read so far when the whole trace is read.
        spacing_bytes: the distance between snapshots; SPACING_BYTES if None.
        index_folder: the folder of the index; the trace's if None.
        name: what messages call the trace; None for its path.

    Attributes:
        index_path: the path of its index, if it has one.
        has_made_index: was the index written just now?
    """

    def __init__(
        self,
        path: Path,
        *,
        warn: Callable[[str], None] | None = None,
        watch: Callable[[int], None] | None = None,
        spacing_bytes: int | None = None,
        index_folder: Path | None = None,
        name: str | None = None,
    ) -> None:
        self.path = path
        self.name = path.name if name is None else name
        self._full_name = path if name is None else name
        self.index_path = (index_folder or path.parent) / f"{path.name}.nvindex"
        self._warn = warn
        self._watch = watch
        self._spacing_bytes = SPACING_BYTES if spacing_bytes is None else spacing_bytes
        self._entries = [SnapshotEntry(0, 0)]
        self._last_step: int | None = None  # None: not known yet
        self.has_made_index = False
        is_large = path.is_file() and path.stat().st_size > self._spacing_bytes
        if is_large and not is_packed(path):
            index = self._index()
            self._entries, self._last_step = index.entries, index.last_step

    def at(self, step: int | None, point: Point) -> Moment:
        """The state at a moment of a step.

        Args:
            step: the engine_step; None for the last.
            point: the moment of that step.

        Raises:
            NoSuchStepError: no such step; the message gives those that there are.
            UnreadableTraceError, NewerTraceError, InconsistentTraceError: see `read_trace`.
        """
        if step is None:
            step = self._last_step or self._find_last_step()
        wanted = StepPoint(step, point)
        last_step = 0
        for moment in self._moments(self.segment_of(step), inputs_of=step):
            last_step = moment.step
            if StepPoint(moment.step, moment.point) == wanted:
                return moment
            if last_step > step:
                break
        if last_step < step:
            raise NoSuchStepError(f"{self.name} has no step {step}: {self._extent()}")
        raise NoSuchStepError(
            f"step {step} of {self.name} has no schedule: it failed before it"
            if point == "schedule"
            else f"{self.name} has no step {step}: {self._extent()}"
        )

    def find(
        self,
        condition: Condition,
        *,
        step: int | None = None,
        point: Point | None = None,
        is_backwards: bool = False,
        watch: Callable[[int], None] | None = None,
    ) -> StepPoint | None:
        """The first place from `step` on where a condition holds; None if there is none.

        Args:
            condition: the condition.
            step: the first step to search, itself included; None for the trace's start, or its end.
            point: look at this moment of each step only.
            is_backwards: search the steps before, the nearest first.
            watch: called with each step that is searched. An exception of it ends the search.

        Raises:
            UnreadableTraceError, NewerTraceError, InconsistentTraceError: see `read_trace`.
        """
        if not is_backwards:
            first = step or 0
            seen = _watched(self._moments(self.segment_of(first)), watch)
            found = matches(seen, condition, point)
            return next((place for place in found if place.step >= first), None)
        for number in reversed(range(self.segment_of(step) + 1)):
            hit = None
            seen = _watched(self._moments(number, is_whole=False), watch)
            for place in matches(seen, condition, point):
                if step is not None and place.step > step:
                    break
                hit = place
            if hit is not None:
                return hit
        return None

    @property
    def header(self) -> Header:
        """The trace's header."""
        return cast("Header", next(read_trace(self.path)))

    # -- segments: from one snapshot to the next -------------------------------------------------

    @property
    def num_segments(self) -> int:
        """Number of parts between snapshots, a few megabytes each."""
        return len(self._entries)

    def segment_of(self, step: int | None) -> int:
        """The number of the segment that a step is in; None stands for the trace's end."""
        if step is None:
            return len(self._entries) - 1
        return max(bisect_left(self._entries, step, key=lambda entry: entry.step) - 1, 0)

    def segment(self, number: int) -> tuple[State, Iterator[Record]]:
        """The state at the beginning of a segment, and its records.

        Raises:
            UnreadableTraceError: the index was changed. Reading the records raises what
                `read_trace` raises.
        """
        if len(self._entries) == 1:
            warn, self._warn = self._warn, None  # warn only once
            return State(), read_trace(self.path, warn=warn, name=self._full_name)
        entry = self._entries[number]
        is_last = number + 1 == len(self._entries)
        stop = None if is_last else self._entries[number + 1].offset
        state = self._read_state(entry) if number else State()
        return state, _records_between(self.path, entry.offset, stop)

    def _moments(
        self, number: int, *, inputs_of: int | None = None, is_whole: bool = True
    ) -> Iterator[Moment]:
        """The moments of a segment, or of all from there to the trace's end."""
        state, records = self.segment(number)
        if is_whole and number + 1 < len(self._entries):
            records = _records_between(self.path, self._entries[number].offset, None)
        yield from moments(records, state, inputs_of=inputs_of)

    def _find_last_step(self) -> int:
        last_step = 0
        for moment in self._moments(len(self._entries) - 1):
            last_step = moment.step
        self._last_step = last_step
        if not last_step:
            raise NoSuchStepError(f"{self.name} has no steps")
        return last_step

    def _extent(self) -> str:
        first = next((moment.step for moment in self._moments(0)), None)
        if first is None:
            return "it has none"
        return f"it has steps {first} to {self._last_step or self._find_last_step()}"

    # -- the index -------------------------------------------------------------------------------

    def _read_state(self, entry: SnapshotEntry) -> State:
        try:
            return load_state(unpack(self.index_path, entry, self.path.stat().st_size))
        except (OSError, zlib.error, msgspec.MsgspecError) as error:
            raise UnreadableTraceError(
                f"{self.index_path} was changed while it was read ({error}): start again"
            ) from error

    def _index(self) -> SnapshotIndex:
        """The index beside the trace, or else a new one."""
        index = read_index(self.index_path)
        if index is not None and index.fits(self.path):
            return index
        index = write_index(self.index_path, self._write_snapshots)
        self.has_made_index = index is not None
        return index or SnapshotIndex(0, 0, 0, [SnapshotEntry(0, 0)])  # always read from the start

    def _write_snapshots(self, index: BinaryIO) -> SnapshotIndex:
        """Fold the whole trace, and write its snapshots into the index file."""
        status = self.path.stat()
        entries, last_step, next_offset = [SnapshotEntry(0, 0)], 0, self._spacing_bytes
        with _LineByLine(FileIO(self.path)) as file:
            reading = _Reading(file, self._watch, self._full_name)
            for moment in moments(reading.records(self._warn)):
                last_step = moment.step
                is_entry = moment.point == "end" and reading.is_between_steps
                if not is_entry or reading.offset < next_offset:
                    continue
                snapshot = save_state(moment.state)
                entries.append(pack(snapshot, index, moment.step, reading.offset))
                apart = max(self._spacing_bytes, _SNAPSHOTS_APART * len(snapshot))
                next_offset = reading.offset + apart
        return SnapshotIndex(status.st_size, status.st_mtime_ns, last_step, entries)


class _LineByLine(BufferedReader):
    """A file that is read line by line, so that `tell()` is the end of the last record."""

    @override
    def read1(self, size: int = -1, /) -> bytes:
        return self.readline(size)


class _Reading:
    """Reads a whole trace, and knows the offset of each record.

    Attributes:
        offset: where the last record begins.
        is_between_steps: is the record before it the end of a step?
    """

    def __init__(
        self, file: BinaryIO, watch: Callable[[int], None] | None, name: Path | str
    ) -> None:
        self._file = file
        self._name = name
        self._watch = watch
        self.offset = 0
        self.is_between_steps = False

    def records(self, warn: Callable[[str], None] | None) -> Iterator[Record]:
        end = 0
        last: Record | None = None
        for record in read_trace(self._file, warn=warn, name=self._name):
            self.offset, end = end, self._file.tell()
            # After a step that failed, the fold holds more than a snapshot keeps.
            self.is_between_steps = isinstance(last, ev.StepEnd)
            if self._watch is not None:
                self._watch(end)
            yield record
            last = record
        self.is_between_steps = False  # the last record was folded as well


def _records_between(path: Path, start: int, stop: int | None) -> Iterator[Record]:
    """The records of a part of a trace, without the warnings that the first reading gave."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if stop is not None and start >= stop:
                return
            start += len(line)
            if not line.endswith(b"\n"):
                return  # a cut last line: the first reading warned of it
            if line.strip():
                try:
                    yield decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise UnreadableTraceError(
                        f"{path} has changed since it was read: byte {start - len(line)} is no "
                        f"longer the start of a record ({error})"
                    ) from error


def _watched(found: Iterator[Moment], watch: Callable[[int], None] | None) -> Iterator[Moment]:
    for moment in found:
        if watch is not None:
            watch(moment.step)
        yield moment
