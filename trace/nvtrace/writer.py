"""TraceWriter: notes now, events later.

Knows the clock, the numbering, the header and the footer. Does not know the engine (`recorder.py`
tells it what to note) or what happens to an event on its way to the file (`pipeline.py`).

During a step it only keeps (struct, time, fields); `drain` builds the events, numbers them and
sends them down the pipeline. So a step is disturbed little, and the phase of what was said before
the step's kind was known (was that page taken for a prefill?) can be filled in.

An event that cannot be built, processed or encoded is lost alone: its number is missing in the
trace, the first one is reported, and nothing of it is left for the next drain. Whatever is raised
meanwhile, `close` ends the trace with a footer.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections import deque
from datetime import UTC, datetime
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nvtrace.envelope import Footer, Header, can_encode
from nvtrace.environment import version_of
from nvtrace.pipeline import Sink, encode, make_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from structlog.typing import Processor

    from nvtrace.events import Event, Phase

Exit = Literal["ok", "error", "interrupted"]


class _Note(NamedTuple):
    """An event to be. `phase` None means: the phase of the step's batch."""

    cls: type[Event]
    ts_ns: int
    phase: Phase | None
    fields: dict[str, Any]


def said(error: BaseException) -> str:
    """Return the message of `error`, whose own __str__ may fail."""
    try:
        return str(error)
    except Exception as inner:  # noqa: BLE001 - anybody's
        return f"(its message cannot be read: {type(inner).__name__})"


class TraceWriter:
    """Writes one trace.

    Args:
        sink: where the lines go.
        processors: structlog processors in front of the encoding one.
        tap: called with the events of each drain, after they are written.

    Attributes:
        step: the engine_step that is under way; None between steps.
        batch_phase: whether that step is a prefill or a decode.
        num_events: events so far, those counted in that are not in the trace.
        num_dropped: events that a processor dropped.
        num_lost: events that could not be written.
        has_header: was the first line written?
        run_id: which run this is, for the header. All ranks of a run have the same.
    """

    def __init__(
        self,
        sink: Sink,
        processors: Iterable[Processor] = (),
        tap: Callable[[list[Event]], None] | None = None,
    ) -> None:
        self.sink = sink
        self.step: int | None = None
        self.batch_phase: Literal["prefill", "decode", "mixed"] = "prefill"
        self.num_events = self.num_dropped = self.num_lost = 0
        self.has_header = False
        self.run_id = uuid.uuid4().hex
        processors = tuple(processors)
        self._is_filtered = bool(processors)
        self._logger = make_logger(sink, processors)
        self._tap = tap
        self._notes: deque[_Note] = deque()
        self._is_closed = False
        self._is_late = False
        self._turn = RLock()  # one thread may close what another one's engine still writes
        self._anchor = time.perf_counter_ns()
        self._anchor_unix = time.time_ns()

    def now(self) -> int:
        """Nanoseconds since the trace began."""
        return time.perf_counter_ns() - self._anchor

    def add(self, cls: type[Event], phase: Phase | None, **fields: Any) -> int:  # noqa: ANN401 - each struct's own fields
        """Note an event. Lists among `fields` must not change any more. Returns its time."""
        now = self.now()
        if not self._is_closed:
            self._notes.append(_Note(cls, now, phase, fields))
        else:
            self._say_once(
                "the trace is closed; it does not record what the engine does from now on"
            )
        return now

    def add_grouped(
        self, cls: type[Event], phase: Phase | None, seq_id: int, **lists: list[Any]
    ) -> None:
        """Note what one sequence did to some pages; the same just after joins the same event.

        Each of `lists` becomes a list of lists: lists[i] is about seq_ids[i].
        """
        if not self._notes or self._notes[-1].cls is not cls:
            self.add(cls, phase, seq_ids=[seq_id], **{name: [[*lists[name]]] for name in lists})
            return
        fields = self._notes[-1].fields
        if fields["seq_ids"][-1] != seq_id:
            fields["seq_ids"].append(seq_id)
            for name in lists:
                fields[name].append([])
        for name, values in lists.items():
            fields[name][-1].extend(values)

    def _say_once(self, why: str) -> None:
        if not self._is_late:
            self._is_late = True
            self.sink.report(why)

    def drain(self) -> None:
        """Build, number and write everything noted; flush; tell the tap."""
        if self.sink.is_forked:
            self._notes.clear()
            self._say_once(
                "this process is a fork, and the trace is its parent's: nothing is recorded here"
            )
            return
        with self._turn:
            events = [] if self._is_closed else self._write_notes()
            if events:
                self.sink.flush()
        if events and self._tap is not None:
            self._tap(events)

    def close(self, exit_: Exit, error_type: str | None = None) -> None:
        """Drain, write the footer, close the file. A second call, or a fork's, does nothing."""
        if self.sink.is_forked:  # before it takes a turn: a thread that is not here may have it
            return
        with self._turn:
            if self._is_closed:
                return
            try:
                if not self.has_header:
                    self.write_header({}, {})
                self.drain()
            finally:  # the tap may fail, a processor may raise CancelledError
                self._end(exit_, error_type)

    def _end(self, exit_: Exit, error_type: str | None) -> None:
        self._is_closed = True
        self.num_events += len(self._notes)  # left by an interruption: their numbers are missing
        try:
            self._write_frame(
                Footer(
                    event_id=self.num_events + 1,
                    num_events=self.num_events,
                    num_dropped=self.num_dropped,
                    exit=exit_,
                    error_type=error_type,
                )
            )
        finally:
            self.sink.close()

    def _write_notes(self) -> list[Event]:
        events = []
        while self._notes:  # a note is dropped when it is written: an interruption loses none
            note = self._notes[0]
            try:
                event = note.cls(
                    event_id=self.num_events + 1,
                    ts_ns=note.ts_ns,
                    step=self.step,
                    phase=note.phase or self.batch_phase,
                    **note.fields,
                )
                is_written = self._logger.emit(event)
            except KeyboardInterrupt:  # it may strike anywhere: the note is not to blame
                raise
            except BaseException as error:
                self._notes.popleft()
                self.num_events += 1
                self._lose(str(note.cls.__struct_config__.tag), error)
                if not isinstance(error, Exception):  # CancelledError, SystemExit
                    raise
            else:
                self.num_events += 1
                self.num_dropped += not is_written
                self._notes.popleft()
                events.append(event)
        return events

    def _write_frame(self, record: Header | Footer) -> None:
        try:
            self._logger.emit(record)
        except BaseException as error:  # a processor's: without it the file is no trace
            self._lose("what a processor returned for the header or footer", error)
            self.sink.write(encode(None, "", {"record": record}))
            if not isinstance(error, Exception):
                raise

    def _lose(self, what: str, error: BaseException) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            self.sink.report(
                f"{what} cannot be written and is missing in the trace "
                f"({type(error).__name__}: {said(error)}); the run goes on"
            )

    def _encodable(self, facts: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in facts.items() if can_encode(value)}
        for name in facts.keys() - kept.keys():
            self._lose(f"the header's {name}", TypeError(f"a {type(facts[name]).__name__}"))
        return kept

    def write_header(
        self,
        config: dict[str, Any],
        model: dict[str, Any],
        rank: int = 0,
        world_size: int = 1,
        gpu: str | None = None,
    ) -> None:
        """Write the first line; `gpu` is the name of the one that computes, if one does."""
        self.has_header = True
        created = datetime.fromtimestamp(self._anchor_unix / 1e9, tz=UTC)
        self._write_frame(
            Header(
                run_id=self.run_id,
                rank=rank,
                world_size=world_size,
                created=created.isoformat(),
                clock={
                    "unit": "ns",
                    "source": "time.perf_counter_ns",
                    "anchor_unix_ns": self._anchor_unix,
                },
                engine={"name": "nanovllm", "version": version_of("nanovllm") or "unknown"},
                environment={
                    "python": platform.python_version(),
                    "torch": version_of("torch") or "unknown",
                    "platform": platform.system(),
                    "machine": platform.machine(),
                    "num_cpus": os.cpu_count(),
                }
                | (
                    {} if gpu is None else {"gpu": gpu, "triton": version_of("triton") or "unknown"}
                ),
                model=self._encodable(model),
                config=self._encodable(config),
                is_filtered=self._is_filtered,
            )
        )
