"""nvtrace doctor: it says what is true here, and measures what it says it measures."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch

from nvtrace import doctor
from nvtrace.doctor import examine_machine, measure_tracing
from support.cli import call

if TYPE_CHECKING:
    from nanovllm import LLM


def test_it_names_what_the_engine_would_take() -> None:
    machine = examine_machine()
    assert machine.num_cpus == os.cpu_count()
    assert machine.packages["torch"] == torch.__version__
    assert 0 < machine.free_bytes <= machine.memory_bytes
    if not torch.cuda.is_available():
        assert (machine.device, machine.dtype, machine.gpu) == ("cpu", "float32", None)
        assert (machine.attention_backend, machine.attention_reason) == ("sdpa", "no_gpu")


def test_the_cost_is_that_of_the_traced_engine_over_the_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def time_by_observer(llm: LLM) -> float:
        llm.step()
        return 1000.0 if type(llm.observer).__name__ == "Observer" else 1100.0

    monkeypatch.setattr(doctor, "_time_steps", time_by_observer)
    cost = measure_tracing()
    assert (cost.step_ns, cost.traced_step_ns, cost.num_seqs) == (1000, 1100, 2)
    assert cost.share == pytest.approx(0.1)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_it_speaks_both_languages(lang: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = call(capsys, "doctor", "--no-cost", "--lang", lang)
    assert (outcome.code, outcome.err) == (0, "")
    assert torch.__version__ in outcome.out
    assert ("packages" in outcome.out) == (lang == "en")


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(call(capsys, "doctor", "--no-cost", "--json").out)
    assert found["machine"]["attention_reason"]
    assert found["tracing"] is None
