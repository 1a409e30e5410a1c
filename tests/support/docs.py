"""The docs as something to run: the commands in their pages, what each prints, and a rewrite of it.

    python -m support.docs --write            in tests/: put what comes out today into the pages
    python -m support.docs --write PAGE...    into these only

In a block marked `console` each line `$ command` is run, and the lines up to the next one are what
it prints on an English (or, in docs/zh, a Chinese) terminal of 80 columns. It is run in a folder of
its own that holds the traces of docs/traces by their names.

    ...                some lines are left out here
    # exit code 1      behind a command: how it ends, if not with 0
    (no output)        it must end with 0 or 1 ("found something"); what it prints is not shown
    make, pip, cd ...  belong to the reader's shell: not run (for `make` the target must exist)
    .venv/bin/pytest   is run in the project

A block (`py`, `toml`) whose first line says `# FILE, where` is a change of the project: its lines
are put there. Then the page is run in a copy of the project that has all of its changes, and there
`make reference` is run as far as the words and lists go.

    # FILE, a new file         the file must not be there
    # FILE, at the end         or `at the end of Scheduler.admit`, a class or function of it
    # FILE, below: LINE        or `above: LINE`, `instead of: LINE`: the one line that begins so

For `--write`, a command whose output is the one line `?` gets all of it, `? 1-4, 9` these lines.

Knows how to take a page apart and how to run what is in it. Does not know what the pages say.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from nvtrace import reference
from nvtrace_cli.main import run_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LANGUAGES = {"en": "en_US.UTF-8", "zh": "zh_CN.UTF-8"}
TRACE_FOLDERS = (DOCS / "traces", DOCS / "exercises")
SHELL_WORDS = {"cd", "git", "make", "pip", "source", "duckdb", "jupyter"}
FOUND_SOMETHING = 1
LEFT_OUT = "..."
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<kind>[\w-]*)")
_EXIT_CODE = re.compile(r"\s# exit code (\d+)")
_ASKED = re.compile(r"^\?(.*)$")
_WHERE = "a new file|at the end|below:|above:|instead of:"
_CHANGE = re.compile(rf"^# (?P<file>[\w/.-]+), (?P<where>{_WHERE})(?: of)? ?(?P<place>.*)$")


# -- pages -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `first` is the number of the line behind its fence, counted from 0."""

    kind: str
    first: int
    lines: list[str]


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a page and the output that stands below it.

    Attributes:
        first: the number of its output's first line in the page, counted from 0.
        num_lines: lines of the page that the output takes, blank ones at its end included.
    """

    line: str
    output: list[str]
    first: int
    num_lines: int

    @property
    def exit_code(self) -> int:
        """What the page says it ends with."""
        found = _EXIT_CODE.search(self.line)
        return int(found[1]) if found else 0

    def may_end_with(self, code: int) -> bool:
        """Is this exit code right? Where nothing is shown, "found something" is as good as 0."""
        is_silent = not self.output and not _EXIT_CODE.search(self.line)
        return code == self.exit_code or (is_silent and code == FOUND_SOMETHING)


def pages(language: str | None = None) -> list[Path]:
    """The pages of a language, or those of all, the READMEs and CONTRIBUTING."""
    if language is not None:
        return sorted((DOCS / language).rglob("*.md"))
    shown_first = [ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md")]
    return [*shown_first, *pages("en"), *pages("zh")]


def language_of(page: Path) -> str:
    """The language that a page's commands answer in."""
    return "zh" if page.is_relative_to(DOCS / "zh") else "en"


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, without their fences and their indentation."""
    blocks: list[Block] = []
    fence: re.Match[str] | None = None
    for number, line in enumerate(text.splitlines()):
        found = _FENCE.match(line)
        if fence is None:
            if found is not None:
                fence = found
                blocks.append(Block(found["kind"], number + 1, []))
        elif found is not None and found["ticks"] == fence["ticks"] and not found["kind"]:
            fence = None
        else:
            blocks[-1].lines.append(line.removeprefix(fence["indent"]))
    return blocks


def commands_of(text: str) -> list[Command]:
    """The commands of a page's console blocks, in order."""
    return [command for block in blocks_of(text) for command in commands_in(block)]


def commands_in(block: Block) -> list[Command]:
    """The commands of a block; none if it is no console block."""
    if block.kind != "console":
        return []
    starts = [index for index, line in enumerate(block.lines) if line.startswith("$ ")]
    commands = []
    for index, stop in zip(starts, [*starts[1:], len(block.lines)], strict=True):
        output = [line.rstrip() for line in block.lines[index + 1 : stop]]
        while output and not output[-1]:
            output.pop()
        line = block.lines[index].removeprefix("$ ")
        commands.append(Command(line, output, block.first + index + 1, stop - index - 1))
    return commands


# -- changes of the project ------------------------------------------------------------------------


def changes_of(text: str) -> list[Block]:
    """The blocks of a page that are to be put into the project's files."""
    return [block for block in blocks_of(text) if block.lines and _CHANGE.match(block.lines[0])]


def make_change(block: Block, root: Path) -> None:
    """Put a block's lines where its first line says, unless the file has them already.

    Raises:
        ValueError: there is no such place, or more than one.
    """
    change = _CHANGE.match(block.lines[0])
    assert change is not None
    file, where, place = root / change["file"], change["where"], change["place"]
    source = file.read_text("utf-8").splitlines() if file.exists() else []
    if "\n".join(block.lines[1:]) in "\n".join(source):
        return
    if (where == "a new file") == file.exists():
        raise ValueError(f"{block.lines[0]}: is there such a file?")
    start = stop = len(source)
    if where == "at the end" and place:
        start = stop = _end_of(ast.parse("\n".join(source)), place)
    elif place:
        found = [n for n, line in enumerate(source) if line.strip().startswith(place)]
        if len(found) != 1:
            raise ValueError(f"{block.lines[0]}: {len(found)} lines begin so")
        start = found[0] + (where == "below:")
        stop = found[0] + (where != "above:")
    source[start:stop] = block.lines[1:]
    file.write_text("\n".join(source) + "\n", encoding="utf-8")


def _end_of(tree: ast.AST, name: str) -> int:
    """The number of the last line of a class or function, its name being dotted."""
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == first:
            return _end_of(node, rest) if rest else node.end_lineno or 0
    raise ValueError(f"there is no {name}")


def outcomes_of(page: Path, folder: Path) -> Iterable[tuple[Command, Outcome]]:
    """Run a page in an empty folder; one that changes the project, in a copy of it."""
    text, language = page.read_text("utf-8"), language_of(page)
    if changes_of(text):
        return outcomes_in_a_copy(str(page.relative_to(DOCS / language)))[language]
    return Workplace(folder, language).run_page(text)


@cache
def outcomes_in_a_copy(page: str) -> dict[str, list[tuple[Command, Outcome]]]:
    """A page's commands, run in a process and a copy of the project of their own.

    Args:
        page: below docs/en.

    Returns:
        Language -> the commands and their outcomes. Both languages make the same changes.
    """
    texts = {language: (DOCS / language / page).read_text("utf-8") for language in LANGUAGES}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "notebooks", "test_*")
        )
        for block in changes_of(texts["en"]):
            make_change(block, copy)
        path = os.pathsep.join(str(copy / root) for root in (".", "trace", "cli", "tests"))
        done = subprocess.run(
            [sys.executable, "-m", "support.docs", "--run", page],
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=os.environ | {"PYTHONPATH": path},
            cwd=copy,
            check=True,
            timeout=120,
        )
    return {
        language: [
            (Command(**command), Outcome(**outcome)) for command, outcome in json.loads(line)
        ]
        for language, line in zip(LANGUAGES, done.stdout.splitlines(), strict=True)
    }


def print_outcomes(page: str) -> None:
    """What `outcomes_in_a_copy` reads: run a page here, in each language."""
    for language in LANGUAGES:
        with tempfile.TemporaryDirectory() as folder:
            place = Workplace(Path(folder), language, is_copy=True)
            found = place.run_page((DOCS / language / page).read_text("utf-8"))
            print(json.dumps([(asdict(command), asdict(outcome)) for command, outcome in found]))  # noqa: T201


# -- running ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended, and what a terminal would have shown of it."""

    code: int
    lines: list[str]


@dataclass(frozen=True, slots=True)
class Workplace:
    """A folder in which a page's commands are run, one after the other.

    Attributes:
        is_copy: the project is a copy, in which `make reference` may write.
    """

    folder: Path
    language: str
    is_copy: bool = False
    environment: dict[str, str] = field(init=False)
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})

    def __post_init__(self) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("NVTRACE", "LC_", "LANG"))}
        path = os.pathsep.join(str(ROOT / root) for root in (".", "trace", "cli"))
        fixed = {"COLUMNS": "80", "LC_ALL": LANGUAGES[self.language], "PYTHONPATH": path}
        object.__setattr__(self, "environment", {**kept, **fixed, "PYTHONUTF8": "1"})
        for trace in traces():
            (self.folder / trace.name).symlink_to(trace)

    def run_page(self, text: str) -> Iterator[tuple[Command, Outcome]]:
        """Run a page's commands and its `python` blocks, in their order."""
        for block in blocks_of(text):
            if block.kind == "python":
                code = compile("\n" * block.first + "\n".join(block.lines), "page", "exec")
                with chdir(self.folder), redirect_stdout(io.StringIO()):
                    exec(code, self.names)  # noqa: S102 - our own page
            for command in commands_in(block):
                outcome = self.run(command)
                if outcome is not None:
                    yield command, outcome

    def run(self, command: Command) -> Outcome | None:
        """Run a command; None if it is not run (see this module's docstring)."""
        stages = pipeline(command.line)
        name = stages[0][0]
        if self.is_copy and stages == [["make", "reference"]]:
            return _make_reference()
        if name in SHELL_WORDS:
            _check_shell_command(stages[0])
            return None
        code, text = self._nvtrace(stages[0]) if name == "nvtrace" else self._process(stages[0])
        for words in stages[1:]:
            code, text = self._process(words, text)
        return Outcome(code, [line.rstrip() for line in text.rstrip().splitlines()])

    def _nvtrace(self, words: list[str]) -> tuple[int, str]:
        """Run it in this process, which has loaded everything already."""
        screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            chdir(self.folder),
            redirect_stdout(screen),
            redirect_stderr(screen),
        ):
            code = run_command(words[1:])
        screen.flush()
        return code, screen.buffer.getvalue().decode()

    def _process(self, words: list[str], text: str = "") -> tuple[int, str]:
        folder = self.folder
        if words[0] == "python":
            words = [sys.executable, *words[1:]]
        elif words[0] == ".venv/bin/pytest":
            folder, words = ROOT, [sys.executable, "-m", "pytest", *words[1:]]
        done = subprocess.run(
            words,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env=self.environment,
            cwd=folder,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout


@cache
def _make_reference() -> Outcome:
    with chdir(ROOT), redirect_stdout(io.StringIO()) as screen:
        code = reference.main(["docs", "trace/nvtrace/catalog"])
    return Outcome(code, screen.getvalue().splitlines())


@cache
def traces() -> list[Path]:
    """The recorded traces that pages may name."""
    return sorted(path for folder in TRACE_FOLDERS for path in folder.glob("*.jsonl.zst"))


def pipeline(line: str) -> list[list[str]]:
    """A command line as words, a list for each stage. A comment is no part of it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|")
    lexer.whitespace_split = True
    stages: list[list[str]] = [[]]
    for word in lexer:
        if word == "|":
            stages.append([])
        else:
            stages[-1].append(word)
    return stages


def _check_shell_command(words: list[str]) -> None:
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        for word in words[1:]:
            assert "=" in word or word in targets, f"make has no target {word}"


# -- comparing and rewriting -----------------------------------------------------------------------


def is_as_shown(shown: list[str], found: list[str]) -> bool:
    """Is this output what the page shows, the lines left out being any?"""
    segments = segments_of(shown)
    position = 0
    for index, segment in enumerate(segments):
        is_first, is_last = index == 0, index == len(segments) - 1
        starts = range(position, len(found) - len(segment) + 1)
        if is_first:
            starts = starts[:1]
        if is_last and not is_first:
            starts = starts[-1:]
        for start in starts:
            if found[start : start + len(segment)] == segment:
                position = start + len(segment)
                break
        else:
            return False
    return position == len(found) or not segments[-1]


def segments_of(shown: list[str]) -> list[list[str]]:
    """What stands before, between and after the lines left out."""
    segments: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == LEFT_OUT:
            segments.append([])
        else:
            segments[-1].append(line)
    return segments


def rewritten(shown: list[str], found: list[str]) -> list[str]:
    """What the page should show of this output: the lines most like those it shows now."""
    if not shown or is_as_shown(shown, found):
        return shown
    asked = _ASKED.match(shown[0])
    if asked is not None:
        return _picked(asked[1], found)
    result: list[str] = []
    position = 0
    segments = segments_of(shown)
    if len(segments) == 1:
        return found
    for index, segment in enumerate(segments):
        if index:
            result.append(LEFT_OUT)
        size = len(segment)
        starts = range(position, max(position, len(found) - size) + 1)
        start = (
            position if index == 0 else max(starts, key=lambda at: _likeness(segment, found, at))
        )
        if index == len(segments) - 1 and segment:
            start = max(position, len(found) - size)
        result += found[start : start + size]
        position = start + size
    return result


def _picked(wanted: str, found: list[str]) -> list[str]:
    """Lines by their numbers: "1-4, 9"; all if nothing is asked."""
    if not wanted.strip():
        return found
    result: list[str] = []
    previous = 0
    for part in wanted.split(","):
        first, _, last = part.strip().partition("-")
        start, stop = int(first), min(int(last or first), len(found))
        if start > previous + 1:
            result.append(LEFT_OUT)
        result += found[start - 1 : stop]
        previous = stop
    return [*result, LEFT_OUT] if previous < len(found) else result


def _likeness(segment: list[str], found: list[str], at: int) -> float:
    window = "\n".join(found[at : at + len(segment)])
    return SequenceMatcher(None, "\n".join(segment), window, autojunk=False).quick_ratio()


def rewrite(page: Path) -> list[str]:
    """Put what comes out today into a page. Returns the commands whose output changed."""
    lines = page.read_text("utf-8").splitlines()
    changed = []
    with tempfile.TemporaryDirectory() as folder:
        edits = []
        for command, outcome in outcomes_of(page, Path(folder)):
            if not command.may_end_with(outcome.code):
                text = "\n".join(outcome.lines)
                raise SystemExit(f"{page}: $ {command.line} ends with {outcome.code}:\n{text}")
            new = rewritten(command.output, outcome.lines)
            if new != command.output:
                edits.append((command, new))
                changed.append(command.line)
    for command, new in reversed(edits):
        old = lines[command.first : command.first + command.num_lines]
        num_blank = len(old) - len("\n".join(old).rstrip().splitlines())
        lines[command.first : command.first + command.num_lines] = [*new, *[""] * num_blank]
    if changed:
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return changed


def main() -> None:
    """Rewrite the outputs in the pages."""
    parser = argparse.ArgumentParser(prog="python -m support.docs", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--run", metavar="PAGE", help="for `outcomes_in_a_copy`")
    parser.add_argument("pages", nargs="*", type=Path)
    arguments = parser.parse_args()
    if arguments.run:
        print_outcomes(arguments.run)
        return
    for page in arguments.pages or pages():
        for line in rewrite(page.resolve()):
            print(f"{page}: $ {line}")  # noqa: T201 - what was rewritten


if __name__ == "__main__":
    main()
