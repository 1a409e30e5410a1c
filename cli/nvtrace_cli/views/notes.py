"""What happened in a step, in words: the last column of the step table.

Knows which facts of a step are worth a sentence, and which sentence of the catalog says them. Does
not know tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvtrace_cli.views.prose import NO_BREAK_SPACE
from nvtrace_cli.views.text import count, escape, ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvtrace.catalog import Catalog
    from nvtrace.metrics import Refusals
    from nvtrace.summary import AlikeSteps, Share, StepSummary


@dataclass(frozen=True, slots=True)
class Note:
    """One key event.

    Attributes:
        text: the sentence.
        style: its colour in the theme.
    """

    text: str
    style: str = ""


def notes(row: AlikeSteps, catalog: Catalog) -> list[Note]:
    """The key events of a row's steps, in the order in which they happened."""
    step = row.first
    found = [
        *_comings_and_goings(step, catalog),
        *_preemptions(step, catalog),
        *_prefill(row, catalog),
        *_batch_change(row, catalog),
        *_ends(step, catalog),
        *_stop(step, catalog),
        *_blocks(row, catalog),
        *_broken_off(step, catalog),
    ]
    quiet = "note_led" if step.is_led else "note_decode"
    return found or [Note(catalog.ui(quiet), "quiet")]


def sequences(seq_ids: Iterable[int], catalog: Catalog) -> str:
    """Requests by their numbers, not to be broken over two lines: "seq 3", "seqs 3, 4"."""
    numbers = tuple(seq_ids)
    text = catalog.ui("seq" if len(numbers) == 1 else "seqs", ids=ids(numbers))
    return text.replace(" ", NO_BREAK_SPACE)


def why_refused(refusals: Iterable[Refusals], catalog: Catalog) -> str:
    """What refused requests need, and what there is of it."""
    return catalog.ui("note_separator").join(
        catalog.ui_or(
            f"refused_{group.reason}",
            "refused_other",
            reason=escape(group.reason),
            count=count(group.count),
            need=catalog.ui(
                "explain_range", least=count(group.least_need), most=count(group.most_need)
            )
            if group.least_need < group.most_need
            else count(group.most_need),
            have=count(group.have),
        )
        for group in refusals
    )


def _comings_and_goings(step: StepSummary, catalog: Catalog) -> Iterator[Note]:
    if step.arrived and step.index > 1:
        key = "note_arrives" if len(step.arrived) == 1 else "note_arrive"
        yield Note(catalog.ui(key, who=sequences(step.arrived, catalog)))
    if step.aborted:
        yield Note(catalog.ui("note_aborted", who=sequences(step.aborted, catalog)), "ended")


def _preemptions(step: StepSummary, catalog: Catalog) -> Iterator[Note]:
    for event, num_held in zip(step.preempted, step.num_blocks_held, strict=True):
        pages, kept = str(event.num_blocks_freed), num_held - event.num_blocks_freed
        if kept:
            pages = catalog.ui("note_kept", freed=pages, held=num_held, kept=kept)
        is_itself = event.seq_id == event.for_seq_id
        text = catalog.ui(
            "note_preempted_itself" if is_itself else "note_preempted",
            who=sequences([event.seq_id], catalog),
            for_whom=sequences([event.for_seq_id], catalog),
            num_blocks=pages,
            num_tokens=event.num_tokens_to_recompute,
        )
        yield Note(text, "preempted")


def _prefill(row: AlikeSteps, catalog: Catalog) -> Iterator[Note]:
    whole: dict[str, list[int]] = {"prompt": [], "recomputed": []}
    for share in row.first.prefills:
        who = sequences([share.seq_id], catalog)
        if share.num_cached:
            text = catalog.ui(
                "note_cached", who=who, num_cached=share.num_cached, num_total=share.num_total
            )
            yield Note(text)
        if not share.is_complete or share.is_continued:
            yield Note(_chunk(share, who, row, catalog))
        else:
            whole["recomputed" if share.is_recompute else "prompt"].append(share.seq_id)
    for what, seq_ids in whole.items():
        if seq_ids:
            key = f"note_{what}" if len(seq_ids) == 1 else f"note_{what}_many"
            yield Note(catalog.ui(key, who=sequences(seq_ids, catalog), count=len(seq_ids)))


def _chunk(share: Share, who: str, row: AlikeSteps, catalog: Catalog) -> str:
    end = next(other for other in row.last.shares if other.seq_id == share.seq_id)
    first, last = share.num_computed_before, end.num_computed_before + end.num_tokens - 1
    return catalog.ui(
        "note_chunk_done" if end.is_complete else "note_chunk",
        who=who,
        span=first if first == last else f"{first}-{last}",
        num_total=share.num_total,
    )


def _batch_change(row: AlikeSteps, catalog: Catalog) -> Iterator[Note]:
    if row.batch_before is not None:
        after = row.first.scheduled
        yield Note(catalog.ui("note_batch", before=row.batch_before, after=after))


def _ends(step: StepSummary, catalog: Catalog) -> Iterator[Note]:
    by_reason: dict[str, list[int]] = {}
    for seq_id, reason in step.finished:
        by_reason.setdefault(reason, []).append(seq_id)
    for reason, seq_ids in by_reason.items():
        key = "note_end" if len(seq_ids) == 1 else "note_end_many"
        text = catalog.ui(key, who=sequences(seq_ids, catalog), reason=escape(reason))
        yield Note(text, "ended")


def _stop(step: StepSummary, catalog: Catalog) -> Iterator[Note]:
    if step.stop is not None:
        need, whole = str(step.stop.need), step.stop_whole
        if whole is not None:
            key = "need_shared" if step.stop.reason == "no_blocks" else "need_cached"
            need = catalog.ui(key, need=need, whole=whole, less=whole - step.stop.need)
        text = catalog.ui_or(
            f"note_stop_{step.stop.reason}",
            "note_stop_other",
            reason=escape(step.stop.reason),
            who=sequences([step.stop.seq_id], catalog),
            need=need,
            have=step.stop.have,
        )
        yield Note(text, "waiting")


def _blocks(row: AlikeSteps, catalog: Catalog) -> Iterator[Note]:
    """Block counts over all steps of the row. What a prefill takes is seen in the free blocks."""
    shared = sum(step.blocks.num_reused - step.blocks.num_revived for step in row.steps)
    counts = (
        ("shared", shared),
        ("revived", sum(step.blocks.num_revived for step in row.steps)),
        ("taken", sum(step.blocks.num_taken for step in row.steps if step.phase == "decode")),
        ("published", sum(step.blocks.num_hashed for step in row.steps)),
        ("evicted", sum(step.blocks.num_evicted for step in row.steps)),
    )
    parts = [catalog.ui(f"pages_{what}", count=count(number)) for what, number in counts if number]
    if parts:
        separator = catalog.ui("pages_separator")
        yield Note(catalog.ui("note_pages", parts=separator.join(parts)), "quiet")


def _broken_off(step: StepSummary, catalog: Catalog) -> Iterator[Note]:
    if step.error is not None and step.error.error_type == "KeyboardInterrupt":
        yield Note(catalog.ui("note_interrupted"), "error")
    elif step.error is not None:
        yield Note(catalog.ui("note_error", error=escape(step.error.error_type)), "error")
    elif step.wall_ns is None and not step.is_led:
        yield Note(catalog.ui("note_cut"), "error")
