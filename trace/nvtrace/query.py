"""Query: what somebody asks for of a trace, as a condition or as a selection.

A condition is a small language, that of conditional breakpoints, for `nvtrace at --until`:

    free_blocks < 10
    event == PREEMPT and seq_id == 3
    3 in waiting or not (kv_usage <= 0.5)

    condition   = clause {"or" clause}
    clause      = factor {"and" factor}
    factor      = "not" factor | "(" condition ")" | comparison
    comparison  = NAME ("==" | "!=" | "<" | "<=" | ">" | ">=") VALUE  |  VALUE "in" NAME

Knows how a condition is spelt, and looks names up in a state and in events. Does not know where it
is asked (`at.py`). Nothing is ever evaluated as Python. A selection is a range of steps, requests,
and a pattern for the names of events.

A NAME is a field of the state (STATE_FIELDS) or of an event; `event` is the event's own name. A
VALUE is a number, true, false, null, or a word, in quotes or not. Names of events are all asked of
one and the same event. What an event does not have is never equal, unequal, less or more.
"""

from __future__ import annotations

import difflib
import fnmatch
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from nvtrace import events as ev
from nvtrace.envelope import Unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nvtrace.replay import State
    from nvtrace.summary import StepSummary

    Value = int | float | str | bool | None
    Test = Callable[["_Scene"], bool]

STATE_FIELDS: dict[str, Callable[[State], Any]] = {
    "engine_step": lambda state: state.engine_step,
    "waiting": lambda state: state.waiting,
    "running": lambda state: state.running,
    "waiting_len": lambda state: len(state.waiting),
    "running_len": lambda state: len(state.running),
    "num_blocks": lambda state: state.num_blocks,
    "free_blocks": lambda state: len(state.free_blocks),
    "used_blocks": lambda state: state.num_blocks - len(state.free_blocks),
    "cached_blocks": lambda state: len(state.cached_blocks),
    "shared_blocks": lambda state: sum(count > 1 for count in state.ref_counts),
    "kv_usage": lambda state: 1 - len(state.free_blocks) / max(state.num_blocks, 1),
}
_EVENT_FIELDS = {"event"} | {
    field.name for cls in ev.EVENT_TYPES.values() for field in msgspec.structs.fields(cls)
}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONSTANTS: dict[str, Value] = {"true": True, "false": False, "null": None}
_KEYWORDS = {"and", "or", "not", "in"}
_TOKEN = re.compile(
    r"""\s*(?: (?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
             | (?P<quoted>"[^"]*"|'[^']*')
             | (?P<word>\w+)
             | (?P<sign>==|!=|<=|>=|[<>()]))""",
    re.VERBOSE,
)
_MISSING = object()
_MOST_PARENTHESES = 50


class QueryError(ValueError):
    """A condition that is none. The message shows where."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that can be asked.

    Attributes:
        text: as it was written.
        is_about_events: does it name anything that only an event has?
    """

    text: str
    is_about_events: bool
    _test: Test

    def holds(self, state: State, events: Sequence[ev.Event]) -> bool:
        """Does it hold for `state`, and for any one of `events` if it is about events?"""
        if not self.is_about_events:
            return self._test(_Scene(state, None))
        return any(self._test(_Scene(state, event)) for event in events)


def parse(text: str) -> Condition:
    """Read a condition.

    Raises:
        QueryError: it is not one; the message points at the column.
    """
    return _Parser(text).parse()


@dataclass(frozen=True, slots=True)
class _Scene:
    """What names are looked up in."""

    state: State
    event: ev.Event | None

    def look_up(self, name: str) -> Any:  # noqa: ANN401 - whatever the field holds
        if name == "event" and self.event is not None:
            return ev.tag_of(self.event)
        if name in STATE_FIELDS:
            return STATE_FIELDS[name](self.state)
        return getattr(self.event, name, _MISSING)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # number, quoted, word, sign, end
    text: str
    column: int


class _Parser:
    """Recursive descent, one method for each line of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._next = 0
        self._depth = 0
        self._is_about_events = False

    def parse(self) -> Condition:
        test = self._condition()
        if self._token.kind != "end":
            raise self._error("expected and, or, or the end", self._token)
        return Condition(self._text, self._is_about_events, test)

    def _condition(self) -> Test:
        tests = [self._clause()]
        while self._accept("or"):
            tests.append(self._clause())
        return lambda scene: any(test(scene) for test in tests)

    def _clause(self) -> Test:
        tests = [self._factor()]
        while self._accept("and"):
            tests.append(self._factor())
        return lambda scene: all(test(scene) for test in tests)

    def _factor(self) -> Test:
        self._depth += 1
        if self._depth > _MOST_PARENTHESES:
            raise self._error(f"nested more than {_MOST_PARENTHESES} deep", self._token)
        if self._accept("not"):
            inner = self._factor()
            test: Test = lambda scene: not inner(scene)  # noqa: E731 - as its neighbours return it
        elif self._accept("("):
            test = self._condition()
            if not self._accept(")"):
                raise self._error("expected )", self._token)
        else:
            test = self._comparison()
        self._depth -= 1
        return test

    def _comparison(self) -> Test:
        first = self._take()
        if self._accept("in"):
            value, name = self._value(first), self._name(self._take())
            return lambda scene: _contains(scene.look_up(name), value)
        name = self._name(first)
        sign = self._take()
        if sign.text not in _COMPARISONS:
            raise self._error("expected ==, !=, <, <=, >, >= or in", sign)
        word = self._take()
        value = self._value(word)
        self._check_value(name, value, word)
        compare = _COMPARISONS[sign.text]
        return lambda scene: _compares(compare, scene.look_up(name), value)

    # -- words -----------------------------------------------------------------------------------

    def _name(self, token: _Token) -> str:
        if token.kind != "word" or token.text in _KEYWORDS:
            raise self._error("expected a name, such as free_blocks or event", token)
        name = token.text
        if name not in STATE_FIELDS and name not in _EVENT_FIELDS:
            raise self._error(f"no state or event has {name}{_hint(name, _ALL_NAMES)}", token)
        self._is_about_events |= name not in STATE_FIELDS
        return name

    def _value(self, token: _Token) -> Value:
        match token.kind:
            case "number":
                is_whole = token.text.lstrip("-").isdecimal()
                return int(token.text) if is_whole else float(token.text)
            case "quoted":
                return token.text[1:-1]
            case "word" if token.text not in _KEYWORDS:
                return _CONSTANTS.get(token.text, token.text)
        raise self._error("expected a number or a word", token)

    def _check_value(self, name: str, value: Value, token: _Token) -> None:
        """Refuse what could never be: it is a slip of the pen."""
        if name == "event" and value not in ev.EVENT_TYPES:
            hint = _hint(token.text.upper(), list(ev.EVENT_TYPES))
            raise self._error(f"there is no event {token.text}{hint}", token)
        if name in {"waiting", "running"}:
            raise self._error(f"{name} is a list: ask {token.text} in {name}", token)
        if name in STATE_FIELDS and not isinstance(value, int | float):
            raise self._error(f"{name} is a number, and {token.text} is not", token)

    # -- tokens ----------------------------------------------------------------------------------

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._token
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _accept(self, text: str) -> bool:
        is_it = self._token.text == text and self._token.kind in {"word", "sign"}
        self._next += is_it
        return is_it

    def _split(self) -> list[_Token]:
        tokens, place, end = [], 0, len(self._text.rstrip())
        while place < end:
            match = _TOKEN.match(self._text, place)
            if match is None or match.lastgroup is None:
                column = end - len(self._text[place:end].lstrip())
                raise self._error("this means nothing here", _Token("", self._text[column], column))
            tokens.append(
                _Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup))
            )
            place = match.end()
        return [*tokens, _Token("end", "", end)]

    def _error(self, message: str, token: _Token) -> QueryError:
        found = f", found {token.text}" if token.text and message.startswith("expected") else ""
        return QueryError(f"{self._text!r}, column {token.column + 1}: {message}{found}")


_ALL_NAMES = sorted({*STATE_FIELDS, *_EVENT_FIELDS})


def _hint(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _compares(compare: Callable[[Any, Any], bool], held: object, value: Value) -> bool:
    if held is _MISSING:
        return False
    try:
        return compare(held, value)
    except TypeError:  # a word and a number have no order
        return False


def _contains(held: object, value: Value) -> bool:
    return isinstance(held, list) and any(
        value in item if isinstance(item, list | tuple) else item == value for item in held
    )


# -- selection -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """Which steps, requests and events of a trace are asked for.

    Attributes:
        first_step, last_step: both included; None for no bound.
        seq_ids: these requests only; None for all.
        event_glob: events whose name matches, in capitals; None for all.
    """

    first_step: int | None = None
    last_step: int | None = None
    seq_ids: frozenset[int] | None = None
    event_glob: str | None = None

    @property
    def is_everything(self) -> bool:
        """Is nothing left out?"""
        return self == Selection()

    @property
    def has_bounds(self) -> bool:
        """Is it about a range of steps?"""
        return self.first_step is not None or self.last_step is not None

    def has_step(self, index: int | None) -> bool:
        """Is this engine step wanted? What happens outside a step is wanted if all steps are."""
        if index is None:
            return not self.has_bounds
        return (self.first_step or 0) <= index and (
            self.last_step is None or index <= self.last_step
        )

    def has_name(self, tag: str) -> bool:
        """Is an event of this name wanted?"""
        return self.event_glob is None or fnmatch.fnmatchcase(tag, self.event_glob)

    def picks_event(self, event: ev.Event | Unknown) -> bool:
        """Is this event wanted?"""
        if isinstance(event, Unknown):
            step = event.fields.get("step")
            in_steps = self.has_step(step if isinstance(step, int) else None)
            return in_steps and self.seq_ids is None and self.has_name(event.event)
        return (
            self.has_step(event.step)
            and self.has_name(ev.tag_of(event))
            and (self.seq_ids is None or bool(self.seq_ids & requests_of(event)))
        )

    def picks_step(self, step: StepSummary) -> bool:
        """Does this step's row belong into the table?"""
        if not self.has_step(step.index):
            return False
        if self.event_glob is not None and not fnmatch.filter(step.tags, self.event_glob):
            return False
        return self.seq_ids is None or bool(self.seq_ids & step.concerned)


def requests_of(event: ev.Event) -> set[int]:
    """The requests that an event names."""
    seq_ids: set[int] = set()
    for name in ("seq_id", "for_seq_id"):
        value = getattr(event, name, None)
        if value is not None:
            seq_ids.add(value)
    for name in ("seq_ids", "finished"):
        seq_ids.update(getattr(event, name, ()))
    return seq_ids
