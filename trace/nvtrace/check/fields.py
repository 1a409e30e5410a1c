"""The values that each field can have, as one table.

A value is checked by itself: a number's range, the known codes. For a field whose value follows
from other events, the table names the invariant that checks it. A test requires that every field of
every event is in the table.

The ranges of what a user may ask for are the engine's (`nanovllm.sampling_params`,
`nanovllm.config`), stated again since a trace is read without an engine. A test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from nvtrace import events as ev
from nvtrace.check.finding import Conflict, Fact, Rule
from nvtrace.envelope import Footer, Header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvtrace.check.ledger import Ledger

    Values = Callable[
        [object], Fact | None
    ]  # None if the value is allowed; else the limit that it breaks

WORDS = "words"  # any name or text
TP_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_SECTIONS = ("clock", "engine", "environment", "model", "config")  # of the header


# -- kinds of values -------------------------------------------------------------------------------


def whole(least: int = 0, most: float = float("inf")) -> Values:
    """A whole number from `least` to `most`."""

    def judge(value: object) -> Fact | None:
        if type(value) is not int:
            return Fact("type", "int")
        if least <= value <= most:
            return None
        return Fact("at_least", least) if value < least else Fact("at_most", most)

    return judge


def real(most: float = float("inf"), *, with_0: bool = False) -> Values:
    """A number above 0 (or 0 itself), and not above `most`."""

    def judge(value: object) -> Fact | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return Fact("type", "float")
        if with_0 and not value >= 0:
            return Fact("at_least", 0)
        if not (value > 0 or with_0):
            return Fact("above", 0)
        return None if value <= most else Fact("at_most", most)

    return judge


def one_of(*codes: object) -> Values:
    """One of some codes."""
    return lambda value: None if value in codes else Fact("one_of", [*codes])


def or_null(values: Values) -> Values:
    """Such a value, or null."""
    return lambda value: None if value is None else values(value)


def each(values: Values, least: int = 0) -> Values:
    """A list of such values, `least` of them or more."""

    def judge(value: object) -> Fact | None:
        if not isinstance(value, list | tuple):
            return Fact("type", "list")
        if len(value) < least:
            return Fact("not_empty", least)
        return next(filter(None, map(values, value)), None)

    return judge


def by_name(values: Values) -> Values:
    """An object of such values."""

    def judge(value: object) -> Fact | None:
        if not isinstance(value, dict):
            return Fact("type", "object")
        return next(filter(None, map(values, value.values())), None)

    return judge


def text(value: object) -> Fact | None:
    """A text, not an empty one."""
    if not isinstance(value, str):
        return Fact("type", "str")
    return None if value else Fact("not_empty", 1)


def flag(value: object) -> Fact | None:
    """True or false."""
    return None if isinstance(value, bool) else Fact("type", "bool")


# -- the table -------------------------------------------------------------------------------------

# The allowed values, or the invariant that checks them, and the names of fields. "EVENT.field" and
# "section.field" are for a name that means something else there.
_TABLE: tuple[tuple[Values | str, str], ...] = (
    # of every event, the header, the footer
    ("event_ids", "event_id num_events"),
    ("times", "ts_ns"),
    ("phases", "phase"),
    ("exit", "exit"),
    (whole(0, 0), "num_dropped"),  # a trace that lacks events is refused
    (or_null(text), "TRACE_FOOTER.error_type"),
    (text, "schema run_id created name engine.version source"),
    (one_of("ns"), "unit"),
    (one_of("text", "tokens"), "content"),
    (one_of("real", "simulated"), "mode"),
    (WORDS, "message text TRACE_HEADER.model clock engine environment config"),
    # settings, as ENGINE_INIT and the header's config call them
    (text, "model policy error_type config.attention_reason"),
    (whole(1, 2**31 - 1), "max_num_batched_tokens max_num_seqs tensor_parallel_size tp_size"),
    (whole(1, 2**31 - 1), "kvcache_block_size block_size"),
    (whole(2, 2**31 - 1), "max_model_len"),
    (or_null(whole(1, 2**31 - 1)), "config.num_kvcache_blocks"),
    (real(1), "gpu_memory_utilization utilization"),
    (real(7 * 24 * 3600), "distributed_timeout"),
    (one_of("cpu", "cuda"), "device"),
    (one_of("float32", "float16", "bfloat16"), "dtype"),
    (or_null(one_of("float32", "float16", "bfloat16")), "model.dtype"),
    (one_of("hybrid", "flash_attn", "triton", "sdpa"), "attention_backend"),
    ("settings", "attention_reason TP_RUNTIME_INIT.device CUDAGRAPH_SKIP.reason"),
    (flag, "enforce_eager enable_prefix_caching fused_kernels ignore_eos is_ahead"),
    (flag, "is_filtered tie_word_embeddings attention_bias has_block_tables"),
    (whole(0, 2**64 - 1), "seed"),
    # the model's shape, and the start
    (whole(1), "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"),
    (whole(1), "num_key_value_heads head_dim num_layers num_kv_heads dtype_bytes block_bytes"),
    (whole(2), "max_position_embeddings"),
    (real(), "rms_norm_eps rope_theta"),
    (whole(), "rank anchor_unix_ns duration_ns pool_bytes"),
    (each(whole()), "version eos_token_ids"),
    (or_null(each(text)), "eos_sources"),
    (by_name(each(whole())), "eos_by_file"),
    (whole(1), "world_size num_files num_keys num_bytes num_local_ranks total_bytes seq_len"),
    (or_null(one_of(*TP_BACKENDS.values())), "backend"),
    (or_null(whole(1)), "num_cpus peak_bytes limit_bytes"),
    (or_null(whole()), "current_bytes graph_pool_bytes"),
    (whole(), "free_bytes used_bytes"),
    ("pool_size", "rule available_bytes"),  # less than 0 is available to a pool of a given size
    (whole(1), "num_blocks num_kvcache_blocks"),
    (each(whole(1), 1), "batch_sizes"),
    # requests
    (
        whole(),
        "n_prompts n_outputs seq_id for_seq_id waiting_len running_len free_blocks need have",
    ),
    (whole(1), "prompt_len num_prompt_tokens"),
    (whole(1, 2**31 - 1), "max_tokens"),
    (real(1e6, with_0=True), "temperature"),
    (or_null(whole(1, 2**31 - 1)), "top_k"),
    (real(1), "top_p"),
    (or_null(each(whole(0, 2**31 - 1), 1)), "stop_token_ids"),
    (or_null(each(text, 1)), "stop"),
    (or_null(whole(0, 2**31 - 1)), "logprobs"),
    ("arrival", "prompt_token_ids REQUEST_ENQUEUE.reason REQUEST_REFUSED.reason"),
    (whole(), "num_completion_tokens num_blocks_freed num_tokens_to_recompute"),
    ("transitions", "previous status STATE_TRANSITION.reason ENGINE_RESET.num_tokens"),
    ("request_facts", "token_id REQUEST_OUTPUT.reason"),
    ("admission_stop", "ADMISSION_STOP.reason"),
    (whole(), "total_steps prefill_steps decode_steps mixed_steps decode_step_index"),
    ("sums", "GENERATE_START.reason GENERATE_FINISH.reason batch_phase num_tokens_stat"),
    # blocks
    ("names", "seq_ids block_ids"),
    ("ref_counts", "freed"),
    ("hash_chain", "hashes"),
    ("eviction", "BLOCKS_EVICT.reason"),
    # a step
    (or_null(whole(1)), "step"),
    ("batch", "SCHEDULE_PREFILL.reason SCHEDULE_DECODE.reason SCHEDULE_MIXED.reason"),
    (whole(1), "engine_step scheduled token_budget num_decodes num_prefills num_batched_tokens"),
    ("covered_once", "num_scheduled_tokens num_computed_tokens num_cached_tokens"),
    (whole(1), "flat_tokens n_seqs max_seqlen_q max_seqlen_k batch_size graph_batch_size"),
    (whole(1), "num_seqs num_tokens"),
    (whole(), "padding"),
    ("layout", "cu_seqlens_q cu_seqlens_k position_ranges context_lens block_tables_shape"),
    ("slots", "slot_ranges slot_mapping"),
    ("graph_size", "RUN_EAGER.reason"),
    ("sampled", "temperatures token_ids"),
    ("ends", "finished"),
    (whole(), "wall_ns schedule_ns prepare_ns forward_ns sample_ns postprocess_ns"),
    (or_null(whole()), "gpu_ns"),
)
FIELDS = {name: values for values, names in _TABLE for name in names.split()}


def values_of(name: str, place: str) -> Values | str | None:
    """The values of a field, or the invariant that checks them; None if it is not in the table.

    Args:
        name: of the field.
        place: its event, or its section of the header.
    """
    return FIELDS.get(f"{place}.{name}", FIELDS.get(name))


def _judges(kind: type[msgspec.Struct]) -> tuple[tuple[str, Values], ...]:
    tag = str(kind.__struct_config__.tag)
    found = ((name, values_of(name, tag)) for name in kind.__struct_fields__)
    return tuple((name, values) for name, values in found if callable(values))


_KINDS: tuple[type[msgspec.Struct], ...] = (*ev.EVENT_TYPES.values(), Header, Footer)
_JUDGES = {kind: _judges(kind) for kind in _KINDS}


def in_range(_ledger: Ledger, record: ev.Event | Header | Footer) -> Iterator[Conflict]:
    """Each value of a record is allowed."""
    for name, judge in _JUDGES[type(record)]:
        expected = judge(getattr(record, name))
        if expected is not None:
            yield Conflict(Fact(name, getattr(record, name)), expected)


def sound(header: Header) -> tuple[Header, list[Conflict]]:
    """The header without the values that are not allowed, and the conflicts of these values.

    A name that is not in the table is a newer version's.
    """
    conflicts: list[Conflict] = []
    kept: dict[str, Any] = {}
    for section in _SECTIONS:
        kept[section] = fields = dict(getattr(header, section))
        for name in [*fields]:
            judge = values_of(name, section)
            expected = judge(fields[name]) if callable(judge) else None
            if expected is not None:
                conflicts.append(Conflict(Fact(name, fields.pop(name)), expected))
    return msgspec.structs.replace(header, **kept), conflicts


RULES = (Rule("ranges", "before", (), in_range),)
