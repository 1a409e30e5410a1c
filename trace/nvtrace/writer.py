"""TraceWriter: numbers events and writes them, with the header and the footer.

During a step it only keeps (event, time, phase); `drain` fills in the envelope of each event and
sends it through the pipeline (`pipeline.py`). So a step is slowed down little, and events that come
before it is known whether the step is a prefill or a decode get the right phase.

If an event cannot be built, processed or encoded, only that event is lost: its number is missing in
the trace, and the first loss is reported. Whatever is raised, `close` ends the trace with a footer.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections import deque
from datetime import UTC, datetime
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import force_setattr

from nvtrace.envelope import Footer, Header, can_encode
from nvtrace.environment import version_of
from nvtrace.events import BlocksOfSeqs, Event, Phase, tag_of
from nvtrace.pipeline import Sink, make_emit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from structlog.typing import Processor

Exit = Literal["ok", "error", "interrupted"]
_NUM_ENVELOPE_FIELDS = len(Event.__struct_fields__)


@cache
def _version_of(package: str) -> str:
    """As `version_of`, but looked up once in this process: it reads files."""
    return version_of(package) or "unknown"


def text_of(error: BaseException) -> str:
    """Return the message of `error`, even if its __str__ fails."""
    try:
        return str(error)
    except Exception as inner:  # noqa: BLE001 - it may raise anything
        return f"(its message cannot be read: {type(inner).__name__})"


class TraceWriter:
    """Writes one trace.

    Args:
        sink: where the lines go.
        processors: structlog processors in front of the encoding one.
        tap: called with the events of each drain, after they are written.
        clock: in nanoseconds; the trace begins now.

    Attributes:
        step: the number of the current step; None between steps.
        batch_phase: the phase of that step's batch.
        num_events: events so far, including dropped and lost ones.
        num_dropped: events that a processor dropped.
        num_lost: events that could not be written.
        has_header: was the header written?
        tap_error: the first error that the tap raised.
        run_id: of the run, for the header. All ranks of a run have the same.
    """

    def __init__(
        self,
        sink: Sink,
        processors: Iterable[Processor] = (),
        tap: Callable[[list[Event]], None] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.sink = sink
        self.step: int | None = None
        self.batch_phase: Literal["prefill", "decode", "mixed"] = "prefill"
        self.num_events = self.num_dropped = self.num_lost = 0
        self.has_header = False
        self.run_id = uuid.uuid4().hex
        processors = tuple(processors)
        self._is_filtered = bool(processors)
        self._emit = make_emit(sink, processors)
        self._tap = tap
        self._notes: deque[tuple[Event | None, int, Phase | None]] = deque()
        self.tap_error: Exception | None = None
        self._is_closed = False
        self._is_late = False
        self._lock = RLock()  # a thread may close the trace while an engine in another one writes
        self._clock, self._anchor = clock, clock()
        self._anchor_unix = time.time_ns()

    def now(self) -> int:
        """Nanoseconds since the trace began."""
        return self._clock() - self._anchor

    def add(self, event: Event | None, phase: Phase | None = None) -> int:
        """Keep an event, built by `nvtrace.events.new`, until the next drain.

        Args:
            event: its lists must not change any more. None if it could not be built.
            phase: None means that of the step's batch.

        Returns:
            Its time.
        """
        now = self._clock() - self._anchor
        if not self._is_closed:
            self._notes.append((event, now, phase))
        else:
            self._say_once(
                "the trace is closed; it does not record what the engine does from now on"
            )
        return now

    def add_joined(self, event: BlocksOfSeqs, phase: Phase | None = None) -> None:
        """Keep a block operation of one sequence; merge it into the last event of the same kind."""
        last = self._notes[-1][0] if self._notes else None
        if not isinstance(last, BlocksOfSeqs) or type(last) is not type(event):
            self.add(event, phase)
            return
        is_same_seq = last.seq_ids[-1] == event.seq_ids[0]
        for name in event.__struct_fields__[_NUM_ENVELOPE_FIELDS:]:
            rows, more = getattr(last, name), getattr(event, name)
            if not is_same_seq:
                rows += more
            elif name != "seq_ids":
                rows[-1] += more[0]

    def _say_once(self, why: str) -> None:
        if not self._is_late:
            self._is_late = True
            self.sink.report(why)

    def drain(self) -> None:
        """Number and write all kept events, flush, and call the tap."""
        if self.sink.is_forked:
            self._notes.clear()
            self._say_once(
                "this process is a fork, and the trace is its parent's: nothing is recorded here"
            )
            return
        with self._lock:
            events = [] if self._is_closed else self._write_notes()
            if events:
                self.sink.flush()
        if events and self._tap is not None:
            try:
                self._tap(events)
            except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on
                self._report_tap(error)

    def _report_tap(self, error: Exception) -> None:
        if self.tap_error is None:
            self.tap_error = error
            self.sink.report(
                f"what watches the trace raised {type(error).__name__}: {text_of(error)}; the run "
                "goes on, and the trace is complete; later errors of it are not shown"
            )

    def close(self, exit_: Exit, error_type: str | None = None) -> None:
        """Drain, write the footer, close the file. A second call, or a fork's, does nothing."""
        if self.sink.is_forked:  # before the lock, which a thread of the parent may hold
            return
        with self._lock:
            if self._is_closed:
                return
            try:
                if not self.has_header:
                    self.write_header({}, {})
                self.drain()
            finally:  # the tap may raise KeyboardInterrupt, a processor CancelledError
                self._end(exit_, error_type)

    def _end(self, exit_: Exit, error_type: str | None) -> None:
        self._is_closed = True
        self.num_events += len(self._notes)  # left after an interrupt: their numbers are missing
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
        events: list[Event] = []
        notes, emit, step = self._notes, self._emit, self.step
        while notes:  # a note is removed after it is written, so that an interrupt loses none
            event, ts_ns, phase = notes[0]
            if event is None:
                notes.popleft()
                self.num_events += 1
                continue
            force_setattr(event, "event_id", self.num_events + 1)
            force_setattr(event, "ts_ns", ts_ns)
            force_setattr(event, "step", step)
            force_setattr(event, "phase", phase or self.batch_phase)
            try:
                is_written = emit(event)
            except KeyboardInterrupt:  # not the note's fault: keep it
                raise
            except BaseException as error:
                notes.popleft()
                self.num_events += 1
                self._lose(tag_of(event), error)
                if not isinstance(error, Exception):  # CancelledError, SystemExit
                    raise
            else:
                self.num_events += 1
                self.num_dropped += not is_written
                notes.popleft()
                events.append(event)
        return events

    def _write_frame(self, record: Header | Footer) -> None:
        try:
            self._emit(record)
        except BaseException as error:  # from a processor; the file needs this record
            self._lose("what a processor returned for the header or footer", error)
            self.sink.take(record)
            if not isinstance(error, Exception):
                raise

    def _lose(self, what: str, error: BaseException) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            self.sink.report(
                f"{what} cannot be written and is missing in the trace "
                f"({type(error).__name__}: {text_of(error)}); the run goes on"
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
        """Write the first line; `gpu` is the name of the GPU, if there is one."""
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
                engine={"name": "nanovllm", "version": _version_of("nanovllm")},
                environment={
                    "python": platform.python_version(),
                    "torch": _version_of("torch"),
                    "platform": platform.system(),
                    "machine": platform.machine(),
                    "num_cpus": os.cpu_count(),
                }
                | ({} if gpu is None else {"gpu": gpu, "triton": _version_of("triton")}),
                model=self._encodable(model),
                config=self._encodable(config),
                is_filtered=self._is_filtered,
            )
        )
