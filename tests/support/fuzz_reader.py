"""A fuzz of everything that reads a trace: broken files in, exit codes of the design out.

    python -m support.fuzz_reader --count 2000 --seed 0     in tests/
    python -m support.fuzz_reader --seed 0 --only 471       one of them again; --keep FILE keeps it

A file is a good trace with one to three things wrong with it: bytes cut or flipped, lines swapped
or repeated, fields of another type, numbers without measure, nesting without end, control
characters, other encodings; packed or not, and the packed bytes damaged as well. Every command that
reads a trace must end with a code of the design and a sentence, soon, and in little memory; what it
prints moves no cursor.

Knows damages, commands and what must hold. Does not know what a command does.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import zstandard

from nvtrace_cli import tail
from nvtrace_cli.main import run_command
from support.cli_traces import HOSTILE_TEXT, article_run, chunked_run, crowded_run, write_trace
from support.recording import BUSY, BUSY_MIXED, Interruption, Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Damage = Callable[[bytes, Random], bytes]

_MOST_SECONDS = 20  # for one command on a trace of at most a few hundred kilobytes
_MOST_MIB = 600  # that the process may grow by
_COMMANDS_A_CASE = 6
_CODES = {0, 1, 2, 3, 4}
_MAY_FIND = {"check", "diff", "at", "validate"}  # these end with 1 if they find something
_STOPPED = 130
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029]")
_ASCII_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f]")  # of data, where no terminal is

# -- commands --------------------------------------------------------------------------------------

# TRACE is the broken file, GOOD another that is whole, OUT a path that nothing lies at.
COMMANDS = (
    "replay TRACE",
    "replay TRACE --lang zh",
    "replay TRACE --view log",
    "replay TRACE --view log --json",
    "replay TRACE --json",
    "replay TRACE --plain --unfold --steps 3..",
    "replay TRACE --seq 1",
    "tail TRACE",
    "check TRACE",
    "check TRACE --json",
    "check TRACE --plain --all",
    "stats TRACE",
    "stats TRACE --json",
    "stats TRACE --plain",
    "at TRACE",
    "at TRACE 3",
    "at TRACE 3 --moment schedule --plain",
    "at TRACE --json",
    "at TRACE --until event==PREEMPT",
    "at TRACE --until free_blocks<3 --backwards --lang zh",
    "explain TRACE --step 3",
    "explain TRACE --seq 1 --proof",
    "explain TRACE --seq 0 --json --all",
    "explain TRACE --seq 2 --lang zh",
    "diff TRACE GOOD",
    "diff GOOD TRACE --json",
    "whatif TRACE --set policy=mixed",
    "whatif TRACE --set num_kvcache_blocks=40 --arrivals time --json",
    "export TRACE --to perfetto",
    "export TRACE --to otlp",
    "export TRACE --to prometheus",
    "export TRACE --to csv --out OUT",
    "export TRACE --to parquet --out OUT",
    "validate TRACE",
    "validate TRACE --json",
    "validate TRACE --plain --all",
)

# -- damages ---------------------------------------------------------------------------------------

_NUMBERS = (-1, 0, 1, 2**31, 2**40, 2**53, 2**63, -(2**63), 2**64, 10**30, 10**400, 1e308, 0.5)
_STRINGS = ("", HOSTILE_TEXT, "\x1b]0;title\x07\x9b31m", "\u202e\u2028\x00", "x" * 5000, "PREEMPT")
_OTHERS: tuple[Any, ...] = (None, True, [], {}, [[]], [None], {"a": {"b": []}}, [1, "x", None])


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _cut_out(data: bytes, random: Random) -> bytes:
    start = random.randrange(len(data) + 1)
    return data[:start] + data[start + random.randrange(1, 500) :]


def _flip(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 20)) if data else 0):
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _insert(data: bytes, random: Random) -> bytes:
    place = random.randrange(len(data) + 1)
    chunk = random.choice(
        (b"\x00", b"\r\n", b"\n\n\n", b"\xff\xfe", b"\x1b[2J", random.randbytes(40))
    )
    return data[:place] + chunk + data[place:]


def _swap(data: bytes, random: Random) -> bytes:
    lines = _lines(data)
    for _ in range(random.choice((1, 3))):
        one, other = random.randrange(len(lines)), random.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _repeat(data: bytes, random: Random) -> bytes:
    lines = _lines(data)
    start = random.randrange(len(lines))
    chosen = lines[start : start + random.choice((1, 1, 30))]
    place = random.choice((start, random.randrange(len(lines))))
    return b"".join([*lines[:place], *chosen, *lines[place:]])


def _drop(data: bytes, random: Random) -> bytes:
    lines = _lines(data)
    start = random.randrange(len(lines))
    return b"".join(lines[:start] + lines[start + random.choice((1, 1, 5)) :])


def _value(random: Random, old: object) -> object:
    """Something else where `old` stood: often of its type, so that it passes for a record."""
    if isinstance(old, list) and old and random.random() < 0.6:
        changed = [*old]
        match random.randrange(4):
            case 0:
                changed[random.randrange(len(old))] = _value(random, random.choice(old))
            case 1:
                changed.pop(random.randrange(len(old)))
            case 2:
                changed.append(random.choice(old))
            case 3:
                random.shuffle(changed)
        return changed
    if isinstance(old, bool):
        return not old
    if isinstance(old, int) and random.random() < 0.7:
        return random.choice((old + 1, old - 1, -old, old * 1000, *_NUMBERS[:8]))
    if isinstance(old, str) and random.random() < 0.7:
        return random.choice(_STRINGS)
    return random.choice((*_NUMBERS, *_STRINGS, *_OTHERS))


def _change_field(data: bytes, random: Random) -> bytes:
    """Fields of another type, or of another value."""
    lines = _lines(data)
    for _ in range(random.choice((1, 1, 4))):
        place = 0 if random.random() < 0.15 else random.randrange(len(lines))
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            record = json.loads(lines[place])
            name = random.choice(sorted(record))
            holder = record
            if isinstance(record[name], dict) and record[name] and random.random() < 0.7:
                holder, name = record[name], random.choice(sorted(record[name]))
            if random.random() < 0.15:
                del holder[name]
            else:
                holder[name] = _value(random, holder[name])
            lines[place] = json.dumps(record, ensure_ascii=random.random() < 0.5).encode() + b"\n"
    return b"".join(lines)


def change_start(data: bytes, random: Random) -> bytes:
    """A value of the header, or of the engine's start, that readers count with."""
    lines = _lines(data)
    place = random.choice((0, 0, *range(min(len(lines), 8))))
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        record = json.loads(lines[place])
        holder = record
        parts = [name for name in record if isinstance(record[name], dict) and record[name]]
        if parts and random.random() < 0.8:
            holder = record[random.choice(parts)]
        holder[random.choice(sorted(holder))] = random.choice((*_NUMBERS, *_STRINGS, *_OTHERS))
        lines[place] = json.dumps(record).encode() + b"\n"
    return b"".join(lines)


def _nest(data: bytes, random: Random) -> bytes:
    """Deep nesting: as a line of its own, as an unknown event, or in a field."""
    depth = random.choice((10, 500, 3000, 200_000))
    deep = b"[" * depth + b"]" * depth
    if random.random() < 0.5:
        deep = b'{"a":' * depth + b"1" + b"}" * depth
    line = random.choice((deep, b'{"event":"NEW","event_id":3,"step":1,"x":' + deep + b"}"))
    lines = _lines(data)
    lines.insert(random.randrange(len(lines) + 1), line + b"\n")
    return b"".join(lines)


def _huge_number(data: bytes, random: Random) -> bytes:
    numbers = [*re.finditer(rb"(?<=[:\[,])-?\d+", data)]
    if not numbers:
        return data
    found = random.choice(numbers)
    digits = random.choice(
        (b"9" * 20, b"9" * 5000, b"1e999", b"-0", b"1e-999", b"0x10", b"NaN", b"01")
    )
    return data[: found.start()] + digits + data[found.end() :]


def _unknown(data: bytes, random: Random) -> bytes:
    """An event of a newer version; what it is called and holds is data as well."""
    lines = _lines(data)
    event: dict[str, Any] = {"event": random.choice(("SPECULATE", HOSTILE_TEXT, "\x1b[2J", ""))}
    event |= {"event_id": random.choice((5, -1, "x", None, 10**30)), HOSTILE_TEXT: HOSTILE_TEXT}
    event |= {"step": random.choice((1, None, "three", 2.5)), "seq_id": [1]}
    lines.insert(random.randrange(1, len(lines) + 1), json.dumps(event).encode() + b"\n")
    return b"".join(lines)


def _recode(data: bytes, random: Random) -> bytes:
    """Another encoding, or its mark."""
    with contextlib.suppress(UnicodeError):
        match random.randrange(5):
            case 0:
                return b"\xef\xbb\xbf" + data
            case 1:
                return data.decode().encode("utf-16")
            case 2:
                return data.decode().encode("utf-32-le")
            case 3:
                return data.replace(b"\n", b"\r\n")
            case 4:
                return data.replace(b"\n", random.choice((b"\r", b" ", b"\n\n", "\u2028".encode())))
    return data


DAMAGES: tuple[Damage, ...] = (
    *(_cut, _cut_out, _flip, _insert, _swap, _repeat, _drop),
    *(
        _change_field,
        _change_field,
        _change_field,
        change_start,
        _nest,
        _huge_number,
        _unknown,
        _recode,
    ),
)

# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A broken file.

    Attributes:
        data: its bytes.
        ending: of its name.
        story: what was done to it.
    """

    data: bytes
    ending: str
    story: str


def good_traces(folder: Path) -> list[bytes]:
    """Whole traces, each with something that the others have not."""
    runs = {"crowded": crowded_run(), "chunked": chunked_run(), "article": article_run()}
    traces = [write_trace(folder / f"{name}.jsonl", run).read_bytes() for name, run in runs.items()]
    traces[2] = b"".join(_lines(traces[2])[:60])  # the rest is more of the same
    simulated = folder / "simulated.jsonl"
    crowded = folder / "crowded.jsonl"
    code, _, err = run_captured(
        ["whatif", str(crowded), "--set", "policy=mixed", "--out", str(simulated)]
    )
    if code:
        raise AssertionError(err)
    broken_off = Recording(BUSY, Interruption(5, "ran"))
    traces += [simulated.read_bytes(), broken_off.data]
    return [*traces, Recording(BUSY).data, Recording(BUSY_MIXED).data]


def draw_case(traces: list[bytes], seed: int, index: int) -> Case:
    """The case of this number."""
    random = Random(f"{seed}/{index}")
    data = random.choice(traces)
    names = []
    for damage in random.choices(DAMAGES, k=random.choice((1, 1, 1, 2, 3))):
        data = damage(data, random) if data else data
        names.append(damage.__name__.strip("_"))
    ending = random.choice(("", "", "", "", ".gz", ".zst"))
    if ending:
        data = gzip.compress(data, 1) if ending == ".gz" else zstandard.compress(data)
        if random.random() < 0.5:
            damage = random.choice((_cut, _flip, _insert, _cut_out))
            data = damage(data, random)
            names.append(f"packed, {damage.__name__.strip('_')}")
        if random.random() < 0.1:
            data += random.choice((data, b"garbage", b"\x00" * 100))
            names.append("packed, more behind it")
    return Case(data, f".jsonl{ending}", ", ".join(names))


def draw_commands(seed: int, index: int) -> tuple[str, ...]:
    """Some commands for the case of this number."""
    return tuple(Random(f"{seed}/{index}/commands").sample(COMMANDS, _COMMANDS_A_CASE))


# -- what must hold --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that must not be."""

    command: str
    what: str

    def __str__(self) -> str:
        return f"nvtrace {self.command}: {self.what}"


class _TooSlowError(BaseException):
    """A command did not end."""


def examine(case: Case, good: Path, folder: Path, commands: tuple[str, ...]) -> list[Fault]:
    """Give a broken file to commands. Returns what must not be."""
    trace = folder / f"trace{case.ending}"
    trace.write_bytes(case.data)
    faults: list[Fault] = []
    for number, command in enumerate(commands):
        places = {"TRACE": str(trace), "GOOD": str(good), "OUT": str(folder / f"out{number}")}
        faults += _attempt(command, [places.get(word, word) for word in command.split()])
    return faults


def _attempt(command: str, arguments: list[str]) -> Iterator[Fault]:
    _forget_peak()
    before, began = _peak_mib(), time.monotonic()
    try:
        code, out, err = run_captured(arguments)
    except _TooSlowError:
        yield Fault(command, f"does not end within {_MOST_SECONDS} s")
        return
    except BaseException as error:  # noqa: BLE001 - whatever came out is the finding
        yield Fault(command, f"{type(error).__name__} came out: {error}")
        return
    name = arguments[0]
    allowed = _CODES - (set() if name in _MAY_FIND else {1}) | (
        {_STOPPED} if name == "tail" else set()
    )
    said = err.splitlines()
    is_text = "--json" not in arguments and "--to" not in arguments
    if code not in allowed:
        yield Fault(command, f"code {code}: {said[-1:]}")
    if code > 1 and code != _STOPPED and not said:
        yield Fault(command, f"code {code} without a word")
    strange = [line for line in said if not line.startswith("nvtrace: ")]
    if strange or any(len(line) > 5000 for line in said):
        yield Fault(command, f"stderr has {(strange or said)[0][:300]!r}")
    if moved := (_CONTROLS if is_text else _ASCII_CONTROLS).search(out + err):
        around = (out + err)[max(moved.start() - 40, 0) : moved.end() + 20]
        yield Fault(command, f"a control character comes out: {around!r}")
    if _peak_mib() - before > _MOST_MIB:
        yield Fault(command, f"takes {_peak_mib() - before:.0f} MiB")
    if time.monotonic() - began > _MOST_SECONDS:
        yield Fault(command, f"takes {time.monotonic() - began:.0f} s")


def run_captured(arguments: list[str]) -> tuple[int, str, str]:
    """Run a command in this process. Returns its code, stdout and stderr."""
    looks = Counter[str]()

    def pause(_seconds: float) -> None:  # of `tail`: nothing will ever come
        looks["num"] += 1
        if looks["num"] > 2:
            raise KeyboardInterrupt

    def too_slow(_number: int, _frame: object) -> None:
        raise _TooSlowError

    handler = signal.signal(signal.SIGALRM, too_slow)
    clock = vars(tail)["time"]
    vars(tail)["time"] = _Clock(pause)  # all that it needs of the module
    signal.alarm(_MOST_SECONDS)
    try:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace") as out:
            err = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run_command(arguments)
            signal.alarm(0)
            out.seek(0)
            return code, out.read(), err.getvalue()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        vars(tail)["time"] = clock


@dataclass(frozen=True, slots=True)
class _Clock:
    sleep: Callable[[float], None]


def _forget_peak() -> None:
    """Let the peak be that of what comes, on Linux: this process may have held more before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_mib() -> float:
    with contextlib.suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- many cases ------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Draw and examine cases; returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Give broken traces to every command.")
    parser.add_argument("--count", type=int, default=1000, help="cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--keep", type=Path, help="write the case's file there")
    options = parser.parse_args(arguments)
    os.environ.setdefault("COLUMNS", "80")
    numbers = range(options.count) if options.only is None else [options.only]
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        traces = good_traces(folder)
        good = folder / "crowded.jsonl"
        for number in numbers:
            case = draw_case(traces, options.seed, number)
            if options.keep is not None:
                options.keep.write_bytes(case.data)
            with tempfile.TemporaryDirectory() as own:
                few = COMMANDS if options.only is not None else draw_commands(options.seed, number)
                for fault in examine(case, good, Path(own), few):
                    kinds[fault.command] += 1
                    sys.stdout.write(f"{options.seed}/{number} ({case.story}): {fault}\n")
                    sys.stdout.flush()
    sys.stdout.write(f"{len(numbers)} broken traces, {_COMMANDS_A_CASE} commands each: ")
    sys.stdout.write(f"{kinds.total()} faults\n")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
