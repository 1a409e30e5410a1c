"""How a command ends: the exit codes, and the errors that carry one.

    0    done                        3    unreadable trace
    1    found something             4    trace newer than this tool
    2    wrong usage                 5    the run failed
    130  interrupted                 70   a fault of nvtrace itself

Knows numbers and sentences. Does not know which command meets which failure.
"""

from __future__ import annotations

USAGE = 2
UNREADABLE_TRACE = 3
NEWER_TRACE = 4
RUN_FAILED = 5
OWN_FAULT = 70
INTERRUPTED = 130


class CommandError(Exception):
    """A failure that has been put into one clear sentence.

    Attributes:
        exit_code: what the process ends with.
    """

    exit_code = OWN_FAULT


class UsageError(CommandError):
    """The command line asks for something that cannot be had."""

    exit_code = USAGE


class RunFailedError(CommandError):
    """The engine did not start, or did not come to its end."""

    exit_code = RUN_FAILED
