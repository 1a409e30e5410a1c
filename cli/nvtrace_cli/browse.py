"""nvtrace replay --interactive: a trace on a terminal, step by step, forwards and back.

This module reads a key, changes the view, and draws the next frame. The meaning of keys is in
`browse_model.py`; the steps come from `nvtrace.step_cache`, frames from `views/browser.py`, and
keys from `terminal.py`.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nvtrace.at import StepPoint
from nvtrace.reader import UnreadableTraceError, open_trace, raw_lines
from nvtrace.snapshots import NoSuchStepError, SeekableTrace
from nvtrace.step_cache import StepCache
from nvtrace.unpack import is_packed
from nvtrace_cli.browse_model import Jump, Message, Move, Quit, Seek, View, press, tick
from nvtrace_cli.failures import UsageError, tidy_ends
from nvtrace_cli.options import say, warn
from nvtrace_cli.terminal import lent_terminal, refuse_unless_terminal
from nvtrace_cli.views.browser import Scene, Screen
from nvtrace_cli.views.reading import reading_bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.catalog import Catalog
    from nvtrace_cli.browse_model import Wish

_FRAMES_PER_SECOND = 16  # at most, while steps go by
_SECONDS_BETWEEN_LOOKS = 0.1  # at the keyboard, while a search goes on


class Keyboard(Protocol):
    """Where keys come from."""

    @property
    def size(self) -> tuple[int, int]:
        """(columns, rows) of the screen."""

    def read(self, timeout: float | None) -> list[str]:
        """The keys that were pressed before the timeout."""


class _StoppedError(Exception):
    """The user has stopped a search."""


def browse(file: str, catalog: Catalog, first_step: int | None) -> None:
    """Browse a trace until the user quits.

    Args:
        file: path of the trace.
        catalog: the words.
        first_step: where to begin; the trace's first step if None.

    Raises:
        UsageError: there is no terminal, or the trace has no steps.
        UnreadableTraceError, NewerTraceError, InconsistentTraceError: see `read_trace`.
    """
    if file == "-":
        raise UsageError("--interactive reads keys from standard input: give a file instead of -")
    refuse_unless_terminal()
    with tidy_ends(), _opened(Path(file)) as trace:
        try:
            cache = StepCache(trace)
        except NoSuchStepError as error:
            raise UsageError(f"{error}: there is nothing to browse") from error
        with lent_terminal() as terminal:
            screen = Screen(Path(file).name, catalog)
            Browser(cache, terminal, screen, cache.nearest(first_step or cache.first)).go()


class Browser:
    """Keys in, frames out.

    Args:
        cache: the trace.
        keyboard: where keys come from.
        screen: where frames go.
        step: where to begin.
    """

    def __init__(self, cache: StepCache, keyboard: Keyboard, screen: Screen, step: int) -> None:
        self.view = View(step)
        self._cache = cache
        self._keyboard = keyboard
        self._screen = screen
        self._next_look = 0.0

    def go(self) -> None:
        """Run until `q` is pressed or the terminal is closed."""
        with suppress(EOFError):
            while self._take_keys():
                pass

    def _take_keys(self) -> bool:
        """Draw a frame and handle the keys that follow. Returns whether to go on."""
        began = time.monotonic()
        self._draw()
        keys = self._keyboard.read(self._patience(time.monotonic() - began))
        for key in keys:
            self.view, wish = press(self.view, key)
            if isinstance(wish, Quit):
                return False
            self._fulfil(wish)
        if self.view.is_playing and not keys:
            self._fulfil(tick(self.view, _FRAMES_PER_SECOND))
        return True

    def _patience(self, spent: float) -> float | None:
        """Seconds to wait for a key: until the next step is due, or None for no limit."""
        if not self.view.is_playing:
            return None
        return max(1 / min(self.view.rate, _FRAMES_PER_SECOND) - spent, 0.0)

    def _draw(self) -> None:
        view, cache = self.view, self._cache
        columns, rows = self._keyboard.size
        look = cache.look(view.step, view.point)
        near = cache.around(view.step, rows, rows)
        scene = Scene(view, look, near, cache.first, cache.last)
        furthest = self._screen.draw(scene, columns, rows)
        self.view = replace(view, scroll=min(view.scroll, furthest))

    # -- requests of a key -----------------------------------------------------------------------

    def _fulfil(self, wish: Wish | None) -> None:
        view = self.view
        match wish:
            case Move(by=by):
                step = self._cache.beside(view.step, by)
                self._arrive(replace(view, is_playing=view.is_playing and step != view.step), step)
            case Jump(step=None):
                self._arrive(view, self._cache.last)
            case Jump(step=int(step)):
                self._arrive(view, self._cache.nearest(step))
            case Seek():
                self._seek(wish)

    def _arrive(self, view: View, step: int) -> None:
        scroll = view.scroll if step == view.step else 0
        self.view = replace(view, step=step, scroll=scroll)

    def _seek(self, seek: Seek) -> None:
        view = self.view
        self._next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        try:
            place = self._place(seek)
        except _StoppedError:
            self.view = replace(view, message=Message("stopped"))
            return
        if place is None:
            key = "no_marker" if seek.condition is None else "not_found"
            where = "before" if seek.is_backwards else "after"
            text = "" if seek.condition is None else seek.condition.text
            self.view = replace(view, message=Message(f"{key}_{where}", text))
            return
        self._arrive(replace(view, point=place.point), place.step)

    def _place(self, seek: Seek) -> StepPoint | None:
        """Search for the condition, forwards or backwards from the current moment."""
        view, back = self.view, seek.is_backwards
        if seek.condition is None:
            step = self._cache.marker(view.step, self._watch, is_backwards=back)
            return None if step is None else StepPoint(step, view.point)
        begin = view.step - 1 if back else view.step + 1
        return self._cache.find(seek.condition, begin, self._watch, is_backwards=back)

    def _watch(self, step: int) -> None:
        """Show how far a search is, and stop it if a key was pressed."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        if {"escape", "q", " "} & set(self._keyboard.read(0)):
            raise _StoppedError
        self._screen.say(Message("searching", f"{step:,}"), *self._keyboard.size)


@contextmanager
def _opened(path: Path) -> Iterator[SeekableTrace]:
    """The trace, opened for random access.

    A compressed trace is unpacked to a temporary file, and a pipe is copied to one. If the trace's
    folder is not writable, the index goes to a temporary folder too.
    """
    with tempfile.TemporaryDirectory(prefix="nvtrace-") as name:
        folder, called = Path(name), path.name
        is_copied = not path.is_file() or is_packed(path)
        if is_copied:
            path = _unpacked(path, folder)
        is_writable = os.access(path.parent, os.W_OK)
        with reading_bar(str(path)) as bar:
            index_folder = None if is_writable else folder
            trace = SeekableTrace(
                path, warn=warn, watch=bar, index_folder=index_folder, name=called
            )
        if trace.has_made_index and is_writable and not is_copied:
            say(f"{trace.index_path} was made, so that the next calls on {path} are fast")
        yield trace


def _unpacked(path: Path, folder: Path) -> Path:
    copy = folder / "trace"
    try:
        with open_trace(path) as packed, copy.open("wb") as file:
            file.writelines(line for _, line, _ in raw_lines(packed, path))
    except OSError as error:
        raise UnreadableTraceError(
            f"{path} cannot be unpacked into {folder} ({error.strerror}): unpack it yourself, or "
            "set TMPDIR to a folder with more space"
        ) from error
    return copy
