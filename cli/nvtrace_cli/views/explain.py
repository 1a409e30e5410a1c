"""An explanation on the terminal, or for other programs.

The layout is here, the sentences are in `explain_notes.py`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from nvtrace.explain import RequestStory, kind_of, links
from nvtrace_cli.views.console import glyphs, make_console
from nvtrace_cli.views.explain_notes import amount, note, step_note
from nvtrace_cli.views.machine import json_line
from nvtrace_cli.views.prose import NO_BREAK_SPACE, Prose
from nvtrace_cli.views.text import count, duration, escape, ids

if TYPE_CHECKING:
    from nvtrace.catalog import Catalog
    from nvtrace.explain import StepStory

_MOST_LINES = 40  # shown unless all are asked for
_TIMES = ("queue_ns", "prefill_ns", "decode_ns", "preempted_ns")
_COLUMNS = ("first_step", "last_step", "kind", "time_ns", "event_ids", "text")


def print_json(story: RequestStory | StepStory) -> None:
    """The story as one object; each link of its chain has a kind, and the ids that prove it."""
    sys.stdout.write(json_line(story) + "\n")


def print_plain(story: RequestStory | StepStory, catalog: Catalog) -> None:
    """One link a line, with tabs; below those of a whole life, its times."""
    sys.stdout.write("\t".join(_COLUMNS) + "\n")
    tell = note if isinstance(story, RequestStory) else step_note
    for link in story.chain:
        text = tell(link, catalog).text.replace(NO_BREAK_SPACE, " ")
        cells = (
            str(link.first_step),
            str(link.last_step),
            kind_of(link),
            str(link.time_ns),
            ",".join(map(str, link.event_ids)),
            text,
        )
        sys.stdout.write("\t".join(map(escape, cells)) + "\n")
    if isinstance(story, RequestStory) and story.times is not None:
        sys.stdout.write("\n")
        for name in _TIMES:
            sys.stdout.write(f"{name}\t{getattr(story.times, name)}\n")


# -- for people ------------------------------------------------------------------------------------


def show_request(
    story: RequestStory, step: int | None, catalog: Catalog, *, has_proof: bool, is_all: bool
) -> None:
    """A request's chain, and where its time went.

    Args:
        story: the explanation.
        step: the step that was asked for; None for the whole life.
        catalog: the words.
        has_proof: name the events behind each sentence.
        is_all: leave nothing out of a long chain.
    """
    console = make_console()
    heading = catalog.ui(
        "explain_heading_request" if step is None else "explain_heading_moment",
        seq_id=story.seq_id,
        step=step,
        prompt=amount(story.prompt_len, "token", catalog),
        answer=amount(story.max_tokens, "token", catalog),
    )
    console.print(Prose((heading, "heading")))
    shown = story.chain
    num_left_out = 0 if is_all else max(len(shown) - _MOST_LINES, 0)
    half = _MOST_LINES // 2
    head = shown[:half] if num_left_out else shown
    console.print(_life_table(head, catalog, has_proof=has_proof))
    if num_left_out:
        rest = catalog.ui("explain_more", count=count(num_left_out))
        console.print(Prose((rest, "quiet")))
        console.print(_life_table(shown[-half:], catalog, has_proof=has_proof))
    if story.times is not None:
        console.print()
        console.print(Text(catalog.ui("explain_times"), style="heading"))
        console.print(_times_table(story.times, catalog))


def show_step(story: StepStory, catalog: Catalog, *, has_proof: bool) -> None:
    """A step's chain."""
    console = make_console()
    heading = catalog.ui("explain_heading_step", step=count(story.step))
    console.print(Prose((heading, "heading")))
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="label", no_wrap=True)
    table.add_column()
    for link in story.chain:
        found = step_note(link, catalog)
        prose = Prose((found.text, found.style), *_proof(link, catalog, has_proof=has_proof))
        table.add_row(Text(glyphs(console).dot), prose)
    console.print(table)


def _life_table(chain: tuple[links.AnyLife, ...], catalog: Catalog, *, has_proof: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="label", no_wrap=True, min_width=8)
    table.add_column(style="label", no_wrap=True, justify="right", min_width=7)
    table.add_column()
    for link in chain:
        found = note(link, catalog)
        prose = Prose((found.text, found.style), *_proof(link, catalog, has_proof=has_proof))
        time = duration(link.time_ns) if link.time_ns else ""
        table.add_row(Text(_when(link, catalog)), Text(time), prose)
    return table


def _when(link: links.AnyLife, catalog: Catalog) -> str:
    is_between = isinstance(link, links.Queued) or (
        isinstance(link, links.Ended) and link.is_between
    )
    if is_between and not link.first_step:
        return catalog.ui("explain_start")
    if is_between:
        return catalog.ui("explain_after", step=count(link.first_step))
    if link.first_step == link.last_step:
        return count(link.first_step)
    return catalog.ui("explain_steps", first=count(link.first_step), last=count(link.last_step))


def _proof(link: links.Link, catalog: Catalog, *, has_proof: bool) -> list[tuple[str, str]]:
    if not has_proof or not link.event_ids:
        return []
    return [(catalog.ui("explain_proof", ids=ids(link.event_ids)), "quiet")]


def _times_table(times: links.Times, catalog: Catalog) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="label", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    rows = [(f"explain_time_{name}", getattr(times, name)) for name in _TIMES]
    for key, time_ns in [*rows, ("explain_time_total", times.total_ns)]:
        share = f"{time_ns / times.total_ns:.1%}" if times.total_ns else ""
        table.add_row(Text(catalog.ui(key)), Text(duration(time_ns)), Text(share))
    return table
