"""The sampler's contract: what is drawn, how often, and that only seed and position decide."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers import sampler as sampler_module
from nanovllm.layers.sampler import Sampler, SamplingTensors, gumbel_noise
from support.models import VOCAB_SIZE
from support.oracle import Oracle, greedy_params, make_llm, tokens_of

if TYPE_CHECKING:
    from pathlib import Path

NUM_DRAWS = 20_000
# A right sampler's chi-square exceeds this once in a thousand seeds; the seeds here are fixed.
CHI_SQUARE_LIMIT = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 7: 24.32}


def params_of(num_rows: int, **changes: object) -> SamplingTensors:
    """Return parameters of rows that differ only in what is given as a list."""
    settings: dict[str, object] = {
        "temperatures": 1.0,
        "top_ks": None,
        "top_ps": 1.0,
        "seeds": 0,
        "positions": list(range(num_rows)),
    }
    lists: dict[str, Any] = {
        name: value if isinstance(value, list) else [value] * num_rows
        for name, value in {**settings, **changes}.items()
    }
    asked = zip(lists["temperatures"], lists["top_ks"], lists["top_ps"], strict=True)
    params = [SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in asked]
    return SamplingTensors(params, lists["seeds"], lists["positions"])


def draw(logits: torch.Tensor, **changes: object) -> list[int]:
    tokens: list[int] = Sampler()(logits, params_of(logits.shape[0], **changes)).tolist()
    return tokens


def draw_often(logits: list[float], **changes: object) -> Counter[int]:
    """Draw from the same logits at many positions."""
    return Counter(draw(torch.tensor([logits]).expand(NUM_DRAWS, -1).contiguous(), **changes))


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def logits_of(probabilities: list[float]) -> list[float]:
    return [math.log(p) for p in probabilities]


def chi_square(counts: Counter[int], probabilities: dict[int, float]) -> float:
    assert set(counts) <= set(probabilities)
    return sum(
        (counts[token] - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for token, p in probabilities.items()
    )


def test_greedy_takes_the_lowest_id_of_equals_also_among_rows_that_are_drawn() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [0.5, 0.1, 0.2], [3.0, 3.0, 3.0]])
    for seed in range(20):
        tokens = draw(logits, temperatures=[0.0, 0.0, 1.0, 0.0], seeds=seed)
        assert [tokens[row] for row in (0, 1, 3)] == [0, 1, 0]
    assert draw(logits, temperatures=0.0) == [0, 1, 0, 0]


def test_greedy_ignores_top_k_top_p_and_seed() -> None:
    logits = random_logits(50, 30)
    expected = logits.argmax(dim=-1).tolist()
    assert draw(logits, temperatures=0.0, top_ks=3, top_ps=0.1, seeds=9) == expected


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = random_logits(200, 30)
    logits[:, 20] = logits[:, 10] = logits.max() + 1  # a tie: the lowest id wins
    assert draw(logits, temperatures=50.0, top_ks=1) == [10] * 200


def test_top_p_keeps_the_token_that_crosses_p() -> None:
    logits = logits_of([0.1, 0.2, 0.3, 0.4])
    assert set(draw_often(logits, top_ps=0.6)) == {2, 3}
    assert set(draw_often(logits, top_ps=0.75)) == {1, 2, 3}
    assert set(draw_often(logits, top_ps=0.39)) == {3}
    assert set(draw_often(logits, top_ps=1e-9)) == {3}
    assert set(draw_often(logits, top_ps=1e-60)) == {3}
    assert set(draw_often(logits, top_ps=0.95)) == {0, 1, 2, 3}


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_equals() -> None:
    logits = [1.0, 2.0, 1.0, 2.0, 1.0, 0.0, 1.0]
    assert set(draw_often(logits, top_ks=3)) == {0, 1, 3}
    assert set(draw_often(logits, top_ks=4)) == {0, 1, 2, 3}
    assert set(draw_often([0.0] * 5, top_ks=2)) == {0, 1}
    assert set(draw_often([0.0] * 5, top_ps=0.5)) == {0, 1, 2}


@pytest.mark.parametrize("off", [None, 0, 4, 10**6])
def test_a_top_k_that_cuts_nothing_changes_nothing(off: int | None) -> None:
    logits = logits_of([0.1, 0.2, 0.3, 0.4])
    assert draw_often(logits, top_ks=off) == draw_often(logits)


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    logits = [0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 0.1, 1.5]
    for temperature in (0.6, 1.0, 2.0):
        probabilities = (torch.tensor(logits) / temperature).softmax(dim=-1).tolist()
        counts = draw_often(logits, temperatures=temperature, seeds=12)
        assert chi_square(counts, dict(enumerate(probabilities))) < CHI_SQUARE_LIMIT[7]


def test_one_position_of_many_seeds_is_as_random_as_many_positions_of_one_seed() -> None:
    logits = logits_of([0.1, 0.2, 0.3, 0.4])
    counts = draw_often(logits, seeds=list(range(NUM_DRAWS)), positions=7)
    assert chi_square(counts, dict(enumerate([0.1, 0.2, 0.3, 0.4]))) < CHI_SQUARE_LIMIT[3]


def test_what_is_kept_is_drawn_by_the_probabilities_among_the_kept() -> None:
    logits = logits_of([0.1, 0.2, 0.3, 0.4])
    counts = draw_often(logits, top_ks=3)
    assert chi_square(counts, {1: 2 / 9, 2: 3 / 9, 3: 4 / 9}) < CHI_SQUARE_LIMIT[2]
    counts = draw_often(logits, top_ps=0.6)
    assert chi_square(counts, {2: 3 / 7, 3: 4 / 7}) < CHI_SQUARE_LIMIT[1]
    # Top-k first: of .4 .3 .2 renormalised, .44 and .33 reach .7. The other way round three remain.
    counts = draw_often(logits, top_ks=3, top_ps=0.7)
    assert chi_square(counts, {2: 3 / 7, 3: 4 / 7}) < CHI_SQUARE_LIMIT[1]
    # Temperature before both: at 0.5 the odds are squared, 16 : 9 : 4 : 1, and the first has .53.
    assert set(draw_often(logits, temperatures=0.5, top_ps=0.5)) == {3}


def test_successive_draws_do_not_depend_on_each_other() -> None:
    logits = torch.zeros(NUM_DRAWS, 2)
    tokens = draw(logits, seeds=3)
    pairs = Counter(2 * a + b for a, b in zip(tokens[0::2], tokens[1::2], strict=True))
    expected = NUM_DRAWS / 8
    assert sum((pairs[i] - expected) ** 2 / expected for i in range(4)) < CHI_SQUARE_LIMIT[3]


def test_a_requests_tokens_depend_on_nothing_but_its_seed_and_positions() -> None:
    logits = random_logits(40, 50)
    temperatures = [0.0, 0.6, 1.0, 5.0] * 10
    top_ks = [None, 3, None, 20, 0] * 8
    top_ps = [1.0, 0.9, 0.5, 1.0] * 10
    settings: dict[str, list[object]] = {
        "temperatures": list(temperatures),
        "top_ks": list(top_ks),
        "top_ps": list(top_ps),
        "seeds": [row // 4 for row in range(40)],
        "positions": [row % 7 for row in range(40)],
    }
    together = draw(logits, **settings)
    for row in range(40):
        own = {name: [values[row]] for name, values in settings.items()}
        assert draw(logits[row : row + 1], **own) == [together[row]]
    backwards = {name: values[::-1] for name, values in settings.items()}
    assert draw(logits.flip(0), **backwards) == together[::-1]


def test_seeds_and_positions_all_give_different_noise() -> None:
    places = [
        (seed, position) for seed in (0, 1, 2, 2**32, 2**63, 2**64 - 1) for position in range(9)
    ]
    params = params_of(
        len(places), seeds=[seed for seed, _ in places], positions=[p for _, p in places]
    )
    noise = gumbel_noise(params.noise_keys, 64)
    correlations = torch.corrcoef(noise).fill_diagonal_(0)
    assert correlations.abs().max() < 0.6
    assert len(set(noise.flatten().tolist())) == noise.numel()


def test_the_noise_is_the_documented_function_of_seed_position_and_token() -> None:
    def splitmix64(x: int) -> int:
        z = (x + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    def lowbias32(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 seeded with 0
    seeds, positions = [0, 5, 2**64 - 1], [0, 1, 4095]
    noise = gumbel_noise(params_of(3, seeds=seeds, positions=positions).noise_keys, 300)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        key = splitmix64(splitmix64(seed) ^ position)
        for token in (0, 1, 299):
            x = lowbias32(lowbias32(token ^ (key % 2**32)) ^ (key >> 32))
            expected = -math.log(-math.log((x + 0.5) / 2**32))
            assert noise[row, token].item() == pytest.approx(expected, rel=1e-6)


def test_the_noise_has_the_gumbel_distribution_and_is_finite_at_its_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = gumbel_noise(params_of(400).noise_keys, 1000).double().flatten()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        threshold = -math.log(-math.log(quantile))
        assert (noise <= threshold).double().mean().item() == pytest.approx(quantile, abs=0.003)
    for extreme in (0, 2**32 - 1):
        monkeypatch.setattr(sampler_module, "_mix32", lambda x, e=extreme: torch.full_like(x, e))
        assert gumbel_noise(params_of(1).noise_keys, 3).isfinite().all()


@pytest.mark.parametrize("temperature", [1e-60, 1e-37, 1e-6, 0.01, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_no_temperature_overflows(temperature: float, scale: float) -> None:
    logits = random_logits(64, 40) * scale
    for changes in ({}, {"top_ks": 5}, {"top_ps": 0.9}):
        tokens = draw(logits, temperatures=temperature, **changes)
        assert all(0 <= token < 40 for token in tokens)
        if temperature <= 1e-6 and scale >= 1.0:
            assert tokens == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-60, 1.0, 1e6])
def test_a_banned_token_is_never_drawn(temperature: float) -> None:
    counts = draw_often([0.0, -math.inf, 0.0], temperatures=temperature)
    assert set(counts) == {0, 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "changes", [{"temperatures": 0.0}, {}, {"top_ks": 2}, {"top_ps": 0.5}, {"top_ks": 1}]
)
def test_logits_that_are_no_numbers_are_an_error_that_names_the_row(
    bad: float, changes: dict[str, object]
) -> None:
    logits = random_logits(4, 10)
    logits[2, 7] = bad
    with pytest.raises(FloatingPointError, match=r"^Row 2 of the logits"):
        draw(logits, **changes)


def test_logits_that_ban_every_token_are_an_error() -> None:
    logits = random_logits(3, 10)
    logits[1] = -math.inf
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match=r"^Row 1 of the logits"):
            draw(logits, temperatures=temperature)


def test_rows_that_need_no_sort_do_not_pay_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows: list[int] = []
    keep_likeliest = sampler_module._keep_likeliest

    def counting(scores: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
        sorted_rows.append(scores.shape[0])
        return keep_likeliest(scores, top_ks, top_ps)

    monkeypatch.setattr(sampler_module, "_keep_likeliest", counting)
    logits = random_logits(4, 10)
    draw(logits)
    draw(logits, temperatures=0.0, top_ks=2)
    assert sorted_rows == []
    draw(logits, temperatures=[0.0, 1.0, 1.0, 1.0], top_ks=[2, 2, None, 0], top_ps=[1, 1, 0.5, 1])
    assert sorted_rows == [2]


def test_a_greedy_batch_draws_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_noise(*_: object) -> torch.Tensor:
        raise AssertionError("noise was drawn")

    monkeypatch.setattr(sampler_module, "gumbel_noise", no_noise)
    logits = random_logits(4, 10)
    assert draw(logits, temperatures=0.0) == logits.argmax(dim=-1).tolist()


def test_the_logits_are_left_as_they_are() -> None:
    logits = random_logits(6, 20)
    before = logits.clone()
    draw(logits, temperatures=[0.0, 0.5, 1.0, 2.0, 1.0, 1.0], top_ks=4, top_ps=0.8)
    assert torch.equal(logits, before)


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        params_of(3, seeds=[1, 2])


# -- through the whole engine ----------------------------------------------------------------------


GOOD = [5, 6, 7]


def llm_with_logits(folder: Path, row: list[float], monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine whose model gives these logits to the first tokens, whatever the text, and no more.

    Everything around the model's answer is as ever.
    """
    llm = make_llm(folder)
    logits = torch.full((VOCAB_SIZE,), -torch.inf)
    logits[: len(row)] = torch.tensor(row)
    compute = llm.model_runner.model.compute_logits

    def fixed(hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(compute(hidden_states)) + logits

    monkeypatch.setattr(llm.model_runner.model, "compute_logits", fixed)
    return llm


@pytest.mark.parametrize("row", [[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0] * 4])
def test_greedy_ties_go_to_the_lowest_id_in_a_mixed_batch(
    row: list[float], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_with_logits(oracle.folder, row, monkeypatch)
    params = [
        SamplingParams(t, max_tokens=20, seed=1, ignore_eos=True) for t in (0.0, 1.0, 0.0, 0.3)
    ]
    outputs = tokens_of(llm.generate([GOOD] * 4, params))
    lowest = row.index(max(row))
    assert outputs[0] == outputs[2] == [lowest] * 20
    assert len(set(outputs[1])) > 1, "at temperature 1 the others are drawn too"


def test_an_engines_top_p_keeps_the_token_that_crosses_p(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_with_logits(oracle.folder, [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)], monkeypatch)

    def seen(**options: Any) -> set[int]:  # noqa: ANN401 - any option
        params = SamplingParams(max_tokens=100, seed=5, **options)
        return set(llm.generate([GOOD], params)[0]["token_ids"])

    assert seen(top_p=0.6) == {2, 3}
    assert seen(top_p=0.3) == {3}
    assert seen(top_p=0.8) == {1, 2, 3}
    assert seen(top_p=1.0) == {0, 1, 2, 3}
    assert seen(top_k=2) == {2, 3}
    assert seen(top_k=3, top_p=0.5) == {2, 3}, "0.4 and 0.3 of the 0.9 that top-k left"


def test_top_k_1_is_greedy(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder)
    prompts = oracle.prompts([3, 9, 1], 15, seed=5)
    params = [
        SamplingParams(1.0, max_tokens=15, top_k=1),
        SamplingParams(5.0, max_tokens=15),
        SamplingParams(0.5, max_tokens=15, top_k=1, top_p=0.5),
    ]
    outputs = tokens_of(llm.generate(prompts, params))
    assert outputs[0] == oracle.greedy(prompts[0], 15)
    assert outputs[2] == oracle.greedy(prompts[2], 15)


def test_a_seed_gives_the_same_tokens_whoever_shares_the_batch(oracle: Oracle) -> None:
    llm = make_llm(oracle.folder)
    seeded = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=15, seed=11)
    alone = llm.generate([GOOD], seeded)[0]["token_ids"]
    for others in ([greedy_params(15)], [SamplingParams(2.0, top_k=5)] * 3, [seeded]):
        outputs = llm.generate([*([[70, 71]] * len(others)), GOOD], [*others, seeded])
        assert outputs[-1]["token_ids"] == alone
