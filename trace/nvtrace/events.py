"""The events of a trace, as typed records.

These structs *are* the trace format: the reader decodes into them, and the JSON Schema and the
events page of the docs are generated from them. They hold facts and reason codes, no prose; the
words for both are in `catalog/`.

A code (a reason, a phase, a status) that is not listed here is read and shown as it is, because a
new policy may have its own reasons. Rules that depend on a known code are not applied then.

Rules for changing them: a new field has a default, a field never changes its meaning, and a change
that an old reader would misread raises the major version in `envelope.py`.
"""

from __future__ import annotations

from functools import cache, partial
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    ParamSpec,
    TypeVar,
    get_args,
    get_type_hints,
)

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Callable


def codes(*known: str) -> msgspec.Meta:
    """The known codes of a field. Another engine or policy may use others."""
    return msgspec.Meta(examples=[*known])


def codes_of(annotation: Any) -> tuple[str, ...]:  # noqa: ANN401 - any annotation
    """The known codes of a field with this annotation; empty if it holds no codes."""
    marks = getattr(annotation, "__metadata__", ())
    return tuple(code for mark in marks for code in mark.examples or ())


Phase = Annotated[
    str,
    codes("bootstrap", "init", "ingress", "prefill", "decode", "mixed", "postprocess", "egress"),
]  # the article's words
Status = Annotated[str, codes("WAITING", "RUNNING", "FINISHED")]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
MOST_BLOCKS = 2**24  # replaying a larger pool would take gigabytes


class Event(msgspec.Struct, frozen=True, gc=False, tag_field="event"):
    """The fields of every event. Events do not refer to each other, so they need no collector."""

    event_id: int
    ts_ns: int
    step: int | None
    phase: Phase

    # The fields in stats={...} of the article's one-line form, in its order.
    log_fields: ClassVar[tuple[str, ...]] = ()


# -- bootstrap, init -------------------------------------------------------------------------------


class EngineInit(Event, frozen=True, kw_only=True, tag="ENGINE_INIT"):
    """The engine begins to start."""

    model: str
    tp_size: Count
    max_num_batched_tokens: Count
    max_num_seqs: Count
    max_model_len: Count
    block_size: Count
    device: str
    dtype: str
    attention_backend: str
    attention_reason: Annotated[
        str,
        codes(
            "asked",
            "first_choice",
            "no_gpu",
            "gpu_too_old",
            "flash_attn_missing",
            "triton_missing",
            "needs_16_bit",
            "needs_pages_of_256",
            "head_dim_unsupported",
            "not_recorded",
        ),
    ] = "not_recorded"
    fused_kernels: bool = False
    enforce_eager: bool
    enable_prefix_caching: bool
    policy: str
    seed: int

    log_fields = ("max_num_batched_tokens", "max_num_seqs", "model", "tp_size")


class TpRuntimeInit(Event, frozen=True, kw_only=True, tag="TP_RUNTIME_INIT"):
    """A process joined the ranks."""

    rank: int
    world_size: int
    device: str
    backend: str | None

    log_fields = ("device", "rank", "world_size")


class ModelWeightsLoaded(Event, frozen=True, kw_only=True, tag="MODEL_WEIGHTS_LOADED"):
    """The checkpoint's tensors are in the model."""

    num_files: int
    num_keys: int
    num_bytes: int
    duration_ns: int

    log_fields = ("num_files", "num_keys")


class WarmupModel(Event, frozen=True, kw_only=True, tag="WARMUP_MODEL"):
    """A prefill of dummy tokens ran, to measure its peak memory."""

    num_seqs: int
    seq_len: int
    num_tokens: int
    peak_bytes: int | None
    duration_ns: int

    log_fields = ("num_seqs", "seq_len", "num_tokens")


class KvBudgetEstimate(Event, frozen=True, kw_only=True, tag="KV_BUDGET_ESTIMATE"):
    """The number of KV blocks was computed."""

    rule: Annotated[str, codes("cpu_bounded", "gpu_measured", "given")]
    total_bytes: int
    free_bytes: int
    used_bytes: int
    peak_bytes: int | None = None
    current_bytes: int | None = None
    graph_pool_bytes: int | None = None
    utilization: Annotated[float, Meta(ge=0, le=1)]
    limit_bytes: int | None
    num_local_ranks: int = 1
    available_bytes: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_bytes: int
    num_blocks: int

    log_fields = ("total_gib", "free_gib", "peak_gib", "block_bytes", "num_blocks")

    @property
    def total_gib(self) -> float:
        """`total_bytes` in the article's unit."""
        return round(self.total_bytes / 2**30, 3)

    @property
    def free_gib(self) -> float:
        """`free_bytes` in the article's unit."""
        return round(self.free_bytes / 2**30, 3)

    @property
    def peak_gib(self) -> float | None:
        """`peak_bytes` in the article's unit."""
        return None if self.peak_bytes is None else round(self.peak_bytes / 2**30, 3)


class CudagraphCapture(Event, frozen=True, kw_only=True, tag="CUDAGRAPH_CAPTURE"):
    """Decode steps of these batch sizes were captured as CUDA graphs."""

    batch_sizes: list[int]
    pool_bytes: int
    duration_ns: int

    log_fields = ("batch_sizes", "pool_bytes")


class CudagraphSkip(Event, frozen=True, kw_only=True, tag="CUDAGRAPH_SKIP"):
    """No CUDA graphs are used."""

    reason: Annotated[
        str,
        codes("enforce_eager", "device_has_no_graphs", "no_fused_kernels", "backend_reads_back"),
    ]


class EngineReady(Event, frozen=True, kw_only=True, tag="ENGINE_READY"):
    """The engine can take requests."""

    num_kvcache_blocks: Annotated[int, Meta(ge=0, le=MOST_BLOCKS)]
    eos_token_ids: list[int]
    eos_sources: list[str] | None = None
    duration_ns: int

    log_fields = ("num_kvcache_blocks", "eos_token_ids")


# -- ingress ---------------------------------------------------------------------------------------


class GenerateStart(Event, frozen=True, kw_only=True, tag="GENERATE_START"):
    """`generate` or `stream` was called."""

    reason: Annotated[str, codes("batch_submitted")] = "batch_submitted"
    n_prompts: int

    log_fields = ("n_prompts",)


class RequestEnqueue(Event, frozen=True, kw_only=True, tag="REQUEST_ENQUEUE"):
    """A request joined the waiting queue's tail."""

    reason: Annotated[str, codes("new_request")] = "new_request"
    seq_id: int
    prompt_len: int
    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int
    ignore_eos: bool
    waiting_len: int
    prompt_token_ids: list[int]
    stop_token_ids: list[int] | None = None
    stop: list[str] | None = None
    logprobs: int | None = None

    log_fields = ("prompt_len", "seq_id", "max_tokens")


class RequestRefused(Event, frozen=True, kw_only=True, tag="REQUEST_REFUSED"):
    """A request that could never finish was refused."""

    reason: Annotated[str, codes("prompt_too_long", "never_fits")]
    prompt_len: int
    need: int
    have: int

    log_fields = ("prompt_len", "need", "have")


class RequestAbort(Event, frozen=True, kw_only=True, tag="REQUEST_ABORT"):
    """A request was taken out of its queue before it had finished."""

    seq_id: int
    num_completion_tokens: int

    log_fields = ("seq_id", "num_completion_tokens")


# -- schedule --------------------------------------------------------------------------------------


class SchedulePrefill(Event, frozen=True, kw_only=True, tag="SCHEDULE_PREFILL"):
    """This step computes prompts."""

    reason: Annotated[str, codes("waiting_admissible", "chunk_continues")]
    engine_step: int
    scheduled: int
    seq_ids: list[int]
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    num_cached_tokens: list[int]
    num_batched_tokens: int
    token_budget: int
    waiting_len: int
    running_len: int
    free_blocks: int

    log_fields = ("engine_step", "scheduled", "waiting_len", "running_len")


class ScheduleDecode(Event, frozen=True, kw_only=True, tag="SCHEDULE_DECODE"):
    """This step computes one token for each running sequence."""

    reason: Annotated[str, codes("no_prefill_admissible", "decodes_first", "static_batch")]
    engine_step: int
    decode_step_index: int
    scheduled: int
    seq_ids: list[int]
    token_budget: int
    waiting_len: int
    running_len: int
    free_blocks: int

    log_fields = ("decode_step_index", "engine_step", "scheduled", "running_len", "waiting_len")


class ScheduleMixed(Event, frozen=True, kw_only=True, tag="SCHEDULE_MIXED"):
    """This step computes one token for running sequences, and prompts as well."""

    reason: Annotated[str, codes("budget_left_for_prefill")] = "budget_left_for_prefill"
    engine_step: int
    scheduled: int
    num_decodes: int
    num_prefills: int
    seq_ids: list[int]
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    num_cached_tokens: list[int]
    num_batched_tokens: int
    token_budget: int
    waiting_len: int
    running_len: int
    free_blocks: int

    log_fields = ("engine_step", "num_decodes", "num_prefills", "waiting_len", "running_len")


class AdmissionStop(Event, frozen=True, kw_only=True, tag="ADMISSION_STOP"):
    """The head of the waiting queue had to wait, and so did all requests behind it."""

    reason: Annotated[
        str, codes("token_budget", "no_blocks", "max_num_seqs", "chunk_not_first", "static_batch")
    ]
    seq_id: int
    need: int
    have: int
    waiting_len: int

    log_fields = ("seq_id", "need", "have", "waiting_len")


class Preempt(Event, frozen=True, kw_only=True, tag="PREEMPT"):
    """A running sequence lost its blocks so that another could go on."""

    seq_id: int
    for_seq_id: int
    num_blocks_freed: int
    num_tokens_to_recompute: int

    log_fields = ("seq_id", "for_seq_id", "num_blocks_freed", "num_tokens_to_recompute")


class StateTransition(Event, frozen=True, kw_only=True, tag="STATE_TRANSITION"):
    """A sequence changed its status, and so its queue."""

    reason: Annotated[
        str,
        codes(
            "admitted",
            "preempted",
            "eos",
            "stop_token",
            "stop_string",
            "max_tokens",
            "max_model_len",
            "aborted",
        ),
    ]
    seq_id: int
    previous: Status
    status: Status
    token_id: int | None
    num_completion_tokens: int
    max_tokens: int

    log_fields = ("seq_id", "token_id", "num_completion_tokens", "max_tokens")


# -- blocks ----------------------------------------------------------------------------------------
# One event holds all consecutive operations of its kind.


class BlocksOfSeqs(Event, frozen=True, kw_only=True):
    """An operation of sequences on blocks: `seq_ids[i]` on `block_ids[i]`."""

    seq_ids: list[int]
    block_ids: list[list[int]]

    log_fields: ClassVar[tuple[str, ...]] = ("seq_ids", "block_ids")


class BlocksShare(BlocksOfSeqs, frozen=True, kw_only=True, tag="BLOCKS_SHARE"):
    """Hashed blocks that other sequences use are shared by one more."""


class BlocksRevive(BlocksOfSeqs, frozen=True, kw_only=True, tag="BLOCKS_REVIVE"):
    """Hashed blocks that were free are used again, with their contents."""


class BlocksAllocate(BlocksOfSeqs, frozen=True, kw_only=True, tag="BLOCKS_ALLOCATE"):
    """New blocks were allocated at admission."""


class BlocksAppend(BlocksOfSeqs, frozen=True, kw_only=True, tag="BLOCKS_APPEND"):
    """A new block for sequences whose last token crossed a block boundary."""


class BlocksHash(BlocksOfSeqs, frozen=True, kw_only=True, tag="BLOCKS_HASH"):
    """Full, computed blocks were hashed. A hash covers all tokens up to the block's end."""

    hashes: list[list[str]]


class BlocksEvict(Event, frozen=True, kw_only=True, tag="BLOCKS_EVICT"):
    """Free hashed blocks lost their hash, and with it their contents."""

    reason: Annotated[str, codes("page_needed", "cache_reset")] = "page_needed"
    block_ids: list[int]
    hashes: list[str]

    log_fields = ("block_ids",)


class BlocksRelease(BlocksOfSeqs, frozen=True, kw_only=True, tag="BLOCKS_RELEASE"):
    """Sequences gave up all their blocks, in this order; no other holds those in `freed`."""

    freed: list[list[int]]

    log_fields = ("seq_ids", "block_ids", "freed")


# -- run -------------------------------------------------------------------------------------------


class PreparePrefillTensors(Event, frozen=True, kw_only=True, tag="PREPARE_PREFILL_TENSORS"):
    """The inputs of a prefill or mixed step are prepared. Ranges are [first, last], inclusive."""

    flat_tokens: int
    n_seqs: int
    max_seqlen_q: int
    max_seqlen_k: int
    has_block_tables: bool
    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    position_ranges: list[tuple[int, int]]
    slot_ranges: list[tuple[int, int]]

    log_fields = ("flat_tokens", "n_seqs", "max_seqlen_q", "max_seqlen_k", "has_block_tables")


class PrepareDecodeTensors(Event, frozen=True, kw_only=True, tag="PREPARE_DECODE_TENSORS"):
    """The inputs of a decode step are prepared: one token per sequence."""

    batch_size: int
    context_lens: list[int]
    slot_mapping: list[int]
    block_tables_shape: tuple[int, int]

    log_fields = ("batch_size", "context_lens_shape", "slot_mapping_shape", "block_tables_shape")

    @property
    def context_lens_shape(self) -> tuple[int]:
        """The tensor's shape."""
        return (len(self.context_lens),)

    @property
    def slot_mapping_shape(self) -> tuple[int]:
        """The tensor's shape."""
        return (len(self.slot_mapping),)


class RunEager(Event, frozen=True, kw_only=True, tag="RUN_EAGER"):
    """The model ran eagerly, kernel by kernel."""

    reason: Annotated[
        str,
        codes(
            "prefill",
            "mixed",
            "enforce_eager",
            "device_has_no_graphs",
            "no_fused_kernels",
            "backend_reads_back",
            "batch_beyond_graphs",
        ),
    ]
    num_tokens: int

    log_fields = ("num_tokens",)


class CudagraphReplay(Event, frozen=True, kw_only=True, tag="CUDAGRAPH_REPLAY"):
    """The decode was launched as one graph; rows beyond the batch are padding."""

    batch_size: int
    graph_batch_size: int
    padding: int
    is_ahead: bool

    log_fields = ("batch_size", "graph_batch_size", "padding")


class SampleTokens(Event, frozen=True, kw_only=True, tag="SAMPLE_TOKENS"):
    """The next tokens were sampled."""

    seq_ids: list[int]
    temperatures: list[float]
    token_ids: list[int]

    log_fields = ("temperatures", "token_ids", "seq_ids")


class StepEnd(Event, frozen=True, kw_only=True, tag="STEP_END"):
    """A step has ended.

    The host's times add up to `wall_ns`. On a CPU `forward_ns` is the time of the model; on a GPU
    it is the time to launch it, and `gpu_ns` is the GPU's time.
    """

    batch_phase: Annotated[str, codes("prefill", "decode", "mixed")]
    num_seqs: int
    num_batched_tokens: int
    num_tokens_stat: int  # the article's: total length of a prefill's sequences; minus the batch
    finished: list[int]
    waiting_len: int
    running_len: int
    free_blocks: int
    wall_ns: int
    schedule_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    postprocess_ns: int
    gpu_ns: int | None

    log_fields = ("num_tokens_stat", "finished")


# -- egress ----------------------------------------------------------------------------------------


class RequestOutput(Event, frozen=True, kw_only=True, tag="REQUEST_OUTPUT"):
    """The text of a finished request."""

    seq_id: int
    reason: Annotated[
        str, codes("eos", "stop_token", "stop_string", "max_tokens", "max_model_len", "aborted")
    ]
    num_prompt_tokens: int
    num_completion_tokens: int
    text: str

    log_fields = ("seq_id", "num_prompt_tokens", "num_completion_tokens")


class GenerateFinish(Event, frozen=True, kw_only=True, tag="GENERATE_FINISH"):
    """`generate` or `stream` has ended."""

    reason: Annotated[str, codes("queues_empty")] = "queues_empty"
    total_steps: int
    prefill_steps: int
    decode_steps: int
    mixed_steps: int = 0
    n_outputs: int

    log_fields = ("total_steps", "prefill_steps", "decode_steps", "n_outputs")


class EngineError(Event, frozen=True, kw_only=True, tag="ENGINE_ERROR"):
    """An exception left the engine."""

    error_type: str
    message: str

    log_fields = ("error_type", "message")


class EngineReset(Event, frozen=True, kw_only=True, tag="ENGINE_RESET"):
    """After an error: all requests were ended, queues emptied, blocks freed, hashes removed.

    `num_tokens` is the length of each: a token may have been sampled but not appended.
    """

    seq_ids: list[int]
    num_tokens: list[int]

    log_fields = ("seq_ids",)


AnyEvent = (
    EngineInit
    | TpRuntimeInit
    | ModelWeightsLoaded
    | WarmupModel
    | KvBudgetEstimate
    | CudagraphCapture
    | CudagraphSkip
    | EngineReady
    | GenerateStart
    | RequestEnqueue
    | RequestRefused
    | RequestAbort
    | SchedulePrefill
    | ScheduleDecode
    | ScheduleMixed
    | AdmissionStop
    | Preempt
    | StateTransition
    | BlocksShare
    | BlocksRevive
    | BlocksAllocate
    | BlocksAppend
    | BlocksHash
    | BlocksEvict
    | BlocksRelease
    | PreparePrefillTensors
    | PrepareDecodeTensors
    | RunEager
    | CudagraphReplay
    | SampleTokens
    | StepEnd
    | RequestOutput
    | GenerateFinish
    | EngineError
    | EngineReset
)
Schedule = SchedulePrefill | ScheduleDecode | ScheduleMixed
SCHEDULES = (SchedulePrefill, ScheduleDecode, ScheduleMixed)
Layout = PreparePrefillTensors | PrepareDecodeTensors
LAYOUTS = (PreparePrefillTensors, PrepareDecodeTensors)
Run = RunEager | CudagraphReplay
RUNS = (RunEager, CudagraphReplay)


_Own = ParamSpec("_Own")
_E = TypeVar("_E", bound=Event)


def new(cls: Callable[Concatenate[int, int, int | None, Phase, _Own], _E]) -> Callable[_Own, _E]:
    """`new(Preempt)(seq_id=...)` builds an event whose envelope `TraceWriter` fills in later."""
    return partial(cls, 0, 0, None, "")


if not TYPE_CHECKING:  # a type checker would lose the types
    new = cache(new)


def tag_of(event: Event | type[Event]) -> str:
    """The event's name in a trace, for example "SCHEDULE_PREFILL"."""
    return str(event.__struct_config__.tag)


def field_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Name -> type of each field: with its known codes, but without the bounds of numbers."""
    plain = get_type_hints(struct)
    fields = msgspec.structs.fields(struct)
    return {
        field.name: field.type if codes_of(field.type) else plain[field.name] for field in fields
    }


EVENT_TYPES: dict[str, type[Event]] = {tag_of(cls): cls for cls in get_args(AnyEvent)}
_CODES = {
    cls: [
        (field.name, frozenset(known))
        for field in msgspec.structs.fields(cls)
        if (known := codes_of(field.type))
    ]
    for cls in EVENT_TYPES.values()
}


def unknown_codes(event: Event) -> dict[str, str]:
    """The event's fields whose code is not known here -> that code."""
    return {
        name: code
        for name, known in _CODES[type(event)]
        if (code := getattr(event, name)) not in known
    }
