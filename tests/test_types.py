"""The public face as another project's type checker sees it: mypy --strict, on a wheel."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from hatchling.builders.wheel import WheelBuilder

from nvtrace.analysis import Trace, load
from support.docs import ROOT, blocks_of, pages

if TYPE_CHECKING:
    from pathlib import Path

FACES = ("nanovllm", "nvtrace", "nvtrace.analysis", "nvtrace.check", "nvtrace.whatif")
PACKAGES = ("nanovllm", "nvtrace", "nvtrace_cli")
# torch's own code takes most of a minute to read, and none of its types is in the public face.
CONFIG = """\
[mypy]
strict = True
[mypy-torch.*,transformers.*]
follow_imports = skip
[mypy-pyarrow.*]
ignore_missing_imports = True
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on whose path the packages lie as a wheel brings them."""
    folder = tmp_path_factory.mktemp("downstream")
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    zipfile.ZipFile(wheel).extractall(folder / "site")
    (folder / "mypy.ini").write_text(CONFIG, encoding="utf-8")
    return folder


def mypy(folder: Path, modules: dict[str, list[str]]) -> dict[str, list[str]]:
    """What mypy says of somebody's modules: each one's lines, without its name."""
    for name, lines in modules.items():
        (folder / f"{name}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache"),
            *("--no-error-summary", *(f"{name}.py" for name in modules)),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    told: dict[str, list[str]] = {name: [] for name in modules}
    for line in done.stdout.splitlines():
        name, _, message = line.partition(".py:")
        told[name].append(message)
    return told


def public_names() -> list[str]:
    """What the faces say that they have."""
    return [f"{face}.{name}" for face in FACES for name in importlib.import_module(face).__all__]


@pytest.fixture(scope="module")
def told(installed: Path) -> dict[str, list[str]]:
    """What mypy says of several modules, after one reading of the packages (seconds)."""
    modules = {}
    for number, page in enumerate([ROOT / "README.md", *pages("en")]):
        blocks = [block for block in blocks_of(page.read_text("utf-8")) if block.kind == "python"]
        if blocks:
            modules[f"page{number}"] = [line for block in blocks for line in block.lines]
    modules["face"] = [f"import {face}" for face in FACES]
    modules["face"] += [f"reveal_type({name})" for name in public_names()]
    modules["wrong"] = ["import nanovllm, nvtrace", "nvtrace.read_rank", "nanovllm.LMM"]
    modules["events"] = [
        "from nvtrace.events import CudagraphSkip, RunEager, new",
        'new(RunEager)(reason="prefill", num_tokens=1)',
        'new(RunEager)(reason="prefill", num_token=1)',
        'new(RunEager)(reason="prefill")',
        "new(CudagraphSkip)(reason=1)",
    ]
    return mypy(installed, modules)


def revealed(lines: list[str]) -> list[str]:
    """The types in mypy's notes, when it says nothing else."""
    types = [re.fullmatch(r'\d+: note: Revealed type is "(.*)"', line) for line in lines]
    assert all(types), lines
    return [type_[1] for type_ in types if type_]


def test_every_public_name_has_a_type(told: dict[str, list[str]]) -> None:
    found = dict(zip(public_names(), revealed(told["face"]), strict=True))
    assert not {name for name, type_ in found.items() if type_ in {"object", "Any"}}
    assert "typing.Iterator[tuple[int, " in found["nvtrace.read_ranks"]


def test_what_the_docs_show_has_types(told: dict[str, list[str]]) -> None:
    of_pages = {name: lines for name, lines in told.items() if name.startswith("page")}
    assert of_pages
    assert not {name: lines for name, lines in of_pages.items() if lines}


def test_with_types_for_pandas_every_table_of_a_trace_is_a_frame(installed: Path) -> None:
    """A stub stands for pandas-stubs, which a user may install: pandas itself has no types."""
    stub = installed / "site" / "pandas-stubs" / "__init__.pyi"
    stub.parent.mkdir()
    stub.write_text("class DataFrame: ...\n", encoding="utf-8")
    names = [name for name in vars(Trace) if not name.startswith("_")]
    code = ["import nvtrace", 'trace = nvtrace.load("trace.jsonl")']
    code += [f"reveal_type(trace.{name})" for name in names]
    try:
        told = mypy(installed, {"tables": code})
    finally:
        shutil.rmtree(stub.parent)
    found = dict(zip(names, revealed(told["tables"]), strict=True))
    assert not {name for name, type_ in found.items() if re.search(r"\bAny\b", type_)}
    frames = {name for name, type_ in found.items() if type_.endswith("pandas.DataFrame")}
    assert frames == {"events", "steps", "requests", "tokens", "blocks", "table"}


def test_a_name_that_there_is_none_of_is_an_error(told: dict[str, list[str]]) -> None:
    assert len([line for line in told["wrong"] if "[attr-defined]" in line]) == 2


def test_an_event_with_a_field_that_is_not_its_own_is_an_error(told: dict[str, list[str]]) -> None:
    found = [re.search(r"^(\d+): error: .*\[(.*)\]", line) for line in told["events"]]
    errors = [("3", "call-arg"), ("4", "call-arg"), ("5", "arg-type")]
    assert [match.groups() for match in found if match] == errors, told["events"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_says_that_it_has_types(package: str, installed: Path) -> None:
    assert (installed / "site" / package / "py.typed").is_file()


@pytest.mark.parametrize("face", FACES)
def test_names_that_are_loaded_late_are_listed(face: str) -> None:
    module = importlib.import_module(face)
    assert {*module.__all__} <= {*dir(module)}
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_what_a_notebook_prints_says_what_it_is() -> None:
    trace = load(ROOT / "docs" / "traces" / "example.jsonl.zst")
    assert repr(trace).endswith("example.jsonl.zst: 1,302 events of rank 0>")
    assert repr(trace.at(40)) == (
        "<State in step 40: 2 running, 0 waiting, 1363 of 1365 blocks free>"
    )
