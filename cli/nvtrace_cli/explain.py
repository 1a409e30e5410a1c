"""nvtrace explain: what happened to a request, or in a step, and why.

`nvtrace.explain` finds the reasons, `views/explain.py` draws them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nvtrace.distribution import HIGH_FACTOR, HIGH_QUARTILES
from nvtrace_cli.failures import UsageError
from nvtrace_cli.options import LangOption, warn, words

if TYPE_CHECKING:
    from nvtrace.explain import RequestStory, StepStory


def explain(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The trace; .gz and .zst are read too, - is stdin."),
    ],
    *,
    seq: Annotated[
        int | None, typer.Option(metavar="ID", help="Explain this request, from arrival to end.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Explain this step; with --seq, what the request did in it."
        ),
    ] = None,
    proof: Annotated[
        bool, typer.Option("--proof", help="Show the events behind each sentence (event_id).")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show all lines of a long explanation.")
    ] = False,
    lang: LangOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object: the chain as facts.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="One sentence a line, with tabs and its events.")
    ] = False,
) -> None:
    """Explain a request or a step: a chain of reasons, each with the events that prove it.

    A request: why it waited in each step, what it shared, when and for whom it was preempted, why
    it ended, where its time went. A step: why its batch had that size, how it ran, and whether it
    was slow: more than {factor} times the median of the other steps of its phase and graph size
    (or, without a graph, number of tokens up to the next power of two), and farther above it than
    {quartiles} times the distance from there to their upper quartile.

    Data goes to stdout, messages to stderr. Exit codes: 0 explained, 2 wrong usage (no such request
    or step), 3 not a readable trace, 4 a trace newer than this nvtrace.
    """
    if seq is None and step is None:
        raise UsageError("nothing to explain: give --seq ID (a request), --step N, or both")
    if json and plain:
        raise UsageError("--json and --plain cannot be used together: give one of them")
    from nvtrace.explain import NotInTraceError, RequestStory  # noqa: PLC0415 - --help needs none
    from nvtrace.reader import name_of  # noqa: PLC0415 - the same
    from nvtrace_cli.views import explain as view  # noqa: PLC0415 - nor rich

    try:
        story = _story(file, seq, step)
    except NotInTraceError as error:
        raise UsageError(f"{name_of(file)}: {error}") from error
    if json:
        view.print_json(story)
    elif plain:
        view.print_plain(story, words(lang))
    elif isinstance(story, RequestStory):
        view.show_request(story, step, words(lang), has_proof=proof, is_all=show_all)
    else:
        view.show_step(story, words(lang), has_proof=proof)


explain.__doc__ = (explain.__doc__ or "").format(factor=HIGH_FACTOR, quartiles=HIGH_QUARTILES)


def _story(file: str, seq: int | None, step: int | None) -> RequestStory | StepStory:
    from nvtrace.caveats import saying_whose  # noqa: PLC0415 - the same
    from nvtrace.explain import explain_request, explain_step  # noqa: PLC0415 - --help needs none
    from nvtrace.reader import name_of, read_trace  # noqa: PLC0415 - the same
    from nvtrace.replay import InconsistentTraceError  # noqa: PLC0415 - the same

    records = saying_whose(read_trace(file, warn=warn), file, warn)
    try:
        if seq is None and step is not None:
            return explain_step(records, step)
        return explain_request(records, seq or 0, step)
    except InconsistentTraceError as error:
        raise InconsistentTraceError(f"{name_of(file)}: {error}") from error
