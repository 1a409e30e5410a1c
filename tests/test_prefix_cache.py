"""The prefix cache: what is found in it, its statistics and its reset."""

from __future__ import annotations

import io

import pytest
from hypothesis import given

from nanovllm import SamplingParams
from nanovllm.engine.prefix_cache_stats import PrefixCacheStats
from nanovllm.errors import RequestRefusedError
from nvtrace import events as ev
from nvtrace.pipeline import Sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder
from nvtrace.replay import State
from support.fake_runner import Settings, make_engine
from support.models import random_tokens
from support.oracle import Oracle, Watcher, assert_empty, greedy_params, make_llm, tokens_of
from support.recording import BUSY, Recording
from support.snapshot import snapshot_of_engine, snapshot_of_fold
from support.workload import MemoryFile, Workload, workloads

PROMPT = [1, 2, 1, 2, 2, 1, 1, 2, 2]
P8 = list(range(20, 28))
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
    with pytest.raises(RuntimeError, match=r"1 requests are unfinished: .* before reset_prefix"):
        engine.reset_prefix_cache()
    assert engine.prefix_cache_stats() == stats
    assert engine.scheduler.block_manager.cached_blocks


def test_prompts_that_are_all_refused_leave_the_cache_as_it_is() -> None:
    engine = make_engine(Settings(kvcache_block_size=2))
    engine.generate([PROMPT], PARAMS)
    cached = dict(engine.scheduler.block_manager.cached_blocks)
    assert cached
    too_long = [1] * engine.config.max_model_len
    for ask in (engine.generate, lambda prompts: list(engine.stream(prompts))):
        with pytest.raises(RequestRefusedError):
            ask([too_long, too_long])
    assert engine.scheduler.block_manager.cached_blocks == cached


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


# -- a fully cached prompt that ends with its block ------------------------------------------------


def test_fully_cached_prompt_computes_at_least_one_token(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher)
    p12 = [*P8, 60, 61, 62, 63]
    for prompt in (P8, P8, p12):
        assert tokens_of(llm.generate([prompt], greedy_params(5))) == [oracle.greedy(prompt, 5)]
    assert [watcher.num_cached_tokens[seq_id] for seq_id in range(3)] == [[0], [4], [8]]
    assert watcher.prefills == [[(0, 8)], [(1, 4)], [(2, 4)]]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
def test_fully_cached_prompts_of_any_length_give_the_same_output(
    block_size: int, oracle: Oracle
) -> None:
    for length in range(1, 17):
        watcher = Watcher()
        llm = make_llm(oracle.folder, watcher, kvcache_block_size=block_size)
        prompt = random_tokens(length, seed=length)
        for _ in range(3):
            assert tokens_of(llm.generate([prompt], greedy_params(2))) == [oracle.greedy(prompt, 2)]
        whole = (length - 1) // block_size * block_size
        assert watcher.num_cached_tokens == {0: [0], 1: [whole], 2: [whole]}


# -- preempted, then admitted again with a prefix hit ----------------------------------------------


@pytest.mark.parametrize("budget", [2, 3, 10000])
def test_readmitted_with_a_prefix_hit_goes_not_past_its_end(budget: int, oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(
        oracle.folder,
        watcher,
        kvcache_block_size=2,
        num_kvcache_blocks=6,
        max_num_batched_tokens=budget,
    )
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
    outputs = llm.generate(prompts, [greedy_params(6), greedy_params(5)])
    assert tokens_of(outputs) == [oracle.greedy(prompts[0], 6), oracle.greedy(prompts[1], 5)]
    readmitted = [cached for cached in watcher.num_cached_tokens.values() if len(cached) > 1]
    assert readmitted
    assert all(cached[1] >= 2 for cached in readmitted)
    assert watcher.highest_position == 8
    assert_empty(llm)


def test_a_budget_of_one_token_runs_one_request_at_a_time(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(
        oracle.folder, watcher, kvcache_block_size=2, num_kvcache_blocks=6, max_num_batched_tokens=1
    )
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
    outputs = llm.generate(prompts, [greedy_params(6), greedy_params(5)])
    assert tokens_of(outputs) == [oracle.greedy(prompts[0], 6), oracle.greedy(prompts[1], 5)]
    assert watcher.highest_position == 8
    assert_empty(llm)


# -- a free cached block that is used again --------------------------------------------------------


def test_revived_block_depends_on_all_before_it(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, kvcache_block_size=2)
    prompts = [[1, 2, 3, 4], [1, 2, 5, 6, 7], [5, 6, 8]]
    for prompt in prompts:
        assert tokens_of(llm.generate([prompt], greedy_params(1))) == [oracle.greedy(prompt, 1)]
    assert [watcher.num_cached_tokens[seq_id] for seq_id in range(3)] == [[0], [2], [0]]


def test_revived_block_is_not_taken_again_for_the_rest_of_the_prompt(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, kvcache_block_size=2, num_kvcache_blocks=4)
    for prompt in ([1, 2, 3, 4, 5, 6], [7] * 3, [1, 2, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7]):
        assert tokens_of(llm.generate([prompt], greedy_params(2))) == [oracle.greedy(prompt, 2)]
        assert_empty(llm)
    assert watcher.num_cached_tokens[2] == [2]


# -- a prefix shared within one step ---------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(1, 5), (5, 1), (1, 1), (5, 5)])
def test_equal_prompts_in_one_step_share_nothing_uncomputed(
    lengths: tuple[int, int], oracle: Oracle
) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, num_kvcache_blocks=9)
    outputs = llm.generate([P8, P8], [greedy_params(n) for n in lengths])
    assert tokens_of(outputs) == [oracle.greedy(P8, n) for n in lengths]
    assert watcher.prefills == [[(0, 8), (1, 8)]]
    assert dict(watcher.num_cached_tokens) == {0: [0], 1: [0]}
    # Whichever of the two left first, the prefix is still there.
    llm.generate([[*P8, 99]], greedy_params(1))
    assert watcher.num_cached_tokens[2] == [8]


def test_equal_prompts_of_which_one_is_freed_leave_the_others_entry(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, num_kvcache_blocks=9)
    llm.add_request(P8, greedy_params(1))
    llm.add_request(P8, greedy_params(6))
    llm.step()  # the first has left; it was its pages that were published
    for prompt in ([70] * 9, [*P8, 40], [80] * 5):
        seq_id = llm.add_request(prompt, greedy_params(3))
        while seq_id in llm.requests:
            for output in llm.step():
                if output["seq_id"] == seq_id:
                    assert output["token_ids"] == oracle.greedy(prompt, 3)
    assert watcher.num_cached_tokens[3] == [8]


def test_an_aborted_prompt_leaves_no_block_that_was_not_computed(oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, max_num_batched_tokens=5)
    [prompt] = oracle.prompts([19], 5, seed=8)
    for num_steps in (1, 2):
        seq_id = llm.add_request(prompt, greedy_params(5))
        for _ in range(num_steps):
            llm.step()
        llm.abort(seq_id)  # after 5 tokens; then after 4 found and 10 computed
    assert tokens_of(llm.generate([prompt], greedy_params(5))) == [oracle.greedy(prompt, 5)]
    assert dict(watcher.num_cached_tokens) == {0: [0], 1: [4], 2: [12]}
