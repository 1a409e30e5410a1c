"""Columns: what is in each DataFrame, in one place: name, dtype, unit, meaning.

docs/en/columns.md and docs/zh/columns.md are generated from here by `python -m nvtrace.reference
docs`; the Chinese words are in `catalog/zh.toml`. Needs no pandas.

`seq_id`, `step`, `rank` and `block_id` mean the same in every frame: they are what frames are
joined on. Of several ranks, `steps`, `requests`, `tokens` and `blocks` are told once: all ranks
compute the same. `events` and `table()` have the events of each, and there `rank` belongs to the
key. Times are nanoseconds of the trace's clock; each rank has its own.

What never happened is missing, not 0, and `isna()` finds it. A dtype with a capital letter
("Int64", "Float64") and "boolean" hold pandas' NA; text, codes and lists hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["int64", "Int64", "float64", "Float64", "bool", "boolean", "category", "str"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a DataFrame.

    Attributes:
        dtype: pandas' name of its type.
        unit: the unit; "" for names and ids.
        meaning: a short description.
    """

    name: str
    dtype: Dtype
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A DataFrame.

    Attributes:
        name: `Trace`'s attribute, or the analysis that returns it.
        row: what a row is, and the order of rows.
        source: the events or frames that it is made from.
        columns: in their order.
    """

    name: str
    row: str
    source: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """The columns' names."""
        return [column.name for column in self.columns]


_RANK = Column("rank", "int64", "", "the process that recorded it; rank 0 decides for all")
_STEP = Column("step", "int64", "", "the engine_step")
_SEQ_ID = Column("seq_id", "int64", "", "the request")
_PHASE = Column("phase", "category", "", "the step's kind: prefill, decode or mixed")

EVENTS = Frame(
    "events",
    "an event, by rank and event_id; its other fields are in `trace.table(event)`",
    "every event that this version knows",
    (
        _RANK,
        Column("event_id", "int64", "", "its number, without gaps within a rank"),
        Column("event", "category", "", "its name, like SCHEDULE_PREFILL"),
        Column("ts_ns", "int64", "ns", "when, since its rank's anchor: headers[rank].clock"),
        Column("step", "Int64", "", "the engine_step; NA between two steps"),
        Column(
            "phase", "category", "", "the part of a run it belongs to, like bootstrap or decode"
        ),
        Column("reason", "category", "", "the code of its reason; NA where there is none"),
        Column("seq_id", "Int64", "", "the one request it is about; NA for none or several"),
    ),
)

STEPS = Frame(
    "steps",
    "a step that was scheduled or ran, as the first rank that was read recorded it",
    "SCHEDULE_*, PREPARE_*, RUN_EAGER, CUDAGRAPH_REPLAY, STEP_END",
    (
        _STEP,
        _RANK,
        Column(
            "event_id", "int64", "", "of the event that schedules it; above rank 0, that runs it"
        ),
        _PHASE,
        Column("reason", "category", "", "why it was of this kind"),
        Column("start_ns", "int64", "ns", "its beginning: ts_ns - wall_ns"),
        Column("ts_ns", "int64", "ns", "its end; the last event's time if it failed"),
        Column("num_seqs", "int64", "requests", "the batch"),
        Column("num_batched_tokens", "int64", "tokens", "computed in it, prompts and decodes"),
        Column("num_prefill_tokens", "Int64", "tokens", "of them, tokens of prompts"),
        Column("num_decode_tokens", "Int64", "tokens", "of them, one for each decoding request"),
        Column("num_context_tokens", "Int64", "tokens", "attended to, the new ones included"),
        Column("token_budget", "Int64", "tokens", "that it was allowed to compute"),
        Column("num_waiting", "Int64", "requests", "in the waiting queue while it computes"),
        Column("num_running", "Int64", "requests", "in the running queue while it computes"),
        Column("num_free_blocks", "Int64", "blocks", "in the free list while it computes"),
        Column("num_finished", "Int64", "requests", "that ended with it"),
        Column("wall_ns", "Int64", "ns", "the host's time, the sum of the five below"),
        Column("schedule_ns", "Int64", "ns", "of it, to decide what to compute"),
        Column("prepare_ns", "Int64", "ns", "of it, to lay out the tensors"),
        Column("forward_ns", "Int64", "ns", "of it, in the model; launch time only, on one GPU"),
        Column("sample_ns", "Int64", "ns", "of it, to sample the tokens, or wait for them"),
        Column("postprocess_ns", "Int64", "ns", "of it, to append them and to end requests"),
        Column("gpu_ns", "Int64", "ns", "the device's own time; NA on a CPU"),
        Column("eager_reason", "category", "", "why it ran kernel by kernel; NA for a CUDA graph"),
        Column("graph_batch_size", "Int64", "rows", "of the CUDA graph; NA if it ran eagerly"),
        Column("num_padding_rows", "Int64", "rows", "of the graph that no request fills"),
        Column("is_ahead", "boolean", "", "was it run ahead: launched before it was scheduled?"),
    ),
)

REQUESTS = Frame(
    "requests",
    "a request that has ended, in the order of their ends; the metrics page defines each column",
    "nvtrace.measure",
    (
        _SEQ_ID,
        Column("finish_reason", "category", "", 'why it ended; "aborted" if it was stopped'),
        Column("num_prompt_tokens", "int64", "tokens", "of its prompt"),
        Column("num_generation_tokens", "int64", "tokens", "of its answer"),
        Column("num_cached_tokens", "int64", "tokens", "of its prompt that the prefix cache had"),
        Column("num_preemptions", "int64", "times", "it gave up its blocks"),
        Column("num_recomputed_tokens", "int64", "tokens", "computed again after a preemption"),
        Column("arrival_ns", "int64", "ns", "when it was enqueued"),
        Column("scheduled_ns", "Int64", "ns", "when it was first admitted"),
        Column("finished_ns", "int64", "ns", "when its last step ended, or it was aborted"),
        Column("preempted_in_prefill_ns", "int64", "ns", "waiting again, before its first token"),
        Column("preempted_in_decode_ns", "int64", "ns", "waiting again, after its first token"),
        Column("first_token_ns", "Int64", "ns", "when its first token was ready"),
        Column("time_to_first_token_ns", "Int64", "ns", "TTFT: first token - arrival"),
        Column("time_per_output_token_ns", "Float64", "ns", "TPOT: the mean of its ITLs"),
        Column("request_queue_time_ns", "int64", "ns", "scheduled - arrival"),
        Column("request_prefill_time_ns", "Int64", "ns", "first token - scheduled"),
        Column("request_decode_time_ns", "Int64", "ns", "finished - first token"),
        Column("request_inference_time_ns", "Int64", "ns", "finished - scheduled"),
        Column("request_preempted_time_ns", "int64", "ns", "waiting again, in total"),
        Column("e2e_request_latency_ns", "int64", "ns", "finished - arrival"),
    ),
)

TOKENS = Frame(
    "tokens",
    "a generated token, by step and place in the batch",
    "SAMPLE_TOKENS of steps that ended",
    (
        _SEQ_ID,
        Column("index", "int64", "", "its place in the answer, from 0"),
        Column("token_id", "int64", "", "the token"),
        Column("step", "int64", "", "the engine_step that sampled it"),
        Column("ts_ns", "int64", "ns", "when it was ready: the step's end"),
        Column(
            "itl_ns", "Int64", "ns", "ITL: since the request's previous token; NA for the first"
        ),
    ),
)

BLOCKS = Frame(
    "blocks",
    "an operation on a KV block, in the order of the trace",
    "BLOCKS_*, ENGINE_RESET",
    (
        Column("event_id", "int64", "", "of the event that records it"),
        Column("step", "Int64", "", "the engine_step; NA between two steps"),
        Column("ts_ns", "int64", "ns", "when"),
        Column(
            "operation",
            "category",
            "",
            "allocate, append, share, revive, hash, release, evict, reset (after an error)",
        ),
        Column("block_id", "int64", "", "the block"),
        Column("seq_id", "Int64", "", "the request that does it; NA for evict and reset"),
        Column("ref_count", "int64", "tables", "that hold the block, after it"),
        Column("is_hashed", "bool", "", "can the prefix cache find the block, after it?"),
    ),
)

FRAMES: dict[str, Frame] = {
    frame.name: frame for frame in (EVENTS, STEPS, REQUESTS, TOKENS, BLOCKS)
}

# -- what the analyses return ----------------------------------------------------------------------

_SHARE = "0 to 1"

_ANALYSES = (
    Frame(
        "latency_breakdown",
        "a request that has ended; queue + prefill + decode + preempted = end to end",
        "requests",
        (
            _SEQ_ID,
            Column("finish_reason", "category", "", "why it ended"),
            Column("queue_ns", "int64", "ns", "waiting to be admitted for the first time"),
            Column("prefill_ns", "Int64", "ns", "admission to first token, without preempted time"),
            Column("decode_ns", "Int64", "ns", "first token to its end, without preempted time"),
            Column("preempted_ns", "int64", "ns", "waiting to be admitted again"),
            Column("e2e_request_latency_ns", "int64", "ns", "the sum of the four above"),
        ),
    ),
    Frame(
        "request_spans",
        "a span of a request's life, by request and time; a request's spans leave no gap",
        "requests, STATE_TRANSITION",
        (
            _SEQ_ID,
            Column("span", "category", "", "queue, prefill, decode or preempted"),
            Column("start_ns", "int64", "ns", "its beginning"),
            Column("end_ns", "int64", "ns", "its end"),
        ),
    ),
    Frame(
        "waiting_by_reason",
        "a reason to wait, the longest first",
        "ADMISSION_STOP, steps",
        (
            Column("reason", "category", "", "why the waiting queue's head was not admitted"),
            Column("num_steps", "int64", "steps", "with this reason"),
            Column("num_request_steps", "int64", "", "requests that waited, added up over them"),
            Column("waiting_ns", "int64", "ns", "the same with each step's wall_ns: time lost"),
        ),
    ),
    Frame(
        "preemption_cost",
        "a request that was preempted and has ended, in the order of their ends",
        "requests, PREEMPT",
        (
            _SEQ_ID,
            Column("num_preemptions", "int64", "times", "it gave up its blocks"),
            Column("num_blocks_freed", "int64", "blocks", "that it freed for others"),
            Column("num_recomputed_tokens", "int64", "tokens", "computed again because of it"),
            Column("preempted_ns", "int64", "ns", "waiting to be admitted again"),
            Column("share_of_latency", "float64", _SHARE, "preempted_ns / end-to-end latency"),
        ),
    ),
    Frame(
        "batch_occupancy",
        "a batch size of a kind of step",
        "steps",
        (
            _PHASE,
            Column("num_seqs", "int64", "requests", "the batch"),
            Column("num_steps", "int64", "steps", "of this kind and size"),
            Column("num_batched_tokens", "int64", "tokens", "computed in them"),
            Column("wall_ns", "int64", "ns", "the host's time in them"),
            Column("share_of_time", "float64", _SHARE, "of the host's time in all steps"),
        ),
    ),
    Frame(
        "static_waste",
        "a step that decodes",
        "steps",
        (
            _STEP,
            Column("num_seats", "int64", "requests", "that a batch has room for"),
            Column("num_seqs", "int64", "requests", "in it"),
            Column("num_empty", "int64", "requests", "seats whose request ended early"),
            Column("num_waiting", "int64", "requests", "in the waiting queue"),
            Column("num_joinable", "int64", "requests", "empty seats that these could have taken"),
        ),
    ),
    Frame(
        "graph_padding",
        "a size of CUDA graph",
        "steps",
        (
            Column("graph_batch_size", "int64", "rows", "of the graph"),
            Column("num_steps", "int64", "steps", "that replayed it"),
            Column("num_rows", "int64", "rows", "computed in them"),
            Column("num_padding_rows", "int64", "rows", "of them that no request fills"),
            Column("graph_padding", "float64", _SHARE, "num_padding_rows / num_rows"),
            Column("median_wall_ns", "Float64", "ns", "the host's time of such a step"),
            Column("median_gpu_ns", "Float64", "ns", "the device's"),
        ),
    ),
    Frame(
        "step_time_by_class",
        "a kind of step and a range of batch sizes, between two powers of 2",
        "steps",
        (
            _PHASE,
            Column("smallest_batch", "int64", "requests", "the smallest in the class"),
            Column("largest_batch", "int64", "requests", "the largest"),
            Column("num_steps", "int64", "steps", "in the class"),
            Column("median_wall_ns", "Float64", "ns", "the host's time of such a step"),
            Column("median_gpu_ns", "Float64", "ns", "the device's; NA on a CPU"),
            Column("median_context_tokens", "Float64", "tokens", "that it attends to"),
            Column("floor_ns", "Float64", "ns", "of a decode step: its bytes / the bandwidth"),
            Column("times_floor", "Float64", "", "median_wall_ns / floor_ns"),
        ),
    ),
    Frame(
        "kv_use",
        "a step, while it computes",
        "steps, blocks",
        (
            _STEP,
            Column("ts_ns", "int64", "ns", "the step's end"),
            Column("num_used_blocks", "int64", "blocks", "in a block table"),
            Column("num_shared_blocks", "int64", "blocks", "of them, in several"),
            Column("num_free_blocks", "int64", "blocks", "in the free list"),
            Column("num_cached_blocks", "int64", "blocks", "of them, that still hold contents"),
            Column("kv_cache_usage", "float64", _SHARE, "num_used_blocks / all blocks"),
        ),
    ),
    Frame(
        "prefix_hits",
        "a request that was admitted and has ended, in the order of their admissions",
        "requests",
        (
            _SEQ_ID,
            Column("scheduled_ns", "int64", "ns", "when it was first admitted"),
            Column("num_prompt_tokens", "int64", "tokens", "of its prompt: looked up"),
            Column("num_cached_tokens", "int64", "tokens", "of them that the prefix cache had"),
            Column("hit_rate", "float64", _SHARE, "num_cached_tokens / num_prompt_tokens"),
            Column("hit_rate_so_far", "float64", _SHARE, "the same over all up to this one"),
        ),
    ),
    Frame(
        "memory_budget",
        "a term of the sum that gives the number of blocks, in its order",
        "KV_BUDGET_ESTIMATE",
        (
            Column("term", "str", "", "what it is"),
            Column("kind", "category", "", "total: the start; less: taken off; left: what remains"),
            Column("num_bytes", "int64", "bytes", "how much"),
        ),
    ),
)

ANALYSES: dict[str, Frame] = {frame.name: frame for frame in _ANALYSES}
