"""Recorder: an Observer that records an event of the same name for each hook.

    with record("trace.jsonl") as observer:
        LLM(model, observer=observer).generate(prompts, sampling_params)

During a step it only builds the events; at the end of the step it writes them, so that tracing
slows the step down little.

The times of a step are those between its hooks: from `step_start` to `schedule_*` is scheduling,
then preparing, then the forward pass, then sampling; the rest is postprocessing.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from typing_extensions import override

from nanovllm.observer import Observer
from nanovllm.parallel.torchrun import TorchrunRank
from nvtrace import events as ev
from nvtrace.events import new
from nvtrace.files import Existing, NewFile, create_file, reopen
from nvtrace.pipeline import Sink, open_sink, sink_of
from nvtrace.ranks import keep_ranks, shared_run_id
from nvtrace.reader import rank_path
from nvtrace.writer import Exit, TraceWriter, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Sequence as Seq
    from os import stat_result
    from types import TracebackType

    from structlog.typing import Processor

    from nanovllm.config import Config
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.kv_cache import KVBudget
    from nanovllm.engine.model_inputs import DecodeInputs, PrefillInputs
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence, SequenceStatus
    from nanovllm.errors import RequestRefusedError
    from nanovllm.utils.loader import LoadedWeights
    from nanovllm.utils.model_config import ModelConfig


_PHASES: dict[str, Literal["prefill", "decode", "mixed"]] = {
    "schedule_prefill": "prefill",
    "schedule_decode": "decode",
    "schedule_mixed": "mixed",
}
_DECODE_REASONS = {"mixed": "decodes_first", "static": "static_batch"}  # by policy


class _Scheduled(TypedDict):
    """The fields that the events of all kinds of steps share."""

    engine_step: int
    scheduled: int
    seq_ids: list[int]
    token_budget: int
    waiting_len: int
    running_len: int
    free_blocks: int


class _Lengths(TypedDict):
    """For each sequence of a step with prompts: tokens computed in it, before it, and cached."""

    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    num_cached_tokens: list[int]
    num_batched_tokens: int


class _StepTimes:
    """When each stage of the current step ended, in nanoseconds since the trace began."""

    __slots__ = ("forward", "prepare", "sample", "schedule", "start")

    def __init__(self, start: int) -> None:
        self.start = self.schedule = self.prepare = self.forward = self.sample = start


@contextmanager
def record(
    path: str | Path,
    *,
    processors: Iterable[Processor] = (),
    tap: Callable[[list[ev.Event]], None] | None = None,
    existing: Existing = "keep",
) -> Iterator[Recorder]:
    """Record one engine into a trace file; with tensor parallelism, one file for each rank.

    trace.jsonl is the file of rank 0, trace.rank1.jsonl that of rank 1, and so on. The trace of a
    rank that the engine starts has its start and the inputs and the run of each step. A rank that
    torchrun starts runs a whole engine, and its trace has all events, as rank 0's has.

    Args:
        path: the file to write; a name ending in .gz or .zst is compressed.
        processors: structlog processors before the encoding one; each sees
            {"event": name, "record": struct} and may raise structlog.DropEvent. With tensor
            parallelism they are pickled for the other ranks.
        tap: called with the events of each step, after they are written. An error in it is printed
            once, and is `observer.trace.tap_error` afterwards; the run goes on.
        existing: if there is a file of this name, "keep" renames it, "replace" replaces it, "error"
            raises. A link is followed; a pipe or a device is written to.

    Yields:
        The observer to pass to one `LLM`. If another run uses the same name, it renames this trace;
        after the end, `observer.trace.sink.place` is where the trace is.

    Raises:
        OSError: the file cannot be created.
    """
    torchrun = TorchrunRank.from_environment(os.environ)
    rank = 0 if torchrun is None else torchrun.rank
    own_path, processors = rank_path(Path(path), rank), tuple(processors)
    sink, kept = open_sink(own_path, existing=existing)
    with Recorder(sink, processors=processors, tap=tap, rank=rank) as recorder:
        recorder.kept = kept
        if torchrun is None:
            if kept is not None:
                recorder.kept_others += keep_ranks(own_path, kept)
            recorder.recipe = RankRecipe(own_path, recorder.trace.run_id, processors, existing)
        yield recorder


class Recorder(Observer):
    """Records one engine. Most users want `record(path)`.

    Args:
        sink: where the lines go.
        processors, tap: see `record`.
        rank: of this process.

    Attributes:
        trace: the writer; `trace.sink.error` is the error of a failed write.
        kept: the new name of an older trace that had this name.
        kept_others: (old, new) names of older traces of other ranks.
        recipe: makes the recorders of the ranks that the engine starts; None records rank 0 only.
        failure: the first method that raised an error, and the error; the trace is incomplete then.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        processors: Iterable[Processor] = (),
        tap: Callable[[list[ev.Event]], None] | None = None,
        rank: int = 0,
    ) -> None:
        self.trace = TraceWriter(sink, processors, tap)
        self.rank = rank
        self.kept: Path | None = None
        self.kept_others: list[tuple[Path, Path]] = []
        self.recipe: RankRecipe | None = None
        self._others: list[NewFile] = []  # the files of the other ranks, in rank 0's process
        self._times = _StepTimes(0)
        self._gpu_ns: int | None = None  # of this step, as far as it is known
        self._last_init = self._init_start = 0
        self._policy = ""
        self._engine_step = 0
        self.failure: str | None = None
        self._error_type: str | None = None  # the failure's
        self._is_scheduling = False  # within a step, before its `schedule_*`
        self._steps = {"prefill": 0, "decode": 0, "mixed": 0}  # of the engine
        self._steps_before = dict(self._steps)  # when generate started

    # -- other ranks -----------------------------------------------------------------------------

    @override
    def for_workers(self) -> Callable[[int], Observer] | None:
        return self.recipe

    @override
    def failed(self, hook: str, error: Exception) -> None:
        if self.failure is None:
            self.failure = f"{hook}() raised {type(error).__name__}: {text_of(error)}"
            self._error_type = type(error).__name__
        if hook.upper() in ev.EVENT_TYPES:
            self.trace.add(None)  # a number is missing in the trace: readers report a lost event
        if hook.startswith("schedule_"):
            self.trace.batch_phase = _PHASES[hook]
        elif hook == "step_start" and self.trace.step is None:
            Recorder.step_start(self, self._engine_step + 1)
        elif hook in {"step_end", "engine_reset"}:
            self.trace.drain()
            self.trace.step = None

    @override
    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            is_stop = isinstance(error, KeyboardInterrupt)
            self.close("interrupted" if is_stop else "error", type(error).__name__)
        elif self.failure is not None:
            self.close("error", self._error_type)
        else:
            self.close("ok")

    def undo(self) -> Path | None:
        """Undo what the recording did to files, if no engine was started.

        The files that it has created are removed, even if they were renamed. Older traces get their
        names back, if these are free.

        Returns:
            Where an older trace is that could not get its name back; None if there is none.
            `kept_others` then has those of other ranks.
        """
        for made in self._others:
            made.undo()
        own, kept = self.trace.sink.made, self.kept
        if own is not None and own.undo() and own.path is not None and own.kept is not None:
            kept = None
            if self.recipe is not None:
                keep_ranks(own.kept, own.path)
        self.kept_others = [(old, new) for old, new in self.kept_others if os.path.lexists(new)]
        return kept

    def _own_place(self) -> Path:
        own, path = self.trace.sink.made, self.recipe.path if self.recipe else Path()
        return path if own is None else next(iter(own.names()), path)

    # -- bootstrap, init -------------------------------------------------------------------------

    @override
    def engine_init(self, config: Config, model_config: ModelConfig) -> None:
        if self.trace.has_header:
            raise ValueError("this recorder already has an engine: use one record() for each LLM")
        world_size = config.tensor_parallel_size
        if self.recipe is not None and world_size > 1:
            for made in self.recipe.make(world_size, self._own_place()):
                self._others.append(made)
                if made.path is not None and made.kept is not None:
                    self.kept_others.append((made.path, made.kept))
        self.trace.run_id = shared_run_id(self.trace.run_id, world_size)
        self.trace.write_header(
            asdict(config), asdict(model_config), self.rank, world_size, _gpu_name(config.device)
        )
        self._policy = config.policy
        self._last_init = self._init_start = self.trace.now()
        event = new(ev.EngineInit)(
            model=config.model,
            tp_size=config.tensor_parallel_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.kvcache_block_size,
            device=config.device,
            dtype=config.dtype,
            attention_backend=config.attention_backend,
            attention_reason=config.attention_reason,
            fused_kernels=config.fused_kernels,
            enforce_eager=config.enforce_eager,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.policy,
            seed=config.seed,
        )
        self.trace.add(event, "bootstrap")
        self._last_init = self.trace.now()

    @override
    def tp_runtime_init(self, rank: int, world_size: int, device: str, backend: str | None) -> None:
        event = new(ev.TpRuntimeInit)(
            rank=rank, world_size=world_size, device=device, backend=backend
        )
        self.trace.add(event, "init")

    @override
    def model_weights_loaded(self, loaded: LoadedWeights) -> None:
        event = new(ev.ModelWeightsLoaded)(
            num_files=loaded.num_files,
            num_keys=loaded.num_keys,
            num_bytes=loaded.num_bytes,
            duration_ns=self._since_last_init(),
        )
        self.trace.add(event, "init")

    @override
    def warmup_model(self, num_seqs: int, seq_len: int, peak_bytes: int | None) -> None:
        event = new(ev.WarmupModel)(
            num_seqs=num_seqs,
            seq_len=seq_len,
            num_tokens=num_seqs * seq_len,
            peak_bytes=peak_bytes,
            duration_ns=self._since_last_init(),
        )
        self.trace.add(event, "init")

    @override
    def kv_budget_estimate(self, budget: KVBudget) -> None:
        self.trace.add(new(ev.KvBudgetEstimate)(**asdict(budget)), "init")
        self._since_last_init()

    @override
    def cudagraph_capture(self, batch_sizes: list[int], pool_bytes: int) -> None:
        event = new(ev.CudagraphCapture)(
            batch_sizes=list(batch_sizes),
            pool_bytes=pool_bytes,
            duration_ns=self._since_last_init(),
        )
        self.trace.add(event, "init")

    @override
    def cudagraph_skip(self, reason: str) -> None:
        self.trace.add(new(ev.CudagraphSkip)(reason=reason), "init")

    @override
    def engine_ready(
        self, num_kvcache_blocks: int, eos_token_ids: Seq[int], eos_sources: Seq[str]
    ) -> None:
        event = new(ev.EngineReady)(
            num_kvcache_blocks=num_kvcache_blocks,
            eos_token_ids=list(eos_token_ids),
            eos_sources=list(eos_sources) or None,
            duration_ns=self.trace.now() - self._init_start,
        )
        self.trace.add(event, "init")
        self.trace.drain()

    # -- ingress, egress -------------------------------------------------------------------------

    @override
    def generate_start(self, num_prompts: int) -> None:
        self._steps_before = dict(self._steps)
        self.trace.add(new(ev.GenerateStart)(n_prompts=num_prompts), "ingress")

    @override
    def request_enqueue(self, seq: Sequence, waiting_len: int) -> None:
        params = seq.sampling_params
        event = new(ev.RequestEnqueue)(
            seq_id=seq.seq_id,
            prompt_len=seq.num_prompt_tokens,
            max_tokens=params.max_tokens,
            temperature=float(params.temperature),
            top_k=params.top_k,
            top_p=float(params.top_p),
            seed=seq.seed,
            ignore_eos=params.ignore_eos,
            stop_token_ids=list(params.stop_token_ids or ()) or None,
            stop=list(params.stop or ()) or None,
            logprobs=params.logprobs,
            waiting_len=waiting_len,
            prompt_token_ids=list(seq.token_ids),
        )
        self.trace.add(event, "ingress")

    @override
    def request_refused(self, token_ids: list[int], error: RequestRefusedError) -> None:
        event = new(ev.RequestRefused)(
            reason=error.reason, prompt_len=len(token_ids), need=error.need, have=error.have
        )
        self.trace.add(event, "ingress")

    @override
    def request_abort(self, seq: Sequence) -> None:
        event = new(ev.RequestAbort)(
            seq_id=seq.seq_id, num_completion_tokens=seq.num_completion_tokens
        )
        self.trace.add(event, "ingress")

    @override
    def request_output(self, seq: Sequence, text: str) -> None:
        event = new(ev.RequestOutput)(
            seq_id=seq.seq_id,
            reason=str(seq.finish_reason),  # it has ended, so there is one
            num_prompt_tokens=seq.num_prompt_tokens,
            num_completion_tokens=seq.num_completion_tokens,
            text=text,
        )
        self.trace.add(event, "egress")

    @override
    def generate_finish(self, num_outputs: int) -> None:
        prefill = self._steps["prefill"] - self._steps_before["prefill"]
        decode = self._steps["decode"] - self._steps_before["decode"]
        mixed = self._steps["mixed"] - self._steps_before["mixed"]
        event = new(ev.GenerateFinish)(
            total_steps=prefill + decode + mixed,
            prefill_steps=prefill,
            decode_steps=decode,
            mixed_steps=mixed,
            n_outputs=num_outputs,
        )
        self.trace.add(event, "egress")
        self.trace.drain()

    @override
    def engine_error(self, error: BaseException) -> None:
        event = new(ev.EngineError)(error_type=type(error).__name__, message=text_of(error))
        self.trace.add(event, "postprocess")

    @override
    def engine_reset(self, seqs: list[Sequence]) -> None:
        event = new(ev.EngineReset)(
            seq_ids=[seq.seq_id for seq in seqs], num_tokens=[seq.num_tokens for seq in seqs]
        )
        self.trace.add(event, "postprocess")
        self.trace.drain()
        self.trace.step = None

    # -- a step: schedule ------------------------------------------------------------------------

    @override
    def step_start(self, engine_step: int) -> None:
        try:
            self.trace.drain()  # the events between two steps
        finally:  # the tap may raise KeyboardInterrupt
            self.trace.step = self._engine_step = engine_step
            self._is_scheduling = True
            self._times = _StepTimes(self.trace.now())
            self._gpu_ns = None

    @override
    def admission_stop(
        self, scheduler: Scheduler, seq: Sequence, reason: str, need: int, have: int
    ) -> None:
        event = new(ev.AdmissionStop)(
            reason=reason,
            seq_id=seq.seq_id,
            need=need,
            have=have,
            waiting_len=len(scheduler.waiting),
        )
        self.trace.add(event)

    @override
    def schedule_prefill(self, batch: Batch, scheduler: Scheduler) -> None:
        first = batch.seqs[0]
        continues = first.num_computed_tokens > first.num_cached_tokens
        event = new(ev.SchedulePrefill)(
            reason="chunk_continues" if continues else "waiting_admissible",
            **self._scheduled(batch, scheduler),
            **_lengths(batch),
        )
        self._add_schedule(event, batch)

    @override
    def schedule_mixed(self, batch: Batch, scheduler: Scheduler) -> None:
        event = new(ev.ScheduleMixed)(
            num_prefills=batch.num_prefills,
            num_decodes=len(batch.seqs) - batch.num_prefills,
            **self._scheduled(batch, scheduler),
            **_lengths(batch),
        )
        self._add_schedule(event, batch)

    @override
    def schedule_decode(self, batch: Batch, scheduler: Scheduler) -> None:
        event = new(ev.ScheduleDecode)(
            reason=_DECODE_REASONS.get(self._policy, "no_prefill_admissible"),
            decode_step_index=self._steps["decode"],
            **self._scheduled(batch, scheduler),
        )
        self._add_schedule(event, batch)

    def _scheduled(self, batch: Batch, scheduler: Scheduler) -> _Scheduled:
        return {
            "engine_step": self._engine_step,
            "scheduled": len(batch.seqs),
            "seq_ids": [seq.seq_id for seq in batch.seqs],
            "token_budget": scheduler.max_num_batched_tokens,
            "waiting_len": len(scheduler.waiting),
            "running_len": len(scheduler.running),
            "free_blocks": scheduler.block_manager.num_free_blocks,
        }

    def _add_schedule(self, event: ev.Event, batch: Batch) -> None:
        self._is_scheduling = False
        self.trace.batch_phase = batch.phase
        self._steps[batch.phase] += 1
        self._times.schedule = self.trace.add(event)

    @override
    def preempt(
        self, victim: Sequence, for_seq: Sequence, freed: list[int], num_computed_tokens: int
    ) -> None:
        event = new(ev.Preempt)(
            seq_id=victim.seq_id,
            for_seq_id=for_seq.seq_id,
            num_blocks_freed=len(freed),
            num_tokens_to_recompute=num_computed_tokens,
        )
        self.trace.add(event)

    @override
    def state_transition(self, seq: Sequence, previous: SequenceStatus, reason: str) -> None:
        is_scheduling = reason in {"admitted", "preempted"}  # then the phase is the batch's
        event = new(ev.StateTransition)(
            reason=reason,
            seq_id=seq.seq_id,
            previous=str(previous),
            status=str(seq.status),
            token_id=seq.token_ids[-1] if seq.num_completion_tokens else None,
            num_completion_tokens=seq.num_completion_tokens,
            max_tokens=seq.sampling_params.max_tokens,
        )
        self.trace.add(event, None if is_scheduling else "postprocess")

    # -- blocks ----------------------------------------------------------------------------------

    @override
    def blocks_share(self, seq: Sequence, block_id: int) -> None:
        self.trace.add_joined(new(ev.BlocksShare)(seq_ids=[seq.seq_id], block_ids=[[block_id]]))

    @override
    def blocks_revive(self, seq: Sequence, block_id: int) -> None:
        self.trace.add_joined(new(ev.BlocksRevive)(seq_ids=[seq.seq_id], block_ids=[[block_id]]))

    @override
    def blocks_allocate(self, seq: Sequence, block_ids: list[int]) -> None:
        event = new(ev.BlocksAllocate)(seq_ids=[seq.seq_id], block_ids=[[*block_ids]])
        self.trace.add_joined(event)

    @override
    def blocks_append(self, seq: Sequence, block_ids: list[int]) -> None:
        self.trace.add_joined(new(ev.BlocksAppend)(seq_ids=[seq.seq_id], block_ids=[[*block_ids]]))

    @override
    def blocks_hash(self, seq: Sequence, block_ids: list[int], hashes: list[bytes]) -> None:
        hexes = [chain_hash.hex() for chain_hash in hashes]
        event = new(ev.BlocksHash)(seq_ids=[seq.seq_id], block_ids=[[*block_ids]], hashes=[hexes])
        self.trace.add_joined(event, "postprocess")

    @override
    def blocks_evict(self, block_ids: list[int], hashes: list[bytes], reason: str) -> None:
        hexes = [chain_hash.hex() for chain_hash in hashes]
        event = new(ev.BlocksEvict)(reason=reason, block_ids=block_ids, hashes=hexes)
        self.trace.add(event, "ingress" if reason == "cache_reset" else None)

    @override
    def blocks_release(self, seq: Sequence, block_ids: list[int], freed: list[int]) -> None:
        event = new(ev.BlocksRelease)(
            seq_ids=[seq.seq_id], block_ids=[[*block_ids]], freed=[[*freed]]
        )
        self.trace.add_joined(event, None if self._is_scheduling else "postprocess")

    # -- a step: run, sample, end ----------------------------------------------------------------

    @override
    def prepare_prefill_tensors(self, inputs: PrefillInputs) -> None:
        event = new(ev.PreparePrefillTensors)(
            flat_tokens=len(inputs.input_ids),
            n_seqs=len(inputs.position_ranges),
            max_seqlen_q=inputs.max_seqlen_q,
            max_seqlen_k=inputs.max_seqlen_k,
            has_block_tables=inputs.block_tables is not None,
            cu_seqlens_q=inputs.cu_seqlens_q,
            cu_seqlens_k=inputs.cu_seqlens_k,
            position_ranges=inputs.position_ranges,
            slot_ranges=inputs.slot_ranges,
        )
        self._times.prepare = self.trace.add(event, "prefill")

    @override
    def prepare_decode_tensors(self, inputs: DecodeInputs) -> None:
        batch_size = len(inputs.input_ids)
        event = new(ev.PrepareDecodeTensors)(
            batch_size=batch_size,
            context_lens=inputs.context_lens,
            slot_mapping=inputs.slot_mapping,
            block_tables_shape=(batch_size, len(inputs.block_tables[0])),
        )
        self._times.prepare = self.trace.add(event, "decode")

    @override
    def run_eager(self, reason: str, num_tokens: int) -> None:
        now = self.trace.add(new(ev.RunEager)(reason=reason, num_tokens=num_tokens))
        self._times.forward = self._times.sample = now

    @override
    def cudagraph_replay(self, batch_size: int, graph_batch_size: int, *, is_ahead: bool) -> None:
        event = new(ev.CudagraphReplay)(
            batch_size=batch_size,
            graph_batch_size=graph_batch_size,
            padding=graph_batch_size - batch_size,
            is_ahead=is_ahead,
        )
        self._times.forward = self._times.sample = self.trace.add(event)

    @override
    def gpu_time(self, gpu_ns: int) -> None:
        self._gpu_ns = gpu_ns

    @override
    def sample_tokens(self, seqs: list[Sequence], token_ids: list[int]) -> None:
        event = new(ev.SampleTokens)(
            seq_ids=[seq.seq_id for seq in seqs],
            temperatures=[float(seq.sampling_params.temperature) for seq in seqs],
            token_ids=token_ids,
        )
        self._times.sample = self.trace.add(event)

    @override
    def step_end(self, batch: Batch, finished: list[Sequence], scheduler: Scheduler) -> None:
        now, times = self.trace.now(), self._times
        num_seqs = len(batch.seqs)
        total_len = sum(seq.num_tokens for seq in batch.seqs)
        event = new(ev.StepEnd)(
            batch_phase=batch.phase,
            num_seqs=num_seqs,
            num_batched_tokens=sum(batch.num_scheduled_tokens),
            num_tokens_stat=-num_seqs if batch.phase == "decode" else total_len,
            finished=[seq.seq_id for seq in finished],
            waiting_len=len(scheduler.waiting),
            running_len=len(scheduler.running),
            free_blocks=scheduler.block_manager.num_free_blocks,
            wall_ns=now - times.start,
            schedule_ns=times.schedule - times.start,
            prepare_ns=times.prepare - times.schedule,
            forward_ns=times.forward - times.prepare,
            sample_ns=times.sample - times.forward,
            postprocess_ns=now - times.sample,
            gpu_ns=self._gpu_ns,
        )
        self.trace.add(event, "postprocess")
        self.trace.drain()
        self.trace.step = None

    def close(self, exit_: Exit = "ok", error_type: str | None = None) -> None:
        """Write the remaining events and the footer. A second call does nothing.

        Args:
            exit_: how the recording ended.
            error_type: the name of the exception that ended it, if one did.
        """
        try:
            self.trace.close(exit_, error_type)
        finally:
            for made in self._others:
                made.file.close()

    def _since_last_init(self) -> int:
        now = self.trace.now()
        duration, self._last_init = now - self._last_init, now
        return duration


def _gpu_name(device: str) -> str | None:
    if device != "cuda":
        return None
    import torch  # noqa: PLC0415 - the engine has loaded it

    return torch.cuda.get_device_name()


def _lengths(batch: Batch) -> _Lengths:
    return {
        "num_scheduled_tokens": list(batch.num_scheduled_tokens),
        "num_computed_tokens": [seq.num_computed_tokens for seq in batch.seqs],
        "num_cached_tokens": [seq.num_cached_tokens for seq in batch.seqs],
        "num_batched_tokens": sum(batch.num_scheduled_tokens),
    }


# -- other ranks' recorders ------------------------------------------------------------------------


class RankRecorder(Recorder):
    """The recorder of a rank that the engine started.

    Args:
        sink: where the lines go.
        rank: from 1.
        run_id: that of rank 0's trace.
        processors: see `nvtrace.recorder.record`.
    """

    def __init__(
        self, sink: Sink, rank: int, run_id: str, processors: Iterable[Processor] = ()
    ) -> None:
        super().__init__(sink, processors=processors, rank=rank)
        self.trace.run_id = run_id

    @override
    def kv_budget_estimate(self, budget: KVBudget) -> None:
        super().kv_budget_estimate(budget)
        self.trace.drain()  # `engine_ready`, which drains too, is called on rank 0 only

    @override
    def run_eager(self, reason: str, num_tokens: int) -> None:
        # This rank has no schedule event, so the phase is taken from how the model ran.
        self.trace.batch_phase = (
            "prefill" if reason == "prefill" else "mixed" if reason == "mixed" else "decode"
        )
        super().run_eager(reason, num_tokens)
        self.trace.drain()  # on this rank, the step ends here

    @override
    def cudagraph_replay(self, batch_size: int, graph_batch_size: int, *, is_ahead: bool) -> None:
        self.trace.batch_phase = "decode"
        super().cudagraph_replay(batch_size, graph_batch_size, is_ahead=is_ahead)
        self.trace.drain()


@dataclass(frozen=True, slots=True)
class RankRecipe:
    """Makes the recorder of a rank, in that rank's process.

    Attributes:
        path: of rank 0's trace.
        run_id: of rank 0's trace.
        processors: see `nvtrace.recorder.record`.
        existing: the same.
        files: the files that rank 0 has created for the others, by rank.
    """

    path: Path
    run_id: str
    processors: tuple[Processor, ...]
    existing: Existing
    files: dict[int, tuple[Path, stat_result]] = field(default_factory=dict)

    def make(self, num_ranks: int, beside: Path) -> Iterator[NewFile]:
        """Create the other ranks' files in rank 0's process, which can undo it.

        Args:
            num_ranks: of the engine.
            beside: where rank 0's trace is now; another run may have renamed it.
        """
        for rank in range(1, num_ranks):
            made = create_file(rank_path(beside, rank), self.existing)
            if made.path is not None:
                self.files[rank] = made.path, os.fstat(made.file.fileno())
            yield made

    def __call__(self, rank: int) -> RankRecorder:
        """Open the rank's file."""
        path = rank_path(self.path, rank)
        made = reopen(*self.files[rank]) if rank in self.files else None
        sink = sink_of(create_file(path, self.existing) if made is None else made, path)
        return RankRecorder(sink, rank, self.run_id, self.processors)
