"""The article's run comes out of the trace: its numbers exactly, and the golden trace whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import pytest

from nvtrace import events as ev
from nvtrace import fold_steps, read_trace
from support.golden import GOLDEN, difference, normalised, record_example

if TYPE_CHECKING:
    from pathlib import Path

    from nvtrace.replay import Step


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("golden") / "trace.jsonl"
    record_example(path)
    return path


@pytest.fixture(scope="module")
def steps(trace: Path) -> list[Step]:
    return [step for step in fold_steps(read_trace(trace)) if step.index]


T = TypeVar("T", bound=ev.Event)


def the(kind: type[T], events: list[ev.Event]) -> T:
    """The one event of its kind."""
    (event,) = [event for event in events if isinstance(event, kind)]
    return event


def test_the_trace_equals_the_golden_one_without_times_and_machine(trace: Path) -> None:
    expected = GOLDEN.read_text("utf-8").splitlines()
    found = difference(expected, normalised(trace))
    assert not found, f"`make golden` takes this over, if it is meant:\n{found}"


def test_a_changed_event_is_shown_readably() -> None:
    assert difference(["a", "b", "c"], ["a", "x", "c"]).splitlines()[3:] == [" a", "-b", "+x", " c"]


def test_the_first_step_lays_out_28_tokens_as_in_the_article(steps: list[Step]) -> None:
    inputs = the(ev.PreparePrefillTensors, steps[0].events)
    assert (inputs.flat_tokens, inputs.n_seqs) == (28, 2)
    assert (inputs.max_seqlen_q, inputs.max_seqlen_k) == (17, 17)
    assert inputs.cu_seqlens_q == inputs.cu_seqlens_k == [0, 11, 28]
    assert inputs.slot_ranges == [(0, 10), (256, 272)]
    assert inputs.has_block_tables is False


def test_the_first_step_ends_with_the_statistic_30(steps: list[Step]) -> None:
    scheduled = the(ev.SchedulePrefill, steps[0].events)
    assert (scheduled.engine_step, scheduled.scheduled) == (1, 2)
    assert (scheduled.waiting_len, scheduled.running_len) == (0, 2)
    assert the(ev.StepEnd, steps[0].events).num_tokens_stat == 30


def test_the_second_step_decodes_at_12_and_18(steps: list[Step]) -> None:
    scheduled = the(ev.ScheduleDecode, steps[1].events)
    assert (scheduled.engine_step, scheduled.decode_step_index) == (2, 0)
    inputs = the(ev.PrepareDecodeTensors, steps[1].events)
    assert (inputs.context_lens, inputs.slot_mapping) == ([12, 18], [11, 273])
    assert inputs.block_tables_shape == (2, 1)


def test_the_batch_shrinks_from_2_to_1_when_the_first_request_ends(steps: list[Step]) -> None:
    statistics = [step.end.num_tokens_stat for step in steps if step.end is not None]
    last_of_two = statistics.index(-1)  # of the decode steps, counted from 0
    assert statistics == [30, *[-2] * (last_of_two - 1), *[-1] * (256 - last_of_two)]
    ended = the(ev.StateTransition, steps[last_of_two - 1].events)
    assert (ended.seq_id, ended.reason, ended.status) == (0, "eos", "FINISHED")
    assert 60 <= ended.num_completion_tokens == last_of_two <= 220
    cut = the(ev.StateTransition, steps[-1].events)
    assert (cut.seq_id, cut.reason, cut.num_completion_tokens) == (1, "max_tokens", 256)


def test_the_totals_are_the_articles(trace: Path) -> None:
    finish = the(ev.GenerateFinish, [r for r in read_trace(trace) if isinstance(r, ev.Event)])
    assert (finish.total_steps, finish.prefill_steps, finish.decode_steps) == (256, 1, 255)
    assert finish.n_outputs == 2
