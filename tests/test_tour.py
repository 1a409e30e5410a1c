"""The tour and the reading order, held against what `generate()` on a CPU really enters."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.assets import TINY_QWEN3
from support.house import AFTERNOON_FILES, ENGINE, code_lines

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(__file__).parents[1]
LANGUAGES = ("en", "zh")
# Files of names only: nothing in them runs while all goes well.
ONLY_NAMES = {"nanovllm/__init__.py", "nanovllm/errors.py"}


@pytest.fixture(scope="module")
def entered() -> set[tuple[str, str]]:
    """(file below the repository, qualified name) of each engine function that a run calls."""
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ENGINE)):
            file = str(Path(frame.f_code.co_filename).relative_to(ROOT))
            found.add((file, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        llm = LLM(TINY_QWEN3, device="cpu", num_kvcache_blocks=8)
        llm.generate(["a", "b"], SamplingParams(max_tokens=3, logprobs=1, top_k=5))
    finally:
        sys.setprofile(before)
    return {(file, name) for file, name in found if "<" not in name.partition(".")[0]}


def reading_order(language: str) -> dict[str, int]:
    """File -> minutes, from the page's table, in its order."""
    page = (ROOT / "docs" / language / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (\d+) ", page, re.MULTILINE)
    return {file: int(minutes) for file, minutes in rows}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_reading_order_has_every_file_of_the_afternoon_and_no_other(language: str) -> None:
    files = {str(file.relative_to(ROOT)) for file in AFTERNOON_FILES if code_lines(file)}
    assert {*reading_order(language)} == files


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_files_minutes_follow_from_its_lines(language: str) -> None:
    for file, minutes in reading_order(language).items():
        assert code_lines(ROOT / file) / 12 - 1 <= minutes <= code_lines(ROOT / file) / 6 + 2, file


def test_what_a_run_enters_is_in_the_reading_order_and_what_is_there_is_entered(
    entered: set[tuple[str, str]],
) -> None:
    afternoon = {str(file.relative_to(ROOT)) for file in AFTERNOON_FILES}
    files = {file for file, _ in entered} & afternoon
    assert {*reading_order("en")} - files == ONLY_NAMES


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_function_that_the_tour_stops_at_is_entered(
    language: str, entered: set[tuple[str, str]]
) -> None:
    page = (ROOT / "docs" / language / "tour.md").read_text(encoding="utf-8")
    called = {f"{file.removesuffix('.py').replace('/', '.')}.{name}" for file, name in entered}
    stops = re.findall(r"`(nanovllm\.[\w.]+)`", page)
    assert len(stops) > 10
    for stop in stops:
        module, _, name = stop.rpartition(".")
        is_value = dataclasses.is_dataclass(getattr(sys.modules.get(module), name, None))
        assert is_value or any(f"{call}.".startswith(f"{stop}.") for call in called), stop
