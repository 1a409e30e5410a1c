"""Rules for the trace of a rank that does not schedule: the layout of each batch, and its run.

Requests and schedules are in rank 0's trace only. Each step here is a layout and a run, and both
must record the same batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.check.finding import Conflict, Fact, Rule, differ
from nvtrace.check.steps import flat_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvtrace.check.ledger import Ledger


def _steps(ledger: Ledger, event: ev.Layout | ev.Run) -> Iterator[Conflict]:
    """Each layout begins a new step, and its run comes next."""
    if ledger.is_whole:
        return
    last, before = ledger.last, (ledger.last and ledger.last.step) or 0
    if isinstance(event, ev.RUNS):
        yield from differ("step", event.step, "step_under_way", before)
        expected = [ev.tag_of(ev.PreparePrefillTensors), ev.tag_of(ev.PrepareDecodeTensors)]
        if last is None or ev.tag_of(last) not in expected:
            yield Conflict(Fact("event", ev.tag_of(event)), Fact("must_precede", expected))
    elif event.step is None or event.step <= before:
        yield Conflict(Fact("step", event.step), Fact("at_least", before + 1))


def _prefill(ledger: Ledger, event: ev.PreparePrefillTensors) -> Iterator[Conflict]:
    if ledger.is_whole or ledger.init is None:
        return
    spans = [(first, last + 1) for first, last in event.position_ranges]
    yield from flat_layout(event, spans)
    size = ledger.init.block_size
    pieces = [  # of each span, what lies in one block: (offset, tokens)
        (position % size, min(size - position % size, stop - position))
        for start, stop in spans
        for position in (start, *range((start // size + 1) * size, stop, size))
    ]
    recorded = [(first % size, last - first + 1) for first, last in event.slot_ranges]
    yield from differ("slot_ranges", recorded, "offsets_and_lengths", pieces)
    yield from _in_pool(
        ledger, "slot_ranges", [slot for both in event.slot_ranges for slot in both]
    )


def _decode(ledger: Ledger, event: ev.PrepareDecodeTensors) -> Iterator[Conflict]:
    if ledger.is_whole or ledger.init is None:
        return
    size, lengths = ledger.init.block_size, event.context_lens
    yield from differ("batch_size", event.batch_size, "layout_of_batch", len(lengths))
    shape = (len(lengths), -(-max(lengths, default=0) // size))
    yield from differ("block_tables_shape", event.block_tables_shape, "layout_of_batch", shape)
    offsets = [(length - 1) % size for length in lengths]
    recorded = [slot % size for slot in event.slot_mapping]
    yield from differ("slot_mapping", recorded, "offsets_in_pages", offsets)
    yield from differ("slot_mapping", len({*event.slot_mapping}), "layout_of_batch", len(lengths))
    yield from _in_pool(ledger, "slot_mapping", event.slot_mapping)


def _in_pool(ledger: Ledger, field: str, slots: list[int]) -> Iterator[Conflict]:
    if ledger.budget is None:
        return
    num_slots = ledger.budget.num_blocks * ledger.budget.block_size
    outside = [slot for slot in slots if not 0 <= slot < num_slots]
    if outside:
        yield Conflict(Fact(field, outside[0]), Fact("num_slots", num_slots))


def _run(ledger: Ledger, event: ev.Run) -> Iterator[Conflict]:
    """It ran the batch of the layout: a prefill eagerly, a decode by a graph if there are any."""
    last, expected = ledger.last, None
    if ledger.is_whole:
        return
    if isinstance(event, ev.CudagraphReplay):
        batch_size = last.batch_size if isinstance(last, ev.PrepareDecodeTensors) else None
        yield from differ("batch_size", event.batch_size, "layout_of_batch", batch_size)
        rest = event.graph_batch_size - event.batch_size
        yield from differ("padding", event.padding, "rows_left_over", rest)
        if event.graph_batch_size not in (ledger.graphs or ()):
            yield Conflict(
                Fact("graph_batch_size", event.graph_batch_size), Fact("batch_sizes", ledger.graphs)
            )
        return
    if isinstance(last, ev.PreparePrefillTensors):
        yield from differ("num_tokens", event.num_tokens, "sum", last.flat_tokens)
        expected = "mixed" if event.reason == "mixed" else "prefill"
    elif isinstance(last, ev.PrepareDecodeTensors):
        yield from differ("num_tokens", event.num_tokens, "sum", last.batch_size)
        expected = ledger.skip.reason if ledger.skip else "batch_beyond_graphs"
    yield from differ("reason", event.reason, "reason_by_state", expected)


RULES = (
    Rule("steps", "before", (*ev.LAYOUTS, *ev.RUNS), _steps),
    Rule("layout", "before", (ev.PreparePrefillTensors,), _prefill),
    Rule("layout", "before", (ev.PrepareDecodeTensors,), _decode),
    Rule("graph_size", "before", ev.RUNS, _run),
)
