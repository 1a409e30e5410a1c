"""Rules for an engine's start: its settings, the size of the KV cache, the CUDA graphs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.check.fields import TP_BACKENDS
from nvtrace.check.finding import Conflict, Fact, Rule, differ
from nvtrace.check.queues import in_vocabulary
from nvtrace.envelope import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.check.ledger import Ledger
    from nvtrace.envelope import Header

_CONFIG_NAMES = {"tp_size": "tensor_parallel_size", "block_size": "kvcache_block_size"}
_SETTINGS = (
    *("model", "tp_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size"),
    *("device", "dtype", "attention_backend", "attention_reason", "fused_kernels"),
    *("enforce_eager", "enable_prefix_caching", "policy", "seed"),
)
_ORDER = (
    *("ENGINE_INIT", "TP_RUNTIME_INIT", "MODEL_WEIGHTS_LOADED", "WARMUP_MODEL"),
    *("KV_BUDGET_ESTIMATE", "CUDAGRAPH_CAPTURE", "CUDAGRAPH_SKIP", "ENGINE_READY"),
)
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_CLOCK_STEP = timedelta(microseconds=2)  # a date has fewer digits than nanoseconds


def header(header: Header) -> Iterator[Conflict]:
    """The header's values agree, within it and between model and settings."""
    config, model, size = header.config, header.model, header.world_size
    if header.rank >= size:
        yield Conflict(Fact("rank", header.rank), Fact("at_most", size - 1))
    yield from differ("world_size", size, "header_config", config.get("tensor_parallel_size", size))
    yield from _created(header)
    if "gpu" in header.environment and config.get("device") == "cpu":
        yield Conflict(Fact("gpu", header.environment["gpu"]), Fact("header_config", "cpu"))
    heads, kv_heads = (model.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if heads is not None and heads % size:
        yield Conflict(Fact("num_attention_heads", heads), Fact("multiple_of", size))
    if heads is not None and kv_heads is not None and heads % kv_heads:
        yield Conflict(Fact("num_attention_heads", heads), Fact("multiple_of", kv_heads))
    length, most = config.get("max_model_len"), model.get("max_position_embeddings")
    if length is not None and most is not None and not model.get("rope_scaling") and length > most:
        yield Conflict(Fact("max_model_len", length), Fact("header_model", most))


def _created(header: Header) -> Iterator[Conflict]:
    """The date is that of ts_ns = 0; a simulated clock has none."""
    anchor = header.clock.get("anchor_unix_ns")
    try:
        created = datetime.fromisoformat(header.created)
        expected = datetime.fromtimestamp((anchor or 0) / 1e9, tz=UTC)
    except (ValueError, OverflowError, OSError):
        yield Conflict(Fact("created", header.created), Fact("type", "datetime"))
        return
    if created.tzinfo is None or (anchor is not None and abs(created - expected) > _CLOCK_STEP):
        yield Conflict(Fact("created", header.created), Fact("clock_anchor", expected.isoformat()))


def _settings(ledger: Ledger, event: ev.EngineInit) -> Iterator[Conflict]:
    config = ledger.header.config if ledger.header else {}
    for field in _SETTINGS:
        expected = config.get(_CONFIG_NAMES.get(field, field))
        if expected is not None:
            yield from differ(field, getattr(event, field), "header_config", expected)
    is_cpu, reason = event.device == "cpu", event.attention_reason
    if reason == "no_gpu" or (is_cpu and reason not in {"asked", "not_recorded"}):
        yield from differ("attention_reason", reason == "no_gpu", "is_cpu", is_cpu)
    if is_cpu and (event.fused_kernels or event.attention_backend != "sdpa"):
        needs_gpu = [event.attention_backend, event.fused_kernels]
        yield Conflict(Fact("attention_backend", needs_gpu), Fact("engine_device", event.device))


def _place(ledger: Ledger, event: ev.TpRuntimeInit) -> Iterator[Conflict]:
    header, init = ledger.header, ledger.init
    if header is not None:
        yield from differ("rank", event.rank, "header_rank", header.rank)
        yield from differ("world_size", event.world_size, "header_world_size", header.world_size)
    if init is not None:
        yield from differ("world_size", event.world_size, "tp_size", init.tp_size)
        device, _, number = event.device.partition(":")
        yield from differ("device", device, "engine_device", init.device)
        numbers = [""] if device == "cpu" else [*map(str, range(event.rank + 1))]
        if number not in numbers:  # a machine's first rank has its first GPU
            yield Conflict(Fact("device", event.device), Fact("one_of", numbers))
        expected = None if event.world_size == 1 else TP_BACKENDS.get(init.device, event.backend)
        yield from differ("backend", event.backend, "backend_by_device", expected)


def _weights(ledger: Ledger, event: ev.ModelWeightsLoaded) -> Iterator[Conflict]:
    """The checkpoint holds this model's tensors, in numbers of two to eight bytes."""
    if event.num_files > event.num_keys:
        yield Conflict(Fact("num_files", event.num_files), Fact("num_keys", event.num_keys))
    model = ModelFacts() if ledger.header is None else ledger.header.facts.model
    if model.architecture != "Qwen3ForCausalLM" or model.num_weights is None:
        return
    num_keys, num_numbers = model.num_weights
    has_tied_head = bool(model.tie_word_embeddings) and event.num_keys == num_keys + 1
    if has_tied_head:  # it may be in the file or not
        num_numbers += (model.vocab_size or 0) * (model.hidden_size or 0)
    yield from differ("num_keys", event.num_keys, "weights_of_model", num_keys + has_tied_head)
    if event.num_bytes % 2 or not 2 * num_numbers <= event.num_bytes <= 8 * num_numbers:
        sizes = [2 * num_numbers, 8 * num_numbers]
        yield Conflict(Fact("num_bytes", event.num_bytes), Fact("bytes_of_model", sizes))


def _duration(ledger: Ledger, event: ev.ModelWeightsLoaded | ev.EngineReady) -> Iterator[Conflict]:
    """The parts of a start fit between its events, and the whole is at least their sum."""
    if ledger.init is None or ledger.last is None:
        return
    least, most = 0, event.ts_ns - ledger.init.ts_ns - ledger.start_ns
    if isinstance(event, ev.EngineReady):  # the start began before its first event
        least, most = ledger.last.ts_ns - ledger.init.ts_ns, event.ts_ns
    if not least <= event.duration_ns <= most:
        yield Conflict(Fact("duration_ns", event.duration_ns), Fact("time_from_to", [least, most]))


def _warmup(ledger: Ledger, event: ev.WarmupModel) -> Iterator[Conflict]:
    yield from differ(
        "num_tokens", event.num_tokens, "num_seqs_x_seq_len", event.num_seqs * event.seq_len
    )
    if ledger.init is not None:
        init = ledger.init
        num_seqs = min(-(-init.max_num_batched_tokens // init.max_model_len), init.max_num_seqs)
        seq_len = min(init.max_num_batched_tokens // num_seqs, init.max_model_len)
        yield from differ("seq_len", event.seq_len, "longest_prefill", seq_len)
        yield from differ("num_seqs", event.num_seqs, "largest_prefill", num_seqs)
        yield from _on_gpu(ledger, event)


def _block_bytes(ledger: Ledger, event: ev.KvBudgetEstimate) -> Iterator[Conflict]:
    product = 2 * event.num_layers * event.block_size * event.num_kv_heads
    product *= event.head_dim * event.dtype_bytes
    yield from differ("block_bytes", event.block_bytes, "page_product", product)
    model = ledger.header.facts.model if ledger.header else None
    world_size = ledger.header.world_size if ledger.header else 1
    for field, name in (
        ("num_layers", "num_hidden_layers"),
        ("head_dim", "head_dim"),
        ("num_kv_heads", "num_key_value_heads"),
    ):
        expected: int | None = getattr(model, name, None)
        if expected is not None and field == "num_kv_heads":
            expected = max(1, expected // world_size)
        if expected is not None:
            yield from differ(field, getattr(event, field), "header_model", expected)
    if ledger.init is not None:
        yield from differ(
            "block_size", event.block_size, "engine_block_size", ledger.init.block_size
        )
        expected = _BYTES.get(ledger.init.dtype, event.dtype_bytes)
        yield from differ("dtype_bytes", event.dtype_bytes, "engine_dtype", expected)
    peak_bytes = ledger.warmup.peak_bytes if ledger.warmup else None
    yield from differ("peak_bytes", event.peak_bytes, "warmup_peak_bytes", peak_bytes)


def _pool_size(ledger: Ledger, event: ev.KvBudgetEstimate) -> Iterator[Conflict]:
    used = event.total_bytes - event.free_bytes
    yield from differ("used_bytes", event.used_bytes, "total_less_free", used)
    config = ledger.header.config if ledger.header else {}
    utilization = config.get("gpu_memory_utilization", event.utilization)
    yield from differ("utilization", event.utilization, "header_config", utilization)
    available = int(event.total_bytes * event.utilization) - event.used_bytes
    if event.peak_bytes is not None and event.current_bytes is not None:
        available -= event.peak_bytes - event.current_bytes + (event.graph_pool_bytes or 0)
    elif event.limit_bytes is not None:
        available = min(available, event.limit_bytes) // max(event.num_local_ranks, 1)
    yield from differ("available_bytes", event.available_bytes, "room_sum", available)
    is_measured = event.peak_bytes is not None
    for field, is_recorded in (
        ("limit_bytes", event.limit_bytes is None),
        ("current_bytes", event.current_bytes is not None),
        ("graph_pool_bytes", event.graph_pool_bytes is not None),
    ):
        yield from differ(field, is_recorded, "is_measured", is_measured)
    if event.free_bytes > event.total_bytes:
        yield Conflict(Fact("free_bytes", event.free_bytes), Fact("at_most", event.total_bytes))
    if (event.current_bytes or 0) > (event.peak_bytes or 0):
        yield Conflict(
            Fact("current_bytes", event.current_bytes), Fact("at_most", event.peak_bytes)
        )
    world_size = ledger.header.world_size if ledger.header else event.num_local_ranks
    if not 1 <= event.num_local_ranks <= world_size:
        yield Conflict(Fact("num_local_ranks", event.num_local_ranks), Fact("at_most", world_size))
    is_given = config.get("num_kvcache_blocks", event.rule == "given") not in {None, False}
    yield from differ("rule", event.rule == "given", "is_pool_given", is_given)
    rules = ("given", "cpu_bounded" if event.peak_bytes is None else "gpu_measured")
    if event.rule not in rules:
        yield Conflict(Fact("rule", event.rule), Fact("rule_by_terms", rules[1]))
    fit = max(event.available_bytes, 0) // max(event.block_bytes, 1)
    is_least = ledger.header is not None and ledger.header.world_size > 1  # another rank's, perhaps
    if event.rule != "given" and (
        event.num_blocks > fit or (event.num_blocks < fit and not is_least)
    ):
        yield Conflict(Fact("num_blocks", event.num_blocks), Fact("pages_that_fit", fit))


def _graphs(ledger: Ledger, event: ev.CudagraphCapture) -> Iterator[Conflict]:
    sizes = event.batch_sizes
    yield from differ("batch_sizes", sizes, "ascending", sorted({s for s in sizes if s > 0}))
    if ledger.init is not None and sizes:
        most = ledger.init.max_num_seqs
        if sizes[-1] > most:
            yield Conflict(Fact("batch_sizes", sizes[-1]), Fact("max_num_seqs", most))
        if ledger.init.enforce_eager:
            yield Conflict(Fact("event", ev.tag_of(event)), Fact("enforce_eager", value=True))
        yield from _on_gpu(ledger, event)


def _on_gpu(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    if ledger.init is not None and ledger.init.device == "cpu":
        yield Conflict(Fact("event", ev.tag_of(event)), Fact("engine_device", ledger.init.device))


def _no_graphs(ledger: Ledger, event: ev.CudagraphSkip) -> Iterator[Conflict]:
    if ledger.init is None:
        return
    if ledger.init.enforce_eager or event.reason == "enforce_eager":
        is_recorded = event.reason == "enforce_eager"
        yield from differ("reason", is_recorded, "enforce_eager", ledger.init.enforce_eager)
    elif ledger.init.device == "cpu" or event.reason == "device_has_no_graphs":
        expected = "device_has_no_graphs" if ledger.init.device == "cpu" else "cuda"
        yield from differ("reason", event.reason, "engine_device", expected)
    elif not ledger.init.fused_kernels or event.reason == "no_fused_kernels":
        is_recorded = event.reason == "no_fused_kernels"
        yield from differ("reason", is_recorded, "no_fused_kernels", not ledger.init.fused_kernels)
    else:
        backend = ledger.init.attention_backend
        yield from differ("reason", "sdpa", "engine_attention_backend", backend)


def _ready(ledger: Ledger, event: ev.EngineReady) -> Iterator[Conflict]:
    recorded = event.num_kvcache_blocks
    if ledger.budget is not None:
        yield from differ("num_kvcache_blocks", recorded, "budget_blocks", ledger.budget.num_blocks)
    if ledger.header is None:
        return
    given = ledger.header.config.get("num_kvcache_blocks")
    if given is not None:
        yield from differ("num_kvcache_blocks", recorded, "header_config", given)
    yield from in_vocabulary(ledger, "eos_token_ids", event.eos_token_ids)
    sources = event.eos_sources
    if sources is None:  # not recorded before
        sources = [""] * len(event.eos_token_ids)
    yield from differ("eos_sources", len(sources), "num_eos_token_ids", len(event.eos_token_ids))
    of_model = [
        i for i, source in zip(event.eos_token_ids, sources, strict=False) if source != "tokenizer"
    ]
    eos_token_ids = ledger.header.model.get("eos_token_ids")
    if eos_token_ids:
        yield from differ("eos_token_ids", of_model, "header_model", [*eos_token_ids])


def _order(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    """Each event of the start comes once, in order; if one of them is there, all are."""
    tag = ev.tag_of(event)
    place = _ORDER.index(tag)
    for other in ledger.started:
        if _ORDER.index(other) >= place or (tag == "CUDAGRAPH_SKIP" and ledger.graphs is not None):
            yield Conflict(Fact("event", tag), Fact("already_started", other))
            break
    if tag != "ENGINE_READY" or ledger.started in (["ENGINE_INIT"], []):
        return
    missing = {*_ORDER} - {*ledger.started, tag, "WARMUP_MODEL"}
    if missing & {"CUDAGRAPH_CAPTURE"} and "CUDAGRAPH_SKIP" in ledger.started:
        missing -= {"CUDAGRAPH_CAPTURE"}
    elif "CUDAGRAPH_CAPTURE" in ledger.started:
        missing -= {"CUDAGRAPH_SKIP"}
    if missing:
        yield Conflict(Fact("event", tag), Fact("must_precede", sorted(missing)))


def _begins(ledger: Ledger, event: ev.Event) -> Iterator[Conflict]:
    if ledger.last is None and ledger.header is not None and ledger.header.rank == 0:
        yield from differ("event", ev.tag_of(event), "first_event", "ENGINE_INIT")


_START = (
    *(ev.EngineInit, ev.TpRuntimeInit, ev.ModelWeightsLoaded, ev.WarmupModel),
    *(ev.KvBudgetEstimate, ev.CudagraphCapture, ev.CudagraphSkip, ev.EngineReady),
)
_TIMED = (ev.ModelWeightsLoaded, ev.WarmupModel, ev.CudagraphCapture, ev.EngineReady)
RULES = (
    Rule("order", "before", (), _begins),
    Rule("order", "before", _START, _order),
    Rule("settings", "before", (ev.EngineInit,), _settings),
    Rule("settings", "before", (ev.TpRuntimeInit,), _place),
    Rule("settings", "before", (ev.ModelWeightsLoaded,), _weights),
    Rule("settings", "before", (ev.WarmupModel,), _warmup),
    Rule("settings", "before", (ev.CudagraphSkip,), _no_graphs),
    Rule("pool_size", "before", (ev.KvBudgetEstimate,), _block_bytes),
    Rule("pool_size", "before", (ev.KvBudgetEstimate,), _pool_size),
    Rule("pool_size", "before", (ev.EngineReady,), _ready),
    Rule("times", "before", _TIMED, _duration),
    Rule("graph_size", "before", (ev.CudagraphCapture,), _graphs),
)
