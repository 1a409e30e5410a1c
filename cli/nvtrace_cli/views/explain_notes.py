"""The sentence for each link of an explanation: which message of the catalog stands for which fact.

`nvtrace.explain` finds the facts, `explain.py` lays the sentences out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvtrace.explain import links
from nvtrace_cli.views.notes import Note
from nvtrace_cli.views.prose import NO_BREAK_SPACE
from nvtrace_cli.views.text import count, duration, escape, ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nvtrace.catalog import Catalog

_SCHEDULES = {"prefill": "SCHEDULE_PREFILL", "decode": "SCHEDULE_DECODE", "mixed": "SCHEDULE_MIXED"}
_UNITS = {"no_blocks": "page", "token_budget": "token", "chunk_not_first": "token"}


def note(link: links.Link, catalog: Catalog) -> Note:
    """The sentence for a link of any kind, and its colour. The request of a chain is not named."""
    return Note(_SENTENCES[type(link)](link, catalog), _style(link))


def step_note(link: links.Link, catalog: Catalog) -> Note:
    """The same for a step's chain, where a request has to be named."""
    found = note(link, catalog)
    if not isinstance(link, links.Preempted):
        return found
    who = requests([link.seq_id], catalog)
    return Note(catalog.ui("explain_who", who=who, text=found.text), found.style)


def _style(link: links.Link) -> str:
    if isinstance(link, links.Chosen):
        return link.phase if link.phase in _SCHEDULES else ""
    if isinstance(link, links.Paced):
        return "warning" if link.is_slow else ""
    return _STYLES.get(type(link), "")


# -- a request's life ------------------------------------------------------------------------------


def _queued(link: links.Queued, catalog: Catalog) -> str:
    key = "explain_queued_behind" if link.num_ahead else "explain_queued"
    return catalog.ui(key, count=count(link.num_ahead))


def _waited(link: links.Waited, catalog: Catalog) -> str:
    if link.reason is None or link.head_seq_id is None or link.need is None or link.have is None:
        return catalog.ui("explain_waited_unsaid")
    is_head = link.num_ahead == (0, 0)
    need = _need(link.reason, link.need, link.whole, catalog)
    text = _stop(link.reason, need, link.have, None if is_head else link.head_seq_id, catalog)
    if link.num_ahead[1] <= 1:
        return text
    return catalog.ui("explain_ahead", text=text, count=_range(link.num_ahead, catalog))


def _need(reason: str, need: links.Span, whole: links.Span | None, catalog: Catalog) -> str:
    """The blocks that the queue's head needs; cached ones do not count."""
    unit = _UNITS.get(reason)
    text = _range(need, catalog) if unit is None else amount(need, unit, catalog)
    if whole is None:
        return text
    less = tuple(sorted((whole[0] - need[0], whole[1] - need[1])))
    key = "need_shared" if unit == "page" else "need_cached"
    return catalog.ui(
        key, need=text, whole=_range(whole, catalog), less=_range((less[0], less[1]), catalog)
    )


def _stop(
    reason: str, need: str, have: links.Span, head_seq_id: int | None, catalog: Catalog
) -> str:
    """Why the queue's head is not admitted; it is named if it is another request."""
    values = {"need": need, "have": _range(have, catalog), "reason": escape(reason)}
    if head_seq_id is None:
        return catalog.ui_or(f"explain_waited_{reason}", "explain_waited_other", **values)
    values["who"] = requests([head_seq_id], catalog)
    return catalog.ui_or(f"explain_behind_{reason}", "explain_behind_other", **values)


def _admitted(link: links.Admitted, catalog: Catalog) -> str:
    key = "explain_admitted_again" if link.is_again else "explain_admitted"
    text = catalog.ui(key, new=amount(link.num_new_blocks, "page", catalog))
    if not link.num_cached_tokens:
        return text
    sources = [
        catalog.ui(key, pages=amount(number, "page", catalog), who=requests(seq_ids, catalog))
        for key, number, seq_ids in (
            ("explain_shared", link.num_shared_blocks, link.shared_with),
            ("explain_revived", link.num_revived_blocks, link.left_by),
        )
        if number
    ]
    return catalog.ui(
        "explain_cached",
        text=text,
        cached=count(link.num_cached_tokens),
        total=amount(link.num_tokens, "token", catalog),
        sources=catalog.ui("pages_separator").join(sources),
    )


def _prefilled(link: links.Prefilled, catalog: Catalog) -> str:
    first, last = link.first_token, link.last_token
    text = catalog.ui(
        "explain_recomputed" if link.num_recomputed else "explain_prefilled",
        tokens=amount(last - first + 1, "token", catalog),
        span=count(first) if first == last else f"{count(first)}-{count(last)}",
        total=count(link.num_total),
        again=count(link.num_recomputed),
    )
    if link.num_steps > 1:
        text = catalog.ui("explain_chunks", text=text, count=count(link.num_steps))
    if link.is_complete:
        text = catalog.ui("explain_complete", text=text)
    if link.batch == (1, 1):
        return text
    return catalog.ui("explain_beside", text=text, batch=_range(link.batch, catalog))


def _decoded(link: links.Decoded, catalog: Catalog) -> str:
    tokens, batch = amount(link.num_steps, "token", catalog), _range(link.batch, catalog)
    return catalog.ui("explain_decoded", tokens=tokens, batch=batch)


def _idled(link: links.Idled, catalog: Catalog) -> str:
    reason = escape(link.reason)
    return catalog.ui_or(f"explain_idled_{link.reason}", "explain_idled_other", reason=reason)


def _preempted(link: links.Preempted, catalog: Catalog) -> str:
    is_itself = link.seq_id == link.for_seq_id
    text = catalog.ui(
        "explain_preempted_itself" if is_itself else "explain_preempted",
        for_whom=requests([link.for_seq_id], catalog),
        pages=_given_back(link, catalog),
        tokens=amount(link.num_tokens_to_recompute, "token", catalog),
    )
    return catalog.ui("explain_in_prefill", text=text) if link.is_prefilling else text


def _given_back(link: links.Preempted, catalog: Catalog) -> str:
    num_kept = link.num_blocks_held - link.num_blocks_freed
    pages = amount(link.num_blocks_held, "page", catalog)
    if not num_kept:
        return pages
    return catalog.ui(
        "explain_kept",
        pages=pages,
        kept=count(num_kept),
        who=requests(link.kept_by, catalog),
        freed=count(link.num_blocks_freed),
    )


def _broken(link: links.Broken, catalog: Catalog) -> str:
    if link.error is None:
        return catalog.ui("explain_broken_unsaid")
    return catalog.ui("explain_broken", error=escape(link.error))


def _ended(link: links.Ended, catalog: Catalog) -> str:
    tokens = amount(link.num_completion_tokens, "token", catalog)
    limit, reason = count(link.max_tokens), _end(link.reason, catalog)
    return catalog.ui("explain_ended", tokens=tokens, limit=limit, reason=reason)


def _unended(link: links.Unended, catalog: Catalog) -> str:
    tokens = amount(link.num_completion_tokens, "token", catalog)
    return catalog.ui_or(
        f"explain_unended_{link.status}",
        "explain_unended_other",
        status=escape(link.status),
        tokens=tokens,
        limit=count(link.max_tokens),
    )


def _end(reason: str, catalog: Catalog) -> str:
    return escape(catalog.reason("STATE_TRANSITION", reason))


# -- a step ----------------------------------------------------------------------------------------


def _came(link: links.Came, catalog: Catalog) -> str:
    return catalog.ui("explain_came", who=requests(link.seq_ids, catalog))


def _chosen(link: links.Chosen, catalog: Catalog) -> str:
    reason = escape(catalog.reason(_SCHEDULES.get(link.phase, ""), link.reason))
    return catalog.ui("explain_chosen", phase=escape(link.phase), reason=reason)


def _computed(link: links.Computed, catalog: Catalog) -> str:
    both = "mixed" if link.decode_ids else "prefill"
    text = catalog.ui(
        f"explain_batch_{both if link.prefill_ids else 'decode'}",
        batch=count(len(link.decode_ids) + len(link.prefill_ids)),
        tokens=amount(link.num_tokens, "token", catalog),
        budget=count(link.token_budget),
        decodes=requests(link.decode_ids, catalog),
        prefills=requests(link.prefill_ids, catalog),
    )
    if link.num_cached_tokens:
        tokens = amount(link.num_cached_tokens, "token", catalog)
        text = catalog.ui("explain_batch_cached", text=text, tokens=tokens)
    if link.before_step is not None and link.before_batch is not None:
        step, before = count(link.before_step), count(link.before_batch)
        text = catalog.ui("explain_batch_before", text=text, step=step, before=before)
    return text if link.num_waiting else catalog.ui("explain_nobody_waits", text=text)


def _left(link: links.Left, catalog: Catalog) -> str:
    is_end = link.reason not in {"preempted", "token_budget"}
    return catalog.ui(
        "explain_gone_ended" if is_end else f"explain_gone_{link.reason}",
        who=requests(link.seq_ids, catalog),
        step=count(link.first_step),
        reason=_end(link.reason, catalog),
    )


def _joined(link: links.Joined, catalog: Catalog) -> str:
    who, step = requests(link.seq_ids, catalog), count(link.first_step)
    return catalog.ui(f"explain_joined_{link.reason}", who=who, step=step)


def _aside(link: links.Aside, catalog: Catalog) -> str:
    return catalog.ui(f"explain_aside_{link.reason}", who=requests(link.seq_ids, catalog))


def _stopped(link: links.Stopped, catalog: Catalog) -> str:
    whole = None if link.whole is None else (link.whole, link.whole)
    need = _need(link.reason, (link.need, link.need), whole, catalog)
    have = (link.have, link.have)
    text = _stop(link.reason, need, have, None, catalog)
    text = catalog.ui("explain_who_waits", who=requests([link.head_seq_id], catalog), text=text)
    if link.num_waiting <= 1:
        return text
    return catalog.ui("explain_behind_it", text=text, count=count(link.num_waiting - 1))


def _eager(link: links.Eager, catalog: Catalog) -> str:
    return catalog.ui("explain_eager", reason=escape(catalog.reason("RUN_EAGER", link.reason)))


def _replayed(link: links.Replayed, catalog: Catalog) -> str:
    ahead = catalog.ui(
        f"explain_late_{link.late_reason}" if link.late_reason else "explain_is_ahead"
    )
    rows, padding = amount(link.graph_batch_size, "row", catalog), count(link.padding)
    return catalog.ui("explain_replayed", rows=rows, padding=padding, ahead=ahead)


def _finished(link: links.Finished, catalog: Catalog) -> str:
    who, reason = requests(link.seq_ids, catalog), _end(link.reason, catalog)
    return catalog.ui("explain_finished", who=who, reason=reason)


def _paced(link: links.Paced, catalog: Catalog) -> str:
    kind, wall = _class(link, catalog), duration(link.wall_ns)
    if link.median_ns is None or link.limit_ns is None:
        return catalog.ui("explain_paced_alone", wall=wall, kind=kind)
    facts = {
        "wall": wall,
        "kind": kind,
        "median": duration(link.median_ns),
        "limit": duration(link.limit_ns),
        "count": count(link.num_others),
    }
    if not link.is_slow:
        return catalog.ui("explain_paced", **facts)
    if link.median_ns:
        text = catalog.ui("explain_slow", factor=f"{link.wall_ns / link.median_ns:.1f}", **facts)
    else:
        text = catalog.ui("explain_slow_zero", **facts)
    if link.grown is not None:
        part = link.parts[link.grown]
        text = catalog.ui(
            "explain_grown",
            text=text,
            part=catalog.ui(f"explain_part_{link.grown}"),
            time=duration(part.time_ns),
            median=duration(part.median_ns or 0),
        )
    return catalog.ui("explain_first", text=text) if link.is_first else text


def _class(link: links.Paced, catalog: Catalog) -> str:
    if link.graph_batch_size is not None:
        rows = amount(link.graph_batch_size, "row", catalog)
        return catalog.ui("explain_class_graph", phase=escape(link.phase), rows=rows)
    most = link.bucket or 1
    span = amount((most // 2 + 1, most), "token", catalog)
    return catalog.ui("explain_class_tokens", phase=escape(link.phase), span=span)


# -- numbers and names -----------------------------------------------------------------------------


def requests(seq_ids: Iterable[int], catalog: Catalog) -> str:
    """Requests by their numbers, not to be broken over two lines: "request 3", "requests 3, 4"."""
    numbers = tuple(seq_ids)
    key = "explain_request" if len(numbers) == 1 else "explain_requests"
    return catalog.ui(key, ids=ids(numbers)).replace(" ", NO_BREAK_SPACE)


def amount(number: int | links.Span, unit: str, catalog: Catalog) -> str:
    """A number of blocks, tokens or rows, or a range: "1 block", "0 to 3 blocks"."""
    span = (number, number) if isinstance(number, int) else number
    key = f"explain_{unit}" if span == (1, 1) else f"explain_{unit}s"
    return catalog.ui(key, count=_range(span, catalog))


def _range(span: links.Span, catalog: Catalog) -> str:
    least, most = span
    if least == most:
        return count(least)
    return catalog.ui("explain_range", least=count(least), most=count(most))


_SENTENCES: dict[type[links.Link], Callable[[Any, Catalog], str]] = {
    links.Queued: _queued,
    links.Waited: _waited,
    links.Admitted: _admitted,
    links.Prefilled: _prefilled,
    links.Decoded: _decoded,
    links.Idled: _idled,
    links.Preempted: _preempted,
    links.Broken: _broken,
    links.Ended: _ended,
    links.Unended: _unended,
    links.Came: _came,
    links.Chosen: _chosen,
    links.Computed: _computed,
    links.Left: _left,
    links.Joined: _joined,
    links.Aside: _aside,
    links.Stopped: _stopped,
    links.Eager: _eager,
    links.Replayed: _replayed,
    links.Finished: _finished,
    links.Paced: _paced,
}
_STYLES: dict[type[links.Link], str] = {
    links.Waited: "waiting",
    links.Stopped: "waiting",
    links.Prefilled: "prefill",
    links.Decoded: "decode",
    links.Idled: "idle",
    links.Preempted: "preempted",
    links.Ended: "ended",
    links.Finished: "ended",
    links.Broken: "error",
    links.Unended: "error",
}
