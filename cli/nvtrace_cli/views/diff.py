"""The differences of two traces (`nvtrace.diff`), on the terminal or for other programs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from nvtrace_cli.views.console import make_console
from nvtrace_cli.views.machine import json_line
from nvtrace_cli.views.prose import Prose
from nvtrace_cli.views.table import FittingTable
from nvtrace_cli.views.text import count, duration, escape, ids, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from nvtrace.catalog import Catalog
    from nvtrace.diff import Decision, Latency, Side, TraceDiff
    from nvtrace.metrics import RequestMetrics

_NOTHING = "-"
_VALUE_WIDTH = 30
_INPUT_WIDTH = 16
_OF_AN_EVENT = ("seq_id", "seq_ids", "block_ids")
_OF_A_REASON = ("seq_id", "seq_ids", "reason", "need")


def print_json(difference: TraceDiff) -> None:
    """One object a line: kinds "setting", "input", "reason", "decision", "latency", "tokens".

    A "summary" comes last.

    Times are in nanoseconds, ratios are B / A.
    """
    for fields in _objects(difference):
        sys.stdout.write(json_line(fields) + "\n")


def _objects(difference: TraceDiff) -> list[dict[str, Any]]:
    objects: list[dict[str, Any]] = [
        {"kind": "setting"} | asdict(setting) for setting in difference.settings
    ]
    objects += [{"kind": "input"} | asdict(found) for found in difference.inputs]
    for kind in ("reason", "decision"):
        found = getattr(difference, kind)
        if found is not None:
            objects.append({"kind": kind} | asdict(found))
    objects += [_latency_object(latency) for latency in difference.latencies]
    objects += [{"kind": "tokens"} | asdict(tokens) for tokens in difference.tokens]
    return [
        *objects,
        {
            "kind": "summary",
            "is_same": difference.is_same,
            "num_decisions": difference.num_decisions,
            "num_settings": len(difference.settings),
            "num_inputs": len(difference.inputs),
            "num_requests": len(difference.tokens) + difference.num_same_tokens,
            "num_same_tokens": difference.num_same_tokens,
            "num_untimed": difference.num_untimed,
            "only_a": difference.only_a,
            "only_b": difference.only_b,
            "ttft_ratio": difference.ttft_ratio,
            "e2e_ratio": difference.e2e_ratio,
        },
    ]


def _latency_object(latency: Latency) -> dict[str, Any]:
    def times(request: RequestMetrics) -> dict[str, int | None]:
        return {"ttft_ns": request.time_to_first_token_ns, "e2e_ns": request.e2e_request_latency_ns}

    return {
        "kind": "latency",
        "seq_id": latency.seq_id,
        "a": times(latency.a),
        "b": times(latency.b),
        "ttft_ratio": latency.ttft_ratio,
        "e2e_ratio": latency.e2e_ratio,
    }


def print_plain(difference: TraceDiff) -> None:
    """One difference a line, with tabs: kind, name, A's value, B's value."""
    lines: list[tuple[str, ...]] = [("kind", "name", "a", "b")]
    lines += [("setting", s.name, _json(s.a), _json(s.b)) for s in difference.settings]
    lines += [
        ("input", f"{found.name}[{found.seq_ids[0]}]", _json(found.a), _json(found.b))
        for found in difference.inputs
    ]
    reason, decision = difference.reason, difference.decision
    if reason is not None:
        for name in ("step", "event", "value"):
            pair = (_json(getattr(side, name)) for side in (reason.a, reason.b))
            lines.append(("reason", reason.field if name == "value" else name, *pair))
    if decision is not None:
        a, b = decision.a, decision.b
        lines += [
            ("decision", "step", _json(a.step), _json(b.step)),
            ("decision", "event", _json(a.event), _json(b.event)),
            ("decision", decision.field, _json(a.value), _json(b.value)),
            ("state", "waiting", _json(a.state.waiting), _json(b.state.waiting)),
            ("state", "running", _json(a.state.running), _json(b.state.running)),
            ("state", "free_blocks", str(a.state.num_free_blocks), str(b.state.num_free_blocks)),
        ]
    for latency in difference.latencies:
        for name in ("time_to_first_token_ns", "e2e_request_latency_ns"):
            values = (_json(getattr(side, name)) for side in (latency.a, latency.b))
            lines.append((name, str(latency.seq_id), *values))
    for tokens in difference.tokens:
        name = f"{tokens.seq_id}[{tokens.index}]"
        lines.append(("tokens", name, _json(tokens.a), _json(tokens.b)))
    for line in lines:
        sys.stdout.write("\t".join(map(escape, line)) + "\n")


# -- for people ------------------------------------------------------------------------------------


def show(difference: TraceDiff, catalog: Catalog, limit: int) -> None:
    """All differences, settings first.

    Args:
        difference: what to show.
        catalog: the words.
        limit: rows of a table of requests, at most.
    """
    console = make_console()
    _show_settings(console, difference, catalog)
    _show_inputs(console, difference, catalog)
    _show_reason(console, difference, catalog)
    _show_decision(console, difference, catalog)
    _show_latencies(console, difference, catalog, limit)
    _show_tokens(console, difference, catalog, limit)
    for name, only in (("A", difference.only_a), ("B", difference.only_b)):
        if only:
            console.print(Prose((catalog.ui("diff_only", trace=name, ids=ids(only)), "")))


def _show_settings(console: Console, difference: TraceDiff, catalog: Catalog) -> None:
    if not difference.settings:
        console.print(Prose((catalog.ui("diff_same_settings"), "")))
        return
    console.print(Text(catalog.ui("diff_settings_title"), style="heading"))
    headings = {"setting": catalog.ui("diff_column_setting"), "a": "A", "b": "B"}
    table = _table(headings, catalog)
    for setting in difference.settings:
        table.add_row(escape(setting.name), _short(setting.a), _short(setting.b))
    console.print(table)


def _show_inputs(console: Console, difference: TraceDiff, catalog: Catalog) -> None:
    total = count(len(difference.tokens) + difference.num_same_tokens)
    if not difference.inputs:
        console.print(Prose((catalog.ui("diff_same_inputs", total=total), "")))
        return
    console.print()
    console.print(Text(catalog.ui("diff_inputs_title"), style="heading"))
    headings = {"input": catalog.ui("diff_column_input"), "of": catalog.ui("diff_column_requests")}
    table = _table({**headings, "a": "A", "b": "B"}, catalog)
    for found in difference.inputs:
        of = catalog.ui("diff_of", count=count(len(found.seq_ids)), total=total)
        name = f"{found.name}[{found.seq_ids[0]}]"
        table.add_row(escape(name), of, *(_short(v, _INPUT_WIDTH) for v in (found.a, found.b)))
    console.print(table)


def _show_reason(console: Console, difference: TraceDiff, catalog: Catalog) -> None:
    reason = difference.reason
    if reason is None:
        return
    console.print()
    console.print(Text(catalog.ui("diff_reason_title"), style="heading"))
    table = _table({"fact": "", "a": "A", "b": "B"}, catalog)
    a, b = reason.a, reason.b
    rows: list[tuple[str, Any, Any]] = [
        (catalog.ui("diff_row_step"), a.step, b.step),
        (catalog.ui("diff_row_event"), a.event, b.event),
        *((name, a.facts.get(name), b.facts.get(name)) for name in _OF_A_REASON),
    ]
    for label, left, right in rows:
        if left is not None or right is not None:
            style = "error" if label == reason.field else ""
            table.add_row(Text(label, style="label"), _short(left), _short(right), style=style)
    console.print(Padding(table, (0, 0, 0, 2)))


def _show_decision(console: Console, difference: TraceDiff, catalog: Catalog) -> None:
    console.print()
    decision = difference.decision
    number = count(difference.num_decisions)
    if decision is None:
        key = "diff_same_decisions" if difference.is_same else "diff_same_effects"
        console.print(Prose((catalog.ui(key, count=number), "heading")))
        return
    console.print(Text(catalog.ui("diff_decision_title"), style="heading"))
    sentence = catalog.ui("diff_decision", count=number, step=decision.after_step)
    console.print(Padding(Prose((sentence, "")), (0, 0, 0, 2)))
    console.print(Padding(_decision_table(decision, catalog), (0, 0, 0, 2)))


def _decision_table(decision: Decision, catalog: Catalog) -> FittingTable:
    a, b = decision.a, decision.b
    table = _table({"fact": "", "a": "A", "b": "B"}, catalog)

    def row(label: str, left: object, right: object, style: str = "") -> None:
        table.add_row(Text(label, style="label"), _short(left), _short(right), style=style)

    row(catalog.ui("diff_row_step"), _step(a, catalog), _step(b, catalog))
    row(catalog.ui("diff_row_event"), a.event or _NOTHING, b.event or _NOTHING)
    shown = _OF_AN_EVENT if decision.field in {"event", "step"} else (decision.field,)
    for name in shown:
        if name in a.facts or name in b.facts:
            row(name, a.facts.get(name), b.facts.get(name), "error")
    row("waiting", ids(a.state.waiting) or _NOTHING, ids(b.state.waiting) or _NOTHING)
    row("running", ids(a.state.running) or _NOTHING, ids(b.state.running) or _NOTHING)
    row(catalog.ui("diff_row_free"), a.state.num_free_blocks, b.state.num_free_blocks)
    row(catalog.ui("diff_row_cached"), a.state.num_cached_blocks, b.state.num_cached_blocks)
    return table


def _step(side: Side, catalog: Catalog) -> str:
    if side.event is None:
        return catalog.ui("diff_over")
    return catalog.ui("diff_between") if side.step is None else str(side.step)


def _show_latencies(console: Console, difference: TraceDiff, catalog: Catalog, limit: int) -> None:
    if difference.num_untimed:
        sentence = catalog.ui("diff_untimed", count=count(difference.num_untimed))
        console.print("", Prose((sentence, "warning")), sep="\n")
    if not difference.latencies:
        return
    console.print()
    console.print(Text(catalog.ui("diff_latency_title"), style="heading"))
    e2e = catalog.ui("diff_column_e2e")
    headings = {"seq": catalog.ui("diff_column_seq")}
    for name, times in (("ttft", "TTFT"), ("e2e", e2e)):
        headings |= {f"{name}_a": f"{times} A", f"{name}_b": f"{times} B", f"{name}_ratio": "B/A"}
    leaving = ("ttft_ratio", "e2e_ratio", "ttft_a", "ttft_b")
    table = _table(headings, catalog, leaving)
    for latency in difference.latencies[:limit]:
        a, b = latency.a, latency.b
        table.add_row(
            str(latency.seq_id),
            _time(a.time_to_first_token_ns),
            _time(b.time_to_first_token_ns),
            _ratio(latency.ttft_ratio),
            _time(a.e2e_request_latency_ns),
            _time(b.e2e_request_latency_ns),
            _ratio(latency.e2e_ratio),
        )
    median, ttft = catalog.ui("diff_median"), difference.ttft_ratio
    cells = (median, "", "", _ratio(ttft), "", "", _ratio(difference.e2e_ratio))
    table.add_row(*cells, style="heading")
    console.print(table)
    _show_rest(console, len(difference.latencies), catalog, limit)


def _show_tokens(console: Console, difference: TraceDiff, catalog: Catalog, limit: int) -> None:
    console.print()
    same, total = difference.num_same_tokens, difference.num_same_tokens + len(difference.tokens)
    sentence = catalog.ui("diff_tokens", same=count(same), total=count(total))
    console.print(Prose((sentence, "heading")))
    if not difference.tokens:
        return
    columns = ("seq", "index", "token_a", "token_b", "num_a", "num_b")
    headings = {name: catalog.ui(f"diff_column_{name}") for name in columns}
    table = _table(headings, catalog)
    for tokens in difference.tokens[:limit]:
        cells = (tokens.seq_id, tokens.index, tokens.a, tokens.b, tokens.num_a, tokens.num_b)
        table.add_row(*(_NOTHING if cell is None else str(cell) for cell in cells))
    console.print(table)
    _show_rest(console, len(difference.tokens), catalog, limit)


def _show_rest(console: Console, total: int, catalog: Catalog, limit: int) -> None:
    if total > limit:
        rest = catalog.ui("diff_more", count=count(total - limit))
        console.print(Prose((rest, "quiet")))


def _table(
    headings: Mapping[str, str], catalog: Catalog, leaving: Sequence[str] = ()
) -> FittingTable:
    """A table that always shows both sides, below each other if there is no room."""
    return FittingTable(
        headings, catalog, leaving=leaving, words=headings, is_continued=not leaving
    )


def _short(value: object, width: int = _VALUE_WIDTH) -> str:
    if value is None:
        return _NOTHING
    text = value if isinstance(value, str) else _json(value)
    return shorten(escape(text), width)


def _json(value: object) -> str:
    return json_line(value)


def _time(nanoseconds: float | None) -> str:
    return _NOTHING if nanoseconds is None else duration(nanoseconds).replace(" ", "")


def _ratio(ratio: float | None) -> str:
    return _NOTHING if ratio is None else f"{ratio:.2f}"
