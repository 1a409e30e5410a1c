"""nvtrace replay --interactive: keys, moments, frames; and a terminal that is given back."""

from __future__ import annotations

import gzip
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from nvtrace import events as ev
from nvtrace.at import StepPoint, matches, moments
from nvtrace.catalog import LANGUAGES, load_catalog
from nvtrace.query import parse
from nvtrace.snapshots import SeekableTrace
from nvtrace.step_cache import MARKERS, StepCache
from nvtrace_cli.browse import Browser
from nvtrace_cli.browse_model import (
    FASTEST,
    SLOWEST,
    Jump,
    Message,
    Move,
    Prompt,
    Quit,
    Seek,
    View,
    Wish,
    press,
    tick,
)
from nvtrace_cli.keys import KeyDecoder
from nvtrace_cli.views.browser import SMALLEST, Scene, Screen
from support.cli import call, command, environment, spawn
from support.cli_traces import HOSTILE_TEXT, crowded_run, write_trace
from support.recording import BUSY, BUSY_MIXED, Interruption, Recording
from support.snapshot import snapshot_of_fold

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nvtrace.at import Moment, Point
    from nvtrace.summary import StepSummary
    from nvtrace_cli.browse_model import Page

MARKED = parse(" or ".join(f"event == {tag}" for tag in MARKERS))
CROWDED_STEPS = 38


def ignore(_step: int) -> None:
    """Nobody waits for a search here."""


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"jk ", ["j", "k", " "]),
        (b"\x1b[A\x1b[B\x1bOC\x1b[D", ["up", "down", "right", "left"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["pageup", "pagedown", "home", "end"]),
        (b"\x1b[1;5C", ["right"]),  # with Ctrl
        (b"\r\n\t\x7f\x08", ["enter", "enter", "tab", "backspace", "backspace"]),
        ("é页".encode(), ["é", "页"]),
        (b"\x00\x01\xff\x1b[200~x\x1b[?1;2c", ["x"]),  # what no key has is passed over
    ],
)
def test_bytes_are_keys(data: bytes, keys: list[str]) -> None:
    assert KeyDecoder().feed(data) == keys


@given(st.lists(st.sampled_from(["\x1b[A", "\x1b[5~", "\x1bOD", "页", "j", "\r"]), max_size=9))
def test_a_keys_bytes_may_come_in_parts(pressed: list[str]) -> None:
    data = "".join(pressed).encode()
    whole, one_by_one = KeyDecoder(), KeyDecoder()
    expected = whole.feed(data)
    assert len(expected) == len(pressed)
    assert [key for byte in data for key in one_by_one.feed(bytes([byte]))] == expected


@given(st.binary(max_size=60))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    decoder = KeyDecoder()
    for key in decoder.feed(data) + decoder.flush():
        assert len(key) > 1 or key.isprintable()
    assert not decoder.is_waiting


def test_an_escape_with_nothing_after_it_is_a_key() -> None:
    decoder = KeyDecoder()
    assert decoder.feed(b"\x1b") == []
    assert decoder.is_waiting
    assert decoder.flush() == ["escape"]
    assert not decoder.is_waiting


# -- what a key does -------------------------------------------------------------------------------


def type_keys(view: View, *keys: str) -> tuple[View, Wish | None]:
    wish: Wish | None = None
    for key in keys:
        view, wish = press(view, key)
    return view, wish


@pytest.mark.parametrize(
    ("keys", "wish"),
    [
        ("l", Move(1)),
        ("h", Move(-1)),
        ("j", Move(1)),
        ("k", Move(-1)),
        ("0", Jump(1)),
        ("G", Jump(None)),
        ("n", Seek(None)),
        ("p", Seek(None, is_backwards=True)),
        ("q", Quit()),
        ("x", None),
    ],
)
def test_a_key_is_a_wish(keys: str, wish: Wish | None) -> None:
    view, wished = type_keys(View(7, is_playing=True, message=Message("stopped")), *keys)
    assert wished == wish
    assert view == replace(View(7), is_playing=wish is None)


def test_a_step_is_gone_to_by_its_number() -> None:
    view, wish = type_keys(View(1), "g", "1", "x", "4", "8", "backspace", "9")
    assert (view.prompt, wish) == (Prompt("step", "149"), None)
    assert press(view, "enter") == (View(1), Jump(149))
    assert press(view, "escape") == (View(1), None)
    assert type_keys(View(1), "g", "enter") == (View(1), None)
    assert type_keys(View(1), "g", "backspace") == (View(1), None)


def test_a_search_is_made_again_on_either_side() -> None:
    view, wish = type_keys(View(1), "/", *"free_blocks < 3", "enter")
    assert isinstance(wish, Seek)
    assert wish.condition is not None
    assert (wish.condition.text, wish.is_backwards) == ("free_blocks < 3", False)
    assert press(view, "]") == (view, wish)
    assert press(view, "[") == (view, replace(wish, is_backwards=True))
    assert type_keys(view, "/", "enter") == (view, wish)
    assert press(View(1), "]")[0].message == Message("no_search")


def test_a_search_for_nonsense_says_what_is_wrong_with_it() -> None:
    view, wish = type_keys(View(1), "/", *"free_bloks < 3", "enter")
    assert wish is None
    assert view.message is not None
    assert "did you mean free_blocks?" in view.message.text
    assert press(view, "x")[0].message is None


def test_pages_are_opened_scrolled_and_left() -> None:
    view, _ = type_keys(View(1), "s", "j", "down", "pagedown", "k")
    assert (view.page, view.scroll) == ("state", 11)
    assert press(view, "right")[1] == Move(1)
    assert press(view, "s") == (View(1), None)
    assert press(view, "escape") == (View(1), None)
    assert press(view, "?")[0] == View(1, page="help")
    assert type_keys(view, "pageup", "pageup")[0].scroll == 0


def test_steps_go_by_faster_and_slower_within_reason() -> None:
    view, _ = press(View(1), " ")
    assert view.is_playing
    assert not press(view, " ")[0].is_playing
    assert not press(view, "left")[0].is_playing
    assert type_keys(view, *"+" * 20)[0].rate == FASTEST
    assert type_keys(view, *"-" * 20)[0].rate == SLOWEST
    assert tick(replace(view, rate=FASTEST), 16) == Move(FASTEST // 16)
    assert tick(replace(view, rate=SLOWEST), 16) == Move(1)


def test_either_moment_of_a_step_is_seen() -> None:
    view, _ = press(View(1), "tab")
    assert view.point == "schedule"
    assert press(view, "tab")[0].point == "end"


# -- moments ---------------------------------------------------------------------------------------

RECORDINGS = {
    "busy": Recording(BUSY),
    "mixed": Recording(BUSY_MIXED),
    "broken off": Recording(BUSY, Interruption(5, "ran")),
}


@contextmanager
def cache_of(
    recording: Recording, folder: Path, spacing_bytes: int
) -> Iterator[tuple[StepCache, SeekableTrace]]:
    path = folder / f"{spacing_bytes}.jsonl"
    path.write_bytes(recording.data)
    film = SeekableTrace(path, warn=pytest.fail, spacing_bytes=spacing_bytes)
    yield StepCache(film), film


def told(moment: Moment) -> tuple[object, ...]:
    return moment.step, moment.point, snapshot_of_fold(moment.state), moment.inputs, moment.schedule


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("spacing_bytes", [1, 4000, 10**9])
def test_the_cache_shows_every_moment_as_the_trace_does(
    name: str, spacing_bytes: int, tmp_path: Path
) -> None:
    recording = RECORDINGS[name]
    places = [StepPoint(moment.step, moment.point) for moment in moments(recording.records)]
    with cache_of(recording, tmp_path, spacing_bytes) as (cache, film):
        for place in [*places, *places[::-1]]:
            look = cache.look(place.step, place.point)
            assert told(look.moment) == told(film.at(place.step, place.point))
            assert look.summary.index == place.step


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("spacing_bytes", [1, 10**9])
def test_the_cache_tells_each_event_once_and_in_order(
    name: str, spacing_bytes: int, tmp_path: Path
) -> None:
    recording = RECORDINGS[name]
    with cache_of(recording, tmp_path, spacing_bytes) as (cache, _):
        steps = cache.around(cache.first, 0, 1000)
        looks = [cache.look(step.index, "end") for step in steps]
    seen = [event for look in looks for event in look.events]
    events = [record for record in recording.records if isinstance(record, ev.Event)]
    last = max(place for place, event in enumerate(events) if event.step is not None)
    assert seen[: last + 1] == events[: last + 1]
    for look in looks[:-1]:
        assert look.num_done == len(look.events)


@pytest.mark.parametrize("spacing_bytes", [1, 4000, 10**9])
def test_steps_have_the_same_neighbours_wherever_the_trace_is_cut(
    spacing_bytes: int, tmp_path: Path
) -> None:
    with cache_of(RECORDINGS["busy"], tmp_path, 10**8) as (whole, _):
        every = whole.around(whole.first, 0, 1000)
    with cache_of(RECORDINGS["busy"], tmp_path, spacing_bytes) as (cache, _):
        assert (cache.first, cache.last) == (1, len(every))
        for place, step in enumerate(every):
            for before, after in ((0, 0), (3, 2), (1000, 0), (0, 1000)):
                expected = every[max(place - before, 0) : place + after + 1]
                found = cache.around(step.index, before, after)
                assert [shown(other) for other in found] == [shown(other) for other in expected]
            assert cache.beside(step.index, 4) == min(step.index + 4, cache.last)
            assert cache.beside(step.index, -4) == max(step.index - 4, 1)
        assert (cache.nearest(-5), cache.nearest(10**30)) == (1, cache.last)


def shown(step: StepSummary) -> StepSummary:
    """A summary, without what only the fold from the trace's start knows of a request."""
    return replace(step, start_ns=0)


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("spacing_bytes", [1, 10**9])
def test_markers_are_where_the_condition_for_them_holds(
    name: str, spacing_bytes: int, tmp_path: Path
) -> None:
    recording = RECORDINGS[name]
    marked = sorted({place.step for place in matches(moments(recording.records), MARKED)})
    assert len(marked) > 3
    with cache_of(recording, tmp_path, spacing_bytes) as (cache, _):
        for step in range(cache.first, cache.last + 1):
            after = next((other for other in marked if other > step), None)
            before = next((other for other in marked[::-1] if other < step), None)
            assert cache.marker(step, ignore, is_backwards=False) == after
            assert cache.marker(step, ignore, is_backwards=True) == before


# -- from key to frame -----------------------------------------------------------------------------


class Script:
    """A keyboard whose keys are pressed one after the other, and a screen that is looked at."""

    size = (80, 24)

    def __init__(self, *batches: list[str]) -> None:
        self.batches = [*batches]
        self.timeouts: list[float | None] = []
        self.scenes: list[Scene] = []
        self.view = View(1)  # in the end

    def read(self, timeout: float | None) -> list[str]:
        self.timeouts.append(timeout)
        if not self.batches:
            raise EOFError
        return self.batches.pop(0)

    def draw(self, scene: Scene, _columns: int, _rows: int) -> int:
        self.scenes.append(scene)
        return 3

    def say(self, message: Message, _columns: int, _rows: int) -> None:
        """A search goes on."""


def play(trace: Path, *batches: list[str]) -> Script:
    script = Script(*batches)
    browser = Browser(StepCache(SeekableTrace(trace)), script, cast("Screen", script), 1)
    browser.go()
    script.view = browser.view
    return script


def view_after(trace: Path, *keys: str) -> View:
    return play(trace, *([key] for key in keys)).view


def test_keys_lead_to_their_steps(folder: Path) -> None:
    trace = folder / "crowded.jsonl"
    assert view_after(trace, "j", "j", "k").step == 2
    assert view_after(trace, "G").step == CROWDED_STEPS
    assert view_after(trace, "G", "j").step == CROWDED_STEPS
    assert view_after(trace, "k").step == 1
    assert view_after(trace, "g", "1", "7", "enter").step == 17
    assert view_after(trace, "g", "9", "9", "9", "enter").step == CROWDED_STEPS
    assert view_after(trace, "g", "1", "7", "enter", "home").step == 1


def test_a_search_finds_the_moment_as_well(folder: Path) -> None:
    trace = folder / "crowded.jsonl"
    keys = ("/", *"event == PREEMPT", "enter")
    found = view_after(trace, *keys)
    film = SeekableTrace(trace)
    first = film.find(parse("event == PREEMPT"))
    assert StepPoint(found.step, found.point) == first
    second = film.find(parse("event == PREEMPT"), step=found.step + 1)
    assert second is not None
    assert view_after(trace, *keys, "]").step == second.step
    assert view_after(trace, *keys, "]", "[").step == found.step
    nowhere = view_after(trace, *keys, "[")
    assert nowhere.step == found.step
    assert nowhere.message == Message("not_found_before", "event == PREEMPT")
    assert view_after(trace, "p").message == Message("no_marker_before")
    assert view_after(trace, "G", "n").message == Message("no_marker_after")


def test_playing_goes_on_without_keys_and_ends_at_the_end(folder: Path) -> None:
    script = play(folder / "crowded.jsonl", [" "], [], [], [], ["q"], [])
    assert [scene.view.step for scene in script.scenes] == [1, 1, 2, 3, 4]
    assert script.timeouts[0] is None
    assert all(timeout is not None and timeout <= 0.25 for timeout in script.timeouts[1:])
    script = play(folder / "crowded.jsonl", ["G"], [" "], [], [])
    assert script.timeouts[-1] is None
    assert not script.scenes[-1].view.is_playing


def test_a_page_is_scrolled_no_further_than_it_goes(folder: Path) -> None:
    assert view_after(folder / "crowded.jsonl", "s", *["j"] * 9).scroll == 3


def test_a_long_search_can_be_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvtrace_cli.browse._SECONDS_BETWEEN_LOOKS", 0.0)
    keys = [["/"], [*"event == ENGINE_ERROR"], ["enter"]]
    stopped = play(folder / "crowded.jsonl", *keys, [], [], ["escape"]).scenes[-1].view
    assert (stopped.step, stopped.message) == (1, Message("stopped"))


# -- frames ----------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def frame(
    capsys: pytest.CaptureFixture[str], trace: Path, view: View, *size: int, lang: str
) -> str:
    cache = StepCache(SeekableTrace(trace))
    near = cache.around(view.step, size[1], size[1])
    scene = Scene(view, cache.look(view.step, view.point), near, cache.first, cache.last)
    screen = Screen(trace.name, load_catalog(lang))  # type: ignore[arg-type]  # one of LANGUAGES
    capsys.readouterr()
    screen.draw(scene, *size)
    return _ANSI.sub("", capsys.readouterr().out)


PAGES: tuple[Page, ...] = ("steps", "state", "events", "help")


@pytest.mark.usefixtures("eighty_columns")
@pytest.mark.parametrize("size", [SMALLEST, (40, 13), (80, 19), (80, 24), (120, 40)])
@pytest.mark.parametrize(("name", "step"), [("article", 1), ("crowded", 11), ("chunked", 3)])
def test_the_steps_end_is_always_there(
    name: str, step: int, size: tuple[int, int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = frame(capsys, folder / f"{name}.jsonl", View(step), *size, lang="en")
    assert f"step#{step} " in drawn


@pytest.mark.usefixtures("eighty_columns")
@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("size", [SMALLEST, (40, 13), (80, 19), (80, 24), (120, 40), (27, 5)])
def test_a_frame_fills_the_screen_and_no_more(
    lang: str, page: Page, size: tuple[int, int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points: tuple[Point, Point] = ("schedule", "end")
    for name in ("article", "crowded", "chunked"):
        for step, point in zip((1, 16), points, strict=True):
            view = View(step, point, page, scroll=2, is_playing=True)
            drawn = frame(capsys, folder / f"{name}.jsonl", view, *size, lang=lang)
            lines = drawn.split("\n")
            assert len(lines) == size[1]
            assert {cell_len(line) for line in lines} == {size[0]}


@pytest.mark.usefixtures("eighty_columns")
def test_the_steps_page_shows_the_step_among_its_neighbours(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = frame(capsys, folder / "article.jsonl", View(149), 80, 24, lang="en")
    assert drawn.startswith("article.jsonl  step 149 of 256")
    lines = drawn.splitlines()
    (here,) = [line for line in lines if line.startswith("▸")]
    assert here.split()[:3] == ["▸", "149", "decode"]
    assert "batch 2 -> 1" in here
    assert any(line.split()[:1] == ["148"] for line in lines)
    assert any(line.startswith("running       1: 1") for line in lines)
    assert any(line.startswith("SCHEDULE_DECODE | ") for line in lines)
    assert "KV blocks: 73 of 256 tokens" in drawn


@pytest.mark.usefixtures("eighty_columns")
def test_a_message_and_a_prompt_stand_in_the_last_row(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = folder / "crowded.jsonl"
    asked = View(1, prompt=Prompt("search", "free_blocks < 3"))
    assert "search for: free_blocks < 3" in frame(capsys, trace, asked, 80, 24, lang="en")
    answered = View(1, message=Message("not_found_after", "seq_id == 9"))
    last = frame(capsys, trace, answered, 80, 24, lang="en").splitlines()[-1]
    assert last.rstrip() == "seq_id == 9 is true nowhere after this step"


@pytest.mark.usefixtures("eighty_columns")
def test_no_trace_can_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "hostile.jsonl", crowded_run(), model=HOSTILE_TEXT)
    for page in PAGES:
        drawn = frame(capsys, trace, View(1, page=page), 200, 60, lang="en")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", drawn)


# -- on a terminal ---------------------------------------------------------------------------------

_ENTER, _LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class Session:
    """A process on a terminal of its own.

    Attributes:
        process: the process.
        seen: what it has written so far.
    """

    def __init__(self, arguments: list[str]) -> None:
        self.keyboard, self.screen = pty.openpty()
        termios.tcsetwinsize(self.keyboard, (24, 80))
        self.before = termios.tcgetattr(self.screen)
        self.seen = b""
        variables = environment(TERM="xterm", NO_COLOR="1")
        self.process = subprocess.Popen(
            arguments,
            stdin=self.screen,
            stdout=self.screen,
            stderr=self.screen,
            env={name: value for name, value in variables.items() if name != "COLUMNS"},
            process_group=0,  # in our session, so that it can be stopped
        )

    def press(self, keys: bytes) -> None:
        os.write(self.keyboard, keys)

    def wait_for(self, text: bytes) -> None:
        """Until `text` comes that was not there before."""
        deadline = time.monotonic() + 60
        fresh = b""
        while text not in fresh:
            ready, _, _ = select.select([self.keyboard], [], [], deadline - time.monotonic())
            assert ready, f"{text!r} did not come: {fresh!r}"
            fresh += os.read(self.keyboard, 65536)
        self.seen += fresh

    def is_restored(self) -> bool:
        return termios.tcgetattr(self.screen) == self.before

    def end(self) -> int:
        code = self.process.wait(timeout=60)
        while select.select([self.keyboard], [], [], 0)[0]:
            self.seen += os.read(self.keyboard, 65536)
        return code


@contextmanager
def session(*arguments: str) -> Iterator[Session]:
    opened = Session([*arguments])
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.keyboard)
        os.close(opened.screen)


def browsing(trace: Path, *options: str) -> list[str]:
    return command("replay", trace, "--interactive", *options)


def test_keys_work_on_a_terminal_and_it_is_given_back(folder: Path) -> None:
    with session(*browsing(folder / "crowded.jsonl", "--steps", "3..")) as terminal:
        terminal.wait_for(b"step 3 of 38")
        assert not terminal.is_restored()
        terminal.press(b"j")
        terminal.wait_for(b"step 4 of 38")
        terminal.press(b"\x1b[D")
        terminal.wait_for(b"step 3 of 38")
        terminal.press(b"/event == PREEMPT\r")
        terminal.wait_for(b"step 11 of 38")
        terminal.press(b"?")
        terminal.wait_for(b"Keys")
        terminal.press(b"q")
        assert terminal.end() == 0
        assert terminal.is_restored()
        assert terminal.seen.count(_ENTER) == terminal.seen.count(_LEAVE) == 1
        assert terminal.seen.endswith(_LEAVE)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGHUP, -signal.SIGHUP),
        (signal.SIGQUIT, -signal.SIGQUIT),
    ],
)
def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(
    number: signal.Signals, code: int, folder: Path
) -> None:
    with session(*browsing(folder / "crowded.jsonl")) as terminal:
        terminal.wait_for(b" quit")
        terminal.process.send_signal(number)
        assert terminal.end() == code
        assert terminal.is_restored()
        assert terminal.seen.endswith(_LEAVE)


def test_a_stopped_one_lends_the_terminal_back_until_it_goes_on(folder: Path) -> None:
    with session(*browsing(folder / "crowded.jsonl")) as terminal:
        terminal.wait_for(b" quit")
        for _ in range(2):
            terminal.process.send_signal(signal.SIGTSTP)
            assert os.WIFSTOPPED(os.waitpid(terminal.process.pid, os.WUNTRACED)[1])
            assert terminal.is_restored()
            terminal.process.send_signal(signal.SIGCONT)
            terminal.wait_for(b" quit")
            assert not terminal.is_restored()
        terminal.press(b"q")
        assert terminal.end() == 0
        assert terminal.is_restored()


def test_a_fault_in_the_middle_leaves_the_terminal_as_it_was() -> None:
    fault = (
        "from nvtrace_cli.terminal import lent_terminal\n"
        "with lent_terminal():\n    raise RuntimeError('in the middle')"
    )
    with session(sys.executable, "-c", fault) as terminal:
        assert terminal.end() == 1
        assert terminal.is_restored()
        assert terminal.seen.index(_LEAVE) < terminal.seen.index(b"in the middle")


def test_a_new_window_size_is_drawn_at_once(folder: Path) -> None:
    with session(*browsing(folder / "article.jsonl")) as terminal:
        terminal.wait_for(b" quit")
        assert b"what happened" in terminal.seen
        termios.tcsetwinsize(terminal.keyboard, (5, 20))
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.wait_for(b"This window")
        terminal.press(b"q")
        assert terminal.end() == 0


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_trace_is_browsed_and_leaves_nothing_behind(
    ending: str, tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "plain.jsonl", crowded_run())
    packed = tmp_path / f"packed.jsonl{ending}"
    data = trace.read_bytes()
    packed.write_bytes(gzip.compress(data) if ending == ".gz" else zstandard.compress(data))
    room = tmp_path / "room"
    room.mkdir()
    with session("env", f"TMPDIR={room}", *browsing(packed)) as terminal:
        terminal.wait_for(b"step 1 of 38")
        terminal.press(b"G")
        terminal.wait_for(b"step 38 of 38")
        terminal.process.send_signal(signal.SIGTERM)
        terminal.end()
    assert list(room.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [packed.name, "plain.jsonl", "room"]


# -- where it does not start -----------------------------------------------------------------------


def test_it_does_not_start_without_a_terminal(folder: Path) -> None:
    outcome = spawn("replay", folder / "crowded.jsonl", "-i")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "nvtrace: --interactive needs a terminal, and stdin is not one\n"


@pytest.mark.parametrize(
    "option",
    [
        ["--json"],
        ["--plain"],
        ["--view", "log"],
        ["--seq", "1"],
        ["--event", "PREEMPT"],
        ["--unfold"],
        ["--speed", "2x"],
    ],
)
def test_it_does_not_start_with_an_option_for_other_views(
    option: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "replay", folder / "crowded.jsonl", "-i", *option)
    assert outcome.code == 2
    assert outcome.err.endswith(f"remove {option[0]}\n")


def test_a_trace_on_stdin_cannot_be_browsed(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = call(capsys, "replay", "-", "-i")
    assert outcome.code == 2
    assert "give a file instead of -" in outcome.err


@pytest.mark.parametrize(
    ("content", "code", "said"), [(b"", 3, b"empty"), (b"Dear diary\n", 3, b"not an nvtrace trace")]
)
def test_what_is_no_trace_is_refused_before_the_screen_is_taken(
    content: bytes, code: int, said: bytes, tmp_path: Path
) -> None:
    (tmp_path / "file.jsonl").write_bytes(content)
    with session(*browsing(tmp_path / "file.jsonl")) as terminal:
        terminal.wait_for(said)
        assert terminal.end() == code
        assert _ENTER not in terminal.seen
