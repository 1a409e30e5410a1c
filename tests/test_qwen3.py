"""The model and its paged attention, against transformers' own Qwen3 in fp32."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM as ReferenceQwen3

from nanovllm.gpu.attention_choice import make_attention_backend
from nanovllm.layers import attention_sdpa
from nanovllm.layers.attention_sdpa import SdpaBackend
from nanovllm.layers.context import Context, forward_context, get_context
from support.models import (
    PagedDriver,
    load,
    make_reference,
    random_tokens,
    reference_greedy,
    reference_logits,
    save_reference,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from nanovllm.models.qwen3 import Qwen3ForCausalLM

BLOCK_SIZES = [1, 3, 16, 256, 1024]
SHAPES: dict[str, dict[str, object]] = {
    "one head to a kv head": {"num_key_value_heads": 4},
    "two heads to a kv head": {},
    "four heads to a kv head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 48},
    "narrow heads": {"head_dim": 2, "tie_word_embeddings": True},
    "one layer, one head": {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def reference() -> ReferenceQwen3:
    return make_reference()


@pytest.fixture(scope="module")
def model(reference: ReferenceQwen3, tmp_path_factory: pytest.TempPathFactory) -> Qwen3ForCausalLM:
    return load(save_reference(reference, tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_tokens_equal_transformers_for_every_shape(
    shape: str, tmp_path: Path
) -> None:
    reference = make_reference(SHAPES[shape])
    driver = PagedDriver(load(save_reference(reference, tmp_path)), block_size=4)
    prompts = {0: random_tokens(9, seed=1), 1: random_tokens(1, seed=2), 2: random_tokens(30, 3)}

    logits = driver.step(prompts, "prefill")

    expected = [reference_logits(reference, prompt) for prompt in prompts.values()]
    assert_same(logits, torch.cat(expected))
    last_rows = torch.tensor([9, 10, 40]) - 1
    tokens = logits[last_rows].argmax(dim=-1).tolist()
    generated = {text_id: [token] for text_id, token in enumerate(tokens)}
    for _ in range(5):
        next_tokens = {text_id: tokens[-1:] for text_id, tokens in generated.items()}
        for text_id, token in enumerate(driver.step(next_tokens, "decode").argmax(dim=-1)):
            generated[text_id].append(int(token))
    for text_id, prompt in prompts.items():
        assert generated[text_id] == reference_greedy(reference, prompt, 6)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_prompt_cut_into_chunks_gives_the_same_logits(
    block_size: int, model: Qwen3ForCausalLM, reference: ReferenceQwen3
) -> None:
    driver = PagedDriver(model, block_size)
    prompts = [random_tokens(20, seed=4), random_tokens(13, seed=5)]
    cuts = [[0, 1, 3, 11, 20], [0, 5, 6, 7, 13]]
    chunks: list[list[Tensor]] = [[], []]
    for part in range(4):
        new_tokens = {row: prompts[row][cuts[row][part] : cuts[row][part + 1]] for row in range(2)}
        sizes = [len(tokens) for tokens in new_tokens.values()]
        for row, logits in enumerate(torch.split(driver.step(new_tokens, "prefill"), sizes)):
            chunks[row].append(logits)
    for row, prompt in enumerate(prompts):
        assert_same(torch.cat(chunks[row]), reference_logits(reference, prompt))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_decode_of_different_context_lengths_reads_nothing_but_its_own_pages(
    block_size: int, model: Qwen3ForCausalLM, reference: ReferenceQwen3
) -> None:
    driver = PagedDriver(model, block_size)
    texts = {row: random_tokens(length, row) for row, length in enumerate([1, 2, 17, 40])}
    driver.step({row: text[:-1] for row, text in texts.items() if len(text) > 1}, "prefill")

    logits = driver.step({row: text[-1:] for row, text in texts.items()}, "decode")

    assert_same(logits, torch.stack([reference_logits(reference, t)[-1] for t in texts.values()]))


def test_a_prefill_may_mix_new_prompts_chunks_and_single_tokens(
    model: Qwen3ForCausalLM, reference: ReferenceQwen3
) -> None:
    driver = PagedDriver(model, block_size=4)
    texts = [random_tokens(length, seed=length) for length in (12, 21, 7)]
    driver.step({0: texts[0][:11], 1: texts[1][:10]}, "prefill")

    logits = driver.step({0: texts[0][11:], 1: texts[1][10:], 2: texts[2]}, "prefill")

    expected = [reference_logits(reference, text) for text in texts]
    assert_same(logits, torch.cat((expected[0][11:], expected[1][10:], expected[2])))


def test_two_texts_may_read_the_same_prefix_pages(
    model: Qwen3ForCausalLM, reference: ReferenceQwen3
) -> None:
    driver = PagedDriver(model, block_size=4)
    prefix = random_tokens(8, seed=6)
    endings = {1: random_tokens(3, seed=7), 2: random_tokens(5, seed=8)}
    driver.step({0: prefix}, "prefill")
    for row in endings:
        driver.texts[row] = type(driver.texts[0])(8, driver.texts[0].block_table.copy())

    first, second = torch.split(driver.step(endings, "prefill"), [3, 5])

    assert_same(first, reference_logits(reference, prefix + endings[1])[8:])
    assert_same(second, reference_logits(reference, prefix + endings[2])[8:])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_way_of_cutting_texts_into_steps_changes_the_logits(
    data: st.DataObject, model: Qwen3ForCausalLM, reference: ReferenceQwen3
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4), label="lengths")
    driver = PagedDriver(model, data.draw(st.integers(1, 9), label="block_size"), num_blocks=128)
    texts = dict(enumerate(random_tokens(length, row) for row, length in enumerate(lengths)))
    computed: dict[int, list[Tensor]] = {row: [] for row in texts}
    done = dict.fromkeys(texts, 0)
    while unfinished := [row for row in texts if done[row] < lengths[row]]:
        rows = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        is_decode = data.draw(st.booleans(), label="decode")
        new_tokens = {}
        for row in rows:
            most = 1 if is_decode else lengths[row] - done[row]
            end = done[row] + data.draw(st.integers(1, most))
            new_tokens[row] = texts[row][done[row] : end]
            done[row] = end
        logits = driver.step(new_tokens, "decode" if is_decode else "prefill")
        sizes = [len(tokens) for tokens in new_tokens.values()]
        for row, part in zip(rows, torch.split(logits, sizes), strict=True):
            computed[row].append(part)
    for row, text in texts.items():
        assert_same(torch.cat(computed[row]), reference_logits(reference, text))


def test_only_the_sampled_rows_reach_the_head(model: Qwen3ForCausalLM) -> None:
    prompts = {0: random_tokens(4, seed=9), 1: random_tokens(6, seed=10)}
    everything = PagedDriver(model, block_size=4).step(prompts, "prefill")

    sampled = PagedDriver(model, block_size=4).step(prompts, "prefill", logits_indices=[3, 9])

    assert everything.shape == (10, 128)
    assert sampled.dtype == torch.float32
    assert_same(sampled, everything[[3, 9]])


def test_a_16_bit_model_stays_close_to_the_same_weights_in_fp32(tmp_path: Path) -> None:
    reference = make_reference({"initializer_range": 0.05})
    reference.bfloat16()
    folder = save_reference(reference, tmp_path)
    prompt = random_tokens(40, seed=11)
    chunks = [prompt[:25], prompt[25:39]]
    driver = PagedDriver(load(folder, torch.bfloat16), block_size=4)

    logits = [driver.step({0: chunk}, "prefill") for chunk in chunks]
    logits.append(driver.step({0: prompt[39:]}, "decode"))

    exact = ReferenceQwen3.from_pretrained(folder, dtype=torch.float32)
    expected = reference_logits(exact, prompt)
    torch.testing.assert_close(torch.cat(logits), expected, rtol=0.05, atol=0.05)


def test_layers_share_one_plan_a_step(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[str] = []
    for name in ("_plan_prefill", "_plan_decode"):
        plan = getattr(attention_sdpa, name)

        def counting(*args: object, name: str = name, plan: object = plan) -> object:
            planned.append(name)
            assert callable(plan)
            return plan(*args)

        monkeypatch.setattr(attention_sdpa, name, counting)
    driver = PagedDriver(model, block_size=4)
    driver.step({0: [1, 2, 3]}, "prefill")
    driver.step({0: [4]}, "decode")
    driver.step({0: [5]}, "decode")
    assert len(model.model.layers) > 1
    assert planned == ["_plan_prefill", "_plan_decode", "_plan_decode"]


def context_of(num_tokens: int, **changes: object) -> Context:
    fields: dict[str, object] = {
        "phase": "prefill",
        "slot_mapping": torch.arange(num_tokens),
        "cu_seqlens_q": torch.tensor([0, num_tokens], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, num_tokens], dtype=torch.int32),
        "max_seqlen_q": num_tokens,
        "max_seqlen_k": num_tokens,
        "context_lens": torch.tensor([num_tokens], dtype=torch.int32),
        "block_tables": None,
        "logits_indices": None,
    }
    return Context(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_prefill_needs_no_cache(tmp_path: Path, reference: ReferenceQwen3) -> None:
    model = load(save_reference(reference, tmp_path))
    prompt = random_tokens(5, seed=12)
    with torch.inference_mode(), forward_context(context_of(5)):
        logits = model.compute_logits(model(torch.tensor(prompt), torch.arange(5)))
    assert_same(logits, reference_logits(reference, prompt))


@pytest.mark.parametrize(
    "changes", [{"phase": "decode"}, {"block_tables": torch.tensor([[0]], dtype=torch.int32)}]
)
def test_a_step_that_reads_a_cache_that_is_not_there_is_an_error(
    changes: dict[str, object], tmp_path: Path, reference: ReferenceQwen3
) -> None:
    model = load(save_reference(reference, tmp_path))
    context = context_of(1, **changes)
    with forward_context(context), pytest.raises(RuntimeError, match="set k_cache and v_cache"):
        model(torch.tensor([1]), torch.tensor([0]))


def test_a_decode_without_block_tables_is_an_error(model: Qwen3ForCausalLM) -> None:
    PagedDriver(model, block_size=4)
    context = context_of(1, phase="decode")
    with forward_context(context), pytest.raises(RuntimeError, match="block_tables"):
        model(torch.tensor([1]), torch.tensor([0]))


def test_outside_of_a_step_there_is_no_context() -> None:
    with pytest.raises(RuntimeError, match="forward_context"):
        get_context()
    with forward_context(context_of(1)) as outer:
        with forward_context(context_of(2)) as inner:
            assert get_context() is inner
        assert get_context() is outer
    with pytest.raises(RuntimeError, match="forward_context"):
        get_context()


def test_an_error_inside_a_step_ends_it() -> None:
    with pytest.raises(ValueError, match="inside"), forward_context(context_of(1)):
        raise ValueError("inside")
    with pytest.raises(RuntimeError, match="forward_context"):
        get_context()


def test_two_threads_do_not_see_each_others_step() -> None:
    seen: list[bool] = []

    def look() -> None:
        with forward_context(context_of(2)) as own:
            seen.append(get_context() is own)

    with forward_context(context_of(1)) as outer:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert get_context() is outer
    assert seen == [True]


def test_an_unknown_attention_backend_is_refused_by_name() -> None:
    assert isinstance(make_attention_backend("sdpa"), SdpaBackend)
    with pytest.raises(ValueError, match="'paged_v9'"):
        make_attention_backend("paged_v9")
