"""Two traces side by side: settings, inputs, the first that differs, latencies, tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from msgspec import structs

from nvtrace import events as ev
from nvtrace.diff import ShortState, diff
from nvtrace.envelope import Footer, Header
from nvtrace.reader import read_trace
from nvtrace.replay import InconsistentTraceError
from support.cli import ROOT, call
from support.cli_traces import Ask, chunked_run, crowded_run, write_records, write_trace
from support.recording import BUSY, BUSY_MIXED, Recording
from support.workload import workloads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nvtrace.envelope import Record
    from support.workload import Workload

RANKS = [str(ROOT / "docs" / "traces" / f"two-ranks{rank}.jsonl.zst") for rank in ("", ".rank1")]


def changed(records: list[Record], change: Callable[[ev.Event], ev.Event]) -> list[Record]:
    """The same records, each event changed."""
    changes = (change(item) if isinstance(item, ev.Event) else item for item in records)
    return cast("list[Record]", list(changes))


def slower(event: ev.Event) -> ev.Event:
    """Everything takes twice as long."""
    later = structs.replace(event, ts_ns=2 * event.ts_ns)
    return structs.replace(later, wall_ns=7) if isinstance(later, ev.StepEnd) else later


@given(workloads())
def test_a_trace_differs_from_itself_in_nothing(workload: Workload) -> None:
    records = Recording(workload).records
    difference = diff(records, records)
    assert difference.is_same
    assert not difference.inputs
    assert not difference.settings
    assert not difference.tokens
    assert not difference.only_a
    assert not difference.only_b
    assert all(latency.a == latency.b for latency in difference.latencies)


def test_times_are_told_and_decide_nothing() -> None:
    records = Recording(BUSY).records
    difference = diff(records, changed(records, slower))
    assert difference.decision is None
    assert difference.e2e_ratio == 2
    assert difference.ttft_ratio == 2


def test_the_first_decision_that_differs_is_told_with_both_states() -> None:
    """Of a budget of 6, request 0 took 5: only "mixed" starts request 1 with what is left."""
    difference = diff(Recording(BUSY).records, Recording(BUSY_MIXED).records)
    decision = difference.decision
    assert decision is not None
    assert [setting.name for setting in difference.settings] == ["policy"]
    assert (decision.field, decision.a.step, decision.b.step) == ("event", 1, 1)
    assert decision.a.event == "SCHEDULE_PREFILL"
    reason = difference.reason
    assert reason is not None
    assert (reason.a.event, reason.a.facts["reason"]) == ("ADMISSION_STOP", "token_budget")
    assert (reason.b.event, reason.b.facts["reason"]) == ("STATE_TRANSITION", "admitted")
    assert (decision.b.event, decision.b.facts["block_ids"]) == ("BLOCKS_ALLOCATE", [[3, 4, 5]])
    assert decision.a.state == ShortState((1,), (0,), num_free_blocks=5, num_cached_blocks=0)
    assert decision.b.state == ShortState((1,), (0,), num_free_blocks=2, num_cached_blocks=0)


def test_what_was_asked_is_an_input_and_no_decision() -> None:
    """The two runs differ in all that a user may ask of a request."""
    asked = {"seed": 77, "temperature": 1.25, "top_p": 0.5, "stop": ["x"], "max_tokens": 99}

    def otherwise(event: ev.Event) -> ev.Event:
        if isinstance(event, ev.StateTransition):
            return structs.replace(event, max_tokens=99)
        return structs.replace(event, **asked) if isinstance(event, ev.RequestEnqueue) else event

    records = Recording(BUSY).records
    difference = diff(records, changed(records, otherwise))
    assert difference.is_same
    assert difference.num_decisions > 50
    assert {found.name: found.b for found in difference.inputs} == asked
    for found in difference.inputs:
        assert found.seq_ids[0] == 0
        assert len(found.seq_ids) >= 4


def test_a_request_that_comes_later_is_an_input_with_effects() -> None:
    late = [
        replace(BUSY.requests[0], arrival=0),
        *(replace(r, arrival=3) for r in BUSY.requests[1:]),
    ]
    difference = diff(Recording(BUSY).records, Recording(replace(BUSY, requests=late)).records)
    names = {found.name for found in difference.inputs}
    assert "arrival" in names
    assert difference.decision is not None


def test_another_reason_with_the_same_effect_is_a_reason_alone() -> None:
    def otherwise(event: ev.Event) -> ev.Event:
        if isinstance(event, ev.ScheduleDecode):
            return structs.replace(event, reason="my_new_word")
        return event

    records = Recording(BUSY).records
    difference = diff(records, changed(records, otherwise))
    assert difference.decision is None
    assert difference.reason is not None
    assert not difference.is_same
    assert (difference.reason.field, difference.reason.b.value) == ("reason", "my_new_word")
    assert difference.reason.a.event == "SCHEDULE_DECODE"


def test_a_field_that_differs_is_named_with_both_values() -> None:
    def other_page(event: ev.Event) -> ev.Event:
        if isinstance(event, ev.Preempt):
            return structs.replace(event, num_blocks_freed=event.num_blocks_freed + 1)
        return event

    records = Recording(BUSY).records
    decision = diff(records, changed(records, other_page)).decision
    assert decision is not None
    assert (decision.field, decision.a.event) == ("num_blocks_freed", "PREEMPT")
    assert decision.b.value == decision.a.value + 1


@pytest.mark.parametrize("field", ["token_budget", "free_blocks"])
def test_what_only_follows_from_the_settings_is_no_decision(field: str) -> None:
    def other(event: ev.Event) -> ev.Event:
        return structs.replace(event, **{field: 10**6}) if hasattr(event, field) else event

    records = Recording(BUSY).records
    assert diff(records, changed(records, other)).decision is None


def test_the_first_other_token_of_each_request_is_told() -> None:
    def other_token(event: ev.Event) -> ev.Event:
        if isinstance(event, ev.SampleTokens) and event.step == 5:
            return structs.replace(event, token_ids=[5 for _ in event.token_ids])
        return event

    records = Recording(BUSY).records
    difference = diff(records, changed(records, other_token))
    drawn = next(e for e in records if isinstance(e, ev.SampleTokens) and e.step == 5)
    unlike = [
        seq_id for seq_id, token in zip(drawn.seq_ids, drawn.token_ids, strict=True) if token != 5
    ]
    assert unlike
    assert [tokens.seq_id for tokens in difference.tokens] == sorted(unlike)
    assert {tokens.b for tokens in difference.tokens} == {5}


def test_an_answer_that_is_a_beginning_of_the_other_parts_where_it_ends() -> None:
    records = Recording(BUSY).records
    steps = [place for place, item in enumerate(records) if isinstance(item, ev.StepEnd)]
    difference = diff(records, records[: steps[4] + 1])
    assert difference.decision is not None
    assert (difference.decision.b.event, difference.decision.after_step) == (None, 5)
    for tokens in difference.tokens:
        assert (tokens.index, tokens.b) == (tokens.num_b, None)
        assert tokens.num_a > tokens.num_b


def test_a_request_that_one_trace_lacks_is_told() -> None:
    fewer = Recording(replace(BUSY, requests=BUSY.requests[:1])).records
    difference = diff(Recording(BUSY).records, fewer)
    assert difference.only_a == [1, 2, 3, 4]
    assert difference.only_b == []


def test_an_event_that_cannot_be_names_its_trace() -> None:
    records = Recording(BUSY).records
    place = next(i for i, item in enumerate(records) if isinstance(item, ev.RequestEnqueue))
    with pytest.raises(InconsistentTraceError, match="trace B: "):
        diff(records, records[:place] + records[place + 1 :])


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A crowded run, and the same with room for all."""
    settings, asks = crowded_run()
    wide = replace(settings, num_kvcache_blocks=100), asks
    a = write_trace(tmp_path / "a.jsonl", (settings, asks))
    return a, write_trace(tmp_path / "b.jsonl", wide)


def test_the_same_decisions_end_with_0_whatever_the_times(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [i for i in read_trace(pair[0]) if isinstance(i, Header | Footer | ev.Event)]
    slow = [slower(item) if isinstance(item, ev.Event) else item for item in records]
    other = write_records(tmp_path / "slow.jsonl", slow)
    outcome = call(capsys, "diff", pair[0], other, "--lang", "en")
    assert outcome.code == 0
    assert "The settings are the same." in outcome.out
    assert "decisions are the same." in outcome.out
    assert "2.00" in outcome.out
    assert "4 of 4 requests have the same tokens." in outcome.out


def test_another_seed_is_told_as_an_input(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [i for i in read_trace(pair[0]) if isinstance(i, Header | Footer | ev.Event)]
    seeded = [
        structs.replace(item, seed=item.seed + 1) if isinstance(item, ev.RequestEnqueue) else item
        for item in records
    ]
    other = write_records(tmp_path / "seeded.jsonl", seeded)
    outcome = call(capsys, "diff", pair[0], other, "--lang", "en")
    assert outcome.code == 0
    assert "seed[0]          4 of 4" in outcome.out
    assert "decisions are the same." in outcome.out
    plain = call(capsys, "diff", pair[0], other, "--plain").out
    assert "input\tseed[0]\t" in plain
    (found, *_) = (
        json.loads(line) for line in call(capsys, "diff", pair[0], other, "--json").out.splitlines()
    )
    assert (found["kind"], found["name"], found["seq_ids"]) == ("input", "seed", [0, 1, 2, 3])


def test_other_decisions_end_with_1_and_fit_80_columns(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "diff", *pair, "--lang", "en")
    assert outcome.code == 1
    for words in ("num_kvcache_blocks   20   100", "The first effect that differs", "free blocks"):
        assert words in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_json_tells_each_difference_and_a_summary(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "diff", *pair, "--json")
    objects = [json.loads(line) for line in outcome.out.splitlines()]
    kinds = [each["kind"] for each in objects]
    assert kinds == ["setting", "reason", "decision", *["latency"] * 4, "summary"]
    assert objects[0] == {"kind": "setting", "name": "num_kvcache_blocks", "a": 20, "b": 100}
    assert objects[2]["a"]["state"]["num_free_blocks"] < objects[2]["b"]["state"]["num_free_blocks"]
    assert objects[-1]["is_same"] is False
    assert objects[-1]["e2e_ratio"] < 1


def test_plain_is_one_difference_a_line(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "diff", *pair, "--plain")
    lines = [line.split("\t") for line in outcome.out.splitlines()]
    assert lines[:2] == [["kind", "name", "a", "b"], ["setting", "num_kvcache_blocks", "20", "100"]]
    assert {len(line) for line in lines} == {4}
    assert sum(line[0] == "e2e_request_latency_ns" for line in lines) == 4


def test_a_long_table_of_requests_is_cut_and_says_so(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "diff", *pair, "--limit", "1", "--lang", "en")
    assert "... and 3 more" in outcome.out


def test_other_prompts_are_an_input_with_effects(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_trace(tmp_path / "c.jsonl", (crowded_run()[0], [Ask(12, 24)]))
    outcome = call(capsys, "diff", pair[0], other, "--lang", "en")
    assert outcome.code == 1
    assert "prompt_token_ids[0]" in outcome.out
    assert "The first effect that differs" in outcome.out
    assert "Only in A: requests 1-3." in outcome.out


def test_latencies_that_nobody_knows_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", chunked_run())
    out = tmp_path / "simulated.jsonl"
    assert call(capsys, "whatif", trace, "--set", "policy=mixed", "--out", out).code == 0
    outcome = call(capsys, "diff", trace, out, "--lang", "en")
    assert "Latencies are left out" in outcome.out
    assert "TTFT" not in outcome.out


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("-", "-"), 2, "standard input can be only one of the traces"),
        (("missing.jsonl", "missing.jsonl"), 3, "no such file"),
        (("a", "b", "--json", "--plain"), 2, "give one"),
        ((RANKS[0], RANKS[1]), 2, f"{RANKS[1]} is rank 1's own trace"),
        ((RANKS[1], RANKS[0], "--json"), 2, f"{RANKS[1]} is rank 1's own trace"),
        ((RANKS[1], RANKS[1]), 2, "are in rank 0's, "),
    ],
)
def test_what_cannot_be_compared_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    outcome = call(capsys, "diff", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert sentence in outcome.err
