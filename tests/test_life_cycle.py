"""Engines side by side, and one engine after an interruption.

Whatever strikes a run, and wherever: the next one gives its own outputs, and nothing is left over.
"""

from __future__ import annotations

import gc
import io
import sys
import threading
import weakref
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine import llm_engine
from nanovllm.observer import Observer
from nvtrace.envelope import Footer
from nvtrace.pipeline import Sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder
from nvtrace.replay import State
from support.fake_runner import InjectedError, Moment, Settings, make_engine, runner_of
from support.models import random_tokens
from support.oracle import (
    HOOKS,
    Narrator,
    Oracle,
    assert_empty,
    greedy_params,
    make_llm,
    save_tokenizer,
    tokens_of,
)
from support.snapshot import snapshot_of_engine, snapshot_of_fold
from support.workload import MemoryFile, Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq
    from pathlib import Path
    from types import FrameType

    from nanovllm import LLM
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.sequence import Sequence

# Two that share a prefix, one that ends early, one that is refused, pages for a preemption.
PREFIX = random_tokens(5, seed=1)
PROMPTS = [[*PREFIX, 40], [*PREFIX, 50, 51], [60], [70] * 99]
PARAMS = [greedy_params(n) for n in (9, 7, 2, 1)]
STRIDE = 47  # of the lines at which a run is interrupted
OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 2,
    "num_kvcache_blocks": 10,
    "max_num_batched_tokens": 4,
}


class Striker(Narrator):
    """Raises an exception at one moment, once, after it has let so many of them pass."""

    def __init__(self) -> None:
        super().__init__()
        self.disarm()

    def arm(self, hook: str, error: BaseException, after: int = 0) -> None:
        """Be ready to strike."""
        self.hook, self.error, self.after = hook, error, after

    def disarm(self) -> None:
        """Let everything pass, and forget what was heard."""
        self.hook = ""
        self.moments.clear()

    def _hear(self, hook: str, *args: object, **kwargs: object) -> None:
        super()._hear(hook, *args, **kwargs)
        if hook == self.hook:
            self.after -= 1
            if self.after < 0:
                self.hook = ""
                raise self.error


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = Oracle.create(tmp_path_factory.mktemp("model"))
    save_tokenizer(oracle.folder)
    return oracle


@pytest.fixture(scope="session")
def right(oracle: Oracle) -> list[list[int]]:
    """What the prompts above must give; the last one is refused."""
    answers = [oracle.greedy(p, sp.max_tokens) for p, sp in zip(PROMPTS, PARAMS, strict=True)]
    return [*answers[:-1], []]


def assert_as_good_as_new(llm: LLM, right: list[list[int]]) -> None:
    assert_empty(llm)
    before = llm.num_requests
    outputs = llm.generate(PROMPTS, PARAMS)
    assert tokens_of(outputs) == right
    assert [output["seq_id"] for output in outputs] == [before, before + 1, before + 2, None]
    assert_empty(llm)


# -- two engines -----------------------------------------------------------------------------------


def test_two_engines_take_turns_without_seeing_each_other(oracle: Oracle, tmp_path: Path) -> None:
    other = Oracle.create(tmp_path, {"num_hidden_layers": 1, "num_key_value_heads": 4})
    engines = [make_llm(oracle.folder, **OPTIONS), make_llm(other.folder, **OPTIONS)]
    for llm in engines:
        for prompt in PROMPTS[:3]:
            llm.add_request(prompt, greedy_params(6))
    tokens: list[dict[int | None, list[int]]] = [{}, {}]
    while not all(llm.is_finished() for llm in engines):
        for llm, found in zip(engines, tokens, strict=True):
            found.update({output["seq_id"]: output["token_ids"] for output in llm.step()})
    for maker, found in zip((oracle, other), tokens, strict=True):
        assert found == {i: maker.greedy(prompt, 6) for i, prompt in enumerate(PROMPTS[:3])}


def test_two_engines_run_in_two_threads(oracle: Oracle, right: list[list[int]]) -> None:
    engines = [make_llm(oracle.folder, **OPTIONS) for _ in range(2)]
    results: list[list[list[int]]] = []

    def run(llm: LLM) -> None:
        for _ in range(3):
            results.append(tokens_of(llm.generate(PROMPTS, PARAMS)))  # noqa: PERF401 - as they come

    threads = [threading.Thread(target=run, args=(llm,)) for llm in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [right] * 6


def test_an_engine_that_is_let_go_leaves_nothing(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder, Narrator())
    llm.generate(PROMPTS[:3], greedy_params(3))
    llm.add_request([5, 6])
    llm.step()
    engine, cache = weakref.ref(llm), weakref.ref(llm.model_runner.kv_cache)
    del llm
    gc.collect()
    assert engine() is None
    assert cache() is None


# -- an exception ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nth_forward", [1, 2, 5, 9])
def test_after_an_exception_in_the_model_the_engine_is_as_good_as_new(
    nth_forward: int, oracle: Oracle, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrator = Narrator()
    llm = make_llm(oracle.folder, narrator, **OPTIONS)
    forward, num_calls = llm.model_runner.model.forward, 0

    def failing(*args: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == nth_forward:
            raise RuntimeError("out of memory")
        return forward(*args)

    monkeypatch.setattr(llm.model_runner.model, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(PROMPTS, PARAMS)
    assert narrator.moments[-2:] == ["engine_error", "engine_reset"]
    assert "generate_finish" not in narrator.moments
    assert_as_good_as_new(llm, right)


def test_after_broken_numbers_the_engine_is_as_good_as_new(
    oracle: Oracle, right: list[list[int]]
) -> None:
    llm = make_llm(oracle.folder, **OPTIONS)
    weight = llm.model_runner.model.model.norm.weight.data
    whole = weight.clone()
    weight.fill_(torch.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="logits"):
            llm.generate(PROMPTS[:3], SamplingParams(temperature, max_tokens=2))
    weight.copy_(whole)
    assert_as_good_as_new(llm, right)


def test_nothing_cached_outlives_a_reset(oracle: Oracle) -> None:
    striker = Striker()
    llm = make_llm(oracle.folder, striker, **OPTIONS)
    striker.arm("step_end", KeyboardInterrupt(), after=3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)
    assert "blocks_hash" in striker.moments
    striker.disarm()
    llm.generate(PROMPTS[:1], PARAMS[0])
    assert not {"blocks_share", "blocks_revive", "blocks_evict"} & set(striker.moments)


# -- Ctrl-C ----------------------------------------------------------------------------------------


def moments_of_a_run(oracle: Oracle) -> list[str]:
    narrator = Narrator()
    llm = make_llm(oracle.folder, narrator, **OPTIONS)
    narrator.moments.clear()
    llm.generate(PROMPTS, PARAMS)
    return narrator.moments


def strikes(oracle: Oracle) -> list[tuple[str, int]]:
    """Some times of each moment of a run, with how many of its kind were before it."""
    counts: Counter[str] = Counter()
    moments = []
    for hook in moments_of_a_run(oracle):
        if counts[hook] in {0, 1, 4, 10}:
            moments.append((hook, counts[hook]))
        counts[hook] += 1
    return moments


def test_the_run_that_is_interrupted_here_has_every_kind_of_moment(oracle: Oracle) -> None:
    start_up = set(HOOKS[: HOOKS.index("engine_ready") + 1])
    rare = {"request_abort", "engine_error", "engine_reset", "blocks_revive", "schedule_mixed"}
    of_gpus = {"cudagraph_replay", "gpu_time"}
    assert set(HOOKS) - set(moments_of_a_run(oracle)) <= start_up | rare | of_gpus
    assert {"preempt", "blocks_share", "blocks_evict"} <= set(moments_of_a_run(oracle))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full")], ids=repr)
def test_after_an_interruption_at_any_moment_the_engine_is_as_good_as_new(
    error: BaseException, oracle: Oracle, right: list[list[int]]
) -> None:
    for hook, nth in strikes(oracle):
        striker = Striker()
        llm = make_llm(oracle.folder, striker, **OPTIONS)
        striker.arm(hook, error, after=nth)
        with pytest.raises(type(error)):
            llm.generate(PROMPTS, PARAMS)
        striker.disarm()
        assert_as_good_as_new(llm, right)


def test_a_second_interruption_while_the_first_is_tidied_up_changes_nothing(
    oracle: Oracle, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    striker = Striker()
    llm = make_llm(oracle.folder, striker, **OPTIONS)
    for second in ("engine_error", "engine_reset"):
        striker.arm(second, KeyboardInterrupt())
        monkeypatch.setattr(llm.model_runner.model, "forward", None)  # the first: a TypeError
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
        monkeypatch.undo()
        striker.disarm()
        assert_as_good_as_new(llm, right)


def interrupt(llm: LLM, at_line: int | None) -> int:
    """Generate; strike before the n-th line that the engine executes. Return how many it did.

    This is what Ctrl-C does: it may strike between any two lines, not only where an observer is.
    """
    num_lines = 0
    folder = str(llm_engine.__file__).rpartition("/")[0]

    def trace(frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401 - recursive
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            num_lines += 1
            if num_lines == at_line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        llm.generate(PROMPTS, PARAMS)
    finally:
        sys.settrace(before)
    return num_lines


def test_after_ctrl_c_between_any_two_lines_the_engine_is_as_good_as_new(
    oracle: Oracle, right: list[list[int]]
) -> None:
    num_lines = interrupt(make_llm(oracle.folder, **OPTIONS), at_line=None)
    assert num_lines > 1000
    for at_line in range(1, num_lines, STRIDE):
        llm = make_llm(oracle.folder, **OPTIONS)
        with pytest.raises(KeyboardInterrupt):
            interrupt(llm, at_line)
        assert_as_good_as_new(llm, right)


def test_step_by_step_too_a_request_goes_on_or_is_gone(
    oracle: Oracle, right: list[list[int]]
) -> None:
    for hook, nth in strikes(oracle):
        striker = Striker()
        llm = make_llm(oracle.folder, striker, **OPTIONS)
        for prompt, params in zip(PROMPTS[:3], PARAMS, strict=False):
            llm.add_request(prompt, params)
        striker.arm(hook, KeyboardInterrupt(), nth)
        tokens: dict[int | None, list[int]] = {}
        while not llm.is_finished():
            try:
                outputs = llm.step()
            except KeyboardInterrupt:
                queued = [seq.seq_id for seq in (*llm.scheduler.waiting, *llm.scheduler.running)]
                assert sorted(llm.requests) == sorted(queued), f"after {hook}, time {nth}"
                llm.scheduler.check()
            else:
                tokens |= {output["seq_id"]: output["token_ids"] for output in outputs}
        for seq_id, found in tokens.items():
            assert seq_id is not None
            assert found == right[seq_id]
        striker.disarm()
        assert_as_good_as_new(llm, right)


@pytest.mark.parametrize(
    ("hook", "is_running"),
    [
        ("request_enqueue", False),
        *(("request_abort", False), ("state_transition", False), ("request_output", False)),
        *(("request_abort", True), ("state_transition", True), ("request_output", True)),
        ("blocks_release", True),
    ],
)
def test_an_interrupted_arrival_or_abort_loses_no_block(
    hook: str, is_running: bool, oracle: Oracle, right: list[list[int]]
) -> None:
    striker = Striker()
    llm = make_llm(oracle.folder, striker, **OPTIONS)
    other = llm.add_request(PROMPTS[0], PARAMS[0])
    seq_id = llm.add_request(PROMPTS[1], PARAMS[1])
    for _ in range(4 if is_running else 1):
        llm.step()
    assert bool(llm.requests[seq_id].block_table) == is_running
    arrive = partial(llm.add_request, PROMPTS[2], PARAMS[2])
    leave = partial(llm.abort, seq_id)
    striker.arm(hook, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        (arrive if hook == "request_enqueue" else leave)()
    queued = [seq.seq_id for seq in (*llm.scheduler.waiting, *llm.scheduler.running)]
    assert sorted(llm.requests) == sorted(queued)
    llm.scheduler.check()
    while not llm.is_finished():
        for output in llm.step():
            if output["seq_id"] in {other, seq_id}:
                assert output["token_ids"] == right[output["seq_id"] or 0]
    striker.disarm()
    assert_as_good_as_new(llm, right)


# -- threads ---------------------------------------------------------------------------------------


CROWDED = Settings(kvcache_block_size=2, num_kvcache_blocks=8, max_num_batched_tokens=6)
FREE = greedy_params(6, ignore_eos=True)


def in_threads(functions: Seq[Callable[[], object]]) -> list[BaseException]:
    """Run each in a thread of its own, all at once and often interrupted; what they raise."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        start.wait()
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - told
            raised.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in functions]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
            assert not thread.is_alive(), "two threads wait for one another"
    finally:
        sys.setswitchinterval(before)
    return raised


def test_threads_that_share_an_engine_take_turns() -> None:
    file = MemoryFile()
    recorder = Recorder(Sink(file))
    engine = make_engine(CROWDED, recorder)
    answers: list[bool] = []

    def generate(prompts: list[list[int]]) -> None:
        right = [Request(prompt, 6).answer()[0] for prompt in prompts]
        for _ in range(15):
            outputs = engine.generate(prompts, FREE)
            answers.append([output.token_ids for output in outputs] == right)

    prompts = [[[1 + i % 2] * (1 + i % 5), [2, 1, 1 + i % 2]] for i in range(30)]
    assert in_threads([partial(generate, each) for each in prompts]) == []
    recorder.close()
    assert answers == [True] * 450
    assert_trace_is_engines(file, engine)


def test_threads_that_share_an_engine_hear_of_each_other_in_one_sentence() -> None:
    """Every way to use an engine, at once: requests join and leave, streams open and close."""
    file = MemoryFile()
    recorder = Recorder(Sink(file))
    engine = make_engine(CROWDED, recorder)
    heard: list[str] = []

    def often(function: Callable[[], object]) -> None:
        for _ in range(40):
            try:
                function()
            except RuntimeError as error:
                heard.append(str(error))

    def generate() -> None:
        assert [output.token_ids for output in engine.generate([[1, 2], [2]], FREE)] == answers

    def stream() -> None:
        assert sum(output["finish_reason"] is not None for output in engine.stream([[1]], FREE))

    def look_in() -> None:
        with closing(engine.stream([[1, 1], [2]], FREE)) as outputs:
            next(outputs)

    def add_and_step() -> None:
        engine.add_request([2, 2], FREE)
        engine.step()

    def add_and_abort() -> None:
        with suppress(KeyError):  # another thread's step has ended it
            engine.abort(engine.add_request([1, 2], FREE))

    answers = [Request(prompt, 6).answer()[0] for prompt in ([1, 2], [2])]
    uses = [generate, stream, look_in, add_and_step, add_and_abort, engine.reset_prefix_cache]
    assert in_threads([partial(often, each) for each in uses * 2]) == []
    while not engine.is_finished():
        engine.step()
    sentences = (
        "a stream() is open: ",
        "requests from add_request() are",
        "requests are unfinished",
    )
    assert all(any(sentence in message for sentence in sentences) for message in heard)
    generate()
    recorder.close()
    assert_trace_is_engines(file, engine)


def assert_trace_is_engines(file: MemoryFile, engine: LLMEngine) -> None:
    """The trace is whole, and its fold is the engine."""
    records = list(read_trace(io.BytesIO(file.contents), warn=pytest.fail))
    assert isinstance(records[-1], Footer)
    state = State()
    for each in records:
        state.apply(each)
    assert len(state.sequences) == engine.num_requests
    state.sequences.clear()
    assert snapshot_of_fold(state) == snapshot_of_engine(engine.scheduler, {})


class FailsToHear(Observer):
    """Raises when it is told of an error or of the reset after it."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def engine_error(self, error: BaseException) -> None:
        if self.hook == "engine_error":
            raise OSError("deaf") from error

    def engine_reset(self, seqs: list[Sequence]) -> None:
        if self.hook == "engine_reset":
            raise OSError("deaf", len(seqs))


@pytest.mark.parametrize("hook", ["engine_error", "engine_reset"])
def test_an_observer_that_fails_while_an_error_is_told_leaves_nothing_behind(hook: str) -> None:
    engine = make_engine(Settings(), FailsToHear(hook))
    is_armed = [True]

    def strike(moment: Moment, _batch: Batch) -> None:
        if moment == "ran" and is_armed.pop():
            raise InjectedError

    runner_of(engine).at = strike
    with pytest.raises((InjectedError, OSError)):
        engine.generate([[1, 2], [3]], greedy_params(3, ignore_eos=True))
    runner_of(engine).at = lambda _moment, _batch: None
    assert not engine.requests
    assert engine.is_finished()
    assert len(engine.generate([[1, 2]], greedy_params(3, ignore_eos=True))[0]["token_ids"]) == 3
