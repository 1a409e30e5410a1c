"""An engine's state at one moment, on the terminal or for other programs.

`nvtrace.snapshots` finds the state, `pool_map.py` draws the pool.
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from nvtrace import events as ev
from nvtrace.claims import said_slots
from nvtrace_cli.views.console import glyphs, make_console
from nvtrace_cli.views.log import log_line
from nvtrace_cli.views.machine import json_line
from nvtrace_cli.views.pool_map import pool_legend, pool_map
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.table import FittingTable
from nvtrace_cli.views.text import count, escape, ids, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from nvtrace.at import Inputs, Moment, SlotRun
    from nvtrace.catalog import Catalog
    from nvtrace.claims import Claim
    from nvtrace.events import Layout
    from nvtrace.replay import SequenceState

_NOTHING = "-"
_MOST_IDS = 16
_MOST_QUEUED = 64
_MOST_RUNS = 24
_LONGEST_VALUE = 40
_REQUEST_COLUMNS = (
    *("seq_id", "status", "finish_reason", "num_prompt_tokens", "num_completion_tokens"),
    *("max_tokens", "num_computed_tokens", "num_cached_tokens", "num_preemptions", "block_table"),
)
_STATUS_STYLES = {"WAITING": "waiting", "RUNNING": "decode", "FINISHED": "ended"}


def print_json(moment: Moment) -> None:
    """The moment as one object."""
    _print_line(json_line(moment_object(moment)))


def moment_object(moment: Moment) -> dict[str, Any]:
    """A moment's facts; blocks that are free and empty have no entry among `blocks`.

    `inputs` is what the trace records; the rest of it is computed from the state. `differs` has the
    values that the step's events record and that do not follow from the events before them.
    """
    state, inputs = moment.state, moment.inputs
    return {
        "engine_step": moment.step,
        "moment": moment.point,
        "phase": moment.phase,
        "reason": None if moment.schedule is None else moment.schedule.reason,
        "scheduled": [] if moment.schedule is None else moment.schedule.seq_ids,
        "waiting": state.waiting,
        "running": state.running,
        "requests": list(map(_request_object, moment.requests)),
        "pool": {
            "block_size": state.block_size,
            "num_blocks": state.num_blocks,
            "num_free_blocks": len(state.free_blocks),
            "num_cached_blocks": len(state.cached_blocks),
            "free_blocks": list(state.free_blocks),
            "blocks": [
                {"block_id": block, "ref_count": refs, "hash": state.block_hashes.get(block)}
                for block, refs in enumerate(state.ref_counts)
                if refs or block in state.block_hashes
            ],
        },
        "inputs": None if inputs is None else _inputs_object(inputs, moment.layout),
        "differs": [claim for claim in moment.claims if not claim.holds],
        "events": [ev.tag_of(event) for event in moment.news],
    }


def _request_object(seq: SequenceState) -> dict[str, Any]:
    return {
        "seq_id": seq.seq_id,
        "status": seq.status,
        "finish_reason": seq.finish_reason,
        "num_prompt_tokens": seq.prompt_len,
        "num_completion_tokens": seq.num_completion_tokens,
        "max_tokens": seq.max_tokens,
        "num_computed_tokens": seq.num_computed_tokens,
        "num_cached_tokens": seq.num_cached_tokens,
        "num_preemptions": seq.num_preemptions,
        "block_table": seq.block_table,
        "token_ids": seq.token_ids,
    }


def _inputs_object(inputs: Inputs, layout: Layout | None) -> dict[str, Any]:
    runs = inputs.runs
    worked_out = {
        "num_tokens": inputs.num_tokens,
        "input_ids": [token_id for run in runs for token_id in run.token_ids],
        "positions": [p for run in runs for p in range(run.first_position, run.last_position + 1)],
        "slot_mapping": [s for run in runs for s in range(run.first_slot, run.last_slot + 1)],
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": inputs.cu_seqlens_k,
        "context_lens": inputs.context_lens,
    }
    slots = said_slots(layout, inputs.num_tokens)
    said = {name: getattr(layout, name, value) for name, value in worked_out.items()}
    return said | ({} if slots is None else {"slot_mapping": slots}) | {"runs": runs}


def print_plain(moment: Moment) -> None:
    """Five tables with tabs, an empty line between two.

    The state, requests, blocks, inputs (from the block tables, and as the trace records them), and
    recorded values that do not follow from the events before them.
    """
    state = moment.state
    _print_row("engine_step", moment.step)
    _print_row("moment", moment.point)
    _print_row("phase", moment.phase or "")
    _print_row("waiting", *state.waiting)
    _print_row("running", *state.running)
    _print_row("num_blocks", state.num_blocks)
    _print_row("block_size", state.block_size)
    _print_row("free_blocks", len(state.free_blocks))
    _print_line("")
    _print_row(*_REQUEST_COLUMNS)
    for seq in moment.requests:
        request = _request_object(seq)
        _print_row(*(_plain(request[name]) for name in _REQUEST_COLUMNS))
    _print_line("")
    _print_row("block_id", "ref_count", "hash")
    for block, refs in enumerate(state.ref_counts):
        if refs or block in state.block_hashes:
            _print_row(block, refs, state.block_hashes.get(block, ""))
    _print_line("")
    positions, slots = ("first_position", "last_position"), ("first_slot", "last_slot")
    _print_row("seq_id", *positions, "block_id", *slots, "said_slots")
    for run, said in moment.runs_as_said():
        place = (run.first_position, run.last_position, run.block_id)
        _print_row(run.seq_id, *place, run.first_slot, run.last_slot, _slots(said) if said else "")
    _print_line("")
    _print_row("event_id", "event", "field", "said", "follows")
    for claim in moment.claims:
        if not claim.holds:
            values = map(json_line, (claim.said, claim.follows))
            _print_row(claim.event_id, claim.event, claim.field, *values)


def _plain(value: object) -> str:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _print_row(*cells: object) -> None:
    _print_line("\t".join(escape(str(cell)) for cell in cells))


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")


# -- for people ------------------------------------------------------------------------------------


def show(moment: Moment, name: str, catalog: Catalog) -> None:
    """The state: queues, requests, the pool as a map, the step's inputs."""
    console = make_console()
    for part in state_parts(moment, name, catalog, console):
        console.print(part)


def state_parts(
    moment: Moment, name: str, catalog: Catalog, console: Console
) -> Iterator[RenderableType]:
    """The state as it is shown, part by part.

    Args:
        moment: the state, and the step's inputs.
        name: of the trace.
        catalog: the words.
        console: where it will be shown.
    """
    state = moment.state
    yield _heading(moment, name, catalog)
    if moment.schedule is None:  # shown instead
        for event in moment.news:
            yield Prose((log_line(event, catalog), ""))
    yield _queues(moment, catalog)
    requests = moment.requests
    if requests:
        yield Text()
        yield Text(catalog.ui("at_requests_title"), style="heading")
        yield _request_table(requests, catalog, console.width)
    if state.num_blocks:
        yield Text()
        title = catalog.ui(
            "at_pool_title", num_blocks=count(state.num_blocks), block_size=state.block_size
        )
        yield Prose((title, "heading"))
        yield from pool_map(state, catalog, console)
        yield pool_legend(state, catalog, console)
    if moment.inputs is not None:
        yield Text()
        yield from _inputs(moment, moment.inputs, catalog, console)
    for claim in moment.claims:
        if not claim.holds:
            yield Prose((_difference(claim, catalog), "error"))


def _heading(moment: Moment, name: str, catalog: Catalog) -> RenderableType:
    where = catalog.ui(f"at_heading_{moment.point}", step=count(moment.step), name=escape(name))
    phase, schedule = moment.phase, moment.schedule
    if schedule is None or phase is None:
        return Prose((where, "heading"), (catalog.ui("at_no_schedule"), "error"))
    reason = escape(catalog.reason(ev.tag_of(schedule), schedule.reason))
    chosen = catalog.ui("explain_chosen", phase=phase, reason=reason)
    return Prose((where, "heading"), (chosen, phase))


def _queues(moment: Moment, catalog: Catalog) -> Table:
    """Both queues in their order, and the free blocks in the order in which they are allocated."""
    state = moment.state
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="label", no_wrap=True)
    grid.add_column()
    for name in ("running", "waiting"):
        queue: list[int] = getattr(state, name)
        line = catalog.ui("at_queue", count=count(len(queue)), ids=ids(queue, _MOST_QUEUED))
        line = line if queue else _NOTHING
        grid.add_row(Text(catalog.ui(f"at_{name}")), Prose((line, "" if queue else "quiet")))
    scheduled = [] if moment.schedule is None else moment.schedule.seq_ids
    batch = ids(scheduled, _MOST_QUEUED) or _NOTHING
    grid.add_row(Text(catalog.ui("at_batch")), Prose((batch, "" if scheduled else "quiet")))
    free = list(state.free_blocks)
    line = catalog.ui("at_queue", count=count(len(free)), ids=ids(free, _MOST_IDS))
    grid.add_row(Text(catalog.ui("at_free")), Prose((line if free else _NOTHING, "")))
    return grid


def _request_table(requests: list[SequenceState], catalog: Catalog, width: int) -> FittingTable:
    names = ("seq", "status", "prompt", "output", "computed", "cached", "table")
    table = FittingTable(
        {name: catalog.ui(f"at_column_{name}") for name in names},
        catalog,
        leaving=("cached", "prompt", "computed", "output", "status"),
        words=("status",),
        prose="table",
    )
    room = width // 8
    for seq in requests:
        status = seq.finish_reason or seq.status
        table.add_row(
            Text(str(seq.seq_id)),
            Text(escape(status), style=_STATUS_STYLES.get(seq.status, "")),
            Text(count(seq.prompt_len)),
            Text(f"{seq.num_completion_tokens}/{seq.max_tokens}"),
            Text(count(seq.num_computed_tokens)),
            Text(count(seq.num_cached_tokens), style="" if seq.num_cached_tokens else "quiet"),
            Text(ids(seq.block_table, room) or _NOTHING),
        )
    return table


def _difference(claim: Claim, catalog: Catalog) -> str:
    """The recorded and the expected value; of equally long lists, the first different items."""
    name, said, follows = claim.field, claim.said, claim.follows
    if isinstance(said, list) and isinstance(follows, list) and len(said) == len(follows):
        pairs = enumerate(zip(said, follows, strict=True))
        place, (said, follows) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        name = f"{name}[{place}]"
    said, follows = (shorten(json_line(value), _LONGEST_VALUE) for value in (said, follows))
    return catalog.ui("at_differs", event=claim.event, name=name, said=said, follows=follows)


def _slots(slots: list[int]) -> str:
    """As "773", "0..10"; any others one by one."""
    if slots == [*range(slots[0], slots[0] + len(slots))]:
        return _range(slots[0], slots[-1])
    return ids(slots, _MOST_IDS)


def _inputs(
    moment: Moment, inputs: Inputs, catalog: Catalog, console: Console
) -> Iterator[RenderableType]:
    title = catalog.ui("at_inputs_title", num_tokens=count(inputs.num_tokens))
    yield Prose((title, "heading"))
    names = ("seq", "positions", "input_ids", "page", "slots")
    table = FittingTable(
        {name: catalog.ui(f"at_column_{name}") for name in names},
        catalog,
        leaving=("input_ids", "positions"),
        words=("input_ids", "page", "slots"),
    )
    times = glyphs(console).times
    for run, said in islice(moment.runs_as_said(), _MOST_RUNS):
        slots = Text(_arithmetic(run, moment.state.block_size, times))
        if said is not None and said != [*range(run.first_slot, run.last_slot + 1)]:
            separator = catalog.ui("note_separator")
            slots = Text(
                f"{slots}{separator}{catalog.ui('at_said', slots=_slots(said))}", style="error"
            )
        tokens = " ".join(map(str, run.token_ids[:_MOST_IDS]))
        table.add_row(
            Text(str(run.seq_id)),
            Text(_range(run.first_position, run.last_position)),
            Text(shorten(tokens, max(console.width - 62, 8)), style="quiet"),
            Text(f"[{run.block_index}] = {run.block_id}"),
            slots,
        )
    yield table
    if len(inputs.runs) > _MOST_RUNS:
        rest = catalog.ui("at_more", count=count(len(inputs.runs) - _MOST_RUNS))
        yield Prose((rest, "quiet"))
    for name in ("cu_seqlens_q", "cu_seqlens_k", "context_lens"):
        numbers = ", ".join(map(str, getattr(moment.layout, name, getattr(inputs, name))))
        yield Text(shorten(f"{name:<12}  {numbers}", console.width), style="quiet")


def _arithmetic(run: SlotRun, block_size: int, times: str) -> str:
    """The slots as a sum: "3 x 256 + 5 = 773", "0 x 256 + 0..10 = 0..10"."""
    page = run.block_id * block_size
    offsets = _range(run.first_slot - page, run.last_slot - page)
    slots = _range(run.first_slot, run.last_slot)
    return f"{run.block_id} {times} {block_size} + {offsets} = {slots}"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"
