"""A trace's lines: header first, events, footer last; and how they become bytes and come back.

Knows the version rule. Does not know files (`reader.py`, `pipeline.py`) or what events mean.

    {"event":"TRACE_HEADER","schema":"nvtrace","version":[1,0], ...}
    {"event":"ENGINE_INIT","event_id":1,"ts_ns":0, ...}
    ...
    {"event":"TRACE_FOOTER","event_id":9001,"num_events":9000,"exit":"ok"}

A newer minor version may have unknown fields (ignored) and unknown events (`Unknown`). A newer
major version is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from nvtrace.events import EVENT_TYPES, AnyEvent, Count, Event, codes

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEMA = "nvtrace"
VERSION = (1, 0)


_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What readers count with of a header's `model`. Here and below, None is unknown."""

    architecture: str | None = None
    vocab_size: Count | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_hidden_layers: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count | None = None
    tie_word_embeddings: bool | None = None
    eos_token_ids: list[int] | None = None

    @property
    def num_weights(self) -> tuple[int, int] | None:
        """How many tensors a Qwen3 of this shape has, and how many numbers they hold together.

        A tied head is counted once. None if the shape is not known.
        """
        match self:
            case ModelFacts(
                hidden_size=int(hidden),
                head_dim=int(head_dim),
                num_attention_heads=int(num_heads),
                num_key_value_heads=int(num_kv_heads),
                intermediate_size=int(intermediate_size),
                num_hidden_layers=int(num_layers),
                vocab_size=int(vocab_size),
                tie_word_embeddings=bool(is_tied),
            ):
                num_outer = 1 if is_tied else 2  # embedding, head
                # q, k, v, o; q_norm, k_norm
                attention = 2 * hidden * head_dim * (num_heads + num_kv_heads) + 2 * head_dim
                mlp = 3 * hidden * intermediate_size  # gate, up, down
                layers = num_layers * (attention + mlp + 2 * hidden)  # and two norms
                num_numbers = layers + hidden + num_outer * vocab_size * hidden
                return num_outer + 1 + 11 * num_layers, num_numbers
        return None


class ConfigFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The same of its `config`."""

    model: str | None = None
    max_num_batched_tokens: Count | None = None
    max_num_seqs: Count | None = None
    max_model_len: Count | None = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    tensor_parallel_size: Count | None = None
    kvcache_block_size: Count | None = None
    num_kvcache_blocks: Count | None = None
    device: str | None = None
    dtype: str | None = None
    policy: str | None = None


class ClockFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The same of its `clock`."""

    anchor_unix_ns: _Number | None = None
    num_untimed_steps: _Number | None = None


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The same of its `engine`."""

    name: str | None = None
    version: str | None = None


class EnvironmentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The same of its `environment`."""

    python: str | None = None
    torch: str | None = None
    platform: str | None = None
    machine: str | None = None
    num_cpus: Count | None = None
    gpu: str | None = None


class HeaderFacts(msgspec.Struct, frozen=True):
    """What readers count with and show of a header's open dicts, each of its type."""

    model: ModelFacts
    config: ConfigFacts
    clock: ClockFacts
    engine: EngineFacts
    environment: EnvironmentFacts


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="TRACE_HEADER"):
    """What ran, where, and with which settings.

    Attributes:
        schema: always "nvtrace".
        version: (major, minor) of the format.
        run_id: tells traces of different runs apart.
        rank: the process that wrote this file, among `world_size`.
        created: wall-clock time of ts_ns = 0, ISO 8601 with zone.
        clock: the clock behind ts_ns, its unit, and ts_ns = 0 in Unix nanoseconds.
        engine: name and version of the engine.
        environment: Python, torch, platform.
        model: the checkpoint's shape.
        config: the engine's settings, all "auto"s resolved.
        content: what of prompts and answers is in the trace: "text" means tokens and text.
        mode: "real" for an engine that ran.
        is_filtered: processors stood before the file, and may have dropped events: gaps in
            `event_id` are meant.
    """

    schema: str = SCHEMA
    version: tuple[int, int] = VERSION
    run_id: str
    rank: int
    world_size: int
    created: str
    clock: dict[str, Any]
    engine: dict[str, Any]
    environment: dict[str, Any]
    model: dict[str, Any]
    config: dict[str, Any]
    content: str = "text"
    mode: str = "real"
    is_filtered: bool = False

    @property
    def facts(self) -> HeaderFacts:
        """What of its dicts is counted with.

        Raises:
            msgspec.ValidationError: a value is of another type, or is none that a run can have.
        """
        return msgspec.convert(self, HeaderFacts, from_attributes=True)


class Footer(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="TRACE_FOOTER"):
    """The trace was closed in good order, after `num_events` events.

    `num_dropped` of them are not in it, since a processor dropped them. `error_type` is the
    exception that ended the recording, if one did.
    """

    event_id: int
    num_events: int
    num_dropped: int = 0
    exit: Annotated[str, codes("ok", "error", "interrupted")]
    error_type: str | None = None


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a name this version does not know, kept as it came."""

    event: str
    fields: dict[str, Any]


Record = Header | Footer | AnyEvent | Unknown

_TAGS = {*EVENT_TYPES, "TRACE_HEADER", "TRACE_FOOTER"}
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Header | Footer | AnyEvent)
_event_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Footer | AnyEvent)
_packer = msgspec.msgpack.Encoder()  # has whole numbers of 64 bits, as other readers do
_mapping_decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class NewerTraceError(ValueError):
    """The trace was written by a version whose format this one cannot read."""


def encode_into(record: Header | Footer | Event, buffer: bytearray) -> None:
    """Append one line, newline included, to `buffer`; nothing of it if that fails."""
    start = len(buffer)
    try:
        try:
            _encoder.encode_into(record, buffer, -1)
        except UnicodeEncodeError:  # a lone surrogate: a file name that is no UTF-8, say
            facts = msgspec.to_builtins(record)
            text = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
            buffer[start:] = text.encode("utf-8", "replace")
        buffer += b"\n"
    except BaseException:
        del buffer[start:]
        raise


def can_encode(value: object) -> bool:
    """Can `value` be a part of a line?"""
    try:
        _encoder.encode(value)
    except UnicodeEncodeError:  # as above
        return True
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def decode(line: bytes | str) -> Record:
    """One line -> one record.

    Raises:
        msgspec.MsgspecError: the line is not a record (`msgspec.ValidationError` and
            `msgspec.DecodeError` are its kinds).
        NewerTraceError: it is the header of a newer major version.
    """
    try:
        record: Record = _decoder.decode(line)
        if isinstance(record, Header):
            _ = record.facts  # before anybody counts with them
            _check_number_sizes(record)
    except msgspec.ValidationError:
        unknown = _decode_unknown(line)
        if unknown is None:
            raise
        record = unknown
    return record


def decode_events(lines: Iterable[bytes]) -> list[Footer | AnyEvent]:
    """Many lines -> as many events, quickly. Anything else is an error here, a footer is not.

    Raises:
        msgspec.MsgspecError: a line is a header, an event of a newer version, blank, or no record.
    """
    return [*map(_event_decoder.decode, lines)]


def decode_strictly(line: bytes | str) -> Record:
    """As `decode`, and no whole number has more than 64 bits, as other readers want it.

    This takes half as long again as decoding. Elsewhere such a number in an event is an
    OverflowError to whoever counts with it.
    """
    record = decode(line)
    _check_number_sizes(record)
    return record


def _check_number_sizes(record: Record) -> None:
    try:
        _packer.encode(record)
    except OverflowError as error:
        raise msgspec.ValidationError("a whole number has more than 64 bits") from error


def _decode_unknown(line: bytes | str) -> Unknown | None:
    fields = _mapping_decoder.decode(line)
    tag = fields.get("event")
    if tag == "TRACE_HEADER":
        check_version(fields)
    if not isinstance(tag, str) or tag in _TAGS:
        return None
    return Unknown(event=tag, fields=fields)


def check_version(header: dict[str, Any]) -> None:
    """Refuse a newer major version, before anything else of the header is judged."""
    match header.get("version"):
        case [int(major), int(minor)] if major > VERSION[0]:
            raise NewerTraceError(
                f"this trace has format version {major}.{minor}, and this nvtrace reads up to "
                f"{VERSION[0]}.x: install a newer nanovllm to read it"
            )
