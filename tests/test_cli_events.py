"""nvtrace events: what it says of one event, and of all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rich.cells import cell_len

from nvtrace.catalog import load_catalog
from nvtrace.reference import RECORD_TYPES
from nvtrace.source import calls_of
from support.cli import call
from support.every import every

if TYPE_CHECKING:
    from nvtrace.catalog import Language


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_list_has_every_event_and_fits(
    language: Language, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "events", "--lang", language)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert [line.split(" ")[0] for line in lines if line.split(" ")[0] in RECORD_TYPES] == list(
        RECORD_TYPES
    )
    assert max(map(cell_len, lines)) <= 80
    assert load_catalog(language).title("PREEMPT") in outcome.out


@pytest.mark.parametrize("language", ["en", "zh"])
@every("tag", RECORD_TYPES)
def test_one_event_is_explained_in_full(
    tag: str, language: Language, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog = load_catalog(language)
    out = call(capsys, "events", tag, "--lang", language).out
    assert out.startswith(f"{tag}  {catalog.title(tag)}")
    assert max(map(cell_len, out.splitlines())) <= 80
    assert "…" not in out
    words = "".join(out.split())
    assert "".join(catalog.meaning(tag).split()) in words
    for name, type_ in RECORD_TYPES[tag].__annotations__.items():
        assert name in out or "ClassVar" in str(type_)


def test_codes_are_explained_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "events", "ADMISSION_STOP").out
    assert "no_blocks        too few free KV blocks" in out


def test_every_place_in_the_source_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "events", "ADMISSION_STOP").out
    places = [str(place) for place in calls_of("admission_stop")]
    assert len(places) > 1
    assert all(place in out for place in places)
    assert "Observer.admission_stop" in out


@pytest.mark.parametrize("name", ["preempt", "Preempt", "PREEMPT"])
def test_the_case_of_a_name_does_not_matter(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "events", name).out.startswith("PREEMPT ")


def test_dashes_are_as_good_as_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "events", "step-end").out.startswith("STEP_END ")


@pytest.mark.parametrize(
    ("name", "meant"), [("SHEDULE_PREFIL", "SCHEDULE_PREFILL"), ("kv", "KV_BUDGET_ESTIMATE")]
)
def test_a_near_miss_is_helped(name: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = call(capsys, "events", name)
    assert outcome.code == 2
    assert meant in outcome.err


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    everything = json.loads(call(capsys, "events", "--json").out)
    assert [event["tag"] for event in everything] == list(RECORD_TYPES)
    one = json.loads(call(capsys, "events", "admission_stop", "--json").out)
    assert one in everything
    assert one["hook"] == "admission_stop"
    assert one["fields"][0]["codes"]["no_blocks"] == "too few free KV blocks"
