"""nvtrace whatif: a recorded workload under other settings, without its model.

`nvtrace.whatif` runs the workload again, `views/whatif.py` draws the comparison.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

from nvtrace_cli.failures import RunFailedError, UsageError
from nvtrace_cli.options import LangOption, complete_changes, say, warn, words
from nvtrace_cli.outputs import refuse_streams, writing

if TYPE_CHECKING:
    from nvtrace.pipeline import Sink
    from nvtrace.whatif import Recording, RerunResult, Settings


class ArrivalsBy(StrEnum):
    """When a request arrives in the re-run."""

    STEP = "step"
    TIME = "time"


def whatif(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The trace; .gz and .zst are read too, - is stdin."),
    ],
    *,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change this setting (may be repeated: all of them together). "
            "max_num_batched_tokens, max_num_seqs, max_model_len, kvcache_block_size, "
            "num_kvcache_blocks, enable_prefix_caching, policy.",
            autocompletion=complete_changes,
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="A separate case, such as 'policy=mixed,max_num_seqs=8' (may be repeated).",
            autocompletion=complete_changes,
        ),
    ] = None,
    arrivals: Annotated[
        ArrivalsBy,
        typer.Option(
            help="Requests arrive before the step of the same number, or at their recorded time."
        ),
    ] = ArrivalsBy.STEP,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Keep the trace of the simulated run.")
    ] = None,
    lang: LangOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per fitted phase, then per run.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Two tables with tabs: the runs, then the fits.")
    ] = False,
) -> None:
    """Rerun a recorded workload with other settings, with the engine's own scheduler.

    The recorded tokens replace the model. Step times are simulated: fitted to the trace, and left
    out where no similar step was recorded. Data goes to stdout, messages to stderr. Exit
    codes: 0 shown, 2 wrong usage, or a question that the trace cannot answer, 3 not a readable
    trace, 4 a trace newer than this nvtrace, 5 the simulated trace could not be written.
    """
    from nvtrace.caveats import saying_whose  # noqa: PLC0415 - --help needs no msgspec
    from nvtrace.reader import name_of, read_trace  # noqa: PLC0415 - the same
    from nvtrace.replay import InconsistentTraceError  # noqa: PLC0415 - the same
    from nvtrace.whatif import WhatIfError, parse_changes, read_recording  # noqa: PLC0415 - the same
    from nvtrace_cli.views import whatif as view  # noqa: PLC0415 - nor rich

    if json and plain:
        raise UsageError("--json and --plain cannot be used together: give one of them")
    if out is not None:
        refuse_streams(out, "a trace")
    try:
        cases = [parse_changes(text.split(",")) for text in case or []]
        if changes:
            cases.insert(0, parse_changes(changes))
        if out is not None and len(cases) > 1:
            raise UsageError(
                f"--out keeps the trace of one run, but there are {len(cases)} cases: give one"
            )
        records = saying_whose(read_trace(file, warn=warn), file, warn)
        recording = read_recording(records)
        all_settings = [recording.settings.changed(each) for each in cases]
        is_again = not cases and out is not None  # then the trace of the unchanged run is written
        for settings in [recording.settings] if is_again else all_settings:
            recording.check(settings)
        outcomes = _run_all(recording, all_settings, arrivals, out)
    except WhatIfError as error:
        raise UsageError(str(error)) from error
    except InconsistentTraceError as error:
        raise InconsistentTraceError(f"{name_of(file)}: {error}") from error
    comparison = view.Comparison(
        recording,
        outcomes,
        [", ".join(f"{name}={value}" for name, value in each.items()) for each in cases],
        is_by_step=arrivals is ArrivalsBy.STEP,
    )
    if json:
        view.print_json(comparison)
    elif plain:
        view.print_plain(comparison)
    else:
        view.show(comparison, words(lang))


def _run_all(
    recording: Recording, cases: list[Settings], arrivals: ArrivalsBy, out: Path | None
) -> list[RerunResult | None]:
    """The unchanged run, then each case; the trace of the last one is written to `out`.

    None stands for the unchanged run if the recorded policy is unknown here.
    """
    from nvtrace.whatif import rerun  # noqa: PLC0415 - --help needs no engine

    times = recording.step_times()
    outcomes: list[RerunResult | None] = []
    runs = [recording.settings, *cases]
    for index, settings in enumerate(runs):
        is_kept = out is not None and index == len(runs) - 1
        if not index and not is_kept and not settings.is_known:
            outcomes.append(None)
            continue
        sink = _open(out) if is_kept and out is not None else None
        try:
            outcome = rerun(recording, settings, times, arrivals=arrivals.value, sink=sink)
        except BaseException:
            if sink is not None:
                sink.discard()
            raise
        outcomes.append(outcome)
        if sink is not None:
            _say_how_it_went(sink, outcome, str(sink.place or out))
    return outcomes


def _open(out: Path) -> Sink:
    from nvtrace.pipeline import open_sink  # noqa: PLC0415 - --help needs no structlog

    with writing(out, UsageError):
        sink, kept = open_sink(out, report=say)
    if kept is not None:
        say(f"{out} already existed: it is now {kept}")
    return sink


def _say_how_it_went(sink: Sink, outcome: RerunResult, name: str) -> None:
    if sink.is_removed:
        raise RunFailedError(f"{name} was removed while it was written: there is no trace")
    if sink.error is not None:
        raise RunFailedError(f"{name} is incomplete ({sink.error})")
    if outcome.num_untimed:
        say(
            f"warning: {name}: {outcome.num_untimed} steps have no simulated time: "
            "do not read times from it"
        )
    say(f"simulated trace: {name}")
