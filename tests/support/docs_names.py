"""What the docs name: links, files, code symbols, events, commands. Does it exist?

Reads sources as syntax trees, so that nothing is imported to check a name. Knows where this
project keeps things; does not know what a page is about.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from typer.main import get_command

from nvtrace.reference import RECORD_TYPES
from nvtrace_cli.main import app
from support.docs import ROOT, blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCES = {"nanovllm": ROOT, "nvtrace": ROOT / "trace", "nvtrace_cli": ROOT / "cli"}
TOP_LEVEL = ("nanovllm", "trace", "cli", "docs", "notebooks", "tests", "support")
OTHER_CAPITALS = {  # what is written like an event and is none
    "OMP_WAIT_POLICY",
    "NVTRACE_DEBUG",
    "NO_COLOR",
    "TINY_QWEN3",
    "PIP_ARGS",
    "BENCH_ARGS",
}
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#{1,6}) +(.*?)(?: *\{ *#([\w-]+) *\})? *$")
_DOTTED = re.compile(r"^(nanovllm|nvtrace|nvtrace_cli)((?:\.\w+)+)(?:\(.*\))?$")
_MEMBER = re.compile(r"^([A-Z]\w+)\.([a-z_]\w*)(?:\(.*\))?$")
_CAPITALS = re.compile(r"^[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+$")
_PLACE = re.compile(r"^(?:[\w.-]+/)+[\w.-]+$")


def prose_of(text: str) -> str:
    """A page without its fenced blocks; they become blank lines."""
    lines = text.splitlines()
    for block in blocks_of(text):
        for number in range(block.first - 1, min(block.first + len(block.lines) + 1, len(lines))):
            lines[number] = ""
    return "\n".join(lines)


def inline_codes(text: str) -> list[str]:
    """What stands between single backticks."""
    return [code.strip() for code in _INLINE.findall(prose_of(text))]


def links(text: str) -> list[str]:
    """Where a page's links and pictures lead."""
    return _LINK.findall(_INLINE.sub("", prose_of(text)))


def headings(text: str) -> list[tuple[int, str]]:
    """A page's headings: (level, anchor)."""
    found = []
    for line in prose_of(text).splitlines():
        heading = _HEADING.match(line)
        if heading is not None:
            found.append((len(heading[1]), heading[3] or anchor(heading[2])))
    return found


def anchor(heading: str) -> str:
    """The anchor of a heading, as MkDocs (and GitHub, for plain words) makes it."""
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


def broken_links(page: Path) -> list[str]:
    """The links of a page to files or headings that are not there."""
    text = page.read_text("utf-8")
    broken = []
    for link in links(text):
        if re.match(r"^[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            broken.append(link)
        elif fragment and target.suffix == ".md":
            anchors = {name for _, name in headings(target.read_text("utf-8"))}
            if fragment not in anchors:
                broken.append(link)
    return broken


def unknown_names(text: str) -> list[str]:
    """The inline codes of a page that name something of this project that is not there."""
    return [code for code in inline_codes(text) if not _is_known(code)]


def _is_known(code: str) -> bool:
    dotted, member = _DOTTED.match(code), _MEMBER.match(code)
    if code.startswith("nvtrace "):
        return command_exists(code)
    if code.startswith("make "):
        return code.split()[1] in make_targets()
    if _CAPITALS.match(code):
        return code in RECORD_TYPES or code in OTHER_CAPITALS
    if dotted is not None:
        return symbol_exists(dotted[1], dotted[2][1:].split("."))
    if member is not None and member[1] in classes():
        return has_member(member[1], member[2])
    return file_exists(code)


def file_exists(code: str) -> bool:
    """Is there such a file or folder? What does not look like one of ours passes."""
    if not _PLACE.match(code) or code.partition("/")[0] not in TOP_LEVEL:
        return True
    return (ROOT / code).exists() or (ROOT / "tests" / code).exists()


def make_targets() -> list[str]:
    """What `make` can make."""
    return re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def command_exists(line: str) -> bool:
    """Does `nvtrace WORD --option ...` have such a command and such options?"""
    words = line.split()[1:]
    if words[0].startswith("-") or not words[0].isalpha() or words[0].isupper():
        return True
    known = options_of_commands().get(words[0])
    if known is None:
        return False
    return all(word.split("=")[0] in known for word in words if word.startswith("--"))


@cache
def options_of_commands() -> dict[str, set[str]]:
    """What each command of `nvtrace` takes: its name -> its options."""
    group: Any = get_command(app)
    return {
        name: {"--help", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}
        for name, command in group.commands.items()
    }


# -- symbols ---------------------------------------------------------------------------------------


def symbol_exists(package: str, names: list[str]) -> bool:
    """Is there a module, class, function, attribute of this dotted name?"""
    place = SOURCES[package] / package
    while names and (place / names[0]).is_dir():
        place, names = place / names[0], names[1:]
    if not names:
        return True
    if (place / f"{names[0]}.py").exists():
        return _is_in(tree_of(place / f"{names[0]}.py"), names[1:])
    return (place / "__init__.py").exists() and _is_in(tree_of(place / "__init__.py"), names)


def _is_in(node: ast.AST, names: list[str]) -> bool:
    if not names:
        return True
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(name=name) if name == names[0]:
                return len(names) == 1 or names[1] in members(child)
            case _ if names[0] in _bound_names(child):
                return len(names) == 1
            case _:
                pass
    return False


def members(node: ast.ClassDef) -> set[str]:
    """The methods and attributes of a class, those set on self included."""
    found = {name for child in node.body for name in _bound_names(child)}
    for child in ast.walk(node):
        match child:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case _:
                pass
    return found


def _bound_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.If(body=body):  # TYPE_CHECKING, a platform
            for child in body:
                yield from _bound_names(child)
        case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
            yield from (alias.asname or alias.name for alias in aliases)
        case _:
            pass


@cache
def tree_of(path: Path) -> ast.Module:
    """A source file as a syntax tree."""
    return ast.parse(path.read_text("utf-8"))


def has_member(class_name: str, name: str) -> bool:
    """Has a class of this name (or one that it inherits from) such a method or attribute?"""
    return any(
        name in names or any(has_member(base, name) for base in bases)
        for names, bases in classes().get(class_name, [])
    )


@cache
def classes() -> dict[str, list[tuple[set[str], list[str]]]]:
    """The members and the bases of each class of the project, by its name (two may share one)."""
    found: dict[str, list[tuple[set[str], list[str]]]] = {}
    for package, root in SOURCES.items():
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef):
                    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                    found.setdefault(node.name, []).append((members(node), bases))
    return found


# -- excerpts --------------------------------------------------------------------------------------


def missing_lines(lines: list[str]) -> list[str]:
    """The lines of an excerpt (block `py`, its first line `# path`) that its file has not.

    They must stand in the file in the same order; a line `...` leaves out what is between.
    """
    path = ROOT / lines[0].removeprefix("#").strip()
    if not path.is_file():
        return [lines[0]]
    source = [line.strip() for line in path.read_text("utf-8").splitlines()]
    missing, position = [], 0
    for line in (line.strip() for line in lines[1:]):
        if line in {"", "..."}:
            continue
        if line in source[position:]:
            position = source.index(line, position) + 1
        else:
            missing.append(line)
    return missing
