"""What a key does while a trace is browsed: view + key -> view, and perhaps a wish.

A view is all that is seen beside the trace itself. A wish is what only somebody who has the trace
can do: find the next step, look for a condition. Nothing here reads, waits or draws, so that every
key is tested without a terminal.

Knows the keys' meanings. Does not know traces (`reel.py`), bytes (`keys.py`) or frames
(`views/browser.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from nvtrace.query import QueryError, parse

if TYPE_CHECKING:
    from nvtrace.at import Point
    from nvtrace.query import Condition

Page = Literal["steps", "state", "events", "help"]
SLOWEST, FASTEST = 1, 256  # steps a second
_FIRST_RATE = 4
_LONG_MOVE = 10  # steps, or lines
_MOST_TYPED = 500  # characters


@dataclass(frozen=True, slots=True)
class Message:
    """A sentence of the catalog: `catalog.ui(f"browse_{key}", text=text)`."""

    key: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line that is being typed: the number of a step, or a condition."""

    kind: Literal["step", "search"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """What is seen.

    Attributes:
        step, point: the moment.
        page: the step among others, its whole state, all its events, or the keys.
        scroll: lines of the page above the screen's top.
        is_playing: do steps go by on their own?
        rate: steps a second, while they do.
        prompt: what is being typed; None if nothing is.
        condition: what was searched for last.
        message: what there is to say; the next key wipes it away.
    """

    step: int
    point: Point = "end"
    page: Page = "steps"
    scroll: int = 0
    is_playing: bool = False
    rate: int = _FIRST_RATE
    prompt: Prompt | None = None
    condition: Condition | None = None
    message: Message | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """To a step so many further on, or before."""

    by: int


@dataclass(frozen=True, slots=True)
class Jump:
    """To the step of this number, or near it; None is the last."""

    step: int | None


@dataclass(frozen=True, slots=True)
class Seek:
    """To the next moment, or the one before, where a condition holds; None is any marker."""

    condition: Condition | None
    is_backwards: bool = False


@dataclass(frozen=True, slots=True)
class Quit:
    """Away."""


Wish = Move | Jump | Seek | Quit

_WISHES: dict[str, Wish] = {
    "q": Quit(),
    "n": Seek(None),
    "p": Seek(None, is_backwards=True),
    "right": Move(1),
    "l": Move(1),
    "left": Move(-1),
    "h": Move(-1),
    "home": Jump(1),
    "0": Jump(1),
    "end": Jump(None),
    "G": Jump(None),
}
_MOVES = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": _LONG_MOVE, "pageup": -_LONG_MOVE}
_PAGES: dict[str, Page] = {"s": "state", "e": "events", "?": "help"}


def press(view: View, key: str) -> tuple[View, Wish | None]:
    """What a key does.

    Args:
        view: what is seen.
        key: its name, by `nvtrace_cli.keys`.

    Returns:
        What is seen then, and what should be done before it is shown.
    """
    view = replace(view, message=None)
    if view.prompt is not None:
        return _type(view, view.prompt, key)
    if key in _WISHES:
        return replace(view, is_playing=False), _WISHES[key]
    if key in _MOVES and view.page == "steps":
        return replace(view, is_playing=False), Move(_MOVES[key])
    if key in _MOVES:
        return replace(view, scroll=max(view.scroll + _MOVES[key], 0)), None
    if key in {"[", "]"}:
        return _search_again(view, is_backwards=key == "[")
    return _change(view, key), None


def tick(view: View, frames_per_second: int) -> Wish:
    """A frame's time has passed while steps go by: on, by as many as belong into a frame."""
    return Move(max(view.rate // frames_per_second, 1))


def _change(view: View, key: str) -> View:
    """What keys do that need nothing of the trace."""
    match key:
        case "s" | "e" | "?":
            page = "steps" if view.page == _PAGES[key] else _PAGES[key]
            view = replace(view, page=page, scroll=0)
        case "escape":
            view = replace(view, page="steps", scroll=0, is_playing=False)
        case " ":
            view = replace(view, is_playing=not view.is_playing)
        case "+" | "=":
            view = replace(view, rate=min(view.rate * 2, FASTEST))
        case "-":
            view = replace(view, rate=max(view.rate // 2, SLOWEST))
        case "tab" | "enter":
            view = replace(view, point="schedule" if view.point == "end" else "end")
        case "g":
            view = replace(view, prompt=Prompt("step"), is_playing=False)
        case "/":
            view = replace(view, prompt=Prompt("search"), is_playing=False)
    return view


def _search_again(view: View, *, is_backwards: bool) -> tuple[View, Wish | None]:
    view = replace(view, is_playing=False)
    if view.condition is None:
        return replace(view, message=Message("no_search")), None
    return view, Seek(view.condition, is_backwards)


def _type(view: View, prompt: Prompt, key: str) -> tuple[View, Wish | None]:
    """A line is being typed."""
    if key == "enter":
        return _enter(replace(view, prompt=None), prompt)
    text: str | None = prompt.text
    if key == "escape" or (key == "backspace" and not prompt.text):
        text = None
    elif key == "backspace":
        text = prompt.text[:-1]
    elif key == "clear":
        text = ""
    elif len(key) == 1 and (prompt.kind == "search" or key.isdecimal()):
        text = (prompt.text + key)[:_MOST_TYPED]
    return replace(view, prompt=None if text is None else replace(prompt, text=text)), None


def _enter(view: View, prompt: Prompt) -> tuple[View, Wish | None]:
    """The line is done; an empty one searches on for what was searched for last."""
    text = prompt.text.strip()
    if prompt.kind == "step":
        return view, Jump(int(text)) if text else None
    if not text:
        return _search_again(view, is_backwards=False)
    try:
        condition = parse(text)
    except QueryError as error:
        return replace(view, message=Message("error", str(error))), None
    return replace(view, condition=condition), Seek(condition)
