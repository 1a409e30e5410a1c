"""Memory: what is alive after so many requests, and how much of the machine the process holds.

    python -m support.memory [NUM_REQUESTS]      in tests/; on the model that ships, with a trace

On a CPU, torch's matrix library (oneDNN) keeps a plan for each shape of matrices that it has met,
1024 at most: the process grows until it has met them. ONEDNN_PRIMITIVE_CACHE_CAPACITY=8 and
LRU_CACHE_CAPACITY=8 in the environment show what the engine itself keeps.

Knows how to ask one engine for many requests in every way there is, and how to count. Does not know
what may grow.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from nanovllm import LLM, SamplingParams
from nanovllm.assets import TINY_QWEN3
from nanovllm.errors import RequestRefusedError
from nvtrace.recorder import record

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

BATCH = 10
"""Requests that `serve` asks for at once."""


def serve(engine: LLMEngine, num_requests: int, rng: Random) -> None:
    """Ask for requests in batches, each in another way; some are refused, aborted or left alone.

    Args:
        engine: idle; it is idle again afterwards.
        num_requests: a multiple of BATCH. Those refused are not counted.
        rng: draws prompts, of tokens below 7, and lengths.
    """
    for number in range(num_requests // BATCH):
        prompts = [rng.choices(range(1, 6), k=rng.randint(1, 12)) for _ in range(BATCH)]
        params = [_params(rng) for _ in prompts]
        with contextlib.suppress(RequestRefusedError):
            engine.add_request([1] * engine.config.max_model_len)
        match number % 4:
            case 0:
                engine.generate(prompts, params)
            case 1:
                for _ in engine.stream(prompts, params):
                    pass
            case 2:  # somebody stops listening
                with contextlib.closing(engine.stream(prompts, params)) as stream:
                    for _ in islice(stream, 5):
                        pass
            case _:  # each goes its own way
                seq_ids = [engine.add_request(*pair) for pair in zip(prompts, params, strict=True)]
                engine.step()
                for seq_id in seq_ids[::3]:
                    if seq_id in engine.requests:
                        engine.abort(seq_id)
                while not engine.is_finished():
                    engine.step()


def _params(rng: Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.8)),
        max_tokens=rng.randint(1, 12),
        stop=rng.choice((None, "ab")),
        logprobs=rng.choice((None, None, 2)),
    )


def living_objects() -> Counter[str]:
    """Containers and instances that are alive, by the name of their type."""
    gc.collect()  # what only circular references keep is not alive
    return Counter(type(found).__qualname__ for found in gc.get_objects())


def allocated_bytes() -> int:
    """What Python has allocated since tracemalloc was started, and not let go."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def resident_bytes() -> int:
    """What the process holds of the machine's memory (Linux)."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def main(num_requests: int = 2000) -> None:
    """Say how much memory the process holds as requests go by."""
    rng = Random(0)
    with tempfile.TemporaryDirectory() as folder, record(Path(folder) / "trace.jsonl") as recorder:
        llm = LLM(TINY_QWEN3, recorder, kvcache_block_size=4, num_kvcache_blocks=64)
        _say(0)
        for quarter in range(1, 5):
            serve(llm, num_requests // 4, rng)
            _say(quarter * num_requests // 4)


def _say(num_requests: int) -> None:
    sys.stdout.write(f"{num_requests:>6} requests  {resident_bytes() / 2**20:8.1f} MiB\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
