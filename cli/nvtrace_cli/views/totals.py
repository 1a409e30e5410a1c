"""The totals at the end of a replay, and how each request ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from rich.console import Group
from rich.table import Table
from rich.text import Text

from nvtrace.metrics import PhaseMetrics, refusals_of
from nvtrace.steptime import Phase
from nvtrace_cli.views.notes import why_refused
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.table import FittingTable
from nvtrace_cli.views.text import count, duration, escape, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console, RenderableType

    from nvtrace.catalog import Catalog
    from nvtrace.summary import RequestSummary, RunSummary

_NS_PER_S = 1e9
_TEXT_INDENT = 5


def totals(
    run: RunSummary, seq_ids: Iterable[int], catalog: Catalog, console: Console
) -> RenderableType:
    """The totals of the run, and its requests.

    Args:
        run: the whole trace.
        seq_ids: the requests to list.
        catalog: the words.
        console: where it will be shown: texts are cut to its width.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="label", no_wrap=True)
    grid.add_column()
    for label, text in _sums(run, catalog):
        grid.add_row(Text(catalog.ui(f"totals_{label}")), Prose((text, "")))
    requests = [run.requests[seq_id] for seq_id in seq_ids]
    parts: list[RenderableType] = [Text(catalog.ui("totals_title"), style="heading"), grid]
    if requests:
        parts += [Text(), _request_table(requests, catalog)]
        parts += list(_texts(requests, catalog, console.width))
    return Group(*parts)


def _sums(run: RunSummary, catalog: Catalog) -> Iterator[tuple[str, str]]:
    prefill, decode, mixed = (run.sums.get(phase, PhaseMetrics()) for phase in get_args(Phase))
    requests = run.requests.values()
    num_prompt = sum(request.prompt_len for request in requests)
    num_completion = sum(request.num_completion_tokens for request in requests)
    yield (
        "steps",
        catalog.ui(
            "totals_steps_sum_mixed" if mixed.num_steps else "totals_steps_sum",
            total=count(sum(phase.num_steps for phase in run.sums.values())),
            prefill=count(prefill.num_steps),
            decode=count(decode.num_steps),
            mixed=count(mixed.num_steps),
        ),
    )
    if run.is_led:
        return
    yield (
        "tokens",
        catalog.ui(
            "totals_tokens_sum",
            num_prompt=count(num_prompt),
            num_completion=count(num_completion),
            num_cached=count(sum(request.num_cached_tokens for request in requests)),
        ),
    )
    wall = sum(phase.wall_ns for phase in run.sums.values())
    if wall:
        yield (
            "time",
            catalog.ui(
                "totals_time_sum_mixed" if mixed.num_steps else "totals_time_sum",
                total=duration(wall),
                prefill=duration(prefill.wall_ns),
                decode=duration(decode.wall_ns),
                mixed=duration(mixed.wall_ns),
            ),
        )
        yield "speed", catalog.ui("totals_speed_sum", rate=_rate(num_completion, wall))
    yield "preemptions", count(sum(request.num_preemptions for request in requests))
    if run.refused:
        why = why_refused(refusals_of(run.refused), catalog)
        yield "refused", catalog.ui("totals_refused_sum", count=count(len(run.refused)), why=why)
    for error in run.errors:
        parts = (error.error_type, error.message) if error.message else (error.error_type,)
        yield "error", escape(": ".join(parts))


def _rate(num_tokens: int, nanoseconds: int) -> str:
    rate = num_tokens * _NS_PER_S / nanoseconds
    return f"{rate:.1f}" if rate < 100 else count(round(rate))  # noqa: PLR2004 - three digits


def _request_table(requests: list[RequestSummary], catalog: Catalog) -> FittingTable:
    names = ("seq", "prompt", "cached", "output", "first_token", "preempted", "end")
    table = FittingTable(
        {name: catalog.ui(f"request_{name}") for name in names},
        catalog,
        leaving=("cached", "preempted", "prompt", "first_token"),
        words=("first_token", "end"),
        gap=1,
    )
    for request in requests:
        table.add_row(
            Text(str(request.seq_id)),
            Text(str(request.prompt_len)),
            Text(
                str(request.num_cached_tokens), style="" if request.num_cached_tokens else "quiet"
            ),
            Text(f"{request.num_completion_tokens}/{request.max_tokens}"),
            Text(_first_token(request, catalog)),
            Text(
                str(request.num_preemptions),
                style="preempted" if request.num_preemptions else "quiet",
            ),
            Text(_end(request, catalog)),
        )
    return table


def _first_token(request: RequestSummary, catalog: Catalog) -> str:
    if request.first_token_ns is None:
        return "-"
    return catalog.ui(
        "request_first_token_at",
        step=str(request.first_token_step or 0),
        time=duration(request.first_token_ns - request.enqueued_ns),
    )


def _end(request: RequestSummary, catalog: Catalog) -> str:
    if request.reason is None:
        return catalog.ui("request_unfinished")
    reason = escape(request.reason)
    if request.end_step is None:
        return reason
    return catalog.ui("request_end_at", reason=reason, step=str(request.end_step))


def _texts(requests: list[RequestSummary], catalog: Catalog, width: int) -> Iterator[Text]:
    for request in requests:
        if request.text is not None:
            label = catalog.ui("seq", ids=request.seq_id)
            start = Text(f"{label}  ", style="label")
            room = width - start.cell_len
            yield Text.assemble(start, shorten(f'"{escape(request.text)}"', room))
