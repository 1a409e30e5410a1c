"""nvtrace stats: latencies, throughput, and how well a run used its machine.

The metrics are in `nvtrace.metrics`; `views/stats.py` draws them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nvtrace_cli.failures import UsageError
from nvtrace_cli.options import LangOption, warn, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvtrace.metrics import RequestMetrics, RunMetrics


def stats(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The trace; .gz and .zst are read too, - is stdin."),
    ],
    *,
    limit: Annotated[
        int, typer.Option(min=0, metavar="N", help="Most rows in the table of requests.")
    ] = 20,
    lang: LangOption = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object per ended request; the run's is the last."),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Two tables with tabs: all requests, then the run.")
    ] = False,
) -> None:
    """Measure a recorded run: latencies, throughput, batches, KV blocks.

    TTFT, ITL, TPOT, queue, prefill, decode and end-to-end times are vLLM's and OpenTelemetry's;
    docs/en/metrics.md defines each. Data goes to stdout, messages to stderr. Exit codes: 0 shown, 2
    wrong usage, 3 not a readable trace, 4 a trace newer than this nvtrace.
    """
    if json and plain:
        raise UsageError("--json and --plain cannot be used together: give one of them")
    from nvtrace_cli.views import stats as view  # noqa: PLC0415 - --help needs no rich
    from nvtrace_cli.views.reading import reading_bar  # noqa: PLC0415 - the same

    with reading_bar(file, prints_meanwhile=json or plain) as watch:
        measured = _measure(file, watch)
        if json:
            view.print_json(measured)
        elif plain:
            view.print_plain(measured)
        else:
            first, num_requests, run = _first_requests(measured, limit)
    if not json and not plain:
        view.show(first, num_requests, run, words(lang))


def _measure(file: str, watch: Callable[[int], None]) -> Iterator[RequestMetrics | RunMetrics]:
    """The metrics of each request as it ends, then those of the run."""
    from nvtrace.caveats import saying_untimed, saying_whose  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace.measure import Measure  # noqa: PLC0415 - the same
    from nvtrace.reader import name_of, read_trace  # noqa: PLC0415 - the same
    from nvtrace.replay import InconsistentTraceError  # noqa: PLC0415 - the same

    measure = Measure()
    try:
        records = saying_whose(read_trace(file, warn=warn, watch=watch), file, warn)
        for record in saying_untimed(records, file, warn):
            yield from measure.apply(record)
    except InconsistentTraceError as error:
        raise InconsistentTraceError(f"{name_of(file)}: {error}") from error
    yield measure.run()


def _first_requests(
    measured: Iterator[RequestMetrics | RunMetrics], limit: int
) -> tuple[list[RequestMetrics], int, RunMetrics]:
    """The first requests to end, the number of all, and the run."""
    from nvtrace.metrics import RunMetrics  # noqa: PLC0415 - --help needs no metrics

    first: list[RequestMetrics] = []
    for num_before, item in enumerate(measured):
        if isinstance(item, RunMetrics):
            return first, num_before, item
        if num_before < limit:
            first.append(item)
    raise AssertionError("the run's metrics come last")
