"""Streaming: outputs as they come, requests that join and leave meanwhile, and closing early."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.assets import TINY_QWEN3
from nanovllm.errors import RequestRefusedError, TokenizerError
from nvtrace import events as ev
from nvtrace.pipeline import Sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder
from nvtrace.replay import State
from support.fake_runner import InjectedError, Settings, make_engine, runner_of, text_of
from support.oracle import Oracle, make_llm, save_tokenizer
from support.snapshot import snapshot_of_engine, snapshot_of_fold
from support.workload import MemoryFile, Request

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.outputs import StreamOutput

PROMPTS = [[1, 2, 1], [2, 2], [1, 1, 1, 1, 2], [1]]


def params(max_tokens: int = 8, **changes: Any) -> SamplingParams:  # noqa: ANN401 - any of its options
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


def answer(prompt: list[int], max_tokens: int = 8) -> list[int]:
    """What the fake model says."""
    return Request(prompt, max_tokens).answer()[0]


def texts(outputs: Iterable[StreamOutput]) -> dict[int | None, str]:
    """seq_id -> all its deltas together; nothing may follow a request's last output."""
    text: dict[int | None, str] = {}
    ended = set()
    for output in outputs:
        seq_id = output["seq_id"]
        assert seq_id not in ended
        assert output["delta"] or output["finish_reason"]
        text[seq_id] = text.get(seq_id, "") + output["delta"]
        if output["finish_reason"] is not None:
            ended.add(seq_id)
    assert ended == set(text)
    return text


def assert_idle(engine: LLMEngine) -> None:
    """Nobody is left anywhere, and all pages are free."""
    assert engine.is_finished()
    assert engine.requests == {}
    assert engine.output_processor.detokenizers == {}
    assert not engine.output_processor.updates
    assert engine.scheduler.block_manager.num_free_blocks == engine.config.num_kvcache_blocks
    assert engine.generate([[1, 2]], params(2))[0]["token_ids"] == answer([1, 2], 2)


# -- the same as generate --------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from(["prefill_first", "mixed", "static"]),
    st.sampled_from([(), ("c",), ("ab", "ba")]),
)
def test_a_stream_says_piece_by_piece_what_generate_says_at_once(
    prompts: list[list[int]], max_tokens: int, policy: str, stop: tuple[str, ...]
) -> None:
    settings = Settings(num_kvcache_blocks=6, max_num_batched_tokens=5, policy=policy)
    whole = make_engine(settings).generate(prompts, params(max_tokens, stop=stop))
    engine = make_engine(settings)
    outputs = [*engine.stream(prompts, params(max_tokens, stop=stop))]
    last = {o["index"]: o for o in outputs if o["finish_reason"]}
    text = texts(outputs)
    for index, expected in enumerate(whole):
        for name in ("seq_id", "token_ids", "finish_reason", "reason", "error"):
            assert last[index][name] == expected[name]
        assert text[expected["seq_id"]] == expected["text"]
    assert_idle(engine)


def test_an_output_comes_after_each_step_for_each_request_that_ran() -> None:
    stream = make_engine(Settings()).stream(PROMPTS[:2], [params(2), params(3)])
    first, second = answer(PROMPTS[0], 2), answer(PROMPTS[1], 3)
    seen = [(o["index"], o["delta"], o["token_ids"], o["finish_reason"]) for o in stream]
    assert seen == [
        (0, text_of(first[:1]), first[:1], None),
        (1, text_of(second[:1]), second[:1], None),
        (0, text_of(first[1:]), first, "length"),
        (1, text_of(second[1:2]), second[:2], None),
        (1, text_of(second[2:]), second, "length"),
    ]


def test_real_text_comes_in_whole_characters() -> None:
    llm = LLM(TINY_QWEN3, num_kvcache_blocks=8)
    prompts = [llm.tokenizer.apply_chat_template(text) for text in ("你是谁？", "who are you?")]  # noqa: RUF001 - Chinese has its own mark
    sampling = [params(30), SamplingParams(temperature=3.0, max_tokens=30, seed=1)]
    whole = llm.generate(prompts, sampling)
    outputs = [*llm.stream(prompts, sampling)]
    text = texts(outputs)
    assert [*text.values()] == [output["text"] for output in whole]
    assert len([o for o in outputs if o["index"] == 0]) > 10
    assert not any("\ufffd" in o["delta"] for o in outputs if o["index"] == 0)


def test_refused_requests_come_first_and_the_others_run() -> None:
    stream = make_engine(Settings(max_model_len=8)).stream([[1] * 8, [1, 2]], params(2))
    refused = next(stream)
    assert (refused["seq_id"], refused["index"], refused["reason"]) == (None, 0, "prompt_too_long")
    assert refused["finish_reason"] == "refused"
    assert "max_model_len=8" in str(refused["error"])
    assert [*stream][-1]["token_ids"] == answer([1, 2], 2)


# -- at the door -----------------------------------------------------------------------------------


def test_what_is_malformed_is_said_at_once() -> None:
    engine = make_engine(Settings())
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        engine.stream([[1], [2]], [params()])
    assert_idle(engine)


def test_if_all_are_refused_the_error_is_raised() -> None:
    engine = make_engine(Settings(max_model_len=4))
    with pytest.raises(RequestRefusedError, match="max_model_len=4"):
        next(engine.stream([[1] * 5], params()))
    assert not engine.output_processor.is_streaming


def test_no_prompts_give_no_outputs() -> None:
    assert [*make_engine(Settings()).stream([])] == []


def test_tokens_that_are_no_bytes_cannot_be_streamed(tmp_path: Path) -> None:
    llm = make_llm(Oracle.create(tmp_path).folder)
    with pytest.raises(TokenizerError, match="streaming needs a tokenizer"):
        llm.stream([[5]])
    save_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="byte-level"):
        make_llm(tmp_path).stream([[5]])


def test_one_stream_at_a_time() -> None:
    engine = make_engine(Settings())
    unstarted = engine.stream([[1]], params(3))
    stream = engine.stream([[1]], params(3))
    next(stream)
    for start in (engine.stream, engine.generate):
        with pytest.raises(RuntimeError, match="is open"):
            start([[1]])
    with pytest.raises(RuntimeError, match="is open"):
        next(unstarted)
    stream.close()
    engine.add_request([1], params(3))
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.stream([[1]])


def test_a_stream_that_nobody_reads_queues_nothing() -> None:
    engine = make_engine(Settings())
    engine.stream([[1]], params(3)).close()
    assert_idle(engine)


# -- meanwhile -------------------------------------------------------------------------------------


def test_a_request_added_meanwhile_is_streamed_too() -> None:
    engine = make_engine(Settings())
    stream = engine.stream([PROMPTS[0]], params(3))
    outputs = [next(stream)]
    seq_id = engine.add_request(PROMPTS[1], params(7))
    outputs += stream
    assert {o["index"] for o in outputs if o["seq_id"] == seq_id} == {None}
    assert texts(outputs)[seq_id] == text_of(answer(PROMPTS[1], 7))
    assert_idle(engine)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
@pytest.mark.parametrize("others", [PROMPTS[1:2], PROMPTS[1:3]])
def test_a_request_aborted_meanwhile_says_so(max_num_seqs: int, others: list[list[int]]) -> None:
    """Running or waiting; the one whose output is being read, or another."""
    for victim in range(1 + len(others)):
        engine = make_engine(Settings(max_num_seqs=max_num_seqs))
        stream = engine.stream([PROMPTS[0], *others], params())
        outputs = [next(stream)]
        aborted = engine.abort(victim)
        outputs += stream
        last = {o["seq_id"]: o for o in outputs if o["finish_reason"]}
        assert last[victim]["finish_reason"] == aborted["finish_reason"] == "abort"
        text = texts(outputs)
        assert text[victim] == aborted["text"]
        for index, prompt in enumerate([PROMPTS[0], *others]):
            if index != victim:
                assert text[index] == text_of(answer(prompt))
        assert_idle(engine)


def test_the_last_request_aborted_ends_the_stream_with_its_output() -> None:
    engine = make_engine(Settings())
    stream = engine.stream([PROMPTS[0]], params(stop="never said"))
    next(stream)
    engine.abort(0)
    assert [o["finish_reason"] for o in stream] == ["abort"]
    assert_idle(engine)


def test_a_step_taken_by_hand_is_streamed_too() -> None:
    engine = make_engine(Settings())
    stream = engine.stream([PROMPTS[0]], params(4))
    outputs = [next(stream)]
    engine.step()
    engine.step()
    outputs += stream
    assert texts(outputs) == {0: text_of(answer(PROMPTS[0], 4))}


# -- ending early ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_outputs", [1, 2, 5])
def test_closing_early_aborts_what_is_unfinished(num_outputs: int) -> None:
    file = MemoryFile()
    recorder = Recorder(Sink(file))
    engine = make_engine(Settings(num_kvcache_blocks=8, max_num_seqs=2), recorder)
    stream = engine.stream(PROMPTS, [params(2), params(), params(), params()])
    for _ in range(num_outputs):
        next(stream)
    unfinished = [*engine.requests]
    stream.close()
    snapshot = snapshot_of_engine(engine.scheduler, {})
    recorder.close()
    records = [*read_trace(io.BytesIO(file.contents), warn=pytest.fail)]
    assert [r.seq_id for r in records if isinstance(r, ev.RequestAbort)] == unfinished
    assert len(unfinished) >= 3
    assert not any(isinstance(r, ev.GenerateFinish) for r in records)
    state = State()
    for record in records:
        state.apply(record)
    state.sequences.clear()
    assert snapshot_of_fold(state) == snapshot
    assert engine.is_finished()
    assert not engine.output_processor.is_streaming


def test_an_error_in_a_step_ends_the_stream_and_the_engine_is_as_new() -> None:
    engine = make_engine(Settings())
    stream = engine.stream(PROMPTS, params())
    next(stream)
    break_next_step(engine)
    with pytest.raises(InjectedError):
        list(stream)
    assert_idle(engine)


def test_an_error_in_a_step_by_hand_is_told_to_the_stream() -> None:
    engine = make_engine(Settings())
    stream = engine.stream(PROMPTS[:2], params())
    outputs = [next(stream), next(stream)]
    break_next_step(engine)
    with pytest.raises(InjectedError):
        engine.step()
    outputs += stream
    assert [o["finish_reason"] for o in outputs] == [None, None, "abort", "abort"]
    assert_idle(engine)


def break_next_step(engine: LLMEngine) -> None:
    """Let the model fail once."""

    def fail(_moment: object, _batch: object) -> None:
        runner_of(engine).at = lambda *_: None
        raise InjectedError

    runner_of(engine).at = fail


def test_a_stream_is_told_as_generate_is() -> None:
    def tags(use: str) -> list[str]:
        file = MemoryFile()
        recorder = Recorder(Sink(file))
        engine = make_engine(Settings(), recorder)
        [*getattr(engine, use)(PROMPTS, params())]
        recorder.close()
        return [
            type(r).__name__
            for r in read_trace(io.BytesIO(file.contents), warn=pytest.fail)
            if isinstance(r, ev.Event)
        ]

    assert tags("stream") == tags("generate")
    assert "GenerateFinish" in tags("stream")
