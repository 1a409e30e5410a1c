"""Reading: measure how fast a trace becomes records and DataFrames, beside pandas' own reader.

    python -m nvtrace.analysis.reading trace.jsonl

Each round times each of them, so that other load slows all of them. Compared are:

    read_blocks         typed records, none kept
    load, .events       all fields of all events in memory, by column, and a frame of all events
    and every table     the same, and a frame of each kind of event with all its fields
    pandas.read_json    one wide frame with all fields, most of them empty in most rows
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import pandas as pd

from nvtrace.analysis.trace import load
from nvtrace.events import EVENT_TYPES
from nvtrace.reader import read_blocks

if TYPE_CHECKING:
    from collections.abc import Callable


def _read(path: Path) -> None:
    for block in read_blocks(path):
        del block


def _events(path: Path) -> object:
    trace = load(path, rank=0)
    return trace, trace.events


def _tables(path: Path) -> object:
    trace = load(path, rank=0)
    return trace, trace.events, [*map(trace.table, EVENT_TYPES)]


def _read_json(path: Path) -> object:
    return pd.read_json(path, lines=True)


CONTENDERS: dict[str, Callable[[Path], object]] = {
    "read_blocks": _read,
    "load, .events": _events,
    "  and every table": _tables,
    "pandas.read_json": _read_json,
}


def main(arguments: list[str]) -> int:
    """Time the contenders on a trace, and print what they took. Returns the exit code."""
    parser = argparse.ArgumentParser("python -m nvtrace.analysis.reading", description=__doc__)
    parser.add_argument("file", type=Path, help="a trace, best of half a million events")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if not options.file.is_file():
        parser.error(f"{options.file}: no such file")
    num_events = len(load(options.file, rank=0).events)  # and all modules are loaded
    seconds = _times(options.file, options.rounds)
    size = options.file.stat().st_size / 1e6
    sys.stdout.write(f"{options.file}: {num_events:,} events, {size:,.1f} MB; ")
    sys.stdout.write(f"medians of {options.rounds} rounds\n")
    slowest = seconds["pandas.read_json"]
    for name, its_seconds in seconds.items():
        ratios = [slow / fast for slow, fast in zip(slowest, its_seconds, strict=True)]
        sys.stdout.write(
            f"{name:<18} {median(its_seconds):8.3f} s {num_events / median(its_seconds):12,.0f} "
            f"events/s {median(ratios):7.1f} x\n"
        )
    return 0


def _times(path: Path, num_rounds: int) -> dict[str, list[float]]:
    """The seconds that each contender took in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(num_rounds):
        for name, contender in CONTENDERS.items():
            gc.collect()
            start = perf_counter()
            result = contender(path)
            seconds[name].append(perf_counter() - start)
            del result
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
