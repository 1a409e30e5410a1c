"""What is alive does not grow with the number of requests that an engine has served."""

from __future__ import annotations

import tracemalloc
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest

from nanovllm import Observer
from nanovllm.assets import TINY_QWEN3
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.detokenizer import Detokenizer
from nvtrace.recorder import Recorder, record
from support.fake_runner import InjectedError, Settings, make_engine, runner_of
from support.memory import allocated_bytes, living_objects, serve
from support.oracle import make_llm

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nanovllm.engine.batch import Batch
    from nanovllm.engine.llm_engine import LLMEngine
    from support.fake_runner import Moment

SMALL = Settings(
    kvcache_block_size=2, num_kvcache_blocks=40, max_num_batched_tokens=20, max_model_len=30
)
WARM_UP = 200  # requests: pages, caches and lists get to their full size
MOST_BYTES = 100  # that a request may leave; a Sequence with its lists is 500 at least


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with record(tmp_path / "trace.jsonl") as recorder:
        yield recorder


@pytest.fixture
def others() -> Counter[str]:
    """What other tests have left alive."""
    return living_objects()


@contextmanager
def tracing_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def growth(engine: LLMEngine, num_requests: int, act: Callable[[], object]) -> list[str]:
    """What grows by more than a little whenever `act` serves so many requests.

    What is made once (a library's table at its first use, say) grows the first time only.
    """
    with tracing_memory():
        serve(engine, WARM_UP, Random(1))
        return _grown(num_requests, act) and _grown(num_requests, act)


def _grown(num_requests: int, act: Callable[[], object]) -> list[str]:
    living_objects()
    objects, num_bytes = living_objects(), allocated_bytes()
    act()
    grown_bytes = allocated_bytes() - num_bytes
    grown_objects = living_objects() - objects
    found = [f"{n} x {name}" for name, n in grown_objects.items() if n >= num_requests // 20]
    return found + [f"{grown_bytes} bytes"] * (grown_bytes > MOST_BYTES * num_requests)


def assert_nothing_is_left(engine: LLMEngine, others: Counter[str]) -> None:
    alive = living_objects() - others
    assert alive[Sequence.__qualname__] == alive[Detokenizer.__qualname__] == 0
    pool = engine.scheduler.block_manager
    assert pool.num_free_blocks == pool.num_blocks
    assert len(pool.cached_blocks) <= pool.num_blocks
    pool.check([])


def test_2000_requests_leave_nothing_behind(recorder: Recorder, others: Counter[str]) -> None:
    engine = make_engine(SMALL, recorder)
    assert growth(engine, 2000, lambda: serve(engine, 2000, Random(2))) == []
    assert engine.num_requests in {WARM_UP + 2000, WARM_UP + 4000}
    assert_nothing_is_left(engine, others)


def test_steps_that_fail_leave_nothing_behind(recorder: Recorder, others: Counter[str]) -> None:
    engine = make_engine(SMALL, recorder)

    def fail(moment: Moment, _batch: Batch) -> None:
        if moment == "sampled":
            raise InjectedError

    def serve_badly() -> None:
        good, runner_of(engine).at = runner_of(engine).at, fail
        for _ in range(100):
            with pytest.raises(InjectedError):
                engine.generate([[1, 2, 3]] * 5)
            with pytest.raises(InjectedError):
                list(engine.stream([[1, 2, 3]] * 5))
        runner_of(engine).at = good

    assert growth(engine, 1000, serve_badly) == []
    engine.generate([[1]])  # until then it keeps the last exception, and so its frames
    assert_nothing_is_left(engine, others)


def test_the_model_that_ships_keeps_nothing_of_its_requests(
    recorder: Recorder, others: Counter[str]
) -> None:
    llm = make_llm(TINY_QWEN3, recorder)
    for token_id in range(llm.model_config.vocab_size):
        llm.tokenizer.token_bytes(token_id)  # each is looked up once, and kept
    assert growth(llm, 120, lambda: serve(llm, 120, Random(2))) == []
    assert_nothing_is_left(llm, others)


# -- the measure itself ----------------------------------------------------------------------------


class Hoarder(Observer):
    """Keeps what it should let go."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    def request_output(self, seq: Sequence, text: str) -> None:
        """Keep a number and some letters of each request."""
        self.kept.append((seq.seq_id, text[:1] * 30))


def test_a_little_that_is_kept_of_each_request_is_noticed() -> None:
    engine = make_engine(SMALL, Hoarder())
    found = growth(engine, 200, lambda: serve(engine, 200, Random(2)))
    assert [text.split()[-1] for text in found] == ["bytes"]


def test_blocks_whose_hashes_are_kept_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(SMALL)
    taken: list[bytes] = []
    chain_hash = BlockManager._chain_hash

    def remember(pool: BlockManager, seq: Sequence, index: int) -> bytes:
        taken.append(chain_hash(pool, seq, index))
        return taken[-1]

    monkeypatch.setattr(BlockManager, "_chain_hash", remember)
    assert growth(engine, 200, lambda: serve(engine, 200, Random(2)))
