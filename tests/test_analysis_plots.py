"""The plots: what is drawn of each frame. How it looks was looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pytest

import nvtrace
from nvtrace.analysis import memory_budget, plots, request_spans

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pandas as pd
    from matplotlib.axes import Axes


@pytest.fixture
def ax() -> Iterator[Axes]:
    """Somewhere to draw."""
    plt.switch_backend("agg")
    figure, axes = plt.subplots()
    yield axes
    figure.canvas.draw()  # nothing that was drawn fails, or warns, when it is shown
    plt.close(figure)


@pytest.fixture(scope="module")
def trace(folder: Path) -> nvtrace.Trace:
    """Four requests, and pages for two."""
    return nvtrace.load(folder / "crowded.jsonl")


def spans_of(trace: nvtrace.Trace) -> pd.DataFrame:
    """The bars of a Gantt chart."""
    return request_spans(trace.requests, trace.table("STATE_TRANSITION"))


def legend(ax: Axes) -> list[str]:
    """The words above the picture."""
    told = ax.get_legend()
    return [] if told is None else [text.get_text() for text in told.get_texts()]


def test_a_gantt_has_a_bar_for_each_span_and_the_first_request_on_top(
    trace: nvtrace.Trace, ax: Axes
) -> None:
    spans = spans_of(trace)
    assert plots.request_gantt(spans, ax) is ax
    assert len(ax.patches) == len(spans)
    assert legend(ax) == ["queue", "prefill", "decode", "preempted"]
    bottom, top = ax.get_ylim()
    assert bottom > top
    drawn = sum(bar.get_width() for bar in ax.patches)  # type: ignore[attr-defined] # rectangles
    in_seconds = (spans["end_ns"] - spans["start_ns"]).sum() / 1e9
    assert drawn == pytest.approx(in_seconds)
    assert "(s)" in ax.get_xlabel()


def test_block_states_are_those_at_each_steps_end(trace: nvtrace.Trace) -> None:
    states = plots.block_states(trace.blocks)
    first = int(trace.blocks["step"].min())
    for step in range(first, first + states.shape[1]):
        state = trace.at(step)
        for block_id, column in enumerate(states[:, step - first]):
            ref_count = state.ref_counts[block_id]
            expected = min(ref_count, 2) + 1 if ref_count else int(block_id in state.block_hashes)
            assert column == expected


def test_many_steps_share_a_column(trace: nvtrace.Trace) -> None:
    blocks = trace.blocks.assign(step=trace.blocks["step"] * 1000)
    states = plots.block_states(blocks)
    assert states.shape[1] == 2000
    assert (states[:, -1] == plots.block_states(trace.blocks)[:, -1]).all()


def test_a_block_map_shows_every_block_at_every_step(trace: nvtrace.Trace, ax: Axes) -> None:
    assert plots.kv_block_map(trace.blocks, ax) is ax
    (image,) = ax.images
    assert np.array_equal(np.asarray(image.get_array()), plots.block_states(trace.blocks))
    assert legend(ax) == ["free", "cached", "in use", "shared"]


def test_queues_and_batches_are_drawn_step_by_step(trace: nvtrace.Trace, ax: Axes) -> None:
    assert plots.queue_and_batch(trace.steps, ax) is ax
    running, waiting = ax.lines
    assert list(np.asarray(running.get_ydata())) == trace.steps["num_running"].tolist()
    assert list(np.asarray(waiting.get_ydata())) == trace.steps["num_waiting"].tolist()
    assert legend(ax)[-2:] == ["running queue", "waiting queue"]


def test_a_scatter_has_a_point_for_each_step_that_has_both_numbers(
    trace: nvtrace.Trace, ax: Axes
) -> None:
    assert plots.step_time_scatter(trace.steps, ax) is ax
    num_points = sum(len(np.asarray(points.get_offsets())) for points in ax.collections)
    assert num_points == len(trace.steps)
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert "ms" in ax.get_ylabel()


def test_a_scatter_of_what_was_never_measured_is_empty(trace: nvtrace.Trace, ax: Axes) -> None:
    plots.step_time_scatter(trace.steps, ax, x="num_context_tokens", y="gpu_ns")
    assert len(ax.collections) == 0
    assert legend(ax) == []


def test_a_waterfall_has_a_bar_for_each_term_that_begins_where_the_last_one_ended(
    trace: nvtrace.Trace, ax: Axes
) -> None:
    budget = memory_budget(trace.table("KV_BUDGET_ESTIMATE"))
    assert plots.memory_waterfall(budget, ax) is ax
    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches]  # type: ignore[attr-defined] # as above
    assert [width for _, width in bars] == pytest.approx((budget["num_bytes"] / 2**30).tolist())
    assert [label.get_text() for label in ax.get_yticklabels()] == budget["term"].tolist()
    (_, total), (start, kept_back) = bars[:2]
    assert start + kept_back == pytest.approx(total)
    assert ax.texts[0].get_text() == "16.00"


@pytest.mark.parametrize("name", ["request_gantt", "kv_block_map", "queue_and_batch"])
def test_nothing_can_be_drawn_too(trace: nvtrace.Trace, ax: Axes, name: str) -> None:
    frames = {
        "request_gantt": spans_of(trace),
        "kv_block_map": trace.blocks,
        "queue_and_batch": trace.steps,
    }
    assert getattr(plots, name)(frames[name][:0], ax) is ax


def test_no_setting_of_matplotlib_is_changed(trace: nvtrace.Trace, ax: Axes) -> None:
    before = dict(plt.rcParams)
    plots.queue_and_batch(trace.steps, ax)
    plots.kv_block_map(trace.blocks, ax)
    assert dict(plt.rcParams) == before
