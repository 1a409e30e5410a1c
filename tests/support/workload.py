"""Random workloads: requests that come, run side by side, and leave.

Knows what each request must answer, whoever runs beside it. Does not know what else a test wants to
see, or how the fake model works (`fake_runner.py`).
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from nanovllm.errors import RequestRefusedError
from nanovllm.sampling_params import SamplingParams
from support.fake_runner import (
    EOS_TOKEN_IDS,
    InjectedError,
    Settings,
    digests,
    make_engine,
    next_token,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.sequence import FinishReason, Sequence
    from nanovllm.observer import Observer


class MemoryFile(io.BytesIO):
    """A file in memory whose contents outlive its closing."""

    contents = b""

    def close(self) -> None:
        """Keep the contents."""
        if not self.closed:
            self.contents = self.getvalue()
        super().close()


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it comes (before which step), and when it is aborted, if ever."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool = True
    arrival: int = 0
    abort: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def answer(self, max_model_len: int = 1000) -> tuple[list[int], FinishReason]:
        """What must come out, whatever else runs."""
        tokens = list(self.prompt)
        while True:
            tokens.append(next_token(digests(tokens)[-1]))
            completion = tokens[len(self.prompt) :]
            if self.stop and text_of(completion).endswith(self.stop):
                return completion, "stop_string"
            if completion[-1] in EOS_TOKEN_IDS and not self.ignore_eos:
                return completion, "eos"
            if completion[-1] in self.stop_token_ids:
                return completion, "stop_token"
            if len(completion) == self.max_tokens:
                return completion, "max_tokens"
            if len(tokens) == max_model_len:
                return completion, "max_model_len"

    def num_blocks(self, settings: Settings) -> int:
        """Pages that its longest possible run fills: all tokens but the last sampled one."""
        longest = min(len(self.prompt) + self.max_tokens, settings.max_model_len) - 1
        return -(-longest // settings.kvcache_block_size)

    def can_fit(self, settings: Settings) -> bool:
        """Must the engine take it?"""
        fits_the_pool = self.num_blocks(settings) <= settings.num_kvcache_blocks
        return len(self.prompt) < settings.max_model_len and fits_the_pool


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests for one engine."""

    settings: Settings
    requests: list[Request]


# Strategies are made once: to make them again for each example takes longer than to draw from them.
_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
_MAX_TOKENS = st.integers(1, 16)
_IGNORE_EOS = st.sampled_from([True, True, False])
_ARRIVALS = st.integers(0, 8)
_ABORTS = st.none() | st.none() | st.integers(0, 16)
_STOP_TOKEN_IDS = st.just(()) | st.sampled_from([(3,), (1, 6)])
_STOPS = st.just(()) | st.sampled_from([("c",), ("ab", "ba"), ("bbb",)])
_LENGTHS = st.integers(2, 10) | st.integers(11, 40) | st.integers(11, 40)
_FEWEST = st.sampled_from([1, 3, 5])
_BLOCK_SIZES = st.integers(1, 4) | st.integers(1, 4) | st.integers(1, 17)
_BUDGETS = st.integers(1, 12) | st.just(1000)
_BATCHES = st.integers(1, 6) | st.just(6)
_POLICIES = st.sampled_from(["prefill_first", "prefill_first", "mixed", "static"])
_SPARE_BLOCKS = st.integers(0, 5)
_integers = cache(st.integers)


@cache
def _stems(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2), min_size=length, max_size=length)


@cache
def _shared(length: int) -> st.SearchStrategy[int]:
    return st.just(length) | st.integers(0, length)


def _request(draw: st.DrawFn, stem: list[int], *, with_aborts: bool) -> Request:
    shared = draw(_shared(len(stem)))
    return Request(
        prompt=stem[:shared] + draw(_TOKENS),
        max_tokens=draw(_MAX_TOKENS),
        ignore_eos=draw(_IGNORE_EOS),
        arrival=draw(_ARRIVALS),
        abort=draw(_ABORTS) if with_aborts else None,
        stop_token_ids=draw(_STOP_TOKEN_IDS),
        stop=draw(_STOPS),
    )


@st.composite
def workloads(draw: st.DrawFn, *, with_aborts: bool = True) -> Workload:
    """Requests with common beginnings, and an engine that is often barely large enough."""
    max_model_len = draw(_LENGTHS)
    stem = draw(_stems(draw(_integers(0, max_model_len // 2))))
    num_requests = draw(_integers(draw(_FEWEST), 6))
    requests = [_request(draw, stem, with_aborts=with_aborts) for _ in range(num_requests)]
    settings = Settings(
        kvcache_block_size=draw(_BLOCK_SIZES),
        num_kvcache_blocks=1,
        max_num_batched_tokens=draw(_BUDGETS),
        max_num_seqs=draw(_BATCHES),
        max_model_len=max_model_len,
        enable_prefix_caching=draw(st.booleans()),
        policy=draw(_POLICIES),
    )
    # Enough for one of them; those that need more are to be refused.
    enough = requests[draw(_integers(0, num_requests - 1))].num_blocks(settings)
    num_blocks = max(enough, 1) + draw(_SPARE_BLOCKS)
    return Workload(replace(settings, num_kvcache_blocks=num_blocks), requests)


class Run:
    """One workload on one engine, step by step.

    Attributes:
        sequences: every sequence that was queued, by its seq_id, ended ones included.
        seq_ids: request's index -> seq_id; refused requests have none.
        num_steps: steps in which the engine had something to do.
        num_resets: steps among them that an InjectedError ended.
    """

    def __init__(
        self,
        workload: Workload,
        observer: Observer | None = None,
        make: Callable[[Settings, Observer | None], LLMEngine] = make_engine,
    ) -> None:
        self.workload = workload
        self.engine = make(workload.settings, observer)
        self.sequences: dict[int, Sequence] = {}
        self.seq_ids: dict[int, int] = {}
        self.num_steps = self.num_resets = 0
        self.is_in_step = False

    def go(self, after_step: Callable[[], None] = lambda: None) -> Run:
        """Let all requests come, run and end. An InjectedError ends those that are there."""
        now = 0
        last_arrival = max(request.arrival for request in self.workload.requests)
        while now <= last_arrival or not self.engine.is_finished():
            self._arrivals_and_aborts(now)
            if not self.engine.is_finished():
                self.num_steps += 1
                self.is_in_step = True
                try:
                    self.engine.step()
                except InjectedError:
                    self.num_resets += 1
                    assert self.engine.is_finished()
                    assert not self.engine.requests
                self.is_in_step = False
                after_step()
            now += 1
        return self

    def _arrivals_and_aborts(self, now: int) -> None:
        for index, request in enumerate(self.workload.requests):
            if request.arrival == now:
                self._add(index, request)
            seq_id = self.seq_ids.get(index)
            if request.abort == now and seq_id is not None and seq_id in self.engine.requests:
                self.engine.abort(seq_id)

    def _add(self, index: int, request: Request) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=request.stop_token_ids,
            stop=request.stop,
        )
        try:
            seq_id = self.engine.add_request(request.prompt, params)
        except RequestRefusedError:
            return
        self.seq_ids[index] = seq_id
        self.sequences[seq_id] = self.engine.requests[seq_id]
