"""The reference: every event, field and code, from the structs and the catalogs.

    python -m nvtrace.reference docs      writes there: {en,zh}/events.md, {en,zh}/columns.md,
                                          trace.schema.json
    python -m nvtrace.reference docs trace/nvtrace/catalog
                                          first adds missing entries to the catalogs in that folder,
                                          from the structs

The structs are in `events.py` and `envelope.py`, their descriptions in `catalog/`. For DataFrames,
columns and English descriptions are in `analysis/columns.py`, the Chinese ones in `catalog/`.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import msgspec

from nvtrace.analysis.columns import ANALYSES, FRAMES
from nvtrace.catalog import LANGUAGES, load_catalog
from nvtrace.envelope import VERSION, Footer, Header, HeaderFacts
from nvtrace.events import EVENT_TYPES, AnyEvent, Event, codes_of, field_types, tag_of
from nvtrace.files import atomic_write
from nvtrace.source import calls_of, hook_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.analysis.columns import Frame
    from nvtrace.catalog import Catalog

RECORD_TYPES: dict[str, type[msgspec.Struct]] = {
    "TRACE_HEADER": Header,
    **EVENT_TYPES,
    "TRACE_FOOTER": Footer,
}
_ENVELOPE = tuple(field.name for field in msgspec.structs.fields(Event))
# Their codes are the same in every language.
NOT_TRANSLATED = {"phase", "previous", "status"}


@dataclass(frozen=True, slots=True)
class FieldReference:
    """One field.

    Attributes:
        type: as it is written in Python; codes as quoted words.
        codes: code -> meaning, if the field holds codes that are described.
    """

    name: str
    type: str
    meaning: str
    codes: dict[str, str]


@dataclass(frozen=True, slots=True)
class EventReference:
    """One kind of line of a trace.

    Attributes:
        when: its phases; empty for header and footer.
        fields: its own, without those of the envelope.
        hook: the observer method that records it; None for header and footer.
    """

    tag: str
    title: str
    when: str
    meaning: str
    fields: tuple[FieldReference, ...]
    hook: str | None


def describe(tag: str, catalog: Catalog) -> EventReference:
    """Describe one kind of line.

    Raises:
        KeyError: there is no such kind.
    """
    struct = RECORD_TYPES[tag]
    is_event = issubclass(struct, Event)
    fields = tuple(
        FieldReference(name, type_name(type_), catalog.field(tag, name), catalog.codes(tag, name))
        for name, type_ in field_types(struct).items()
        if not (is_event and name in _ENVELOPE)
    )
    hook = hook_of(tag) if is_event else None
    title, when, meaning = catalog.title(tag), catalog.when(tag), catalog.meaning(tag)
    return EventReference(tag, title, when, meaning, fields, hook)


def envelope_fields(catalog: Catalog) -> tuple[FieldReference, ...]:
    """The fields of every event."""
    fields = (
        FieldReference(field.name, type_name(field.type), catalog.field("", field.name), {})
        for field in msgspec.structs.fields(Event)
    )
    return (FieldReference("event", "str", catalog.field("", "event"), {}), *fields)


def type_name(annotation: Any) -> str:  # noqa: ANN401 - any annotation
    """An annotation as text: "list[int]", "int | None", '"eos" | "max_tokens"'."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is NoneType:
        return "None"
    if annotation is Any:
        return "any"
    if codes := codes_of(annotation):
        return " | ".join(f'"{code}"' for code in codes)
    if origin in {Union, UnionType}:
        return " | ".join(map(type_name, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_name, arguments))}]"
    return str(annotation.__name__)


# -- docs/en/events.md, docs/zh/events.md ----------------------------------------------------------


def events_markdown(catalog: Catalog) -> str:
    """The whole of docs/en/events.md, or of its Chinese counterpart."""
    parts = [
        catalog.reference("introduction", major=VERSION[0], minor=VERSION[1]),
        _field_table(envelope_fields(catalog), catalog),
        "",
    ]
    parts += [_section(describe(tag, catalog), catalog) for tag in RECORD_TYPES]
    return "\n".join(parts)


def _section(event: EventReference, catalog: Catalog) -> str:
    words = {"title": event.title, "when": event.when, "meaning": event.meaning}
    lead = catalog.reference("lead_with_phases" if event.when else "lead", **words)
    lines = [f"## {event.tag}", "", lead, ""]
    if event.fields:
        lines += [_field_table(event.fields, catalog), ""]
    for field in event.fields:
        if field.codes:
            lines += [catalog.reference("codes_of", field=field.name), ""]
            lines += [
                catalog.reference("code", code=code, meaning=meaning)
                for code, meaning in field.codes.items()
            ]
            lines.append("")
    if event.hook is not None:
        files = sorted({place.file for place in calls_of(event.hook)})
        said = ", ".join(f"`{file}`" for file in files) or catalog.reference("nowhere")
        lines += [catalog.reference("said_in", hook=event.hook, files=said), ""]
    return "\n".join(lines)


def _field_table(fields: tuple[FieldReference, ...], catalog: Catalog) -> str:
    rows = [catalog.reference("field_heads"), "|---|---|---|"]
    rows += [
        f"| `{field.name}` | `{_cell(field.type)}` | {_cell(field.meaning)} |" for field in fields
    ]
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- docs/en/columns.md, docs/zh/columns.md --------------------------------------------------------


def columns_markdown(catalog: Catalog) -> str:
    """The whole of docs/en/columns.md, or of its Chinese counterpart."""
    parts = [catalog.reference("columns_introduction"), catalog.reference("frames"), ""]
    parts += [_frame_section(frame, f"trace.{frame.name}", catalog) for frame in FRAMES.values()]
    parts += [catalog.reference("analyses"), ""]
    parts += [_frame_section(frame, frame.name, catalog) for frame in ANALYSES.values()]
    return "\n".join(parts)


def _frame_section(frame: Frame, heading: str, catalog: Catalog) -> str:
    row = catalog.row(frame.name, frame.row)
    source = catalog.source(frame.name, frame.source).replace("*", "\\*")  # SCHEDULE_*
    lines = [f"### {heading}", "", catalog.reference("frame_lead", row=row, source=source), ""]
    lines += [catalog.reference("column_heads"), "|---|---|---|---|"]
    for column in frame.columns:
        meaning = _cell(catalog.column(frame.name, column.name, column.meaning))
        unit = catalog.unit(column.unit)
        lines.append(f"| `{column.name}` | {column.dtype} | {unit} | {meaning} |")
    return "\n".join([*lines, ""])


# -- docs/trace.schema.json ------------------------------------------------------------------------


def trace_schema() -> dict[str, Any]:
    """The JSON Schema of one line of a trace."""
    schema = msgspec.json.schema(Header | Footer | AnyEvent)
    facts = msgspec.json.schema(HeaderFacts)["$defs"]
    for name, part in facts.pop("HeaderFacts")["properties"].items():
        schema["$defs"]["Header"]["properties"][name] = part
    schema["$defs"] |= facts
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of an nvtrace trace, format {VERSION[0]}.{VERSION[1]}",
        **schema,
    }


def documents() -> dict[str, str]:
    """The generated files: name -> content."""
    schema = msgspec.json.format(msgspec.json.encode(trace_schema()), indent=2).decode()
    catalogs = {language: load_catalog(language) for language in LANGUAGES}
    return {
        **{f"{name}/events.md": events_markdown(catalog) for name, catalog in catalogs.items()},
        **{f"{name}/columns.md": columns_markdown(catalog) for name, catalog in catalogs.items()},
        "trace.schema.json": schema + "\n",
    }


# -- missing entries of the catalogs ---------------------------------------------------------------


def add_missing_words(file: Path) -> list[str]:
    """Add the missing entries of events to a catalog file, with texts from their structs.

    Returns:
        What was added, for example "events.PREEMPT.title".
    """
    text = file.read_text("utf-8")
    words = tomllib.loads(text)
    added = []
    for struct in EVENT_TYPES.values():
        for table, key, said in _words_of(struct):
            own: dict[str, Any] = words
            for name in table.split("."):
                own = own.get(name, {})
            is_shared = table.endswith(".fields") and key in words["fields"]
            if key not in own and not is_shared:
                text = _with_entry(text, table, f"{key} = {json.dumps(said, ensure_ascii=False)}\n")
                added.append(f"{table}.{key}")
    if added:
        with atomic_write(file) as out:
            out.write(text.encode())
    return added


def _words_of(struct: type[Event]) -> Iterator[tuple[str, str, str]]:
    """(table, key, text) of an event, from its docstring, its comments and its names."""
    event = f"events.{tag_of(struct)}"
    meaning = " ".join((struct.__doc__ or f"{struct.__name__}.").split())
    title = meaning.partition(". ")[0].removesuffix(".")
    yield event, "title", title[0].lower() + title[1:]
    yield event, "when", "prefill, decode, mixed"
    yield event, "meaning", meaning
    source = inspect.getsource(struct)
    for field in msgspec.structs.fields(struct):
        comment = re.search(rf"^    {field.name}: .*  # (.+)$", source, re.MULTILINE)
        yield f"{event}.fields", field.name, comment[1] if comment else _spelt_out(field.name)
        if field.name not in NOT_TRANSLATED:
            for code in codes_of(field.type):
                yield f"{event}.codes.{field.name}", code, _spelt_out(code)


def _spelt_out(name: str) -> str:
    return re.sub("^num ", "number of ", name.replace("_", " "))


def _with_entry(text: str, table: str, entry: str) -> str:
    """Insert an entry into its table, or into a new table after the event's, or after all."""
    event = ".".join(table.split(".")[:2])
    for name, head in (
        (rf"{table}\]", ""),
        (rf"{event}\b", f"[{table}]\n"),
        (r"events\.", f"\n[{table}]\n"),
    ):
        *_, last = [None, *re.finditer(rf"^\[{name}.*\n(?:[^[\n].*\n)*", text, re.MULTILINE)]
        if last is not None:
            return text[: last.end()] + head + entry + text[last.end() :]
    raise ValueError("the catalog has no words for events")


def main(arguments: list[str]) -> int:
    """Write the documents into a folder. Returns the exit code."""
    if len(arguments) not in {1, 2} or not all(Path(folder).is_dir() for folder in arguments):
        sys.stderr.write("usage: python -m nvtrace.reference DOCS [CATALOGS]\n")
        return 2
    for folder in arguments[1:]:
        for language in LANGUAGES:
            path = Path(folder, f"{language}.toml")
            if added := add_missing_words(path):
                names = "".join(f"    {name}\n" for name in added)
                sys.stdout.write(f"{path}: new words, to be said better, in {language}:\n{names}")
    for name, content in documents().items():
        path = Path(arguments[0]) / name
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as file:
            file.write(content.encode())
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
