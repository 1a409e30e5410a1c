"""Fuzz: thousands of random workloads, longer and harsher than Hypothesis's, each with a seed.

    python -m support.fuzz --count 10000 --seed 0      what `make fuzz` runs, in tests/
    python -m support.fuzz --seed 0 --only 4711        one of them again, and what it asks

Knows how to draw a case, what must hold while and after it runs, and how to spread many of them
over processes. Does not know how a workload is run or recorded (`workload.py`, `recording.py`), nor
what the slots of a KV cache must hold (`fake_runner.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pprint import pformat
from random import Random
from typing import TYPE_CHECKING

import pytest

from nvtrace import events as ev
from nvtrace.recorder import Recorder
from support.fake_runner import Settings, make_engine, runner_of
from support.graph_runner import make_graph_engine
from support.recording import HOOKS_OF_A_STEP, Interruption, Recording, assert_fold_equals_engine
from support.workload import Request, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nanovllm.engine.batch import Batch
    from nanovllm.engine.llm_engine import LLMEngine
    from support.fake_runner import Moment
    from support.workload import Run

    Spread = Callable[[Callable[[int], "Outcome"], Iterable[int]], Iterable["Outcome"]]

_MOMENTS = ("scheduled", "ran", "sampled", *HOOKS_OF_A_STEP)
_ROUND = 400  # steps from a round of requests to the next: most have ended, the engine is at rest
_POLICIES = ("prefill_first", "prefill_first", "mixed", "mixed", "static")
_CHUNK_OF_CASES = 20  # handed to a process at once


# -- a case ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, and what befalls its engine.

    Attributes:
        workload: its requests come in one to three rounds.
        interruptions: exceptions; each waits until the one before has struck.
        cache_resets: the prefix cache is reset when the engine is at rest for the nth time, from 0.
    """

    workload: Workload
    interruptions: tuple[Interruption, ...]
    cache_resets: frozenset[int]


def draw_case(seed: int, index: int) -> Case:
    """The case of this number: the same whoever runs before it."""
    rng = Random(f"{seed}/{index}")
    max_model_len = rng.choice((rng.randint(2, 12), *(rng.randint(12, 140) for _ in range(4))))
    requests = _draw_requests(rng, max_model_len)
    settings = Settings(
        kvcache_block_size=rng.choice((rng.randint(1, 4), rng.randint(1, 17))),
        max_num_batched_tokens=rng.choice((rng.randint(1, 4), rng.randint(1, 40), 1000)),
        max_num_seqs=rng.choice((rng.randint(1, 4), 12, 12)),
        max_model_len=max_model_len,
        enable_prefix_caching=rng.random() < 0.7,
        policy=rng.choice(_POLICIES),
    )
    # Enough for the largest, or for any one of them: those that need more are to be refused.
    needs = [request.num_blocks(settings) for request in requests]
    enough = max(1, rng.choice((max(needs), max(needs), rng.choice(needs))))
    spare = rng.choice((0, rng.randint(0, 3), rng.randint(0, 12)))
    settings = replace(settings, num_kvcache_blocks=enough + spare)
    return Case(
        Workload(settings, requests),
        _draw_interruptions(rng),
        frozenset(number for number in range(6) if rng.random() < 0.4),
    )


def _draw_requests(rng: Random, max_model_len: int) -> list[Request]:
    stems = [_draw_tokens(rng, rng.randint(0, max_model_len // 2)) for _ in range(2)]
    num_rounds = rng.randint(1, 3)
    is_crowd = rng.random() < 0.5
    requests = []
    for _ in range(rng.randint(6, 12) if is_crowd else rng.randint(1, 6)):
        stem = rng.choice(stems)
        shared = rng.choice((len(stem), rng.randint(0, len(stem)), rng.randint(0, len(stem))))
        arrival = rng.randrange(num_rounds) * _ROUND + rng.choice((0, rng.randint(0, 30)))
        is_aborted = rng.random() < 0.15
        request = Request(
            prompt=stem[:shared] + _draw_tokens(rng, rng.randint(1, 4)),
            max_tokens=rng.choice((rng.randint(1, 8), rng.randint(1, 60), rng.randint(20, 60))),
            ignore_eos=rng.random() < 0.9,
            arrival=arrival,
            abort=arrival + rng.randint(0, 60) if is_aborted else None,
            stop_token_ids=rng.choice(((), (), (), (), (), (), (), (), (3,), (1, 6))),
            stop=rng.choice(((), (), (), (), ("abc",), ("ab", "ba"), ("bbb", "cdefg"))),
        )
        requests.append(request)
    return requests


def _draw_tokens(rng: Random, num_tokens: int) -> list[int]:
    return rng.choices(range(3), k=num_tokens)


def _draw_interruptions(rng: Random) -> tuple[Interruption, ...]:
    steps = sorted(rng.choices(range(1, 60), k=rng.choice((0, 0, 1, 1, 2, 3))))
    return tuple(
        Interruption(step, rng.choice(_MOMENTS), is_noted=rng.random() < 0.5) for step in steps
    )


# -- a run -----------------------------------------------------------------------------------------


class Ordeal(Recording):
    """A case's recording, with a look at the engine after every step.

    Attributes:
        tally: what it went through.
    """

    def __init__(self, case: Case) -> None:
        self.tally: Counter[str] = Counter()
        self._most_steps = _most_steps(case.workload)
        self._cache_resets = case.cache_resets
        self._num_rests = 0
        self._later = list(case.interruptions)
        # Every other case goes through the engine's own graphs.
        make = make_graph_engine if len(case.workload.requests) % 2 else make_engine
        super().__init__(case.workload, self._next_interruption(), make)

    def _next_interruption(self) -> Interruption | None:
        return self._later.pop(0) if self._later else None

    def _at(self, moment: Moment, batch: Batch) -> None:
        if moment == "scheduled":
            self.run.engine.scheduler.check()
            budget = self.run.workload.settings.max_num_batched_tokens
            assert sum(batch.num_scheduled_tokens) <= budget, "more tokens than the budget has"
            pieces = zip(batch.seqs, batch.num_scheduled_tokens, strict=True)
            self.tally["chunks"] += sum(num < seq.num_uncomputed_tokens for seq, num in pieces)
        super()._at(moment, batch)

    def _after_step(self) -> None:
        super()._after_step()
        engine = self.run.engine
        engine.scheduler.check()
        assert self.run.num_steps <= self._most_steps, "the engine goes round in circles"
        if self._interruption is None:
            self._interruption = self._next_interruption()
            self._arm_if_it_is_a_hook(self._interruption)
        if engine.is_finished():
            if self._num_rests in self._cache_resets:
                engine.reset_prefix_cache()
                self.tally["cache resets"] += 1
            self._num_rests += 1

    def _arm_if_it_is_a_hook(self, interruption: Interruption | None) -> None:
        recorder = self.run.engine.observer
        if interruption is not None and interruption.at in HOOKS_OF_A_STEP:
            assert isinstance(recorder, Recorder)
            self._arm(recorder, interruption.at)


def _most_steps(workload: Workload) -> int:
    """Each token costs one decode step, or at most one prefill in chunks."""
    num_chunks = -(-workload.settings.max_model_len // workload.settings.max_num_batched_tokens)
    return sum((request.max_tokens + 1) * num_chunks for request in workload.requests)


def examine(case: Case) -> Counter[str]:
    """Run a case. Returns what it went through.

    Raises:
        AssertionError: something did not hold. So does anything else that is raised.
    """
    ordeal = Ordeal(case)
    assert_fold_equals_engine(ordeal)
    _assert_nothing_is_left(ordeal.run.engine)
    _assert_right_answers(ordeal.run)
    tally = ordeal.tally
    tally["steps"] = ordeal.run.num_steps
    runner = runner_of(ordeal.run.engine)
    tally["steps run ahead"] = runner.num_ahead
    tally["steps run ahead, not used"] = runner.num_discarded
    for record in ordeal.records:
        match record:
            case ev.Preempt():
                tally["preemptions"] += 1
            case ev.BlocksShare() | ev.BlocksRevive():
                tally["prefix hits (blocks)"] += sum(map(len, record.block_ids))
            case ev.BlocksEvict(reason="page_needed"):
                tally["evictions (blocks)"] += len(record.block_ids)
            case ev.RequestEnqueue():
                tally["requests"] += 1
            case ev.RequestRefused():
                tally["refusals"] += 1
            case ev.EngineError():
                tally["errors"] += 1
            case ev.StateTransition(status="FINISHED"):
                tally[f"ended by {record.reason}"] += 1
            case _:
                pass
    return tally


def _assert_nothing_is_left(engine: LLMEngine) -> None:
    pool = engine.scheduler.block_manager
    assert pool.num_free_blocks == pool.num_blocks, "a page was lost"
    assert not engine.requests, f"forgotten: {engine.requests}"
    assert not engine.output_processor.detokenizers, "a text was kept"


def _assert_right_answers(run: Run) -> None:
    settings = run.workload.settings
    for index, request in enumerate(run.workload.requests):
        is_taken = index in run.seq_ids
        assert is_taken == request.can_fit(settings), f"{request} was refused, or was not"
        if not is_taken:
            continue
        seq = run.sequences[run.seq_ids[index]]
        tokens, reason = request.answer(settings.max_model_len)
        if seq.finish_reason == "aborted":
            assert request.abort is not None or run.num_resets, f"{seq} was never aborted"
            assert seq.completion_token_ids == tokens[: seq.num_completion_tokens], seq
        else:
            assert (seq.completion_token_ids, seq.finish_reason) == (tokens, reason), seq


# -- many ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case: a tally, or how it failed."""

    index: int
    tally: Counter[str]
    failure: str | None = None


def attempt(seed: int, index: int) -> Outcome:
    """Run one case, whatever happens."""
    try:
        return Outcome(index, examine(draw_case(seed, index)))
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - each is a fault to be told
        return Outcome(index, Counter(), traceback.format_exc())


@contextmanager
def _spreading(num_jobs: int) -> Iterator[Spread]:
    """A `map` that keeps the order; over several processes if there are to be several."""
    if num_jobs == 1:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs) as pool:
        yield partial(pool.imap, chunksize=_CHUNK_OF_CASES)


def run_all(count: int, seed: int, num_jobs: int) -> int:
    """Run cases 0 .. count - 1, say what they went through. Returns the exit code."""
    start = time.monotonic()
    total: Counter[str] = Counter()
    with _spreading(num_jobs) as spread:
        for outcome in spread(partial(attempt, seed), range(count)):
            if outcome.failure is not None:
                _say(outcome.failure.rstrip())
                _say(f"case {outcome.index} of seed {seed} failed; the same one again:")
                _say(f"  python -m support.fuzz --seed {seed} --only {outcome.index}")
                return 1
            total += outcome.tally
    seconds = time.monotonic() - start
    _say(
        f"{count:,} workloads of seed {seed}: all held, in {seconds:.0f} s on {num_jobs} processes"
    )
    for name in sorted(total):
        _say(f"{total[name]:>14,}  {name}")
    return 0


def run_one(seed: int, index: int) -> int:
    """Show one case and run it; a failure comes out as it is. Returns the exit code."""
    case = draw_case(seed, index)
    _say(pformat(case, width=100, compact=True))
    _say(str(dict(examine(case))))
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m support.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=int, default=10_000, help="how many workloads")
    parser.add_argument("--seed", type=int, default=0, help="of all of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", type=int, metavar="INDEX", help="this one alone")
    options = parser.parse_args(arguments)
    if options.only is not None:
        return run_one(options.seed, options.only)
    return run_all(options.count, options.seed, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
