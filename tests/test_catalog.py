"""The word catalogs: both languages have a word for everything that a trace can hold."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from string import Formatter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from nvtrace.analysis.columns import ANALYSES, FRAMES
from nvtrace.catalog import LANGUAGES, Catalog, Language, load_catalog
from nvtrace.events import Event, codes_of
from nvtrace.reference import NOT_TRANSLATED, RECORD_TYPES
from nvtrace.scenarios import SCENARIOS
from support.every import every

if TYPE_CHECKING:
    from collections.abc import Iterator

ALL_FRAMES = FRAMES | ANALYSES
_ENVELOPE = {field.name for field in msgspec.structs.fields(Event)}


def raw_words(language: Language) -> dict[str, Any]:
    """The catalog file, parsed."""
    text = resources.files("nvtrace.catalog").joinpath(f"{language}.toml").read_text("utf-8")
    return tomllib.loads(text)


def codes_of_all_records() -> Iterator[tuple[str, str, str]]:
    """(record, field, code) of every known code in the format."""
    for tag, struct in RECORD_TYPES.items():
        for field in msgspec.structs.fields(struct):
            if field.name not in NOT_TRANSLATED:
                for code in codes_of(field.type):
                    yield tag, field.name, code


def key_of(meanings: dict[str, str], frame: str, column: str) -> str:
    """Where the catalog has a column's meaning."""
    own = f"{frame}.{column}"
    return own if own in meanings else column


@pytest.fixture(params=LANGUAGES)
def catalog(request: pytest.FixtureRequest) -> Catalog:
    return load_catalog(request.param)


@every("tag", RECORD_TYPES)
def test_every_record_has_a_title_and_a_meaning(tag: str, catalog: Catalog) -> None:
    assert catalog.title(tag) != tag
    assert catalog.meaning(tag).endswith((".", "。"))
    assert bool(catalog.when(tag)) == issubclass(RECORD_TYPES[tag], Event)


@every("tag", RECORD_TYPES)
def test_every_field_has_a_meaning(tag: str, catalog: Catalog) -> None:
    names = [field.name for field in msgspec.structs.fields(RECORD_TYPES[tag])]
    assert [name for name in names if not catalog.field(tag, name)] == []


def test_every_code_is_put_into_words(catalog: Catalog) -> None:
    codes = list(codes_of_all_records())
    missing = [(t, f, code) for t, f, code in codes if not catalog.codes(t, f).get(code)]
    assert ("SCHEDULE_PREFILL", "reason", "waiting_admissible") in codes
    assert missing == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_word_is_left_over(language: Language) -> None:
    words = raw_words(language)
    known_codes = set(codes_of_all_records())
    names = {
        field.name for struct in RECORD_TYPES.values() for field in msgspec.structs.fields(struct)
    }
    sections = {"ui", "fields", "events", "scenarios", "check", "reference"}
    assert set(words) - {"columns"} == sections
    assert set(words["events"]) == set(RECORD_TYPES)
    assert set(words["fields"]) - names == {"event"}
    for tag, event in words["events"].items():
        assert set(event) <= {"title", "when", "meaning", "fields", "codes"}
        own = {field.name for field in msgspec.structs.fields(RECORD_TYPES[tag])}
        assert set(event.get("fields", {})) <= own
        for field, codes in event.get("codes", {}).items():
            assert {(tag, field, code) for code in codes} <= known_codes


def test_both_languages_have_the_same_sentences_with_the_same_places() -> None:
    def places(words: dict[str, Any]) -> dict[str, set[str]]:
        return {
            key: {name for _, name, _, _ in Formatter().parse(sentence) if name}
            for key, sentence in words["ui"].items()
        }

    english, chinese = (raw_words(language) for language in ("en", "zh"))
    assert set(english["ui"]) == set(chinese["ui"])
    # A language may leave out who it is about, but must not ask for what it is not given.
    for key, asked in places(chinese).items():
        assert asked <= places(english)[key] | {"who", "count", "limit"}, key


def test_every_frame_and_every_column_has_chinese_words_and_none_is_left_over() -> None:
    words = raw_words("zh")["columns"]
    used = {
        key_of(words["meanings"], frame.name, column.name)
        for frame in ALL_FRAMES.values()
        for column in frame.columns
    }
    units = {column.unit for frame in ALL_FRAMES.values() for column in frame.columns}
    assert used == set(words["meanings"])
    assert set(words["rows"]) == set(words["sources"]) == set(ALL_FRAMES)
    assert set(words["units"]) == units - {""}
    assert set(words) == {"rows", "sources", "meanings", "units"}


def test_columns_share_chinese_words_only_if_they_share_the_english_ones() -> None:
    meanings = raw_words("zh")["columns"]["meanings"]
    english: dict[str, set[str]] = {}
    for frame in ALL_FRAMES.values():
        for column in frame.columns:
            key = key_of(meanings, frame.name, column.name)
            english.setdefault(key, set()).add(column.meaning)
    assert {key: said for key, said in english.items() if len(said) > 1} == {}


def test_a_column_is_told_in_its_language_and_what_is_unknown_as_it_was_given() -> None:
    english, chinese = load_catalog("en"), load_catalog("zh")
    assert english.column("blocks", "ts_ns", "when") == "when"
    assert chinese.column("blocks", "ts_ns", "when") == "发生时刻"
    assert chinese.column("kv_use", "step", "the engine_step") == "所属的 engine_step"
    assert chinese.column("blocks", "moon", "its phase") == "its phase"
    assert (english.unit("blocks"), chinese.unit("blocks"), chinese.unit("")) == (
        "blocks",
        "块",
        "",
    )
    assert english.row("kv_use", "a step") == english.source("kv_use", "a step") == "a step"
    assert chinese.source("kv_use", "steps, blocks") == "steps、blocks"


def test_every_sentence_of_the_catalog_is_used_somewhere() -> None:
    package = resources.files("nvtrace_cli")
    files = [*package.iterdir(), *package.joinpath("views").iterdir()]
    source = "\n".join(file.read_text("utf-8") for file in files if file.name.endswith(".py"))
    # Keys that are put together: f"note_stop_{reason}" stands for every key that it matches.
    literals = set(re.findall(r'"([a-z_]+)"', source))
    patterns = [
        re.compile(re.sub(r"\{[^}]*\}", r"\\w+", pattern))
        for pattern in re.findall(r'f"([a-z_]*\{[^"]*\}[a-z_]*)"', source)
    ]
    unused = [
        key
        for key in raw_words("en")["ui"]
        if key not in literals and not any(pattern.fullmatch(key) for pattern in patterns)
    ]
    assert unused == []


def test_every_scenario_has_a_title_and_a_story(catalog: Catalog) -> None:
    for name in SCENARIOS:
        title, story = catalog.scenario(name)
        assert title not in {"", name}
        assert story
    assert set(raw_words(catalog.language)["scenarios"]) == set(SCENARIOS)


def test_the_chinese_reasons_are_the_articles() -> None:
    chinese = load_catalog("zh")
    assert chinese.reason("GENERATE_START", "batch_submitted") == "批量请求进入引擎"
    assert chinese.reason("REQUEST_ENQUEUE", "new_request") == "新请求进入 waiting 队列"
    assert chinese.reason("SCHEDULE_PREFILL", "waiting_admissible") == "waiting 队列有可准入请求"
    assert (
        chinese.reason("SCHEDULE_DECODE", "no_prefill_admissible")
        == "无可 prefill 请求，转入 decode 连续批"  # noqa: RUF001 - Chinese has its own comma
    )
    assert chinese.reason("GENERATE_FINISH", "queues_empty") == "waiting/running 均为空"


def test_what_no_catalog_knows_is_called_by_its_own_name(catalog: Catalog) -> None:
    assert catalog.title("SPECULATE") == "SPECULATE"
    assert catalog.reason("PREEMPT", "full_moon") == "full_moon"
    assert catalog.field("PREEMPT", "phase_of_the_moon") == ""


def test_a_language_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="en, zh"):
        load_catalog("tlh")  # type: ignore[arg-type]  # that is the point


def test_a_sentence_without_its_value_is_an_error(catalog: Catalog) -> None:
    with pytest.raises(KeyError):
        catalog.ui("note_batch", before=2)
