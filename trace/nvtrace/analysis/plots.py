"""Plots of frames. Each function takes a DataFrame and a matplotlib Axes to draw into.

    figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
    plots.request_gantt(request_spans(trace.requests, trace.table("STATE_TRANSITION")), ax)

No setting of matplotlib is changed. The colours are from Paul Tol's schemes, which colour-blind
readers can distinguish; a phase has the same colour in each plot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COLORS = {
    "queue": "#d5d8dc",
    "prefill": "#4477aa",
    "decode": "#44aa99",
    "mixed": "#ddaa33",
    "preempted": "#cc6677",
}
_PAGE_COLORS = {"free": "#ffffff", "cached": "#d5d8dc", "in use": "#44aa99", "shared": "#aa4499"}
_INK, _FAINT = "#333940", "#e4e7ea"
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "\u00b5s"), (1, "ns"))
_GIB = 2**30
_MAX_COLUMNS = 2000  # more than a screen has
_MANY_TICKS = 1000  # high / low, from which on 1, 10, 100 are enough


def request_gantt(spans: pd.DataFrame, ax: Axes) -> Axes:
    """Draw each request as a bar: where it waited, and when it computed.

    Args:
        spans: what `request_spans` returns.
        ax: drawn into, and returned.
    """
    zero = spans["start_ns"].min() if len(spans) else 0
    end = spans["end_ns"].max() if len(spans) else 1
    scale, unit = _unit(end - zero)
    rows = {seq_id: row for row, seq_id in enumerate(spans["seq_id"].unique())}
    for span, its_spans in spans.groupby("span", observed=True):
        ax.barh(
            its_spans["seq_id"].map(rows),
            (its_spans["end_ns"] - its_spans["start_ns"]) / scale,
            left=(its_spans["start_ns"] - zero) / scale,
            height=0.72,
            color=COLORS[str(span)],
            label=str(span),
        )
    ax.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    ax.set_xlim(0, (end - zero) / scale)
    _whole_numbers(ax.yaxis)
    names = list(rows)
    ax.yaxis.set_major_formatter(
        lambda row, _: str(names[int(row)]) if row == int(row) and 0 <= row < len(names) else ""
    )
    _calm(ax, "x")
    ax.set(xlabel=f"time since the first arrival ({unit})", ylabel="request (seq_id)")
    _legend(ax)
    return ax


def kv_block_map(blocks: pd.DataFrame, ax: Axes) -> Axes:
    """Draw the state of each KV block at the end of each step.

    Args:
        blocks: `Trace.blocks`.
        ax: drawn into, and returned.
    """
    states = block_states(blocks)
    first, last = _extent(blocks)
    ax.imshow(
        states,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=ListedColormap(list(_PAGE_COLORS.values())),
        vmin=-0.5,
        vmax=len(_PAGE_COLORS) - 0.5,
        extent=(first - 0.5, last + 0.5, -0.5, len(states) - 0.5),
    )
    _whole_numbers(ax.xaxis, ax.yaxis)
    _calm(ax)
    ax.set(xlabel="step", ylabel="KV block (block_id)")
    handles = [
        Patch(facecolor=color, edgecolor=_INK if color == "#ffffff" else color, lw=0.5, label=state)
        for state, color in _PAGE_COLORS.items()
    ]
    _legend(ax, handles)
    return ax


def block_states(blocks: pd.DataFrame) -> npt.NDArray[np.int64]:
    """(num_blocks, num_steps) the state of each block at each step's end: 0 free ... 3 shared.

    There are fewer columns than steps if these are very many. Blocks that no operation is about are
    left out at the end.

    Args:
        blocks: `Trace.blocks`.
    """
    first, last = _extent(blocks)
    num_columns = min(last - first + 1, _MAX_COLUMNS)
    steps = blocks["step"].ffill().fillna(first).to_numpy(np.int64)
    columns = (steps - first) * num_columns // (last - first + 1)
    block_ids = blocks["block_id"].to_numpy()
    latest = np.zeros((block_ids.max(initial=0) + 1, num_columns), np.int64)
    latest[block_ids, columns] = np.arange(1, len(blocks) + 1)  # the last one wins
    latest = np.maximum.accumulate(latest, axis=1)
    after = np.where(
        blocks["ref_count"] > 0, np.minimum(blocks["ref_count"], 2) + 1, blocks["is_hashed"]
    )
    return np.concatenate([[0], after])[latest]


def _extent(blocks: pd.DataFrame) -> tuple[int, int]:
    """The first and the last step that an operation is in."""
    steps = blocks["step"].dropna()
    return (int(steps.min()), int(steps.max())) if len(steps) else (1, 1)


def queue_and_batch(steps: pd.DataFrame, ax: Axes) -> Axes:
    """Draw how many requests wait, run, and compute, step by step.

    Args:
        steps: `Trace.steps`.
        ax: drawn into, and returned.
    """
    steps = steps[steps["num_waiting"].notna()]
    x = steps["step"].to_numpy()
    batch, running, waiting = (
        steps[name].to_numpy(np.int64) for name in ("num_seqs", "num_running", "num_waiting")
    )
    for phase in steps["phase"].unique():
        its_batch = np.where(steps["phase"] == phase, batch, 0)
        color = COLORS.get(phase, _INK)
        ax.fill_between(
            x, its_batch, step="mid", color=color, alpha=0.5, lw=0, label=f"{phase} batch"
        )
    ax.step(x, running, where="mid", color=_INK, lw=1, label="running queue")
    ax.step(x, waiting, where="mid", color=COLORS["preempted"], lw=1.4, label="waiting queue")
    ax.set_ylim(bottom=0)
    ax.margins(x=0.01)
    _whole_numbers(ax.xaxis, ax.yaxis)
    _calm(ax, "y")
    ax.set(xlabel="step", ylabel="requests")
    _legend(ax)
    return ax


def step_time_scatter(
    steps: pd.DataFrame, ax: Axes, *, x: str = "num_batched_tokens", y: str = "wall_ns"
) -> Axes:
    """Draw how long each step took against its size, on logarithmic scales.

    Args:
        steps: `Trace.steps`.
        ax: drawn into, and returned.
        x: the column of the size: num_batched_tokens, num_context_tokens or num_seqs.
        y: the column of the time: wall_ns, gpu_ns or one of the parts.
    """
    steps = steps[steps[x].notna() & steps[y].notna()]
    scale, unit = _unit(steps[y].median() if len(steps) else 1)
    for phase, its_steps in steps.groupby("phase", observed=True):
        ax.scatter(
            its_steps[x].to_numpy(np.float64),
            its_steps[y].to_numpy(np.float64) / scale,
            s=18,
            color=COLORS.get(str(phase), _INK),
            alpha=0.55,
            lw=0,
            label=f"{phase} ({len(its_steps):,} steps)",
        )
    ax.set(xscale="log", yscale="log")
    _round_numbers(ax.xaxis, ax.yaxis)
    _calm(ax, "both")
    names = {
        "num_batched_tokens": "tokens computed in the step",
        "num_context_tokens": "tokens attended to in the step",
        "num_seqs": "requests in the batch",
        "wall_ns": "host's time of the step",
        "gpu_ns": "device's time of the step",
    }
    ax.set(xlabel=names.get(x, x), ylabel=f"{names.get(y, y)} ({unit})")
    _legend(ax)
    return ax


def memory_waterfall(budget: pd.DataFrame, ax: Axes) -> Axes:
    """Draw the sum that gives the number of KV blocks, each term where the one before ended.

    Args:
        budget: what `memory_budget` returns.
        ax: drawn into, and returned.
    """
    colors = {"total": COLORS["queue"], "less": COLORS["prefill"], "left": COLORS["decode"]}
    total = budget["num_bytes"].max() / _GIB
    level = 0.0
    for row, (kind, num_bytes) in enumerate(zip(budget["kind"], budget["num_bytes"], strict=True)):
        size = num_bytes / _GIB
        start = level - size if kind == "less" else 0.0
        color = colors[kind]  # the edge keeps the thinnest bar in sight
        ax.barh(row, size, left=start, height=0.62, color=color, edgecolor=color, lw=0.8)
        level = start if kind == "less" else size
        label = ("\u2212" if kind == "less" else "") + f"{size:.{2 if size >= 1 else 3}f}"
        ax.text(start + size + total * 0.01, row, label, va="center", color=_INK, fontsize="small")
        if row + 1 < len(budget):
            ax.plot([level, level], [row + 0.31, row + 0.69], color=_INK, lw=0.6)
    ax.set_yticks(range(len(budget)), budget["term"])
    ax.set_ylim(len(budget) - 0.4, -0.6)
    ax.set_xlim(0, total * 1.12)
    _calm(ax, "x")
    ax.set_xlabel("memory (GiB)")
    return ax


# -- style -----------------------------------------------------------------------------------------


def _unit(ns: float) -> tuple[float, str]:
    """The unit in which such a time is easy to read."""
    return next((scale, unit) for scale, unit in _UNITS if ns >= scale or scale == 1)


def _whole_numbers(*axes: Axis) -> None:
    """A few round ticks, all of them whole numbers."""
    for axis in axes:
        axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))


def _round_numbers(*axes: Axis) -> None:
    """Ticks of a logarithmic axis as plain numbers: 200, not 2 x 10^2."""
    for axis in axes:
        low, high = axis.get_view_interval()
        subs = (1, 2, 5) if high < low * _MANY_TICKS else (1,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=9))
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axis.set_minor_formatter(NullFormatter())


def _calm(ax: Axes, grid: Literal["x", "y", "both"] | None = None) -> None:
    """No box, faint lines, dark grey text."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color("#aab0b6")
    ax.tick_params(colors=_INK, length=3, width=0.6)
    ax.xaxis.label.set_color(_INK)
    ax.yaxis.label.set_color(_INK)
    ax.set_axisbelow(True)
    if grid is not None:
        ax.grid(visible=True, axis=grid, color=_FAINT, lw=0.8)


def _legend(ax: Axes, handles: Sequence[Artist] | None = None) -> None:
    """A legend in one row above the plot."""
    if handles is None:
        handles, _ = ax.get_legend_handles_labels()
    if not handles:
        return
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize="small",
        labelcolor=_INK,
        handlelength=1.2,
        borderaxespad=0.2,
    )
