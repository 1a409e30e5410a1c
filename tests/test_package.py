"""What is installed: the wheel without the engine, its size, its page on an index, completion."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hatchling.builders.wheel import WheelBuilder

from support.cli import ROOT, environment, spawn

if TYPE_CHECKING:
    from pathlib import Path

TRACE = ROOT / "docs" / "traces" / "example.jsonl.zst"
MOST_BYTES = 200_000_000
READING = (
    ("replay", TRACE),
    ("check", TRACE),
    ("explain", TRACE, "--seq", "0"),
    ("at", TRACE, "40"),
    ("stats", TRACE),
    ("export", TRACE, "--to", "perfetto"),
    ("whatif", TRACE, "--set", "max_num_seqs=1"),
    ("validate", TRACE),
    ("run", "--list"),
    ("--help",),
)
RUNNING = (("run", "example"), ("bench",), ("doctor",))


@dataclass(frozen=True, slots=True)
class Installed:
    """A clean environment with the wheel in it, and nothing else."""

    folder: Path
    wheel: Path

    @property
    def site(self) -> Path:
        """Where the packages are."""
        [site] = self.folder.glob("env/lib/python*/site-packages")
        return site

    def run(self, *arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, out of reach of the sources."""
        kept = environment(**changes)
        del kept["PYTHONPATH"]
        program = self.folder / "env" / "bin" / str(arguments[0])
        command = [str(program), *map(str, arguments[1:])]
        return subprocess.run(
            command, cwd=self.folder, env=kept, capture_output=True, text=True, check=False
        )


def pip_install(environment_: Path, *what: str | Path) -> None:
    """Install into an environment that has no pip of its own."""
    python = environment_ / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    command += ["-c", str(ROOT / "constraints.txt"), *map(str, what)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("light")
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    venv.create(folder / "env", with_pip=False)
    pip_install(folder / "env", wheel)
    return Installed(folder, folder / "dist" / os.path.basename(wheel))  # noqa: PTH119 - a str


def size_of(folder: Path) -> int:
    """What the files of a folder take on the disk, compiled ones included, as `du` counts."""
    return sum(file.lstat().st_blocks * 512 for file in folder.rglob("*"))


@pytest.mark.slow
def test_a_trace_is_read_without_the_engine_as_with_it(light: Installed) -> None:
    """One install for all of it: that is what takes the time."""
    assert size_of(light.site) < MOST_BYTES / 2
    assert not {"torch", "transformers", "pandas"} & {path.name for path in light.site.iterdir()}
    for arguments in READING:
        told = light.run("nvtrace", *arguments)
        assert (told.returncode, told.stdout) == (0, spawn(*arguments).out), told.stderr
    told = light.run(
        "python", "-c", "from nvtrace.environment import *; print(version_of('nanovllm'))"
    )
    assert told.stdout == "0.1.0\n"
    for arguments in RUNNING:
        told = light.run("nvtrace", *arguments)
        assert (told.returncode, told.stdout) == (2, "")
        assert told.stderr == (
            "nvtrace: this needs torch, which is not installed: "
            "pip install 'nanovllm-nvtrace[engine]'\n"
        )
    told = light.run("python", "-c", "from nvtrace import load")
    assert told.stderr.endswith(": pip install 'nanovllm-nvtrace[frames]'\n")
    pip_install(light.folder / "env", f"{light.wheel}[frames]")
    told = light.run(
        "python", "-c", f"import nvtrace; print(len(nvtrace.load({str(TRACE)!r}).steps))"
    )
    assert (told.returncode, told.stdout) == (0, "256\n"), told.stderr
    assert not (light.site / "torch").exists()


@pytest.mark.slow
def test_the_page_on_an_index_has_no_link_that_leads_nowhere(light: Installed) -> None:
    [file] = light.site.glob("*nvtrace-*.dist-info/METADATA")
    page = str(email.message_from_bytes(file.read_bytes()).get_payload())
    assert page.startswith("# nanovllm + nvtrace")
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert links
    assert not [link for link in links if not link.startswith("https://")]


def test_who_cites_it_names_the_version_that_is_installed() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {f"version: {project['version']}", f"license: {project['license']}"} <= {*citation}


def test_the_floors_are_the_versions_that_are_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    ranges = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    ranges += project["optional-dependencies"]["frames"]
    floors = dict(each.split(">=") for each in ranges if ">=" in each)
    lines = (ROOT / "constraints-lowest.txt").read_text("utf-8").splitlines()
    run = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert floors.keys() <= run.keys()
    off = {name for name, floor in floors.items() if not f"{run[name]}.".startswith(f"{floor}.")}
    assert off == {"torch"}  # its floor was run on a GPU


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("run chu", "chunked-prefill"),
        ("run example --policy mi", "mixed"),
        ("run example --device cu", "cuda"),
        ("bench --device cu", "cuda"),
        ("replay x --event PREE", "PREEMPT"),
        ("tail x --event pree", "preempt"),
        ("events PREE", "PREEMPT"),
        ("whatif x --set policy=mi", "policy=mixed"),
        ("whatif x --case policy=mixed,max_num_s", "policy=mixed,max_num_seqs="),
        ("replay x --lang z", "zh"),
        ("replay x --view t", "timeline"),
        ("export x --to ot", "otlp"),
        ("bench see", "seed"),
    ],
)
def test_a_shell_completes_what_has_a_name(typed: str, completed: str) -> None:
    """As bash asks, in a process that cannot import torch."""
    words = f"nvtrace {typed}"
    script = (
        "import sys; sys.modules.update(torch=None, transformers=None, pandas=None)\n"
        "from nvtrace_cli.main import main; main()"
    )
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(_NVTRACE_COMPLETE="complete_bash", **asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [completed], done.stderr
