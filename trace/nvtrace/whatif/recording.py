"""Recording: what a re-run needs of a trace.

Arrivals and aborts with the step before which they came, the tokens of each request, and the shape
and time of each step. The trace is read once. A step's shape and time are taken at its SCHEDULE_*
and STEP_END, so no grouping into steps is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.envelope import Header
from nvtrace.measure import Measure
from nvtrace.replay import InconsistentTraceError, phase_of
from nvtrace.steptime import StepShape, StepTimes
from nvtrace.whatif.settings import Settings, WhatIfError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvtrace.envelope import Record
    from nvtrace.metrics import RunMetrics


class Decisions:
    """For each step a number that stands for its decision, so that two runs can be compared.

    The number is a hash of the batch, its tokens, the queues' lengths, and what was done to blocks
    since the decision before.

    Attributes:
        numbers: one for each step; they differ from process to process.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._blocks = 0

    def take(self, event: object) -> None:
        """Take in a record."""
        match event:
            case ev.SchedulePrefill() | ev.ScheduleMixed():
                self._decide(event, (*event.num_scheduled_tokens, *event.num_computed_tokens))
            case ev.ScheduleDecode():
                self._decide(event, ())
            case ev.BlocksEvict():
                self._blocks = hash((self._blocks, *event.block_ids))
            case (
                ev.BlocksShare()
                | ev.BlocksRevive()
                | ev.BlocksAllocate()
                | ev.BlocksAppend()
                | ev.BlocksHash()
                | ev.BlocksRelease()
            ):
                blocks = tuple(map(tuple, event.block_ids))
                self._blocks = hash((self._blocks, ev.tag_of(event), *event.seq_ids, blocks))

    def _decide(self, schedule: ev.Schedule, counts: tuple[int, ...]) -> None:
        queues = (schedule.waiting_len, schedule.running_len)
        facts = (schedule.engine_step, tuple(schedule.seq_ids), counts, queues, self._blocks)
        self.numbers.append(hash(facts))


@dataclass(slots=True)
class RecordedOutput:
    """What a request generated.

    Attributes:
        token_ids: its completion.
        finish_reason: why it ended; None if the trace ends before it did.
        text: the completion as text, if the trace has it.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""

    @property
    def is_open(self) -> bool:
        """Did it not finish? A re-run may then need tokens that were not recorded."""
        return self.finish_reason in {None, "aborted"}


@dataclass(frozen=True, slots=True)
class Command:
    """A call from outside, between two steps.

    Attributes:
        before_step: the number of the next step.
        ts_ns: its time.
        event: an arrival, a refusal, an abort, or a reset of the prefix cache; None for the end of
            the trace, which aborts all unfinished requests.
        since_step_ns: time since the last step's end.
        is_idle: were there no requests at that step's end?
    """

    before_step: int
    ts_ns: int
    event: ev.RequestEnqueue | ev.RequestRefused | ev.RequestAbort | ev.BlocksEvict | None
    since_step_ns: int = 0
    is_idle: bool = False


class Recording:
    """A recorded run, ready to be run again.

    Attributes:
        header, init, ready: the records of the engine's start.
        settings: those that decide the schedule.
        commands: all calls from outside, in order.
        answers: the recorded output of each request, by seq_id.
        schedule: `Decisions.numbers`.
        steps: the shape and time of each step.
        metrics: the recorded run's metrics.
    """

    def __init__(
        self, header: Header, init: ev.EngineInit, ready: ev.EngineReady, reader: _Reader
    ) -> None:
        self.header, self.init, self.ready = header, init, ready
        self.settings = Settings.of(init, ready)
        self.commands = reader.commands
        self.answers = reader.answers
        self.schedule = reader.decisions.numbers
        self.steps = reader.steps
        self.metrics: RunMetrics = reader.measure.run()
        self._gaps = reader.gaps

    @property
    def refused(self) -> list[ev.RequestRefused]:
        """The requests that were refused."""
        events = (command.event for command in self.commands)
        return [event for event in events if isinstance(event, ev.RequestRefused)]

    def step_times(self) -> StepTimes:
        """The model of the recorded step times."""
        return StepTimes(self.steps, round(median(self._gaps)) if self._gaps else 0)

    def check(self, settings: Settings) -> None:
        """Refuse settings that need tokens which were not recorded.

        Raises:
            WhatIfError: see above.
        """
        settings.check()
        cut = sum(answer.finish_reason == "max_model_len" for answer in self.answers.values())
        if cut and settings.max_model_len > self.settings.max_model_len:
            raise WhatIfError(
                f"{cut} answers ended at max_model_len={self.settings.max_model_len}, and the "
                "tokens beyond it were not recorded: it can only be lowered"
            )
        longest = self.header.facts.model.max_position_embeddings
        if longest is not None and settings.max_model_len > longest:
            raise WhatIfError(
                f"the model has {longest} positions: max_model_len={settings.max_model_len} is "
                "larger"
            )


def read_recording(records: Iterable[Record]) -> Recording:
    """Read a trace for re-runs.

    Raises:
        WhatIfError: the run cannot be run again.
        InconsistentTraceError: an event is about a request that never arrived.
    """
    reader = _Reader()
    for record in records:
        reader.take(record)
    reader.end()
    header, init, ready = reader.header, reader.init, reader.ready
    if header is None or init is None or ready is None:
        raise WhatIfError(
            "the trace has no ENGINE_INIT and ENGINE_READY: it is another rank's, or the run did "
            "not start. Give the trace of rank 0"
        )
    return Recording(header, init, ready, reader)


class _Reader:
    """Takes in a trace record by record."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.init: ev.EngineInit | None = None
        self.ready: ev.EngineReady | None = None
        self.commands: list[Command] = []
        self.answers: dict[int, RecordedOutput] = {}
        self.decisions = Decisions()
        self.steps: list[tuple[StepShape, int]] = []
        self.gaps: list[int] = []
        self.measure = Measure()
        self._prompt_lens: dict[int, int] = {}
        self._shape: StepShape | None = None
        self._last_step = 0
        self._last_end: ev.StepEnd | None = None
        self._last_ts = 0

    def take(self, record: Record) -> None:
        """Take in one record."""
        if isinstance(record, ev.Event):
            self._last_ts = record.ts_ns
        self.measure.apply(record)
        self.decisions.take(record)
        try:
            self._take(record)
        except KeyError as error:
            raise InconsistentTraceError(f"request {error} never arrived") from error
        except (WhatIfError, InconsistentTraceError):
            raise
        except (ValueError, ArithmeticError) as error:
            what = f"event {record.event_id}" if isinstance(record, ev.Event) else "a record"
            raise InconsistentTraceError(f"{what} contradicts itself: {error}") from error

    def _take(self, record: Record) -> None:
        match record:
            case Header():
                self.header = record
            case ev.EngineInit():
                self.init = record
            case ev.EngineReady():
                self.ready = record
            case ev.EngineError() | ev.EngineReset():
                raise WhatIfError(
                    f"the engine failed after {self._last_step} steps ({ev.tag_of(record)}) and "
                    "was reset: only a run without a failure can be run again"
                )
            case ev.RequestEnqueue():
                if record.seq_id in self.answers:
                    raise InconsistentTraceError(f"request {record.seq_id} arrives twice")
                self.answers[record.seq_id] = RecordedOutput()
                self._prompt_lens[record.seq_id] = record.prompt_len
                self._command(record)
            case ev.RequestAbort() | ev.RequestRefused():
                self._command(record)
            case ev.BlocksEvict(reason="cache_reset"):
                self._command(record)
            case ev.RequestOutput():
                self.answers[record.seq_id].text = record.text
            case _:
                self._take_of_step(record)

    def _take_of_step(self, record: Record) -> None:
        match record:
            case ev.SchedulePrefill() | ev.ScheduleDecode() | ev.ScheduleMixed():
                self._last_step = record.engine_step
                self._shape = self._shape_of(record)
            case ev.SampleTokens():
                for seq_id, token_id in zip(record.seq_ids, record.token_ids, strict=True):
                    self.answers[seq_id].token_ids.append(token_id)
            case ev.StateTransition(status="FINISHED"):
                self.answers[record.seq_id].finish_reason = record.reason
            case ev.StepEnd():
                self._step_end(record)

    def end(self) -> None:
        """Note the end of the trace, which aborts all unfinished requests."""
        if any(answer.finish_reason is None for answer in self.answers.values()):
            self.commands.append(Command(self._last_step + 1, self._last_ts, None))

    def _command(
        self, event: ev.RequestEnqueue | ev.RequestRefused | ev.RequestAbort | ev.BlocksEvict
    ) -> None:
        end, next_step = self._last_end, self._last_step + 1
        if end is None:
            self.commands.append(Command(next_step, event.ts_ns, event))
            return
        is_idle = not end.waiting_len and not end.running_len
        since_step_ns = event.ts_ns - end.ts_ns
        self.commands.append(Command(next_step, event.ts_ns, event, since_step_ns, is_idle))

    def _step_end(self, end: ev.StepEnd) -> None:
        before = self._last_end
        if before is not None and (before.waiting_len or before.running_len):
            self.gaps.append(max(end.ts_ns - end.wall_ns - before.ts_ns, 0))
        if self._shape is not None:
            self.steps.append((self._shape, end.wall_ns))
        self._last_end = end

    def _shape_of(self, schedule: ev.Schedule) -> StepShape:
        if isinstance(schedule, ev.ScheduleDecode):
            num_seqs = len(schedule.seq_ids)
            context = sum(self._length(seq_id) for seq_id in schedule.seq_ids)
            return StepShape("decode", num_seqs, context, num_seqs)
        return StepShape(
            phase_of(schedule),
            schedule.num_batched_tokens,
            sum(schedule.num_computed_tokens) + sum(schedule.num_scheduled_tokens),
            len(schedule.seq_ids),
        )

    def _length(self, seq_id: int) -> int:
        return self._prompt_lens[seq_id] + len(self.answers[seq_id].token_ids)
