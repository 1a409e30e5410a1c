"""The command `nvtrace`: mounts the commands, and turns errors into messages and exit codes.

The exit codes are listed in `failures.py`. Every command module imports what it needs inside its
function, so that `nvtrace --help` loads no rich, no msgspec and no torch.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Annotated, NoReturn

from nvtrace_cli.failures import (
    INTERRUPTED,
    NEWER_TRACE,
    OUTPUT_FAILED,
    OWN_FAULT,
    UNREADABLE_TRACE,
    USAGE,
    CommandError,
    interrupts_end_it,
    silence_stdout,
)

with interrupts_end_it():  # loading takes a moment
    import typer

    from nanovllm import __version__
    from nvtrace_cli.at import at
    from nvtrace_cli.bench import bench
    from nvtrace_cli.check import check
    from nvtrace_cli.diff import diff
    from nvtrace_cli.doctor import doctor
    from nvtrace_cli.events import events
    from nvtrace_cli.explain import explain
    from nvtrace_cli.export import export
    from nvtrace_cli.options import say
    from nvtrace_cli.replay import replay
    from nvtrace_cli.run import run
    from nvtrace_cli.schema import schema
    from nvtrace_cli.stats import stats
    from nvtrace_cli.stderr import fill_missing_streams
    from nvtrace_cli.tail import tail
    from nvtrace_cli.validate import validate
    from nvtrace_cli.whatif import whatif

if TYPE_CHECKING:
    from collections.abc import Callable

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}

app = typer.Typer(
    name="nvtrace",
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(replay)
app.command()(tail)
app.command()(check)
app.command()(stats)
app.command()(at)
app.command()(explain)
app.command()(diff)
app.command()(whatif)
app.command()(events)
app.command()(export)
app.command()(validate)
app.command()(schema)
app.command()(bench)
app.command()(doctor)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        sys.stdout.write(f"nvtrace {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def nvtrace(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Trace an LLM engine: record a run, replay it, explain it, look up its events."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    with interrupts_end_it():
        fill_missing_streams()
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:  # escape what the terminal cannot encode
                reconfigure(errors="backslashreplace")
    code = run_command(arguments)
    if code == INTERRUPTED:
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> NoReturn:
    """End at once, with this exit code.

    Python itself would end by the signal if it arrived while code was run from a string, as
    `dataclass` does. (See `unhandled_keyboard_interrupt` in CPython.)
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(code)


@cache
def _command() -> Callable[..., object]:
    """The command line as typer's command, built once."""
    return typer.main.get_command(app)


def run_command(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code; every error is one line on stderr."""
    try:
        code = _command()(arguments, prog_name="nvtrace", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):
        # typer and rich turn a closed pipe into SystemExit; no command raises it itself.
        silence_stdout()
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("NVTRACE_DEBUG"):
            raise
        if _is_of_stdout(error):
            silence_stdout()
        say(_sentence(error))
        return _exit_code(error)
    return code if isinstance(code, int) else 0


def _sentence(error: Exception) -> str:
    """The message for an error."""
    if hasattr(error, "format_message"):  # typer's own: a wrong option
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "nvtrace"
        return f"{error.format_message().rstrip('.')} (see {command} --help)"
    if _is_of_stdout(error):
        return f"stdout cannot be written, so the output is incomplete: {error}"
    advice = _advice(error)
    if advice is not None:
        return advice
    if isinstance(error, OverflowError):
        return (
            f"a number in the trace is too large ({error}): `nvtrace validate` says in which line"
        )
    if _exit_code(error) == OWN_FAULT:
        kind = type(error).__name__
        return f"{kind}: {error} - this is a bug in nvtrace; NVTRACE_DEBUG=1 shows where"
    return str(error)


def _advice(error: Exception) -> str | None:
    """What to install, if that is what is missing."""
    from nvtrace.environment import install_advice  # noqa: PLC0415 - for errors only

    return install_advice(error.name) if isinstance(error, ModuleNotFoundError) else None


def _exit_code(error: Exception) -> int:
    from nvtrace.envelope import NewerTraceError  # noqa: PLC0415 - for errors only
    from nvtrace.reader import UnreadableTraceError  # noqa: PLC0415 - the same
    from nvtrace.replay import InconsistentTraceError  # noqa: PLC0415 - the same

    if _advice(error) is not None:
        return USAGE
    if isinstance(error, NewerTraceError):
        return NEWER_TRACE
    if isinstance(error, UnreadableTraceError | InconsistentTraceError | OverflowError):
        return UNREADABLE_TRACE
    if isinstance(error, CommandError) or hasattr(error, "format_message"):
        return int(getattr(error, "exit_code", OWN_FAULT))
    return OUTPUT_FAILED if _is_of_stdout(error) else OWN_FAULT


def _is_of_stdout(error: Exception) -> bool:
    """Is this an error of the disk that stdout goes to? Errors of other files name the file."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS and error.filename is None
