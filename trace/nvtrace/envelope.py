"""The lines of a trace: header first, then events, footer last; encoding, decoding, versions.

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
    """The values of a header's `model` that readers use. Here and below, None means unknown."""

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
        """The number of tensors and of parameters of such a Qwen3; a tied head counts once.

        None if a size is not known.
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
    """The same for its `config`."""

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
    """The same for its `clock`."""

    anchor_unix_ns: _Number | None = None
    num_untimed_steps: _Number | None = None


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The same for its `engine`."""

    name: str | None = None
    version: str | None = None


class EnvironmentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The same for its `environment`."""

    python: str | None = None
    torch: str | None = None
    platform: str | None = None
    machine: str | None = None
    num_cpus: Count | None = None
    gpu: str | None = None


class HeaderFacts(msgspec.Struct, frozen=True):
    """The values of a header's dicts that readers use, with their types."""

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
        run_id: identifies the run; all ranks of a run have the same.
        rank: of the process that wrote this file, among `world_size`.
        created: wall-clock time of ts_ns = 0, ISO 8601 with zone.
        clock: the clock of ts_ns, its unit, and ts_ns = 0 in Unix nanoseconds.
        engine: name and version of the engine.
        environment: Python, torch, platform.
        model: the model's config.
        config: the engine's settings, all "auto"s resolved.
        content: which content of prompts and answers is recorded: "text" means tokens and text.
        mode: "real" for an engine that ran.
        is_filtered: processors were used, and may have dropped events, so there may be gaps in
            `event_id`.
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
        """The values of its dicts that readers use.

        Raises:
            msgspec.ValidationError: a value has a wrong type, or is impossible.
        """
        return msgspec.convert(self, HeaderFacts, from_attributes=True)


class Footer(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="TRACE_FOOTER"):
    """The trace was closed properly, after `num_events` events.

    `num_dropped` of them are not in it, because a processor dropped them. `error_type` is the
    exception that ended the recording, if one did.
    """

    event_id: int
    num_events: int
    num_dropped: int = 0
    exit: Annotated[str, codes("ok", "error", "interrupted")]
    error_type: str | None = None


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """An event that this version does not know, with its fields."""

    event: str
    fields: dict[str, Any]


Record = Header | Footer | AnyEvent | Unknown

_TAGS = {*EVENT_TYPES, "TRACE_HEADER", "TRACE_FOOTER"}
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Header | Footer | AnyEvent)
_event_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Footer | AnyEvent)
_packer = msgspec.msgpack.Encoder()  # its whole numbers have 64 bits, as those of other readers
_mapping_decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class NewerTraceError(ValueError):
    """The trace was written by a version whose format this one cannot read."""


def encode_into(record: Header | Footer | Event, buffer: bytearray) -> None:
    """Append one line, with its newline, to `buffer`; if that fails, append nothing."""
    start = len(buffer)
    try:
        try:
            _encoder.encode_into(record, buffer, -1)
        except UnicodeEncodeError:  # a lone surrogate: a file name that is not UTF-8, say
            facts = msgspec.to_builtins(record)
            text = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
            buffer[start:] = text.encode("utf-8", "replace")
        buffer += b"\n"
    except BaseException:
        del buffer[start:]
        raise


def can_encode(value: object) -> bool:
    """Can `value` be encoded in a line?"""
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
            _ = record.facts  # check them here, before anything uses them
            _check_number_sizes(record)
    except msgspec.ValidationError:
        unknown = _decode_unknown(line)
        if unknown is None:
            raise
        record = unknown
    return record


def decode_events(lines: Iterable[bytes]) -> list[Footer | AnyEvent]:
    """Decode many lines, fast. They must be known events or a footer.

    Raises:
        msgspec.MsgspecError: a line is a header, an unknown event, blank, or not a record.
    """
    return [*map(_event_decoder.decode, lines)]


def decode_strictly(line: bytes | str) -> Record:
    """As `decode`, and check that no whole number has more than 64 bits, as other readers need it.

    The check adds half of the decoding time. Without it, such a number in an event leads to an
    OverflowError where it is used.
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
    """Raise NewerTraceError for a newer major version, before the header is checked otherwise."""
    match header.get("version"):
        case [int(major), int(minor)] if major > VERSION[0]:
            raise NewerTraceError(
                f"this trace has format version {major}.{minor}, and this nvtrace reads up to "
                f"{VERSION[0]}.x: install a newer nanovllm to read it"
            )
