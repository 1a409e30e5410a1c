"""The notebooks: they run, their .ipynb are what they say today, and their exercises are fair."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from support.every import every
from support.notebooks import (
    FOLDER,
    MAX_BYTES,
    SOURCES,
    Session,
    cells_of,
    execute,
    exercises_of,
    notebook_of,
    num_pictures_in,
    outputs_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SOLUTIONS = Path(__file__).parent / "solutions"
NUM_QUESTIONS = 9


@pytest.fixture(scope="module", autouse=True)
def _exercise_is_found() -> Iterator[None]:
    """A kernel starts in the notebooks' folder, where exercise.py is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield
        sys.modules.pop("exercise", None)


def recorded(source: Path) -> nbformat.NotebookNode:
    """The .ipynb of a source, as it was committed."""
    notebook: nbformat.NotebookNode = nbformat.read(notebook_of(source), as_version=4)
    return notebook


def test_there_is_a_notebook_for_each_question() -> None:
    assert [int(source.stem[:2]) for source in SOURCES] == [*range(1, NUM_QUESTIONS + 1)]
    assert sorted(FOLDER.glob("*.ipynb")) == [notebook_of(source) for source in SOURCES]


# -- what is written -------------------------------------------------------------------------------


@every("source", SOURCES)
def test_the_first_cell_asks_and_the_last_one_answers(source: Path) -> None:
    first, *_, last = cells_of(source)
    assert first.source.startswith(f"# {int(source.stem[:2])}. ")
    assert re.search(r"^\*\*Question:\*\* [^?]+\?$", first.source, re.MULTILINE)
    assert last.kind == "markdown"
    assert last.source.startswith("## Answer\n")


@every("source", SOURCES)
def test_each_number_of_the_prose_is_in_the_code_or_in_what_it_says(source: Path) -> None:
    cells = recorded(source).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    known = numbers_in("\n".join(cell.source + "\n" + outputs_of(cell) for cell in code))
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    told = {number for number in numbers_in(_NO_PROSE.sub(" ", prose)) if len(number) > 1}
    assert told <= known, f"where are {sorted(told - known)} from?"


_NO_PROSE = re.compile(r"^#.*$|\]\([^)]*\)|`[^`]*`|section [\d.]+|[A-Za-z][\w.-]*", re.MULTILINE)
_NUMBER = re.compile(r"\d(?:[\d_,]*\d)?(?:\.\d+)?")


def numbers_in(text: str) -> set[str]:
    """The numbers in a text, without what makes them easier to read."""
    return {re.sub("[_,]", "", number) for number in _NUMBER.findall(text)}


@every("source", SOURCES)
def test_two_or_three_exercises_come_before_the_answer(source: Path) -> None:
    cells = cells_of(source)
    exercises = exercises_of(cells)
    assert len(exercises) in {2, 3}
    headings = [line for cell in cells for line in cell.source.splitlines() if line[:2] == "##"]
    expected = [f"### Exercise {number}" for number in range(1, len(exercises) + 1)]
    assert headings[-len(expected) - 2 :] == ["## Your turn", *expected, "## Answer"]


@every("page", [*SOURCES, FOLDER / "README.md"])
def test_what_it_links_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text("utf-8"))
    assert links
    assert not [link for link in links if not (FOLDER / link).exists()]


# -- what was recorded -----------------------------------------------------------------------------


@every("source", SOURCES)
def test_the_ipynb_has_the_cells_of_its_source(source: Path) -> None:
    assert cells_of(notebook_of(source)) == cells_of(source), "`make notebooks` writes it anew"


@every("source", SOURCES)
def test_the_ipynb_is_small_and_tells_nothing_of_the_machine_it_was_made_on(source: Path) -> None:
    text = notebook_of(source).read_text("utf-8")
    assert len(text.encode()) < MAX_BYTES
    assert num_pictures_in(recorded(source)) >= 1
    assert re.search(r"/(home|root|tmp|work)/|Traceback|Warning|kernel_version", text) is None


# -- what happens today ----------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
def test_it_says_what_its_ipynb_says_and_takes_the_right_answers_only(source: Path) -> None:
    session, cells = Session(), cells_of(source)
    for cell, kept in zip(cells, recorded(source).cells, strict=True):
        said = session.run(cell.source) if cell.kind == "code" else ""
        assert said == outputs_of(kept), f"`make notebooks` writes it anew:\n{cell.source}"
        assert "check" not in cell.tags or said.startswith("Try it: ")
    solutions = tomllib.loads((SOLUTIONS / f"{source.stem}.toml").read_text("utf-8"))["exercise"]
    for exercise, solution in zip(exercises_of(cells), solutions, strict=True):
        assert solution["right"]
        assert solution["wrong"]
        for answer in solution["right"]:
            session.run(answer)
            assert session.run(exercise.check.source) == "Right.\n", answer
        for answer in solution["wrong"]:
            session.run(answer)
            assert session.run(exercise.check.source).startswith("Not yet: "), answer


def test_a_kernel_makes_the_ipynb_that_is_there() -> None:
    made, kept = execute(SOURCES[0]), recorded(SOURCES[0])
    assert made.metadata == kept.metadata
    for new, old in zip(made.cells, kept.cells, strict=True):
        assert without_pictures(new) == without_pictures(old)


def without_pictures(cell: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A cell, without what depends on the fonts of a machine."""
    plain = deepcopy(cell)
    for output in plain.get("outputs", ()):
        output.get("data", {}).pop("image/png", None)
    return plain


def test_a_check_says_what_an_answers_own_code_raises(capsys: pytest.CaptureFixture[str]) -> None:
    check = importlib.import_module("exercise").check
    check(0, lambda n: 1 / n, hint="not 0")
    assert capsys.readouterr().out == (
        "Not yet: it raises ZeroDivisionError: division by zero. Think of this: not 0\n"
    )
