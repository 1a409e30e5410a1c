"""Re-run: run a recorded workload with the engine's own scheduler, without a model.

    commands -> Scheduler, BlockManager (nanovllm's) -> batch
                   ^                                      | how long? StepTimes
                   +------- the recorded tokens ----------+

The loop is the engine's own (`EngineCore`); this module is its runner. The rules:

- A request ends with its last recorded token, for the recorded reason.
- A request that was aborted is aborted before the same step, or at the same simulated time; or
  earlier, if it would need a token that was not recorded. The end of a trace aborts all others.
- A request that the new settings cannot hold is refused, as the engine would do.
- A request that was refused is refused again, since its prompt was not recorded; under other
  settings it is left out.

Needs no torch.
"""

from __future__ import annotations

import copy
import io
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore, Launched
from nanovllm.engine.model_inputs import prepare_decode, prepare_prefill
from nanovllm.engine.policies import POLICIES
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import RequestRefusedError
from nanovllm.observer import SILENT
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.input_processor import check_fits
from nvtrace import events as ev
from nvtrace.measure import Measure
from nvtrace.pipeline import DropEvent, Sink
from nvtrace.replay import InconsistentTraceError
from nvtrace.steptime import OutOfRange, StepShape
from nvtrace.whatif.recorder import Clock, SimulatedRecorder
from nvtrace.whatif.recording import Decisions

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from nvtrace.metrics import RunMetrics
    from nvtrace.steptime import StepTimes
    from nvtrace.whatif.recording import Command, RecordedOutput, Recording
    from nvtrace.whatif.settings import Settings

Arrivals = Literal["step", "time"]
_TOLD_BY_TOKENS = {"eos", "stop_token", "max_tokens", "max_model_len", "aborted", None}


@dataclass(frozen=True, slots=True)
class RerunResult:
    """The result of a re-run.

    Attributes:
        settings: those of the run.
        metrics: of the simulated run; its times are valid only if `num_untimed` is 0.
        schedule: `Decisions.numbers`.
        num_untimed: steps unlike all recorded ones, whose time is unknown.
        beyond: why, for the first of each kind.
        refused: the requests that were refused.
        num_left_out: requests that were refused in the recorded run, and are left out here.
        is_stopped: did the run stop at a step of unknown time, since arrivals go by time?
    """

    settings: Settings
    metrics: RunMetrics
    schedule: list[int]
    num_untimed: int
    beyond: list[OutOfRange]
    refused: list[ev.RequestRefused]
    num_left_out: int
    is_stopped: bool

    def first_other_step(self, recording: Recording) -> int | None:
        """The first step with another decision than the recorded one; None if there is none."""
        theirs, mine = recording.schedule, self.schedule
        for index, (recorded, again) in enumerate(zip(theirs, mine, strict=False)):
            if recorded != again:
                return index + 1
        return None if len(theirs) == len(mine) else min(len(theirs), len(mine)) + 1


def rerun(
    recording: Recording,
    settings: Settings,
    times: StepTimes,
    *,
    arrivals: Arrivals = "step",
    sink: Sink | None = None,
) -> RerunResult:
    """Run a recorded workload again.

    Args:
        recording: the workload.
        settings: the settings of the run.
        times: predicts the time of a step.
        arrivals: "step": a request arrives before the step of the recorded number, or as soon as no
            requests are left; "time": at its recorded time, or at the end of the step that is then
            running.
        sink: the output of the simulated trace; None to keep none.

    Raises:
        WhatIfError: the settings need tokens that were not recorded.
    """
    recording.check(settings)
    outcome = _Rerun(recording, settings, times, arrivals, None).go(num_untimed=0)
    if sink is not None:  # again, since the first line has the number of untimed steps
        _Rerun(recording, settings, times, arrivals, sink).go(outcome.num_untimed)
    return outcome


class _Rerun:
    """The runner of the loop, and the calls between its steps."""

    runs_ahead = False

    def __init__(
        self,
        recording: Recording,
        settings: Settings,
        times: StepTimes,
        arrivals: Arrivals,
        sink: Sink | None,
    ) -> None:
        self.recording, self.settings, self.times = recording, settings, times
        self.is_by_time = arrivals == "time"
        self.clock = Clock()
        self.observer = SimulatedRecorder(
            self.clock,
            Sink(io.BytesIO()) if sink is None else sink,
            processors=(_drop,) if sink is None else (),
            tap=self._watch,
        )
        pool = BlockManager(
            settings.num_kvcache_blocks,
            settings.kvcache_block_size,
            self.observer,
            enable_prefix_caching=settings.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            pool,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            eos_token_ids=recording.ready.eos_token_ids,
            observer=self.observer,
            policy=POLICIES[settings.policy],
        )
        self.commands = deque(recording.commands)
        self.first_ts_ns = self.commands[0].ts_ns if self.commands else 0
        self.core = EngineCore(self.scheduler, self, self._stopped, self.observer)
        self.living: dict[int, Sequence] = {}
        self.pause_ns = 0  # the last step's end
        self.step_due = 0  # commands before this step are due, since no requests are left
        self.measure = Measure()
        self.decisions = Decisions()
        self.beyond: dict[tuple[str, str | None], OutOfRange] = {}
        self.refused: list[ev.RequestRefused] = []
        self.num_untimed = self.num_left_out = 0
        self.is_stopped = False

    def go(self, num_untimed: int) -> RerunResult:
        """Run to the end; the trace's header records `num_untimed` steps of unknown time."""
        self.observer.begin(self.recording, self.settings, num_untimed)
        while (self.commands or not self.scheduler.is_finished()) and not self.is_stopped:
            self._run_commands()
            self._end_the_exhausted()
            if not self.scheduler.is_finished():
                self._step()
        self.observer.close("interrupted" if self.is_stopped else "ok")
        return RerunResult(
            settings=self.settings,
            metrics=self.measure.run(),
            schedule=self.decisions.numbers,
            num_untimed=self.num_untimed,
            beyond=list(self.beyond.values()),
            refused=self.refused,
            num_left_out=self.num_left_out,
            is_stopped=self.is_stopped,
        )

    def _watch(self, events: list[ev.Event]) -> None:
        for event in events:
            self.measure.apply(event)  # type: ignore[arg-type]  # a recorder has no others
            self.decisions.take(event)
            if isinstance(event, ev.RequestRefused):
                self.refused.append(event)

    # -- calls from outside ----------------------------------------------------------------------

    def _run_commands(self) -> None:
        """Run the commands before the next step; if no requests are left, the next one now."""
        if self.commands and self.scheduler.is_finished():
            self._wait_for(self.commands[0])
        while self.commands and self._is_due(self.commands[0]):
            command = self.commands.popleft()
            if not self.is_by_time and not command.is_idle:  # at the recorded time after the step
                self._pass_until(min(command.since_step_ns, self.times.between_ns))
            self._do(command)

    def _wait_for(self, command: Command) -> None:
        if self.is_by_time:
            self.clock.now_ns = max(self.clock.now_ns, command.ts_ns - self.first_ts_ns)
        else:
            self.step_due = command.before_step
            if command.is_idle:
                self._pass_until(command.since_step_ns)
        self.pause_ns = self.clock.now_ns

    def _pass_until(self, since_step_ns: int) -> None:
        """Advance the clock to this time after the last step."""
        self.clock.advance(max(self.pause_ns + since_step_ns - self.clock.now_ns, 0))

    def _is_due(self, command: Command) -> bool:
        if self.is_by_time:
            return command.ts_ns - self.first_ts_ns <= self.clock.now_ns
        return command.before_step <= max(self.core.engine_step + 1, self.step_due)

    def _do(self, command: Command) -> None:
        match command.event:
            case ev.RequestEnqueue() as event:
                self._enqueue(event)
            case ev.RequestRefused() as event:
                if self.settings == self.recording.settings:
                    self.observer.refused_as_recorded(event)
                else:
                    self.num_left_out += 1
            case ev.RequestAbort() as event:
                self._abort(event.seq_id)
            case ev.BlocksEvict():
                if self.scheduler.is_finished():  # else the engine would refuse it
                    self.scheduler.block_manager.reset_prefix_cache()
            case None:
                for seq_id in [*self.living]:
                    self._abort(seq_id)

    def _enqueue(self, event: ev.RequestEnqueue) -> None:
        params = _sampling_params(event)
        try:
            check_fits(event.prompt_len, params.max_tokens, self.scheduler)
        except RequestRefusedError as error:
            self.observer.request_refused(event.prompt_token_ids, error)
            return
        seq = Sequence(event.seq_id, event.prompt_token_ids, params, event.seed)
        self.living[event.seq_id] = seq
        self.scheduler.add(seq)

    def _abort(self, seq_id: int) -> None:
        """Abort a request, unless it has ended or was left out."""
        if seq_id in self.living:
            seq = self.living[seq_id]
            self.scheduler.abort(seq)
            self._output(seq)

    def _end_the_exhausted(self) -> None:
        """Abort the requests that would need a token that was not recorded.

        Scheduling a copy shows whether the next step samples a token for them. Only requests that
        did not finish can need more tokens.
        """
        while exhausted := [seq for seq in self.living.values() if self._is_exhausted(seq)]:
            trial = copy.deepcopy(self.scheduler, {id(self.observer): SILENT})
            asked = {seq.seq_id for seq in trial.schedule().sampled_seqs}
            ending = [seq.seq_id for seq in exhausted if seq.seq_id in asked]
            for seq_id in ending:
                self._abort(seq_id)
            if not ending:
                return

    def _is_exhausted(self, seq: Sequence) -> bool:
        answer = self._answer(seq)
        return answer.is_open and seq.num_completion_tokens >= len(answer.token_ids)

    def _answer(self, seq: Sequence) -> RecordedOutput:
        return self.recording.answers[seq.seq_id]

    # -- a step ----------------------------------------------------------------------------------

    def _step(self) -> None:
        self._pass_until(self.times.between_ns)
        finished = self.core.step()
        self.pause_ns = self.clock.now_ns
        for seq in finished:
            self._output(seq)

    def launch(self, batch: Batch, _engine_step: int) -> Launched:
        """See Runner. Record what a runner records, and advance the clock by the step's time."""
        block_size = self.settings.kvcache_block_size
        if batch.phase == "decode":
            self.observer.prepare_decode_tensors(prepare_decode(batch, block_size))
        else:
            self.observer.prepare_prefill_tensors(prepare_prefill(batch, block_size))
        self._pass_time(_shape_of(batch))
        reason = "device_has_no_graphs" if batch.phase == "decode" else batch.phase
        self.observer.run_eager(reason, sum(batch.num_scheduled_tokens))
        return Launched([self._next_token(seq) for seq in batch.sampled_seqs])

    def _stopped(self, seqs: list[Sequence], _token_ids: list[int]) -> list[Sequence]:
        return [seq for seq in seqs if self._reaches_stop_string(seq)]

    def _pass_time(self, shape: StepShape) -> None:
        duration = self.times.predict(shape)
        if isinstance(duration, OutOfRange):
            self.num_untimed += 1
            self.beyond.setdefault((duration.phase, duration.quantity), duration)
            self.is_stopped = self.is_by_time
        else:
            self.clock.advance(duration)

    def _next_token(self, seq: Sequence) -> int:
        token_ids = self._answer(seq).token_ids
        if seq.num_completion_tokens == len(token_ids):
            raise InconsistentTraceError(
                f"request {seq.seq_id} ended after {len(token_ids)} tokens, and no token or limit "
                "in the trace is the reason"
            )
        return token_ids[seq.num_completion_tokens]

    def _reaches_stop_string(self, seq: Sequence) -> bool:
        answer = self._answer(seq)
        is_last = seq.num_completion_tokens + 1 == len(answer.token_ids)
        return is_last and answer.finish_reason not in _TOLD_BY_TOKENS

    def _output(self, seq: Sequence) -> None:
        answer = self._answer(seq)
        is_whole = seq.num_completion_tokens == len(answer.token_ids)
        self.observer.request_output(seq, answer.text if is_whole else "")
        del self.living[seq.seq_id]


def _sampling_params(event: ev.RequestEnqueue) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=event.temperature,
            max_tokens=event.max_tokens,
            ignore_eos=event.ignore_eos,
            top_k=event.top_k,
            top_p=event.top_p,
            stop_token_ids=event.stop_token_ids,
            stop=event.stop,
            logprobs=event.logprobs,
        )
    except (TypeError, ValueError) as error:
        raise InconsistentTraceError(
            f"no engine accepts request {event.seq_id}: {error}"
        ) from error


def _shape_of(batch: Batch) -> StepShape:
    num_tokens = sum(batch.num_scheduled_tokens)
    context = sum(seq.num_computed_tokens for seq in batch.seqs) + num_tokens
    return StepShape(batch.phase, num_tokens, context, len(batch.seqs))


def _drop(*_: object) -> dict[str, object]:
    """A processor for a run whose trace is not kept: nothing is encoded."""
    raise DropEvent
