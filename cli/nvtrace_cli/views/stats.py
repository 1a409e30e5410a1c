"""A trace's metrics on the terminal, as tables or for other programs.

`nvtrace.metrics` defines the metrics.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from nvtrace.distribution import Percentiles
from nvtrace.metrics import PhaseMetrics, RequestMetrics, RunMetrics, facts, metric_names
from nvtrace_cli.views.console import make_console
from nvtrace_cli.views.machine import json_line
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.table import FittingTable
from nvtrace_cli.views.text import count, duration, escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvtrace.catalog import Catalog

_NOTHING = "-"
_LATENCIES = (
    "time_to_first_token_ns",
    "inter_token_latency_ns",
    "time_per_output_token_ns",
    "request_queue_time_ns",
    "request_prefill_time_ns",
    "request_decode_time_ns",
    "request_preempted_time_ns",
    "e2e_request_latency_ns",
)
_SPREAD_COLUMNS = ("count", "mean", "min", "p50", "p90", "p95", "p99", "max")
_REQUEST_COLUMNS = (
    *("seq", "prompt", "cached", "output", "queue", "prefill", "ttft"),
    *("tpot", "gap", "decode", "e2e", "preempted"),
)


def print_json(measured: Iterable[RequestMetrics | RunMetrics]) -> None:
    """One object a line: {"kind": "request", ...} as they end, {"kind": "run", ...} last.

    Times are in nanoseconds, throughputs per second, shares from 0 to 1.
    """
    for item in measured:
        kind = "run" if isinstance(item, RunMetrics) else "request"
        _print_line(json_line({"kind": kind} | facts(item)))


def print_plain(measured: Iterable[RequestMetrics | RunMetrics]) -> None:
    """All requests as a table with tabs, an empty line, and the run as name, value, spread.

    An empty cell means that it never happened. Times are in nanoseconds.
    """
    names = [n for n in metric_names(RequestMetrics) if n != "inter_token_latencies_ns"]
    _print_line("\t".join(names))
    for item in measured:
        if isinstance(item, RequestMetrics):
            _print_line("\t".join(_plain(getattr(item, name)) for name in names))
        else:
            _print_line("")
            for line in _plain_run(item):
                _print_line(line)


def _plain_run(run: RunMetrics) -> Iterator[str]:
    yield "\t".join(("metric", "value", *_SPREAD_COLUMNS))
    for name, value in facts(run).items():
        if name == "phases":
            for kind, phase in run.phases.items():
                for part in PhaseMetrics.__dataclass_fields__:
                    yield f"{escape(kind)}.{part}\t{_plain(getattr(phase, part))}"
        elif isinstance(value, Percentiles):
            cells = (_plain(getattr(value, column)) for column in _SPREAD_COLUMNS)
            yield "\t".join((name, "", *cells))
        else:
            yield f"{name}\t{_plain(value)}"


def _plain(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")


# -- for people ------------------------------------------------------------------------------------


def show(
    requests: list[RequestMetrics], num_requests: int, run: RunMetrics, catalog: Catalog
) -> None:
    """The run, its latencies, and its requests.

    Args:
        requests: those to list.
        num_requests: how many ended in all.
        run: the whole trace's metrics.
        catalog: the words.
    """
    console = make_console()
    console.print(Text(catalog.ui("stats_run_title"), style="heading"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="label", no_wrap=True)
    grid.add_column()
    is_led = bool(run.phases) and run.mean_blocks_used is None  # a rank that does not schedule
    sentences = _machine_sentences(run, catalog) if is_led else _sentences(run, catalog)
    for label, sentence in sentences:
        grid.add_row(Text(catalog.ui(f"stats_{label}")), Prose((sentence, "")))
    console.print(grid)
    for title, table in (
        ("stats_steps_title", _phase_table(run, catalog)),
        ("stats_latency_title", _latency_table(run, catalog)),
        ("stats_requests_title", _request_table(requests, catalog)),
    ):
        if table.row_count:
            console.print()
            console.print(Prose((catalog.ui(title), "heading")))
            console.print(table)
    if requests and num_requests > len(requests):
        rest = catalog.ui("stats_more", count=count(num_requests - len(requests)))
        console.print(Prose((rest, "quiet")))


def _sentences(run: RunMetrics, catalog: Catalog) -> Iterator[tuple[str, str]]:
    yield (
        "requests",
        catalog.ui(
            "stats_requests_sum",
            total=count(run.num_requests),
            finished=count(run.num_finished),
            aborted=count(run.num_aborted),
            unfinished=count(run.num_unfinished),
            refused=count(run.num_refused),
        ),
    )
    yield (
        "tokens",
        catalog.ui(
            "stats_tokens_sum" if run.prefix_cache_queries else "stats_tokens_sum_uncached",
            num_prompt=count(run.num_prompt_tokens),
            num_generated=count(run.num_generation_tokens),
            num_cached=count(run.prefix_cache_hits),
            share=_percent(run.prefix_cache_hit_rate),
        ),
    )
    if run.duration_ns:
        yield (
            "time",
            catalog.ui(
                "stats_time_sum", total=duration(run.duration_ns), steps=duration(run.step_time_ns)
            ),
        )
        yield (
            "throughput",
            catalog.ui(
                "stats_throughput_sum",
                output=_rate(run.output_throughput),
                total=_rate(run.total_token_throughput),
                requests=_rate(run.request_throughput),
            ),
        )
    yield from _machine_sentences(run, catalog)
    yield (
        "preemptions",
        catalog.ui(
            "stats_preemptions_sum",
            count=count(run.num_preemptions),
            num_tokens=count(run.num_recomputed_tokens),
        ),
    )


def _machine_sentences(run: RunMetrics, catalog: Catalog) -> Iterator[tuple[str, str]]:
    if run.batch_efficiency is not None:
        yield (
            "batch",
            catalog.ui(
                "stats_batch_sum",
                share=_percent(run.batch_efficiency),
                mean=f"{run.batch_efficiency * run.largest_batch:.1f}",
                largest=count(run.largest_batch),
            ),
        )
    if run.token_budget_use is not None:
        budget = count(run.token_budget or 0)
        share = _percent(run.token_budget_use)
        yield "budget", catalog.ui("stats_budget_sum", share=share, budget=budget)
    if run.num_graph_rows:
        yield (
            "graphs",
            catalog.ui(
                "stats_graphs_sum",
                share=_percent(run.graph_padding),
                padding=count(run.num_graph_padding),
                rows=count(run.num_graph_rows),
            ),
        )
    if run.mean_blocks_used is not None:
        yield (
            "kv",
            catalog.ui(
                "stats_kv_sum",
                mean=_percent(run.kv_cache_usage),
                most=_percent(run.max_kv_cache_usage),
                num_blocks=count(run.num_blocks),
            ),
        )


def _phase_table(run: RunMetrics, catalog: Catalog) -> FittingTable:
    names = ("phase", "steps", "batch", "tokens", "time", "step_time", "gpu_time")
    table = FittingTable(
        {name: catalog.ui(f"stats_column_{name}") for name in names},
        catalog,
        leaving=("tokens", "gpu_time", "batch", "time"),
        words=("phase",),
    )
    for kind, phase in run.phases.items():
        table.add_row(
            Text(escape(kind), style=kind),
            Text(count(phase.num_steps)),
            Text(f"{phase.num_seqs / phase.num_steps:.1f}"),
            Text(count(phase.num_tokens)),
            Text(duration(phase.wall_ns) if phase.wall_ns else "-"),
            Text(duration(phase.wall_ns / phase.num_steps) if phase.wall_ns else "-"),
            _time(None if phase.gpu_ns is None else phase.gpu_ns / phase.num_steps),
        )
    return table


def _latency_table(run: RunMetrics, catalog: Catalog) -> FittingTable:
    columns = ("mean", "p50", "p90", "p99", "max")
    first, last = (catalog.ui(f"stats_column_{name}") for name in ("latency", "count"))
    table = FittingTable(
        {"latency": first, **dict(zip(columns, columns, strict=True)), "count": last},
        catalog,
        leaving=("count", "p90", "max", "mean", "p99"),
        words=("latency",),
    )
    for name in _LATENCIES:
        spread: Percentiles | None = getattr(run, name)
        if spread is None or not spread.max:
            continue
        table.add_row(
            Text(catalog.ui(f"stats_{name}")),
            *(_time(getattr(spread, column)) for column in columns),
            Text(count(spread.count), style="quiet"),
        )
    return table


def _request_table(requests: Iterable[RequestMetrics], catalog: Catalog) -> FittingTable:
    table = FittingTable(
        {name: catalog.ui(f"stats_column_{name}") for name in _REQUEST_COLUMNS},
        catalog,
        leaving=("prefill", "decode", "cached", "gap", "prompt", "queue", "preempted", "output"),
        gap=0,
    )
    for request in requests:
        gaps = request.inter_token_latencies_ns
        hits, losses = request.num_cached_tokens, request.num_preemptions
        table.add_row(
            Text(str(request.seq_id)),
            Text(str(request.num_prompt_tokens)),
            Text(str(hits), style="" if hits else "quiet"),
            Text(str(request.num_generation_tokens)),
            _time(request.request_queue_time_ns),
            _time(request.request_prefill_time_ns),
            _time(request.time_to_first_token_ns),
            _time(request.time_per_output_token_ns),
            _time(max(gaps, default=None)),
            _time(request.request_decode_time_ns),
            _time(request.e2e_request_latency_ns),
            Text(str(losses), style="preempted" if losses else "quiet"),
        )
    return table


def _time(nanoseconds: float | None) -> Text:
    if nanoseconds is None:
        return Text(_NOTHING, style="quiet")
    return Text(duration(nanoseconds).replace(" ", ""))


def _percent(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.1%}"


def _rate(per_second: float | None) -> str:
    if per_second is None:
        return _NOTHING
    return f"{per_second:.1f}" if per_second < 1000 else count(round(per_second))  # noqa: PLR2004 - four digits
