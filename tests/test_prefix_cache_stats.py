"""The prefix cache's statistics and its reset, counted by hand and from the trace."""

from __future__ import annotations

import io

import pytest
from hypothesis import given

from nanovllm import SamplingParams
from nanovllm.engine.prefix_cache_stats import PrefixCacheStats
from nvtrace import events as ev
from nvtrace.pipeline import Sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder
from nvtrace.replay import State
from support.fake_runner import Settings, make_engine
from support.recording import BUSY, Recording
from support.snapshot import snapshot_of_engine, snapshot_of_fold
from support.workload import MemoryFile, Workload, workloads

PROMPT = [1, 2, 1, 2, 2, 1, 1, 2, 2]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_queries_and_hits_are_counted_in_tokens() -> None:
    engine = make_engine(Settings(kvcache_block_size=4))
    assert engine.prefix_cache_stats() == PrefixCacheStats()
    engine.generate([PROMPT], PARAMS)
    assert engine.prefix_cache_stats() == PrefixCacheStats(num_queries=1, num_query_tokens=9)
    before = engine.prefix_cache_stats()
    engine.generate([PROMPT, PROMPT[:6], [2, 2]], PARAMS)
    assert engine.prefix_cache_stats() == PrefixCacheStats(4, 9 + 9 + 6 + 2, 8 + 4)
    assert before.num_queries == 1, "it is a copy"


def test_a_request_that_comes_back_is_counted_apart() -> None:
    engine = make_engine(Settings(kvcache_block_size=2, num_kvcache_blocks=6))
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (6, 5)]
    engine.generate([[1, 2, 3, 4], [1, 2, 3, 4, 5]], params)
    stats = engine.prefix_cache_stats()
    assert (stats.num_queries, stats.num_query_tokens, stats.num_hit_tokens) == (2, 9, 0)
    assert stats.num_resumed_queries >= 1
    assert stats.num_resumed_hit_tokens >= 2
    assert stats.num_resumed_query_tokens >= 6


def test_a_request_that_was_preempted_before_its_first_token_comes_back_too() -> None:
    engine = make_engine(
        Settings(
            kvcache_block_size=1, num_kvcache_blocks=8, max_num_batched_tokens=2, policy="mixed"
        )
    )
    outputs = engine.generate(
        [[1], [2, 1, 2, 1, 2, 1]],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (8, 1)],
    )
    assert [len(output["token_ids"]) for output in outputs] == [8, 1]
    stats = engine.prefix_cache_stats()
    assert (stats.num_queries, stats.num_query_tokens) == (2, 7)
    assert (stats.num_resumed_queries, stats.num_resumed_query_tokens) == (1, 6)


def test_a_cache_that_is_off_is_asked_nothing() -> None:
    engine = make_engine(Settings(enable_prefix_caching=False))
    engine.generate([PROMPT, PROMPT], PARAMS)
    assert engine.prefix_cache_stats() == PrefixCacheStats()
    engine.reset_prefix_cache()


def stats_of_trace(recording: Recording) -> PrefixCacheStats:
    """Add up the admissions that the trace tells of."""
    stats, state = PrefixCacheStats(), State()
    for record in recording.records:
        state.apply(record)
        if isinstance(record, ev.StateTransition) and record.reason == "admitted":
            seq = state.sequences[record.seq_id]
            stats.count(
                len(seq.token_ids), seq.num_cached_tokens, is_resumed=seq.num_preemptions > 0
            )
    return stats


@given(workloads().filter(lambda workload: workload.settings.enable_prefix_caching))
def test_the_trace_tells_the_same(workload: Workload) -> None:
    recording = Recording(workload)
    assert recording.run.engine.prefix_cache_stats() == stats_of_trace(recording)


def test_the_busy_workload_has_hits_of_both_kinds() -> None:
    stats = stats_of_trace(Recording(BUSY))
    assert stats.num_hit_tokens > 0
    assert stats.num_resumed_hit_tokens > 0


# -- reset -----------------------------------------------------------------------------------------


def test_after_a_reset_nothing_is_found_and_the_counting_starts_anew() -> None:
    engine = make_engine(Settings())
    [first] = engine.generate([PROMPT], PARAMS)
    engine.reset_prefix_cache()
    engine.scheduler.check()
    assert engine.prefix_cache_stats() == PrefixCacheStats()
    [second] = engine.generate([PROMPT], PARAMS)
    assert engine.prefix_cache_stats() == PrefixCacheStats(1, 9, 0)
    assert first["token_ids"] == second["token_ids"]


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_reset_while_requests_are_there_is_refused(num_steps: int) -> None:
    engine = make_engine(Settings())
    engine.generate([PROMPT], PARAMS)
    engine.add_request(PROMPT, PARAMS)
    for _ in range(num_steps):
        engine.step()
    stats = engine.prefix_cache_stats()
    with pytest.raises(RuntimeError, match="1 requests are unfinished and may use cached blocks"):
        engine.reset_prefix_cache()
    assert engine.prefix_cache_stats() == stats
    assert engine.scheduler.block_manager.cached_blocks


def test_a_reset_is_in_the_trace_and_the_fold_follows_it() -> None:
    file = MemoryFile()
    recorder = Recorder(Sink(file))
    engine = make_engine(Settings(kvcache_block_size=2, num_kvcache_blocks=8), recorder)
    engine.reset_prefix_cache()  # of nothing: no event
    engine.generate([PROMPT, PROMPT[2:]], PARAMS)
    num_cached = len(engine.scheduler.block_manager.cached_blocks)
    engine.reset_prefix_cache()
    engine.generate([PROMPT[1:]], PARAMS)
    snapshot = snapshot_of_engine(engine.scheduler, {})
    recorder.close()
    state, resets = State(), []
    for record in read_trace(io.BytesIO(file.contents), warn=pytest.fail):
        state.apply(record)
        if isinstance(record, ev.BlocksEvict) and record.reason == "cache_reset":
            resets.append(record)
            assert state.cached_blocks == {}
    assert [(len(reset.block_ids), reset.step, reset.phase) for reset in resets] == [
        (num_cached, None, "ingress")
    ]
    assert num_cached > 0
    state.sequences.clear()
    assert snapshot_of_fold(state) == snapshot
