"""The panel at the top of a replay: the model, the settings, the KV budget, the machine."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nvtrace_cli.views.console import glyphs
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.text import count, duration, escape, flow, parameters, size

if TYPE_CHECKING:
    from rich.console import Console

    from nvtrace import events as ev
    from nvtrace.catalog import Catalog
    from nvtrace.envelope import EnvironmentFacts
    from nvtrace.summary import RunSummary

_LINES = ("model", "engine", "limits", "ends", "page", "room", "pages", "machine", "started")
_FRAME = 6  # columns of the border, its padding, and the gap after the labels


def header_panel(run: RunSummary, name: str, catalog: Catalog, console: Console) -> Panel:
    """The panel: what ran, with which settings, on which machine.

    Args:
        run: the trace.
        name: of the trace.
        catalog: the words.
        console: where it will be shown.
    """
    shapes = glyphs(console)
    labels = [catalog.ui(f"header_{line}") for line in _LINES]
    room = console.width - _FRAME - max(cell_len(label) for label in labels)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="label", no_wrap=True)
    grid.add_column()
    contents = (
        _model(run, catalog),
        _engine(run, catalog),
        _limits(run, catalog),
        _ends(run),
        *_kv_budget(run.budget, catalog, shapes.times, run.header.world_size),
        _machine(run.header.facts.environment),
        _started(run, catalog),
    )
    for label, parts in zip(labels, contents, strict=True):
        if parts:
            escaped = [escape(part) for part in parts]
            lines = flow(escaped, shapes.dot, room).split("\n")
            grid.add_row(Text(label), Prose(*((line, "") for line in lines)))
    return Panel(
        grid,
        title=Text(f" {escape(name)} ", style="heading"),
        title_align="left",
        border_style="quiet",
        padding=(0, 1),
    )


def _model(run: RunSummary, catalog: Catalog) -> list[str]:
    facts = run.header.facts
    model = facts.model
    folder = run.init.model if run.init else facts.config.model
    parts = [PurePath(folder).name or folder] if folder else []
    if model.architecture is not None:
        parts.append(model.architecture)
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    shape = {name: getattr(model, name) for name in names}
    if None not in shape.values():
        parts.append(catalog.ui("header_shape", **shape))
    if model.num_weights is not None:
        _, num_parameters = model.num_weights
        parts.append(catalog.ui("header_parameters", number=parameters(num_parameters)))
    if run.weights is not None:
        parts.append(catalog.ui("header_weights", size=size(run.weights.num_bytes)))
    return parts


def _engine(run: RunSummary, catalog: Catalog) -> list[str]:
    engine = run.header.facts.engine
    parts = [f"{engine.name or '?'} {engine.version or ''}".strip()]
    if run.init:
        if run.init.tp_size > 1:
            parts.append(catalog.ui("header_ranks", number=run.init.tp_size))
        parts += [run.init.device, run.init.dtype, run.init.attention_backend]
        parts.append(run.init.policy)
        key = "on" if run.init.enable_prefix_caching else "off"
        parts.append(catalog.ui(f"header_prefix_caching_{key}"))
    if run.ready:
        parts.append(catalog.ui("header_ready", time=duration(run.ready.duration_ns)))
    return parts


def _limits(run: RunSummary, catalog: Catalog) -> list[str]:
    if run.init is None:
        return []
    return [
        catalog.ui("header_limit_seqs", number=count(run.init.max_num_seqs)),
        catalog.ui("header_limit_tokens", number=count(run.init.max_num_batched_tokens)),
        catalog.ui("header_limit_len", number=count(run.init.max_model_len)),
    ]


def _ends(run: RunSummary) -> list[str]:
    """The tokens that end a sequence, each with the files that name it, if that was recorded."""
    if run.ready is None or run.ready.eos_sources is None:
        return []
    named = zip(run.ready.eos_token_ids, run.ready.eos_sources, strict=False)
    return [f"{token_id} ({sources})" for token_id, sources in named]


def _kv_budget(
    budget: ev.KvBudgetEstimate | None, catalog: Catalog, times: str, num_ranks: int
) -> tuple[list[str], list[str], list[str]]:
    """The KV budget with its numbers: the size of a block, the available memory, the blocks."""
    if budget is None:
        return [], [], []
    page = catalog.ui(
        "header_page_sum",
        times=times,
        num_layers=budget.num_layers,
        block_size=budget.block_size,
        num_kv_heads=budget.num_kv_heads,
        head_dim=budget.head_dim,
        dtype_bytes=budget.dtype_bytes,
        block_bytes=size(budget.block_bytes),
    )
    pages = catalog.ui_or(
        f"header_pages_{budget.rule}",
        "header_pages_other",
        rule=escape(budget.rule),
        available=size(budget.available_bytes),
        block_bytes=size(budget.block_bytes),
        num_blocks=count(budget.num_blocks),
        num_tokens=count(budget.num_blocks * budget.block_size),
        pool=size(budget.num_blocks * budget.block_bytes),
    )
    rooms = [] if budget.rule == "given" else [_room(budget, catalog, times)]
    if num_ranks == 1:
        return [page], rooms, [pages]
    if budget.rule == "cpu_bounded":
        available, number = size(budget.available_bytes), budget.num_local_ranks
        rooms.append(catalog.ui("header_room_ranks", size=available, number=number))
    return [page, catalog.ui("header_page_ranks", number=num_ranks)], rooms, [pages]


def _room(budget: ev.KvBudgetEstimate, catalog: Catalog, times: str) -> str:
    """The sum that leads to the available memory."""
    step_bytes = (budget.peak_bytes or 0) - (budget.current_bytes or 0)
    return catalog.ui_or(
        f"header_room_sum_{budget.rule}",
        "header_room_sum_other",
        rule=escape(budget.rule),
        times=times,
        utilization=f"{budget.utilization:.2f}",
        total=size(budget.total_bytes),
        used=size(budget.used_bytes),
        rest=size(int(budget.total_bytes * budget.utilization) - budget.used_bytes),
        limit="-" if budget.limit_bytes is None else size(budget.limit_bytes),
        step=size(step_bytes),
        graphs=size(budget.graph_pool_bytes or 0),
        available=size(budget.available_bytes),
    )


def _machine(environment: EnvironmentFacts) -> list[str]:
    known = (
        (environment.platform, f"{environment.platform} {environment.machine or ''}".strip()),
        (environment.num_cpus, f"{environment.num_cpus} CPUs"),
        (environment.python, f"Python {environment.python}"),
        (environment.torch, f"torch {environment.torch}"),
        (environment.gpu, environment.gpu or ""),
    )
    return [shown for value, shown in known if value is not None]


def _started(run: RunSummary, catalog: Catalog) -> list[str]:
    created = run.header.created
    shown = created[:19].replace("T", " ") + (" UTC" if created.endswith("+00:00") else "")
    parts = [shown, catalog.ui("header_events", number=count(run.num_events))]
    if run.header.world_size > 1:
        parts.append(f"rank {run.header.rank} / {run.header.world_size}")
    return parts
