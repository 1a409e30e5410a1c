"""What happened in a step, in words: the last column of the step table.

Knows which facts of a step are worth a sentence, and which sentence of the catalog says them. Does
not know tables or terminals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvtrace_cli.views.text import escape, ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvtrace.catalog import Catalog
    from nvtrace_cli.folding import Row
    from nvtrace_cli.summary import Share, StepSummary


def notes(row: Row, catalog: Catalog) -> list[str]:
    """The key events of a row's steps, the most telling first."""
    step = row.first
    found = [
        *_arrivals(step, catalog),
        *_preemptions(step, catalog),
        *_prefill(row, catalog),
        *_batch_change(row, catalog),
        *_ends(step, catalog),
        *_stop(step, catalog),
        *_pages(row, catalog),
        *_broken_off(step, catalog),
    ]
    if step.phase == "decode" and not any((found, step.finished)):
        found = [catalog.ui("note_decode")]
    return found


def sequences(seq_ids: Iterable[int], catalog: Catalog) -> str:
    """Requests by their numbers: "seq 3", "seqs 3, 4"."""
    numbers = tuple(seq_ids)
    return catalog.ui("seq" if len(numbers) == 1 else "seqs", ids=ids(numbers))


def _arrivals(step: StepSummary, catalog: Catalog) -> Iterator[str]:
    if step.arrived and step.index > 1:
        yield catalog.ui("note_arrived", who=sequences(step.arrived, catalog))


def _preemptions(step: StepSummary, catalog: Catalog) -> Iterator[str]:
    for event in step.preempted:
        key = "note_preempted_itself" if event.seq_id == event.for_seq_id else "note_preempted"
        yield catalog.ui(
            key,
            who=sequences([event.seq_id], catalog),
            for_whom=sequences([event.for_seq_id], catalog),
            num_blocks=event.num_blocks_freed,
            num_tokens=event.num_tokens_to_recompute,
        )


def _prefill(row: Row, catalog: Catalog) -> Iterator[str]:
    if row.first.phase != "prefill":
        return
    complete = [share.seq_id for share in row.first.shares if share.is_complete]
    for share in row.first.shares:
        if share.num_cached:
            yield catalog.ui(
                "note_cached",
                who=sequences([share.seq_id], catalog),
                num_cached=share.num_cached,
                num_total=share.num_total,
            )
        if not share.is_complete or share.num_computed_before > share.num_cached:
            yield _chunk(share, row, catalog)
    if complete:
        key = "note_prompt_done" if len(complete) == 1 else "note_prompts_done"
        yield catalog.ui(key, who=sequences(complete, catalog), count=len(complete))


def _chunk(share: Share, row: Row, catalog: Catalog) -> str:
    last = next(s for s in row.last.shares if s.seq_id == share.seq_id)
    return catalog.ui(
        "note_chunk",
        who=sequences([share.seq_id], catalog),
        first=share.num_computed_before,
        last=last.num_computed_before + last.num_tokens - 1,
        num_total=share.num_total,
    )


def _batch_change(row: Row, catalog: Catalog) -> Iterator[str]:
    if row.batch_before is not None:
        yield catalog.ui("note_batch", before=row.batch_before, after=len(row.first.shares))


def _ends(step: StepSummary, catalog: Catalog) -> Iterator[str]:
    by_reason: dict[str, list[int]] = {}
    for seq_id, reason in step.finished:
        by_reason.setdefault(reason, []).append(seq_id)
    for reason, seq_ids in by_reason.items():
        key = "note_end" if len(seq_ids) == 1 else "note_ends"
        yield catalog.ui(key, who=sequences(seq_ids, catalog), reason=escape(reason))


def _stop(step: StepSummary, catalog: Catalog) -> Iterator[str]:
    if step.stop is not None:
        yield catalog.ui(
            f"note_stop_{step.stop.reason}",
            who=sequences([step.stop.seq_id], catalog),
            need=step.stop.need,
            have=step.stop.have,
        )


def _pages(row: Row, catalog: Catalog) -> Iterator[str]:
    """Page counts over all steps of the row. What a prefill takes is seen in the free pages."""
    counts = (
        ("taken", sum(step.pages.num_taken for step in row.steps if step.phase == "decode")),
        ("published", sum(step.pages.num_published for step in row.steps)),
        ("evicted", sum(step.pages.num_evicted for step in row.steps)),
    )
    for what, number in counts:
        if number:
            yield catalog.ui(f"note_page_{what}" if number == 1 else f"note_pages_{what}", n=number)


def _broken_off(step: StepSummary, catalog: Catalog) -> Iterator[str]:
    if step.error is not None:
        yield catalog.ui("note_error", error=escape(step.error.error_type))
    elif step.wall_ns is None:
        yield catalog.ui("note_cut")
