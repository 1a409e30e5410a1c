"""nvtrace export: a trace in the formats of other tools.

The formats are in `nvtrace.export`.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

from nvtrace_cli.failures import OUTPUT_FAILED, CommandError, UsageError, tidy_ends
from nvtrace_cli.options import LangOption, say, warn, words
from nvtrace_cli.outputs import check_out, is_input, is_stream, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nvtrace.envelope import Record


class Format(StrEnum):
    """The format to export to."""

    PERFETTO = "perfetto"
    OTLP = "otlp"
    PROMETHEUS = "prometheus"
    PARQUET = "parquet"
    CSV = "csv"


_FOLDER_MODULES = {Format.PARQUET: "parquet_tables", Format.CSV: "csv_tables"}


class _OutputError(CommandError):
    """The output file cannot be written, or the receiver does not take what is sent."""

    exit_code = OUTPUT_FAILED


def export(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The trace; .gz and .zst are read too, - is stdin."),
    ],
    *,
    to: Annotated[
        Format, typer.Option("--to", help="A timeline, spans, totals, or tables (a folder).")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="The output file or folder; by default stdout, if it is not a folder.",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --to otlp: send the spans to this receiver, such as http://localhost:4318.",
        ),
    ] = None,
    lang: LangOption = None,
) -> None:
    """Convert a trace to another tool's format: Perfetto, OpenTelemetry, Prometheus, Parquet, CSV.

    Data goes to stdout, PATH or URL, messages to stderr. Exit codes: 0 exported, 2 wrong usage, 3
    not a readable trace, 4 a trace newer than this nvtrace, 74 PATH cannot be written, or URL does
    not take the spans.
    """
    if endpoint is not None:
        if to is not Format.OTLP:
            raise UsageError(f"--endpoint is for --to otlp, not for --to {to}")
        if out is not None:
            raise UsageError("--out writes a file and --endpoint sends: give one of them")
    if out is not None and is_stream(out, 1):
        out = None
    module = _FOLDER_MODULES.get(to)
    try:
        with tidy_ends():
            if endpoint is not None:
                number, unit = _send(file, endpoint), "export_spans"
            elif module is None:
                number, unit = _export_lines(file, to.value, out), "export_lines"
            else:
                number, unit = _export_folder(file, module, to, out), "export_rows"
    except OverflowError as error:  # a number of hundreds of digits
        raise UsageError(
            f"{file} holds a number that is too large for --to {to} ({error}): "
            "`nvtrace validate` and `nvtrace check` say what is wrong with the trace"
        ) from error
    if out is not None or endpoint is not None:
        catalog = words(lang)
        done = "export_done" if endpoint is None else "export_sent"
        amount = catalog.ui(unit, number=f"{number:,}")
        say(catalog.ui(done, out=endpoint or out, amount=amount))


def _send(file: str, endpoint: str) -> int:
    """Send the spans to a receiver. Returns how many there are."""
    from nvtrace.caveats import saying_whose  # noqa: PLC0415 - nor msgspec
    from nvtrace.export import ExportError  # noqa: PLC0415 - --help needs no formats
    from nvtrace.export.otlp_http import SendError, send  # noqa: PLC0415 - the same
    from nvtrace.reader import read_trace  # noqa: PLC0415 - nor msgspec

    try:
        return send(saying_whose(read_trace(file, warn=warn), file, warn), endpoint)
    except ExportError as error:
        raise UsageError(f"--endpoint: {error}") from error
    except SendError as error:
        raise _OutputError(str(error)) from error


def _export_lines(file: str, module: str, out: Path | None) -> int:
    """Write a format of lines. Returns how many there are."""
    from nvtrace.caveats import saying_whose  # noqa: PLC0415 - nor msgspec
    from nvtrace.files import atomic_write  # noqa: PLC0415 - --help needs no files
    from nvtrace.reader import read_trace  # noqa: PLC0415 - the same

    to_lines: Callable[[Iterable[Record]], Iterator[str]]
    to_lines = import_module(f"nvtrace.export.{module}").lines
    lines = to_lines(saying_whose(read_trace(file, warn=warn), file, warn))
    num_lines = 0
    if out is None:
        for line in lines:
            sys.stdout.write(line + "\n")
        return num_lines
    _refuse(file, out)
    with writing(out, _OutputError), atomic_write(out) as stream:
        for line in lines:
            stream.write(f"{line}\n".encode())
            num_lines += 1
    return num_lines


def _export_folder(file: str, module: str, to: Format, out: Path | None) -> int:
    """Write a format of tables. Returns how many rows there are."""
    from nvtrace.export import ExportError  # noqa: PLC0415 - --help needs no formats
    from nvtrace.reader import read_ranks  # noqa: PLC0415 - nor msgspec

    if out is None:
        raise UsageError(f"--to {to} writes several files: give a folder with --out")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is not a folder, and --to {to} needs one")
    write: Callable[[Iterable[tuple[int, Record]], Path], int]
    write = import_module(f"nvtrace.export.{module}").write
    try:
        with writing(out, _OutputError):
            return write(read_ranks(file, warn=warn), out)
    except ExportError as error:
        raise UsageError(str(error)) from error


def _refuse(file: str, out: Path) -> None:
    """Refuse to overwrite the trace itself, or what is no file."""
    check_out(out)
    if is_input(out, file):
        raise UsageError(f"--out {out} is the trace itself: give another file")
