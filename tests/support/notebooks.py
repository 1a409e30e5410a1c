"""The notebooks: what is in their sources, what they say when they run, and the .ipynb beside them.

    python -m support.notebooks             in tests/: run all and write their .ipynb
    python -m support.notebooks 03 05       those whose names begin like this

A source is a Python file of cells (`# %%`, Jupytext's percent form). The .ipynb is made from it by
a real kernel and holds the outputs; nothing in it depends on when or where it was made. The tests
run the same cells in their own process, which needs no kernel and takes a tenth of the time.

Knows cells and outputs. Does not know what any notebook asks.
"""

from __future__ import annotations

import ast
import io
import sys
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jupytext
import matplotlib as mpl
import nbformat
import pandas as pd
from IPython.lib.pretty import pretty
from matplotlib import pyplot as plt
from nbclient import NotebookClient

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
MAX_BYTES = 300_000
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
_MAX_COLUMNS = 20  # of a DataFrame; pandas' own in a notebook
_SECONDS_A_CELL = 120


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a source."""

    kind: Literal["markdown", "code"]
    source: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exercise:
    """The cell to fill in, and the one that says whether it is right."""

    task: Cell
    check: Cell


def notebook_of(source: Path) -> Path:
    """The .ipynb of a source."""
    return source.with_suffix(".ipynb")


# -- sources ---------------------------------------------------------------------------------------


def cells_of(source: Path) -> list[Cell]:
    """The cells of a source, or of an .ipynb."""
    cells = jupytext.read(source).cells
    return [
        Cell(cell.cell_type, cell.source, tuple(cell.metadata.get("tags", ()))) for cell in cells
    ]


def exercises_of(cells: Iterable[Cell]) -> list[Exercise]:
    """The exercises among the cells, in order."""
    tasks = [cell for cell in cells if "exercise" in cell.tags]
    checks = [cell for cell in cells if "check" in cell.tags]
    return [Exercise(*pair) for pair in zip(tasks, checks, strict=True)]


# -- running in this process -----------------------------------------------------------------------


class Session:
    """What a kernel is to a notebook: a namespace in which one cell runs after the other."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "__main__"}
        mpl.use("Agg")

    def run(self, code: str) -> str:
        """Run a cell's code in the notebooks' folder.

        Returns:
            What it prints, then what it ends with if that is an expression: a DataFrame as HTML,
            anything else as IPython writes it.
        """
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        value = None
        with io.StringIO() as printed:
            with redirect_stdout(printed), chdir(FOLDER):
                exec(compile(tree, "<cell>", "exec"), self._names)  # noqa: S102 - our own cells
                if isinstance(last, ast.Expr):
                    expression = compile(ast.Expression(last.value), "<cell>", "eval")
                    value = eval(expression, self._names)  # noqa: S307 - our own cells
                shown = _shown(value)
            plt.close("all")
            return printed.getvalue() + shown


def _shown(value: object) -> str:
    """What a notebook shows of a cell's last expression."""
    if value is None:
        return ""
    with pd.option_context("display.max_columns", _MAX_COLUMNS):
        html = value._repr_html_() if hasattr(value, "_repr_html_") else None
    return str(pretty(value) if html is None else html)


# -- running in a kernel ---------------------------------------------------------------------------


def execute(source: Path) -> nbformat.NotebookNode:
    """Run a source's cells in a kernel of their own.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised something.
    """
    notebook: nbformat.NotebookNode = jupytext.read(source)
    notebook.metadata = nbformat.NotebookNode(kernelspec=_KERNEL, language_info={"name": "python"})
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number:02}"
    client = NotebookClient(
        notebook,
        timeout=_SECONDS_A_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
        coalesce_streams=True,  # one print may come in two parts, or not
        extra_arguments=["--log-level=ERROR"],  # a warning is about networks, and there is none
    )
    client.execute()
    notebook.metadata.language_info = {"name": "python"}  # the kernel has put its version there
    return notebook


def outputs_of(cell: nbformat.NotebookNode) -> str:
    """The text of a cell's outputs, in the form that `Session.run` returns."""
    text = ""
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            text += output.text
        elif output.output_type == "execute_result":
            text += output.data.get("text/html", output.data["text/plain"])
    return text


def num_pictures_in(notebook: nbformat.NotebookNode) -> int:
    """How many pictures its outputs hold."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def main(prefixes: list[str]) -> None:
    """Make the .ipynb of the sources that are named, or of all."""
    for source in SOURCES:
        if not prefixes or source.name.startswith(tuple(prefixes)):
            path = notebook_of(source)
            nbformat.write(execute(source), path)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")  # noqa: T201 - a script


if __name__ == "__main__":
    main(sys.argv[1:])
