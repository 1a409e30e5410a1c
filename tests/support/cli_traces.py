"""Traces for the command line's tests: real engine, fake model, and the same bytes each time.

Knows how to make times and surroundings equal on every machine. Does not know what the command
line shows of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nanovllm.sampling_params import SamplingParams
from nvtrace import events as ev
from nvtrace.envelope import Footer, Header, encode_into
from nvtrace.reader import read_trace
from nvtrace.recorder import record
from support.fake_runner import Settings, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from nvtrace.envelope import Record

GIB = 1024**3
PREFILL_NS = 772_240_000  # the article's first step
DECODE_NS = 3_020_000
HOSTILE_TEXT = "[bold red]no markup[/] \x1b[2J\x07 \u202e wide: 质数\nnext line\ttab"
MODEL = {  # Qwen3-0.6B
    "architecture": "Qwen3ForCausalLM",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt's length, its limit, and the step before which it comes."""

    prompt_len: int
    max_tokens: int
    before_step: int = 1
    abort_before: int | None = None


def article_run() -> tuple[Settings, list[Ask]]:
    """The article's shape: 11 and 17 tokens, 148 and 256 steps, pages of 256 in 2 GiB."""
    settings = Settings(kvcache_block_size=256, num_kvcache_blocks=73)
    return settings, [Ask(11, 148), Ask(17, 256)]


def crowded_run() -> tuple[Settings, list[Ask]]:
    """Four requests, and pages for two of them."""
    settings = Settings(kvcache_block_size=4, num_kvcache_blocks=20)
    return settings, [Ask(11, 24) for _ in range(4)]


def chunked_run() -> tuple[Settings, list[Ask]]:
    """A budget of 8 tokens a step; and one more request that comes late and is aborted."""
    settings = Settings(kvcache_block_size=4, max_num_batched_tokens=8)
    late = Ask(3, 9, before_step=10, abort_before=13)
    return settings, [Ask(11, 9), Ask(37, 9), Ask(5, 9), late]


def write_trace(path: Path, run: tuple[Settings, list[Ask]], model: str = "Qwen3-0.6B") -> Path:
    """Run, record, and rewrite the trace with times and surroundings that never change.

    Args:
        path: the trace to write.
        run: one of the runs above.
        model: the folder that the trace names.
    """
    settings, asks = run
    with record(path, existing="replace") as recorder:
        engine = make_engine(settings, recorder)
        recorder.generate_start(len(asks))
        coming = list(enumerate(asks))
        while coming or not engine.is_finished():
            step = engine.engine_step + 1
            while coming and coming[0][1].before_step <= step:
                engine.add_request(*_request(*coming.pop(0)))
            for seq_id, ask in enumerate(asks):
                if ask.abort_before == step:
                    engine.abort(seq_id)
            engine.step()
        recorder.generate_finish(len(asks))
    num_blocks = settings.num_kvcache_blocks
    return write_records(path, list(_steadied(read_trace(path), model, num_blocks)))


def _request(index: int, ask: Ask) -> tuple[list[int], SamplingParams]:
    prompt = [(position * 5 + index) % 7 for position in range(ask.prompt_len)]
    return prompt, SamplingParams(temperature=0.6, max_tokens=ask.max_tokens, ignore_eos=True)


def write_records(path: Path, records: Iterable[Header | Footer | ev.Event]) -> Path:
    """Write records as a trace, just as they are."""
    buffer = bytearray()
    for item in records:
        encode_into(item, buffer)
    path.write_bytes(bytes(buffer))
    return path


def _steadied(
    records: Iterable[Record], model: str, num_blocks: int
) -> Iterator[Header | Footer | ev.Event]:
    """The same records in a world without chance; a KV budget is put in after ENGINE_INIT."""
    now = num_inserted = 0
    for item in records:
        if isinstance(item, Header):
            yield _steady_header(item)
        elif isinstance(item, Footer):
            event_id = item.event_id + num_inserted
            yield replace(item, event_id=event_id, num_events=item.num_events + num_inserted)
        elif isinstance(item, ev.Event):
            steady = _steady(item, model)
            now += steady.wall_ns if isinstance(steady, ev.StepEnd) else 1000
            yield replace(steady, event_id=item.event_id + num_inserted, ts_ns=now)
            if isinstance(item, ev.EngineInit):
                num_inserted = 1
                yield _budget(item.event_id + 1, now, item.block_size, num_blocks)


def _steady_header(header: Header) -> Header:
    return replace(
        header,
        run_id="0" * 32,
        created="2026-01-02T03:04:05.600000+00:00",
        engine={"name": "nanovllm", "version": "0.1.0"},
        environment={"platform": "Linux", "machine": "x86_64", "num_cpus": 8, "python": "3.11.9"},
        model=MODEL,
        config={},
    )


def _steady(event: ev.Event, model: str) -> ev.Event:
    match event:
        case ev.EngineInit():
            return replace(event, model=model)
        case ev.EngineReady():
            return replace(event, duration_ns=1_234_000_000)
        case ev.RequestOutput():
            return replace(event, text=HOSTILE_TEXT)
        case ev.StepEnd():
            wall_ns = PREFILL_NS if event.batch_phase == "prefill" else DECODE_NS
            parts = ("schedule_ns", "prepare_ns", "forward_ns", "sample_ns", "postprocess_ns")
            return replace(event, wall_ns=wall_ns, **dict.fromkeys(parts, wall_ns // 5))
    return event


def _budget(event_id: int, ts_ns: int, block_size: int, num_blocks: int) -> ev.KvBudgetEstimate:
    """16 GiB, of which 10 are free; the bounded rule leaves 2 GiB, unless the pages are given."""
    block_bytes = 2 * 28 * block_size * 8 * 128 * 2
    return ev.KvBudgetEstimate(
        event_id=event_id,
        ts_ns=ts_ns,
        step=None,
        phase="init",
        rule="cpu_bounded" if num_blocks == 2 * GIB // block_bytes else "given",
        total_bytes=16 * GIB,
        free_bytes=10 * GIB,
        used_bytes=6 * GIB,
        utilization=0.9,
        limit_bytes=2 * GIB,
        available_bytes=2 * GIB,
        num_layers=28,
        block_size=block_size,
        num_kv_heads=8,
        head_dim=128,
        dtype_bytes=2,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
    )


def scaled(records: Iterable[Record]) -> Iterator[Header | Footer | ev.Event]:
    """The records with times and limits of a large run: tables need their room."""
    for item in records:
        match item:
            case ev.StepEnd():
                times = [name for name in item.__struct_fields__ if name.endswith("_ns")]
                changes = {name: (getattr(item, name) or 0) * 12_345 for name in times}
                yield replace(item, **changes)
            case ev.RequestEnqueue() | ev.StateTransition():
                yield replace(item, ts_ns=item.ts_ns * 12_345, max_tokens=1_234_567)
            case ev.Event():
                yield replace(item, ts_ns=item.ts_ns * 12_345)
            case Header() | Footer():
                yield item
