"""Observer: the hooks that the engine calls to report what it does.

Most methods are one kind of event. Each does nothing by default, so an engine without an observer
pays for an empty call per hook. The engine calls a method after the change that it is named for;
other changes of the same action may follow. The arguments are names already in scope. The engine
never branches on the observer and never reads a result. This file knows no traces and no clocks:
`nvtrace.recorder.Recorder` overrides them and records an event of the same name (`schedule_prefill`
here, `SchedulePrefill` there, `SCHEDULE_PREFILL` in the trace); what `step_start` and `gpu_time`
report becomes a part of later events.

An observer must not change its arguments, and must copy what it keeps: the engine changes its lists
later.

With tensor parallelism several processes share a model. Each is a *rank*, and has its own observer;
rank 0 schedules. The one exception to "never reads a result" is `for_workers`: an engine that
starts processes for the other ranks needs their observers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq
    from types import TracebackType
    from typing import Self

    from nanovllm.config import Config
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.kv_cache import KVBudget
    from nanovllm.engine.model_inputs import DecodeInputs, PrefillInputs
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence, SequenceStatus
    from nanovllm.errors import RequestRefusedError
    from nanovllm.utils.loader import LoadedWeights
    from nanovllm.utils.model_config import ModelConfig


class Observer:
    """Observes one engine. Override the methods that you need."""

    # -- other ranks, errors ---------------------------------------------------------------------

    def for_workers(self) -> Callable[[int], Observer] | None:
        """Observers for ranks 1, 2 ... Called once, when the engine starts processes for them.

        Returns:
            A function that makes the observer of a rank, or None for no observers. It is pickled,
            and called with the rank in that rank's process. Called on that observer are
            `engine_init`, the hooks of the model's start, and in each step `step_start`,
            `prepare_*_tensors` and `run_eager` or `cudagraph_replay`. It is used as a context
            manager, which ends with the process.
        """
        return None

    def failed(self, hook: str, error: Exception) -> None:
        """The method `hook` raised `error`. `LLM` prints the first one on stderr and goes on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """No other method will be called after this one."""

    # -- bootstrap, init -------------------------------------------------------------------------

    def engine_init(self, config: Config, model_config: ModelConfig) -> None:
        """The engine begins to start, with these settings (all "auto"s resolved)."""

    def tp_runtime_init(self, rank: int, world_size: int, device: str, backend: str | None) -> None:
        """This process is connected to the other ranks, if there are any."""

    def model_weights_loaded(self, loaded: LoadedWeights) -> None:
        """The checkpoint's tensors are in the model."""

    def warmup_model(self, num_seqs: int, seq_len: int, peak_bytes: int | None) -> None:
        """A prefill of dummy tokens ran, to measure its peak memory. It belongs to no request."""

    def kv_budget_estimate(self, budget: KVBudget) -> None:
        """The number of KV blocks was computed, and the blocks were allocated."""

    def cudagraph_capture(self, batch_sizes: list[int], pool_bytes: int) -> None:
        """Decode steps of these batch sizes were captured as CUDA graphs."""

    def cudagraph_skip(self, reason: str) -> None:
        """No CUDA graphs will be used; `reason` says why."""

    def engine_ready(
        self, num_kvcache_blocks: int, eos_token_ids: Seq[int], eos_sources: Seq[str]
    ) -> None:
        """The engine can take requests.

        `eos_sources` says where each id comes from: names of files, or "tokenizer".
        """

    # -- ingress, egress -------------------------------------------------------------------------

    def generate_start(self, num_prompts: int) -> None:
        """`generate` began, or the first output of a `stream` was requested."""

    def request_enqueue(self, seq: Sequence, waiting_len: int) -> None:
        """A request joined the waiting queue's tail; `waiting_len` requests wait now."""

    def request_refused(self, token_ids: list[int], error: RequestRefusedError) -> None:
        """A request that could never finish was refused. It has no seq_id."""

    def request_abort(self, seq: Sequence) -> None:
        """A request was taken out of its queue before it had finished."""

    def request_output(self, seq: Sequence, text: str) -> None:
        """The tokens of a finished request were decoded to text."""

    def generate_finish(self, num_outputs: int) -> None:
        """`generate` or `stream` ran to its end, with this many outputs.

        Not called after an exception, or if a stream was closed early.
        """

    def engine_error(self, error: BaseException) -> None:
        """An exception in a step, or while a request was queued or aborted.

        Every unfinished request is ended next (`engine_reset`).
        """

    def engine_reset(self, seqs: list[Sequence]) -> None:
        """`seqs` were aborted; both queues are empty, all blocks are free and have no hash."""

    # -- a step: schedule ------------------------------------------------------------------------

    def step_start(self, engine_step: int) -> None:
        """A step begins."""

    def admission_stop(
        self, scheduler: Scheduler, seq: Sequence, reason: str, need: int, have: int
    ) -> None:
        """`seq`, the head of the waiting queue, must wait.

        It needs `need`, and there are `have`: places to run ("max_num_seqs"), blocks ("no_blocks"),
        or tokens of this step's budget ("token_budget"; "chunk_not_first" if it is longer than any
        step's budget and not the first prompt of this one). For "static_batch", `need` sequences
        must end first, and `have` is 0.
        """

    def schedule_prefill(self, batch: Batch, scheduler: Scheduler) -> None:
        """This step computes prompts."""

    def schedule_decode(self, batch: Batch, scheduler: Scheduler) -> None:
        """This step computes one token for each running sequence, as far as the budget goes."""

    def schedule_mixed(self, batch: Batch, scheduler: Scheduler) -> None:
        """This step computes one token for running sequences, and prompts as well."""

    def preempt(
        self, victim: Sequence, for_seq: Sequence, freed: list[int], num_computed_tokens: int
    ) -> None:
        """`victim` lost its blocks so that `for_seq` can go on.

        `num_computed_tokens` of its tokens were computed, and must be computed again. Its status
        changes next (`state_transition`).
        """

    def state_transition(self, seq: Sequence, previous: SequenceStatus, reason: str) -> None:
        """A sequence changed its status (and so its queue)."""

    # -- blocks ----------------------------------------------------------------------------------

    def blocks_share(self, seq: Sequence, block_id: int) -> None:
        """`seq` shares a hashed block that other sequences use too."""

    def blocks_revive(self, seq: Sequence, block_id: int) -> None:
        """`seq` uses a hashed block that was free."""

    def blocks_allocate(self, seq: Sequence, block_ids: list[int]) -> None:
        """`seq` got new blocks at its admission."""

    def blocks_append(self, seq: Sequence, block_ids: list[int]) -> None:
        """`seq` got one new block, as its last token crossed a block boundary."""

    def blocks_hash(self, seq: Sequence, block_ids: list[int], hashes: list[bytes]) -> None:
        """Full, computed blocks of `seq` were hashed: other sequences can find them now."""

    def blocks_evict(self, block_ids: list[int], hashes: list[bytes], reason: str) -> None:
        """Free hashed blocks lost their hash, and with it their contents."""

    def blocks_release(self, seq: Sequence, block_ids: list[int], freed: list[int]) -> None:
        """`seq` gave up its blocks, in this order; no other sequence holds those in `freed`."""

    # -- a step: run, sample, end ----------------------------------------------------------------

    def prepare_prefill_tensors(self, inputs: PrefillInputs) -> None:
        """The inputs of a prefill or mixed step are prepared."""

    def prepare_decode_tensors(self, inputs: DecodeInputs) -> None:
        """The inputs of a decode step are prepared: one token per sequence."""

    def run_eager(self, reason: str, num_tokens: int) -> None:
        """The model ran without a CUDA graph, kernel by kernel; `reason` says why."""

    def cudagraph_replay(self, batch_size: int, graph_batch_size: int, *, is_ahead: bool) -> None:
        """The decode was launched as one graph of `graph_batch_size` rows.

        `is_ahead`: before the host had ended the previous step.
        """

    def gpu_time(self, gpu_ns: int) -> None:
        """The GPU was busy with this step for `gpu_ns`."""

    def sample_tokens(self, seqs: list[Sequence], token_ids: list[int]) -> None:
        """The next token of each of `seqs` was sampled."""

    def step_end(self, batch: Batch, finished: list[Sequence], scheduler: Scheduler) -> None:
        """The step's tokens were appended, and the finished sequences were removed."""


SILENT = Observer()
