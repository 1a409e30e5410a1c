"""One example of every event, and a trace made of them: what reading is tried on.

Knows the structs alone; no engine runs for it, so its story makes no sense.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from nvtrace import events as ev
from nvtrace.envelope import Footer, Header, encode_into


def example_of(cls: type[ev.Event], event_id: int = 1) -> ev.Event:
    """Some value of an event: zeros, empty texts and first choices."""
    fields = {field.name: _plain(field.type) for field in msgspec.structs.fields(cls)}
    named = {"event": ev.tag_of(cls), "event_id": event_id}
    return msgspec.convert(fields | named, cls)


def _plain(kind: Any) -> object:  # noqa: ANN401 - a type, as annotations have it
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return args[0]
    if origin is UnionType:
        return _plain(args[0])
    if origin is Annotated:  # a number within bounds: the least one
        return args[0](args[1].ge)
    if origin is tuple:
        return [_plain(arg) for arg in args]
    return origin() if origin is not None else kind()


def line_of(record: Header | Footer | ev.Event) -> bytes:
    """The line that a record becomes."""
    buffer = bytearray()
    encode_into(record, buffer)
    return bytes(buffer)


def changed(line: bytes, **changes: object) -> bytes:
    """The line with other fields."""
    fields = msgspec.json.decode(line, type=dict[str, Any]) | changes
    return msgspec.json.encode(fields) + b"\n"


def example_trace() -> list[bytes]:
    """A header, one example of every event, and a footer."""
    header = Header(
        run_id="0123",
        rank=0,
        world_size=1,
        created="2026-01-01T00:00:00+00:00",
        clock={"unit": "ns", "anchor_unix_ns": 10**18},
        engine={"name": "nanovllm"},
        environment={"python": "3.11"},
        model={"num_hidden_layers": 2},
        config={"max_num_seqs": 4},
    )
    events = [example_of(cls, number) for number, cls in enumerate(ev.EVENT_TYPES.values(), 1)]
    footer = Footer(event_id=len(events) + 1, num_events=len(events), exit="ok")
    return [line_of(header), *map(line_of, events), line_of(footer)]
