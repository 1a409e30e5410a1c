"""The generated reference: complete, and as committed."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import nanovllm
import nvtrace.catalog
from nanovllm.observer import Observer
from nvtrace import reference
from nvtrace.analysis.columns import ANALYSES, FRAMES
from nvtrace.catalog import LANGUAGES, load_catalog
from nvtrace.events import EVENT_TYPES, Event, Preempt
from nvtrace.reference import (
    RECORD_TYPES,
    add_missing_words,
    describe,
    main,
    trace_schema,
    type_name,
)
from nvtrace.source import calls_of, definition_of, hook_of
from support.every import every

documents = cache(reference.documents)

DOCS = Path(__file__).parents[1] / "docs"
CATALOGS = Path(nvtrace.catalog.__file__).parent


DOCUMENTS = ["en/events.md", "zh/events.md", "en/columns.md", "zh/columns.md", "trace.schema.json"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_committed_document_is_what_the_structs_say(name: str) -> None:
    committed = (DOCS / name).read_text("utf-8")
    assert committed == documents()[name], f"docs/{name} has drifted: run `make reference`"


@pytest.mark.parametrize("name", ["en/events.md", "zh/events.md"])
def test_the_document_has_every_event_with_every_field(name: str) -> None:
    text = documents()[name]
    for tag, struct in RECORD_TYPES.items():
        section = text.split(f"## {tag}\n")[1].split("\n## ")[0]
        own = {field.name for field in msgspec.structs.fields(struct)}
        if issubclass(struct, Event):
            own -= {field.name for field in msgspec.structs.fields(Event)}
        assert {line.split("`")[1] for line in section.splitlines() if line[:3] == "| `"} == own


@pytest.mark.parametrize("name", ["en/columns.md", "zh/columns.md"])
def test_the_document_has_every_frame_with_every_column(name: str) -> None:
    text = documents()[name]
    headings = {f"trace.{frame.name}": frame for frame in FRAMES.values()} | ANALYSES
    for heading, frame in headings.items():
        section = text.split(f"### {heading}\n")[1].split("\n##")[0]
        rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
        assert rows == frame.names


@pytest.mark.parametrize("name", ["en/columns.md", "zh/columns.md"])
def test_a_star_in_the_name_of_several_events_is_a_star(name: str) -> None:
    """Two of them in a line would else be read as emphasis."""
    text = documents()[name]
    assert r"SCHEDULE_\*" in text
    assert re.findall(r"(?<!\\)\*", text) == []


def test_the_tool_writes_all_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (
        {path.relative_to(tmp_path).as_posix() for path in files} == {*documents()} == {*DOCUMENTS}
    )
    assert capsys.readouterr().out.count("\n") == len(documents()) == 5


@pytest.mark.parametrize("language", LANGUAGES)
def test_words_that_a_catalog_lacks_are_made_from_the_structs(
    language: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in CATALOGS.glob("*.toml"):
        shutil.copy(source, tmp_path)
    file = tmp_path / f"{language}.toml"
    whole = file.read_text("utf-8")
    assert add_missing_words(file) == []
    assert file.read_text("utf-8") == whole

    cut = re.sub(r"\[events\.PREEMPT\]\n(.+\n)*", "", whole)
    cut = re.sub(r"^(for_seq_id|num_blocks_freed|no_blocks) = .*\n", "", cut, flags=re.MULTILINE)
    cut = re.sub(r"\[events\.STATE_TRANSITION\.codes\.reason\]\n(.+\n)*", "", cut)
    file.write_text(cut, "utf-8")
    folder = tmp_path / "docs"
    folder.mkdir()
    assert main([str(folder), str(tmp_path)]) == 0

    events = tomllib.loads(file.read_text("utf-8"))["events"]
    meaning = " ".join((Preempt.__doc__ or "").split())
    assert events["PREEMPT"] == {
        "title": meaning[0].lower() + meaning[1:-1],
        "when": "prefill, decode, mixed",
        "meaning": meaning,
        "fields": {"for_seq_id": "for seq id", "num_blocks_freed": "number of blocks freed"},
    }
    assert events["ADMISSION_STOP"]["codes"]["reason"]["no_blocks"] == "no blocks"
    assert events["STATE_TRANSITION"]["codes"]["reason"]["max_tokens"] == "max tokens"
    lines = file.read_text("utf-8").splitlines()
    changes = [*unified_diff(cut.splitlines(), lines, n=0, lineterm="")][2:]
    assert {change[0] for change in changes} == {"@", "+"}
    printed = capsys.readouterr().out
    assert f"{file}: " in printed
    assert "    events.PREEMPT.fields.for_seq_id\n" in printed
    assert add_missing_words(file) == []


def test_the_tool_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["no/such/folder"]) == 2
    assert "usage" in capsys.readouterr().err


def definition(schema: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """A struct's part of the schema."""
    found: dict[str, Any] = schema["$defs"][struct.__name__]
    return found


def test_the_schema_has_every_record_and_demands_what_has_no_default() -> None:
    schema = trace_schema()
    for tag, struct in RECORD_TYPES.items():
        part = definition(schema, struct)
        fields = msgspec.structs.fields(struct)
        assert part["properties"]["event"] == {"enum": [tag]}
        assert set(part["properties"]) == {"event", *(field.name for field in fields)}
        required = {"event", *(field.name for field in fields if field.required)}
        assert set(part["required"]) == required


def test_the_schema_lets_newer_fields_pass() -> None:
    for struct in RECORD_TYPES.values():
        assert definition(trace_schema(), struct).get("additionalProperties", True) is True


def test_the_schema_is_json() -> None:
    assert json.loads(documents()["trace.schema.json"])["$schema"].startswith("https://json-schema")


@pytest.mark.parametrize(
    ("annotation", "name"),
    [
        (int, "int"),
        (int | None, "int | None"),
        (list[tuple[int, int]], "list[tuple[int, int]]"),
        (dict[str, Any], "dict[str, any]"),
    ],
)
def test_types_are_written_as_one_reads_them(annotation: object, name: str) -> None:
    assert type_name(annotation) == name


def test_codes_are_written_as_words() -> None:
    fields = {field.name: field for field in describe("ADMISSION_STOP", load_catalog("en")).fields}
    assert fields["reason"].type.startswith('"token_budget" | "no_blocks"')
    assert fields["reason"].codes["no_blocks"] == "too few free KV blocks"
    assert "event_id" not in fields


@every("tag", EVENT_TYPES)
def test_every_event_has_an_observer_method_whose_place_is_found(tag: str) -> None:
    hook = hook_of(tag)
    assert callable(getattr(Observer, hook))
    place = definition_of(hook)
    assert place is not None
    lines = source_lines(place.file)
    assert lines[place.line - 1].strip().startswith(f"def {hook}(")


def test_every_place_that_says_an_event_is_found() -> None:
    places = [place for tag in EVENT_TYPES for place in calls_of(hook_of(tag))]
    assert len(places) > len(EVENT_TYPES) // 2
    for place in places:
        assert "observer." in source_lines(place.file)[place.line - 1]
    assert [place.file for place in calls_of("preempt")] == ["nanovllm/engine/scheduler.py"]


def test_a_hook_that_nobody_calls_has_no_place() -> None:
    assert calls_of("no_such_hook") == []
    assert definition_of("no_such_hook") is None


def source_lines(file: str) -> list[str]:
    """The lines of a file of the engine."""
    root = Path(nanovllm.__file__).parents[1]
    return (root / file).read_text("utf-8").splitlines()
