"""What a key does while a trace is browsed: view + key -> view, and perhaps a request.

A view is the state of the browser without the trace. A request needs the trace, for example to find
the next step or to search for a condition; `browse.py` carries it out. Nothing here reads, waits or
draws, so every key can be tested without a terminal.
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
    """The line that the user is typing: a step number, or a condition."""

    kind: Literal["step", "search"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """The state of the browser.

    Attributes:
        step, point: the moment that is shown.
        page: what is shown: the step among its neighbours, its state, its events, or the keys.
        scroll: lines of the page above the screen's top.
        is_playing: does it move to the next step by itself?
        rate: steps a second while playing.
        prompt: the line that is being typed; None if there is none.
        condition: the last condition that was searched for.
        message: shown until the next key.
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
    """Move by a number of steps; negative is backwards."""

    by: int


@dataclass(frozen=True, slots=True)
class Jump:
    """Go to the step of this number or the nearest one; None is the last step."""

    step: int | None


@dataclass(frozen=True, slots=True)
class Seek:
    """Go to the next or previous moment at which a condition holds; None means any marker."""

    condition: Condition | None
    is_backwards: bool = False


@dataclass(frozen=True, slots=True)
class Quit:
    """Quit."""


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
    """Handle a key.

    Args:
        view: the current one.
        key: its name, by `nvtrace_cli.keys`.

    Returns:
        The new view, and a request to carry out before it is shown.
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
    """While playing: move on by the number of steps that belong to one frame."""
    return Move(max(view.rate // frames_per_second, 1))


def _change(view: View, key: str) -> View:
    """Keys that do not need the trace."""
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
    """Handle a key while a line is typed."""
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
    """Carry out the typed line; an empty one repeats the last search."""
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
