"""Config: every option's limits, what "auto" comes to, and how many KV pages the memory holds."""

from __future__ import annotations

import dataclasses
import math
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nanovllm import LLM, Observer
from nanovllm.config import Config
from nanovllm.engine import kv_cache
from nanovllm.engine.kv_cache import CPU_KV_CACHE_LIMIT, KVBudget
from nanovllm.errors import KVCacheError, RequestRefusedError
from nanovllm.utils.devices import GIB, cpu_memory
from nanovllm.utils.model_config import ModelConfig
from nvtrace.envelope import Footer, Header
from nvtrace.reader import read_trace
from nvtrace.recorder import record
from support.models import edit_config, make_reference, save_reference
from support.oracle import greedy_params, make_llm

if TYPE_CHECKING:
    from collections.abc import Callable

COUNTS = [
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "tensor_parallel_size",
    "kvcache_block_size",
    "num_kvcache_blocks",
]
LEGAL: dict[str, list[Any]] = {
    "max_num_batched_tokens": [1, 16384, 10**9],
    "max_num_seqs": [1, 512, 10**9],
    "max_model_len": [2, 4096, 10**9],
    "gpu_memory_utilization": [1e-9, 0.5, 1, 1.0],
    "tensor_parallel_size": [1, 2, 3, 64],
    "distributed_timeout": [1e-3, 60, 60.0, 3600.0],
    "enforce_eager": [True, False],
    "kvcache_block_size": [1, 3, 256, 1024],
    "num_kvcache_blocks": [None, 1, 10**6],
    "device": ["auto", "cpu", "cuda"],
    "dtype": ["auto", "float32", "float16", "bfloat16"],
    "attention_backend": ["auto", "hybrid", "flash_attn", "triton", "sdpa"],
    "fused_kernels": [True, False],
    "policy": ["prefill_first"],
    "enable_prefix_caching": [True, False],
    "seed": [0, 1, 2**32 - 1],
}
OUT_OF_RANGE: dict[str, list[Any]] = {
    **{name: [0, -1, -256, 2**31, 10**30] for name in COUNTS},
    "max_model_len": [1, 0, -1, 2**31],
    "gpu_memory_utilization": [0, 0.0, -0.5, 1.0001, 90, math.nan, math.inf],
    "distributed_timeout": [0, 0.0, -1, math.nan, math.inf, 1e9],
    "device": ["cuda:0", "gpu", ""],
    "dtype": ["float64", "int8", "fp32", ""],
    "attention_backend": ["flash", ""],
    "policy": ["fifo", ""],
    "seed": [-1, 2**64],
}
OF_WRONG_TYPE: dict[str, list[Any]] = {
    "fused_kernels": [1, 0, "yes", None],
    **{name: [1.5, 2.0, "4", True, [4]] for name in COUNTS},
    "gpu_memory_utilization": ["0.9", None, True, [0.9]],
    "distributed_timeout": ["60", None, True, [60]],
    "enforce_eager": [0, 1, None, "no"],
    "enable_prefix_caching": [0, 1, None, "false"],
    "seed": [1.5, "5", None, True],
}


def pairs(values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, listed in values.items() for value in listed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(make_reference(), tmp_path_factory.mktemp("model"))


def test_every_option_has_its_cases_here() -> None:
    names = {field.name for field in dataclasses.fields(Config)} - {"model", "attention_reason"}
    words = {"device", "dtype", "attention_backend", "policy"}
    assert set(LEGAL) == names
    assert set(OUT_OF_RANGE) == names - {"enforce_eager", "enable_prefix_caching", "fused_kernels"}
    assert set(OF_WRONG_TYPE) == names - words


def test_the_defaults_are_those_of_nano_vllm() -> None:
    config = Config.create("model", {})
    assert config.max_num_batched_tokens == 16384
    assert config.max_num_seqs == 512
    assert config.max_model_len == 4096
    assert config.gpu_memory_utilization == 0.9
    assert config.tensor_parallel_size == 1
    assert config.distributed_timeout == 60.0
    assert config.enforce_eager is False
    assert config.kvcache_block_size == 256
    assert config.num_kvcache_blocks is None
    assert (config.device, config.dtype, config.attention_backend) == ("auto", "auto", "auto")
    assert config.policy == "prefill_first"
    assert config.enable_prefix_caching is True


@pytest.mark.parametrize(("name", "value"), pairs(LEGAL))
def test_a_legal_value_is_kept(name: str, value: object) -> None:
    assert getattr(Config.create("model", {name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), pairs(OUT_OF_RANGE))
def test_a_value_out_of_range_is_a_value_error_that_names_the_option(
    name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        Config.create("model", {name: value})


@pytest.mark.parametrize(("name", "value"), pairs(OF_WRONG_TYPE))
def test_a_value_of_a_wrong_type_is_a_type_error_that_names_the_option(
    name: str, value: object
) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be "):
        Config.create("model", {name: value})


@pytest.mark.parametrize("name", ["device", "dtype", "attention_backend", "policy"])
@pytest.mark.parametrize("value", [None, 1, ["auto"]])
def test_a_word_that_is_none_is_refused_with_those_there_are(name: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be one of .*{LEGAL[name][0]}"):
        Config.create("model", {name: value})


def test_values_of_other_libraries_become_pythons(folder: Path, tmp_path: Path) -> None:
    class Word(str, Enum):  # noqa: UP042 - its str() is "Word.CPU"
        CPU = "cpu"

    options = {
        "device": Word.CPU,
        "dtype": np.str_("float32"),
        "attention_backend": np.str_("sdpa"),
        "policy": np.str_("mixed"),
        "max_num_seqs": np.int64(4),
        "num_kvcache_blocks": np.uint8(9),
        "max_model_len": np.int32(32),
        "gpu_memory_utilization": np.float32(0.5),
        "seed": np.uint64(2**64 - 1),
    }
    with record(tmp_path / "trace.jsonl") as observer:
        llm = LLM(Path(np.str_(folder)), observer, **options)
        assert len(llm.generate([[5]], greedy_params(2))) == 1
    assert {type(getattr(llm.config, name)) for name in options} == {str, int, float}
    assert type(Config.create(np.str_(folder), {}).model) is str
    header, *_, footer = read_trace(tmp_path / "trace.jsonl", warn=pytest.fail)
    assert isinstance(header, Header)
    assert isinstance(footer, Footer)
    assert {name: header.config[name] for name in options} == {**options, "device": "cpu"}


def test_an_unknown_option_is_a_type_error_that_names_it_and_those_there_are(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"'max_num_seq'.*max_num_seqs") as caught:
        LLM(folder, max_num_seq=4)
    for name in LEGAL:
        assert name in str(caught.value)


def test_a_bad_option_is_refused_before_the_model_is_read() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        LLM("no such folder", max_num_seqs=0)


def test_a_home_folder_may_be_written_as_a_tilde(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Path(Config.create("~/model", {}).model) == tmp_path / "model"
    assert Path(Config.create(Path("~") / "model", {}).model) == tmp_path / "model"


def test_every_auto_is_resolved(folder: Path) -> None:
    config = Config.create(folder, {}).resolve(ModelConfig.from_folder(folder))
    assert (config.device, config.dtype, config.attention_backend) == ("cpu", "float32", "sdpa")
    assert config.max_model_len == 512, "the model has no more positions"


def test_what_was_given_stays_when_auto_is_resolved(folder: Path) -> None:
    config = Config.create(folder, {"dtype": "bfloat16", "max_model_len": 100})
    config = config.resolve(ModelConfig.from_folder(folder))
    assert (config.dtype, config.max_model_len) == ("bfloat16", 100)


@pytest.fixture(scope="module")
def stretched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose 64 positions are stretched to 256, of which its config says 80."""
    folder = save_reference(make_reference(), tmp_path_factory.mktemp("stretched"))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": yarn}
    edit_config(folder, {"max_position_embeddings": 80, **rope})
    return folder


def test_a_length_that_the_scaling_allows_is_had(stretched: Path) -> None:
    llm = make_llm(stretched, max_model_len=256)
    assert llm.config.max_model_len == 256
    [output] = llm.generate([[5] * 200], greedy_params(99, ignore_eos=True))
    assert len(output["token_ids"]) == 56
    with pytest.raises(RequestRefusedError, match="shorten the prompt or take another model") as no:
        llm.generate([[5] * 256])
    assert "positions for 256 tokens" in str(no.value)


def test_a_length_that_is_lowered_is_warned_of_where_it_was_asked(stretched: Path) -> None:
    with pytest.warns(UserWarning, match="max_model_len=257 is lowered to 256: the model") as seen:
        llm = LLM(stretched, max_model_len=257, num_kvcache_blocks=4)
    assert llm.config.max_model_len == 256
    assert [Path(warning.filename) for warning in seen] == [Path(__file__)]
    assert LLM(stretched, num_kvcache_blocks=4).config.max_model_len == 256  # 4096 nobody asked for


@pytest.mark.parametrize(("length", "advice"), [(100, "raise max_model_len"), (300, "another")])
def test_only_a_limit_that_can_be_raised_is_advised_to_be(
    length: int, advice: str, stretched: Path
) -> None:
    llm = make_llm(stretched, max_model_len=90)
    with pytest.raises(RequestRefusedError, match=f"max_model_len=90 .*shorten .* or .*{advice}"):
        llm.generate([[5] * length])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_engine_computes_in_the_dtype_that_was_asked_for(dtype: str, folder: Path) -> None:
    llm = make_llm(folder, dtype=dtype)
    assert {str(p.dtype) for p in llm.model_runner.model.parameters()} == {f"torch.{dtype}"}
    assert str(llm.model_runner.kv_cache.dtype) == f"torch.{dtype}"
    outputs = llm.generate([[5, 6, 7], [8]], greedy_params(6))
    assert [len(output["token_ids"]) for output in outputs] == [6, 6]


# -- the KV budget ---------------------------------------------------------------------------------

BLOCK_BYTES = 2 * 2 * 256 * 2 * 16 * 4  # K and V, layers, tokens, kv heads, head_dim, float32


class BudgetKeeper(Observer):
    """Keeps the budget."""

    def __init__(self) -> None:
        self.budgets: list[KVBudget] = []

    def kv_budget_estimate(self, budget: KVBudget) -> None:
        """Keep it."""
        self.budgets.append(budget)


def start(folder: Path, **options: Any) -> tuple[LLM, KVBudget]:  # noqa: ANN401 - any option
    keeper = BudgetKeeper()
    llm = LLM(folder, keeper, **options)
    [budget] = keeper.budgets
    return llm, budget


@pytest.fixture
def set_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def set_to(total: int, free: int) -> None:
        monkeypatch.setattr(kv_cache, "device_memory", lambda _device: (total, free))

    return set_to


def test_the_terms_of_the_kv_budget_add_up(
    folder: Path, set_memory: Callable[[int, int], None]
) -> None:
    set_memory(GIB, GIB // 2)
    llm, budget = start(folder, gpu_memory_utilization=0.75)
    assert budget.rule == "cpu_bounded"
    assert (budget.total_bytes, budget.free_bytes, budget.used_bytes) == (GIB, GIB // 2, GIB // 2)
    assert (budget.utilization, budget.limit_bytes) == (0.75, CPU_KV_CACHE_LIMIT)
    assert budget.available_bytes == GIB // 4
    per_token = 2 * budget.num_layers * budget.num_kv_heads * budget.head_dim * budget.dtype_bytes
    assert budget.block_bytes == budget.block_size * per_token == BLOCK_BYTES
    assert budget.num_blocks == GIB // 4 // BLOCK_BYTES
    assert llm.scheduler.block_manager.num_blocks == budget.num_blocks
    assert llm.model_runner.kv_cache.nbytes == budget.num_blocks * budget.block_bytes


def test_half_the_bytes_a_number_give_twice_the_blocks(
    folder: Path, set_memory: Callable[[int, int], None]
) -> None:
    set_memory(GIB, GIB // 2)
    _, whole = start(folder)
    _, half = start(folder, dtype="bfloat16")
    assert half.dtype_bytes == 2
    assert half.num_blocks // 2 == whole.num_blocks


def test_a_big_machine_gives_no_more_than_the_limit(
    folder: Path, set_memory: Callable[[int, int], None]
) -> None:
    set_memory(1000 * GIB, 900 * GIB)
    _, budget = start(folder)
    assert budget.available_bytes == budget.limit_bytes == CPU_KV_CACHE_LIMIT
    assert budget.num_blocks == CPU_KV_CACHE_LIMIT // BLOCK_BYTES


def test_a_given_number_of_blocks_is_taken_whatever_the_memory(
    folder: Path, set_memory: Callable[[int, int], None]
) -> None:
    set_memory(GIB, 0)
    llm, budget = start(folder, num_kvcache_blocks=3)
    assert (budget.rule, budget.num_blocks) == ("given", 3)
    assert llm.model_runner.kv_cache.shape[2] == llm.scheduler.block_manager.num_blocks == 3


@pytest.mark.parametrize("free", [0, GIB // 10, GIB // 10 + BLOCK_BYTES - 1])
def test_memory_without_room_for_a_block_is_an_error_that_says_what_to_do(
    free: int, folder: Path, set_memory: Callable[[int, int], None]
) -> None:
    set_memory(GIB, free)
    with pytest.raises(KVCacheError, match=r"no KV block fits.*num_kvcache_blocks") as caught:
        start(folder)
    assert "in use (by all programs)" in str(caught.value)
    # What it advises to raise it to is enough, and hardly more.
    enough = re.findall(r"raise gpu_memory_utilization to (\S+),", str(caught.value))
    assert len(enough) == (free > 0)
    for share in map(float, enough):
        assert start(folder, gpu_memory_utilization=share)[1].num_blocks >= 1
        with pytest.raises(KVCacheError):
            start(folder, gpu_memory_utilization=share - 0.002)
    set_memory(GIB, GIB // 10 + BLOCK_BYTES + 1)
    assert start(folder)[1].num_blocks == 1


def test_more_blocks_than_the_machine_has_memory_are_an_error_that_says_what_to_do(
    folder: Path, set_memory: Callable[[int, int], None]
) -> None:
    set_memory(GIB, GIB)
    with pytest.raises(KVCacheError, match=r"2\.00 GiB.*lower num_kvcache_blocks"):
        start(folder, num_kvcache_blocks=2 * GIB // BLOCK_BYTES)


@pytest.mark.parametrize("block_size", [256, 2**31 - 1])
def test_more_blocks_than_any_machine_gives_are_an_error_that_says_what_to_do(
    block_size: int, folder: Path
) -> None:
    with pytest.raises(KVCacheError, match="lower num_kvcache_blocks"):
        start(folder, num_kvcache_blocks=2**31 - 1, kvcache_block_size=block_size)


def test_this_machines_memory_is_a_plausible_number() -> None:
    total, free = cpu_memory()
    assert 0 <= free <= total
    assert total > GIB // 4
