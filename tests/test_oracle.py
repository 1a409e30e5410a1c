"""The whole engine against transformers: greedy tokens equal generate(do_sample=False), in fp32.

However requests share the engine: alone, in batches, in chunks, over cached prefixes, after
preemptions, with pages of any size.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import Observer, SamplingParams
from nanovllm.assets import TINY_QWEN3
from support.models import edit_config, make_reference, random_tokens, save_reference
from support.oracle import Oracle, Watcher, assert_empty, greedy_params, make_llm, tokens_of

if TYPE_CHECKING:
    from pathlib import Path

    from nanovllm import LLM
    from nanovllm.config import Config
    from nanovllm.utils.model_config import ModelConfig

SHAPES: dict[str, dict[str, object]] = {
    "GQA 1": {"num_key_value_heads": 4},
    "GQA 2": {},
    "GQA 4, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "wide heads": {"head_dim": 48, "num_hidden_layers": 3},
    "narrow heads, tied": {"head_dim": 6, "tie_word_embeddings": True},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}
BLOCK_SIZES = [1, 3, 16, 256]
LENGTHS = [1, 9, 30, 4, 17]
MAX_TOKENS = 12


@pytest.fixture(scope="session", params=SHAPES)
def oracle_of_shape(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Oracle:
    return Oracle.create(tmp_path_factory.mktemp("model"), SHAPES[request.param])


@pytest.fixture(scope="session")
def prompts(oracle: Oracle) -> list[list[int]]:
    return oracle.prompts(LENGTHS, MAX_TOKENS)


def assert_right(
    llm: LLM, oracle: Oracle, prompts: list[list[int]], max_tokens: int = MAX_TOKENS
) -> None:
    """Run the prompts together, and compare each with what transformers says to it alone."""
    outputs = llm.generate(prompts, greedy_params(max_tokens))
    assert tokens_of(outputs) == [oracle.greedy(prompt, max_tokens) for prompt in prompts]
    assert_empty(llm)


class TestEveryShape:
    """Of heads, head sizes and RoPE."""

    def test_gives_the_right_tokens_alone(self, oracle_of_shape: Oracle) -> None:
        llm = make_llm(oracle_of_shape.folder)
        for prompt in oracle_of_shape.prompts(LENGTHS, MAX_TOKENS):
            assert_right(llm, oracle_of_shape, [prompt])

    def test_gives_the_right_tokens_in_a_batch_of_different_lengths(
        self, oracle_of_shape: Oracle
    ) -> None:
        prompts = oracle_of_shape.prompts(LENGTHS, MAX_TOKENS)
        assert_right(make_llm(oracle_of_shape.folder), oracle_of_shape, prompts)

    def test_gives_the_right_tokens_in_chunks_over_cached_prefixes_after_preemptions(
        self, oracle_of_shape: Oracle
    ) -> None:
        prompts = oracle_of_shape.prompts(LENGTHS, MAX_TOKENS)
        watcher = Watcher()
        llm = make_llm(
            oracle_of_shape.folder, watcher, max_num_batched_tokens=7, num_kvcache_blocks=12
        )
        assert_right(llm, oracle_of_shape, prompts)
        assert_right(llm, oracle_of_shape, prompts[::-1])
        assert watcher.num_preemptions.total() > 0
        assert sum(sum(cached) for cached in watcher.num_cached_tokens.values()) > 0
        assert any(len(cached) > 1 and cached[1] for cached in watcher.num_cached_tokens.values())
        assert max(sum(tokens for _, tokens in step) for step in watcher.prefills) == 7


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_of_any_size_give_the_right_tokens(
    block_size: int, enable_prefix_caching: bool, oracle: Oracle, prompts: list[list[int]]
) -> None:
    llm = make_llm(
        oracle.folder,
        Watcher(),
        kvcache_block_size=block_size,
        num_kvcache_blocks=max(400 // block_size, 5),
        enable_prefix_caching=enable_prefix_caching,
    )
    assert_right(llm, oracle, prompts)
    assert_right(llm, oracle, prompts)


@pytest.mark.parametrize("length", [250, 255, 256, 257])
def test_a_completion_may_cross_the_edge_of_a_block_of_256(length: int, oracle: Oracle) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, kvcache_block_size=256, num_kvcache_blocks=4)
    prompts = oracle.prompts([length, 3], 10, seed=length)
    assert_right(llm, oracle, prompts, 10)
    assert_right(llm, oracle, prompts, 10)
    assert watcher.num_cached_tokens[2] == [256 if length == 257 else 0]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [1, 3, 15, 16, 17])
def test_chunks_of_any_size_give_the_right_tokens(
    budget: int, enable_prefix_caching: bool, oracle: Oracle
) -> None:
    watcher = Watcher()
    llm = make_llm(
        oracle.folder,
        watcher,
        max_num_batched_tokens=budget,
        kvcache_block_size=16,
        enable_prefix_caching=enable_prefix_caching,
    )
    lengths = [16, 1, 33, 15, 50, 17]
    prompts = oracle.prompts(lengths, MAX_TOKENS, seed=1)
    assert_right(llm, oracle, prompts)

    computed = dict.fromkeys(range(len(prompts)), 0)
    for step in watcher.prefills:
        assert sum(num_tokens for _, num_tokens in step) <= budget
        for seq_id, num_tokens in step:
            computed[seq_id] += num_tokens
    assert computed == dict(enumerate(lengths))
    assert watcher.num_sampled == dict.fromkeys(range(len(prompts)), MAX_TOKENS)


@pytest.mark.parametrize("budget", [3, 1000])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_cached_prefixes_give_the_right_tokens(
    block_size: int, budget: int, oracle: Oracle
) -> None:
    prefix = random_tokens(33, seed=2)
    endings = [random_tokens(length, seed) for seed, length in enumerate([1, 2, 20, 7])]
    prompts = [prefix + ending for ending in endings] + [prefix[:20], prefix]
    assert all(oracle.is_clear(prompt, 5) for prompt in prompts)
    watcher = Watcher()
    llm = make_llm(
        oracle.folder,
        watcher,
        kvcache_block_size=block_size,
        num_kvcache_blocks=400 // block_size,
        max_num_batched_tokens=budget,
    )
    assert_right(llm, oracle, prompts[:1], 5)
    assert_right(llm, oracle, prompts, 5)

    whole = (33 // block_size) * block_size  # what of the shared 33 fills pages
    hits = [cached for [cached] in watcher.num_cached_tokens.values()]
    assert hits[0] == 0
    assert hits[2:5] == [whole] * 3
    assert hits[5] == ((20 - 1) // block_size) * block_size
    assert hits[6] == ((33 - 1) // block_size) * block_size


def test_without_prefix_caching_nothing_is_found_cached(
    oracle: Oracle, prompts: list[list[int]]
) -> None:
    watcher = Watcher()
    llm = make_llm(oracle.folder, watcher, enable_prefix_caching=False)
    assert_right(llm, oracle, prompts)
    assert_right(llm, oracle, prompts)
    assert {cached for found in watcher.num_cached_tokens.values() for cached in found} == {0}


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [3, 1000])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 56), (3, 20), (16, 4)])
def test_a_request_preempted_again_and_again_gives_the_right_tokens(
    block_size: int, num_blocks: int, budget: int, enable_prefix_caching: bool, oracle: Oracle
) -> None:
    watcher = Watcher()
    llm = make_llm(
        oracle.folder,
        watcher,
        kvcache_block_size=block_size,
        num_kvcache_blocks=num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
    )
    prompts = oracle.prompts([5, 7, 9, 3], 48, seed=3)
    assert_right(llm, oracle, prompts, 48)
    assert max(watcher.num_preemptions.values()) >= 2
    assert watcher.num_sampled == dict.fromkeys(range(4), 48)


def test_a_text_ends_where_transformers_ends_it(oracle: Oracle, tmp_path: Path) -> None:
    prompts = oracle.prompts([6, 11, 3], 20, seed=4)
    endless = [oracle.greedy(prompt, 20) for prompt in prompts]
    reference = make_reference()
    # One end that the first text reaches early, and one that the second reaches late.
    reference.generation_config.eos_token_id = [endless[0][4], endless[1][15]]
    ending = Oracle(reference, save_reference(reference, tmp_path))
    llm = make_llm(tmp_path)

    outputs = llm.generate(prompts, greedy_params(20))

    assert tokens_of(outputs) == [ending.greedy(prompt, 20) for prompt in prompts]
    assert len(outputs[0]["token_ids"]) <= 5
    for output in outputs:
        has_ended = output["token_ids"][-1] in llm.scheduler.eos_token_ids
        assert output["finish_reason"] == ("stop" if has_ended else "length")
    ignoring = llm.generate(prompts, greedy_params(20, ignore_eos=True))
    assert tokens_of(ignoring) == endless


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_workload_changes_the_tokens(data: st.DataObject, oracle: Oracle) -> None:
    bases = [random_tokens(24, seed=base) for base in range(3)]
    requests = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(bases),
                st.integers(0, 24),  # tokens shared with others
                st.integers(0, 3),  # tokens of its own
                st.integers(1, 10),  # max_tokens
            ).filter(lambda request: request[1] + request[2] > 0),
            min_size=1,
            max_size=6,
        ),
        label="requests",
    )
    prompts = [
        base[:num_shared] + random_tokens(num_own, seed=index)
        for index, (base, num_shared, num_own, _) in enumerate(requests)
    ]
    params = [greedy_params(max_tokens) for *_, max_tokens in requests]
    right = [oracle.greedy(p, sp.max_tokens) for p, sp in zip(prompts, params, strict=True)]
    for prompt, sampling_params in zip(prompts, params, strict=True):
        assume(oracle.is_clear(prompt, sampling_params.max_tokens))
    block_size = data.draw(st.sampled_from([1, 2, 3, 4, 7, 16]), label="block_size")
    longest = max(len(p) + sp.max_tokens - 1 for p, sp in zip(prompts, params, strict=True))
    fewest = -(-longest // block_size)
    llm = make_llm(
        oracle.folder,
        Watcher(),
        kvcache_block_size=block_size,
        num_kvcache_blocks=data.draw(st.integers(fewest, fewest + 20), label="num_blocks"),
        max_num_batched_tokens=data.draw(st.integers(1, 40), label="budget"),
        max_num_seqs=data.draw(st.integers(1, 6), label="max_num_seqs"),
        enable_prefix_caching=data.draw(st.booleans(), label="enable_prefix_caching"),
    )

    for _ in range(2):  # the second time over what the first left in the cache
        assert tokens_of(llm.generate(prompts, params)) == right
        assert_empty(llm)


@pytest.mark.parametrize(
    "question", ["introduce yourself", "What is a block table?", "介绍一下你自己", "什么是前缀缓存"]
)
def test_the_model_that_ships_says_what_transformers_says(question: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_QWEN3)
    reference = AutoModelForCausalLM.from_pretrained(TINY_QWEN3, dtype=torch.float32)
    oracle = Oracle(reference, TINY_QWEN3)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(prompt, str)
    token_ids = tokenizer.encode(prompt)
    right = oracle.greedy(token_ids, 40)
    watcher = Watcher()
    llm = make_llm(TINY_QWEN3, watcher, max_num_batched_tokens=5, num_kvcache_blocks=30)

    together = llm.generate([prompt, token_ids, "Hello"], greedy_params(40))

    assert tokens_of(together[:2]) == [right, right]
    assert together[0]["text"] == tokenizer.decode(right, skip_special_tokens=True)
    assert together[0]["num_prompt_tokens"] == len(token_ids)
    assert sum(watcher.num_cached_tokens[1]) > 0


# -- preempted twice, and in chunks of any size ----------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preempted_twice_gives_what_a_huge_pool_gives(temperature: float, oracle: Oracle) -> None:
    prompts = oracle.prompts([3, 5, 4], 30, seed=9)
    params = [SamplingParams(temperature, max_tokens=30, seed=seed) for seed in range(3)]
    huge = make_llm(oracle.folder, num_kvcache_blocks=1000).generate(prompts, params)
    for num_blocks in (9, 10, 13):
        watcher = Watcher()
        llm = make_llm(oracle.folder, watcher, num_kvcache_blocks=num_blocks)
        assert llm.generate(prompts, params) == huge
        assert max(watcher.num_preemptions.values()) >= 2
        assert watcher.num_sampled == {0: 30, 1: 30, 2: 30}


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 7, 10000])
@pytest.mark.parametrize("block_size", [4, 6])
def test_chunks_give_the_same_tokens_and_sample_at_their_end_only(
    block_size: int, budget: int, oracle: Oracle
) -> None:
    watcher = Watcher()
    llm = make_llm(
        oracle.folder, watcher, kvcache_block_size=block_size, max_num_batched_tokens=budget
    )
    rising = [list(range(20, 20 + length)) for length in (3, 9, 8)]
    prompts = [*rising, random_tokens(21, seed=1), [50]]
    outputs = llm.generate(prompts, greedy_params(6))
    assert tokens_of(outputs) == [oracle.greedy(prompt, 6) for prompt in prompts]
    assert all(sum(num_tokens for _, num_tokens in step) <= budget for step in watcher.prefills)
    assert watcher.num_sampled == dict.fromkeys(range(5), 6)
    if budget == 1:
        assert all(len(step) == 1 for step in watcher.prefills)
    if budget == 10000:
        assert len(watcher.prefills) == 1


# -- checkpoints of any spelling -------------------------------------------------------------------


@pytest.mark.parametrize("is_head_stored", [True, False])
def test_tied_heads_are_right_stored_or_not(is_head_stored: bool, tmp_path: Path) -> None:
    oracle = Oracle.create(tmp_path, {"tie_word_embeddings": True})
    if is_head_stored:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, tmp_path / "model.safetensors")
    [prompt] = oracle.prompts([6], 8)
    assert tokens_of(make_llm(tmp_path).generate([prompt], greedy_params(8))) == [
        oracle.greedy(prompt, 8)
    ]


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("rope_parameters", "older"),
    [
        ({"rope_type": "default", "rope_theta": 300.0}, {"rope_theta": 300.0}),
        (
            {"rope_type": "yarn", "rope_theta": 300.0, **YARN},
            {"rope_theta": 300.0, "rope_scaling": {"type": "yarn", **YARN}},
        ),
    ],
)
@pytest.mark.parametrize("spelling", ["of transformers 5", "older"])
def test_rope_is_read_in_both_spellings(
    spelling: str, rope_parameters: dict[str, object], older: dict[str, object], tmp_path: Path
) -> None:
    oracle = Oracle.create(tmp_path, {"rope_parameters": rope_parameters})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert "rope_theta" not in config, "transformers 5 says it in rope_parameters only"
    if spelling == "older":
        dtypes = {"dtype": None, "torch_dtype": "float32"}
        edit_config(tmp_path, {"rope_parameters": None, **dtypes, **older})
    prompts = oracle.prompts([40, 7], 20)
    assert tokens_of(make_llm(tmp_path).generate(prompts, greedy_params(20))) == [
        oracle.greedy(prompt, 20) for prompt in prompts
    ]


class DtypeKeeper(Observer):
    """Keeps what the engine says of dtypes."""

    def __init__(self) -> None:
        self.dtypes: list[str | None] = []

    def engine_init(self, config: Config, model_config: ModelConfig) -> None:
        """Keep both."""
        self.dtypes = [config.dtype, model_config.dtype]


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_said", [True, False])
def test_checkpoints_of_any_dtype_run_in_float32_on_a_cpu(
    stored: torch.dtype, is_said: bool, tmp_path: Path
) -> None:
    name = str(stored).removeprefix("torch.")
    reference: Any = make_reference()
    save_reference(reference.to(stored), tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    oracle = Oracle(reference, tmp_path)
    if not is_said:
        edit_config(tmp_path, {"dtype": None})
    keeper = DtypeKeeper()
    llm = make_llm(tmp_path, keeper)
    assert keeper.dtypes == ["float32", name if is_said else None]
    prompts = oracle.prompts([5, 17], 15)
    assert tokens_of(llm.generate(prompts, greedy_params(15))) == [
        oracle.greedy(prompt, 15) for prompt in prompts
    ]
