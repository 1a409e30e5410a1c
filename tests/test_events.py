"""The event structs: the rules of the format, and the article's words."""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvtrace import events as ev
from nvtrace.envelope import Footer, Header, Unknown, decode, encode_into
from support.every import every
from support.examples import changed, example_of, line_of

if TYPE_CHECKING:
    from collections.abc import Callable

EVENTS = list(ev.EVENT_TYPES.values())
FEW = settings().max_examples // 10  # each of many kinds has its own round trip
ENVELOPE = ("event_id", "ts_ns", "step", "phase")

# The article's one-line forms: what stats={...} holds, in its order.
ARTICLE_STATS = {
    "GENERATE_START": ("n_prompts",),
    "REQUEST_ENQUEUE": ("prompt_len", "seq_id", "max_tokens"),
    "SCHEDULE_PREFILL": ("engine_step", "scheduled", "waiting_len", "running_len"),
    "SCHEDULE_DECODE": (
        *("decode_step_index", "engine_step", "scheduled", "running_len", "waiting_len"),
    ),
    "STATE_TRANSITION": ("seq_id", "token_id", "num_completion_tokens", "max_tokens"),
    "GENERATE_FINISH": ("total_steps", "prefill_steps", "decode_steps", "n_outputs"),
    "ENGINE_INIT": ("max_num_batched_tokens", "max_num_seqs", "model", "tp_size"),
    "TP_RUNTIME_INIT": ("device", "rank", "world_size"),
    "MODEL_WEIGHTS_LOADED": ("num_files", "num_keys"),
    "PREPARE_PREFILL_TENSORS": (
        *("flat_tokens", "n_seqs", "max_seqlen_q", "max_seqlen_k", "has_block_tables"),
    ),
    "PREPARE_DECODE_TENSORS": (
        *("batch_size", "context_lens_shape", "slot_mapping_shape", "block_tables_shape"),
    ),
}


# -- the structs -----------------------------------------------------------------------------------


def test_every_struct_is_in_the_union() -> None:
    structs = {*ev.Event.__subclasses__(), *ev.BlocksOfSeqs.__subclasses__()}
    assert {*EVENTS} == structs - {ev.BlocksOfSeqs}


@every("cls", EVENTS)
def test_a_tag_is_its_structs_name_in_capitals(cls: type[ev.Event]) -> None:
    assert ev.tag_of(cls) == re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()


@every("cls", EVENTS)
def test_events_are_frozen_and_made_by_names_and_explained(cls: type[ev.Event]) -> None:
    assert cls.__struct_config__.frozen
    assert cls.__struct_config__.tag_field == "event"
    assert not cls.__struct_config__.array_like
    make: Callable[..., ev.Event] = cls
    with pytest.raises(TypeError, match="positional"):
        make(1, 0, None, "init", "an own field")
    assert cls.__doc__
    assert cls.__doc__ != ev.Event.__doc__


@every("cls", EVENTS)
def test_the_envelope_comes_first(cls: type[ev.Event]) -> None:
    required = [field.name for field in msgspec.structs.fields(cls)]
    assert {*ENVELOPE} <= {*required}
    names = list(msgspec.json.decode(line_of(example_of(cls)), type=dict[str, Any]))
    assert names[:5] == ["event", *ENVELOPE]


@every("cls", EVENTS)
def test_reasons_are_codes_of_an_open_list(cls: type[ev.Event]) -> None:
    for field in fields_of(cls):
        if field.name in ("reason", "rule", "batch_phase", "previous", "status", "phase"):
            known = ev.codes_of(field.type)
            assert known
            assert all(re.fullmatch(r"[A-Za-z_]+", code) for code in known)
            other = decode(changed(line_of(example_of(cls)), **{field.name: "my_new_word"}))
            assert isinstance(other, cls)
            assert ev.unknown_codes(other) == {field.name: "my_new_word"}


@every("cls", EVENTS)
def test_times_and_sizes_are_whole_numbers(cls: type[ev.Event]) -> None:
    for name, kind in ev.field_types(cls).items():
        if name.endswith(("_ns", "_bytes", "_id", "_len")):
            assert {*(get_args(kind) or [kind])} <= {int, NoneType}


@every("cls", EVENTS)
def test_the_one_line_form_shows_fields_that_are_there(cls: type[ev.Event]) -> None:
    event = example_of(cls)
    for name in cls.log_fields:
        getattr(event, name)
    assert len({*cls.log_fields}) == len(cls.log_fields)


@every("tag, names", ARTICLE_STATS.items())
def test_the_one_line_form_shows_what_the_article_shows(tag: str, names: tuple[str, ...]) -> None:
    assert ev.EVENT_TYPES[tag].log_fields == names


def fields_of(cls: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(cls)


# -- lines -----------------------------------------------------------------------------------------


def values_of(kind: Any) -> st.SearchStrategy[Any]:  # noqa: ANN401 - a type, as annotations have it
    """Any value that a field of this type may have."""
    origin, args = get_origin(kind), get_args(kind)
    if known := ev.codes_of(kind):
        return st.sampled_from(known) | st.text(max_size=8)
    if origin in {UnionType, Annotated}:  # or a number within bounds
        least: Any = getattr(args[-1], "ge", None)
        of_args = [values_of(arg) for arg in args if isinstance(arg, type)]
        return st.one_of(of_args) if least is None else st.sampled_from((least, least + 1))
    if origin is list:
        return st.lists(values_of(args[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*(values_of(arg) for arg in args))
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), st.none() | st.integers(0, 9), max_size=3)
    return {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=8),
        bool: st.booleans(),
        NoneType: st.none(),
    }[kind]


def structs(cls: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    """Any value of a struct, built from its type hints."""
    return st.builds(cls, **{field.name: values_of(field.type) for field in fields_of(cls)})


@pytest.mark.parametrize("cls", [*EVENTS, Footer])
@settings(max_examples=FEW)
@given(data=st.data())
def test_any_record_comes_back_from_its_line(
    cls: type[msgspec.Struct], data: st.DataObject
) -> None:
    record = data.draw(structs(cls))
    assert isinstance(record, ev.Event | Footer)
    line = line_of(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line) == record


def test_a_line_is_added_to_what_the_buffer_holds() -> None:
    buffer = bytearray(b"before\n")
    encode_into(example_of(ev.StepEnd), buffer)
    assert bytes(buffer) == b"before\n" + line_of(example_of(ev.StepEnd))


@given(structs(Header))
def test_any_header_of_this_version_comes_back_from_its_line(header: Header) -> None:
    header = msgspec.structs.replace(header, schema="nvtrace", version=(1, 0))
    assert decode(line_of(header)) == header


@every("cls", EVENTS)
def test_a_newer_field_is_passed_over_and_an_unknown_name_is_kept_as_it_came(
    cls: type[ev.Event],
) -> None:
    event = example_of(cls)
    fields = msgspec.json.decode(line_of(event), type=dict[str, Any])
    newer = fields | {"a_newer_field": {"deep": [1, 2]}}
    assert decode(msgspec.json.encode(newer)) == event
    unknown = newer | {"event": "A_NEWER_EVENT"}
    assert decode(msgspec.json.encode(unknown)) == Unknown(event="A_NEWER_EVENT", fields=unknown)


@every("cls", EVENTS)
def test_a_field_with_a_default_may_be_missing_and_no_other(cls: type[ev.Event]) -> None:
    fields = msgspec.json.decode(line_of(example_of(cls)), type=dict[str, Any])
    for field in fields_of(cls):
        rest = {name: value for name, value in fields.items() if name != field.name}
        if field.required:
            with pytest.raises(msgspec.ValidationError, match=field.name):
                decode(msgspec.json.encode(rest))
        else:
            assert getattr(decode(msgspec.json.encode(rest)), field.name) == field.default
