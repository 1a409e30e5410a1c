"""nvtrace explain: facts worked by hand, what must hold for every run, and what is shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len

from nvtrace import events as ev
from nvtrace.catalog import LANGUAGES, Catalog, load_catalog
from nvtrace.distribution import HIGH_FACTOR, HIGH_QUARTILES
from nvtrace.envelope import Header
from nvtrace.explain import NotInTraceError, explain_request, explain_step, kind_of, links
from nvtrace.explain.pace import PARTS, Pace
from nvtrace.measure import Measure
from nvtrace.reader import read_trace
from nvtrace.replay import InconsistentTraceError
from nvtrace.summarize import summarize
from nvtrace.summary import AlikeSteps
from nvtrace_cli.views.explain_notes import note, step_note
from nvtrace_cli.views.notes import notes
from support.cli import ROOT, call, environment, spawn
from support.cli_traces import HOSTILE_TEXT, article_run, write_trace
from support.fake_runner import Settings
from support.golden import GOLDEN
from support.recording import BUSY, BUSY_MIXED, HOOKS_OF_A_STEP, Interruption, Recording
from support.workload import Request, Workload, workloads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from nvtrace.envelope import Record

STATIC = Workload(
    Settings(policy="static"),
    [Request([1, 2], max_tokens=3), Request([2, 1], max_tokens=2, arrival=1)],
)
STRUCK_IN_PREFILL = Workload(
    Settings(kvcache_block_size=2, num_kvcache_blocks=6, max_num_batched_tokens=4, policy="mixed"),
    [Request([1, 2], max_tokens=6), Request([2, 1] * 4, max_tokens=1, arrival=1)],
)
FULL_HOUSE = Workload(
    Settings(max_num_seqs=1),
    [Request([1, 2], max_tokens=2), Request([2, 1], max_tokens=1), Request([2, 2], max_tokens=1)],
)
TIGHT_BUDGET = Workload(
    Settings(max_num_batched_tokens=3),
    [Request([1, 2, 1, 2], max_tokens=3), Request([2, 1, 2, 1], max_tokens=3)],
)
_ENVELOPE = {"first_step", "last_step", "num_steps", "time_ns", "event_ids"}


@pytest.fixture(scope="module")
def busy() -> list[Record]:
    return Recording(BUSY).records


def told(records: Iterable[Record], seq_id: int) -> list[tuple[Any, ...]]:
    """A request's chain: kind, first and last step, and the facts but time and proof."""
    return [_told(link) for link in explain_request(records, seq_id).chain]


def told_of_step(records: Iterable[Record], step: int) -> list[tuple[Any, ...]]:
    """The same for a step, without how long it took."""
    chain = explain_step(records, step).chain
    return [_told(link) for link in chain if not isinstance(link, links.Paced)]


def _told(link: links.Link) -> tuple[Any, ...]:
    left_out = {*_ENVELOPE, "whole", "num_blocks_held", "kept_by"}  # the last three: see below
    facts = [value for name, value in msgspec.structs.asdict(link).items() if name not in left_out]
    return kind_of(link), link.first_step, link.last_step, *facts


# -- a request's life, by hand ---------------------------------------------------------------------


def test_a_request_waits_for_the_budget_shares_pages_and_stands_aside(busy: list[Record]) -> None:
    assert told(busy, 1) == [
        ("queued", 0, 0, 5, 8, 1),
        ("waited", 1, 1, "token_budget", 1, (5, 5), (1, 1), (0, 0), False),
        ("admitted", 2, 2, 5, 4, 2, (0,), 0, (), 1, False),
        ("prefilled", 2, 2, 4, 4, 5, 0, (1, 1), True),
        ("idled", 3, 4, "prefills_first", (1, 1)),
        ("decoded", 5, 11, (1, 3)),
        ("ended", 11, 11, "max_tokens", 8, 8, 2, False),
    ]


def test_a_request_that_is_preempted_in_decode_computes_its_tokens_again(
    busy: list[Record],
) -> None:
    assert told(busy, 2) == [
        ("queued", 2, 2, 7, 7, 0),
        ("admitted", 3, 3, 7, 0, 0, (), 0, (), 4, False),
        ("prefilled", 3, 4, 0, 6, 7, 0, (1, 1), True),
        ("decoded", 5, 5, (3, 3)),
        ("preempted", 6, 6, 2, 0, 4, 8, False),
        ("waited", 7, 11, "no_blocks", 2, (5, 5), (0, 3), (0, 0), True),
        ("admitted", 12, 12, 9, 0, 0, (), 0, (), 5, True),
        ("prefilled", 12, 13, 0, 8, 9, 8, (1, 2), True),
        ("decoded", 14, 17, (1, 2)),
        ("ended", 17, 17, "max_tokens", 7, 7, 0, False),
    ]


def test_a_request_waits_because_of_who_is_ahead_and_revives_what_was_left(
    busy: list[Record],
) -> None:
    assert told(busy, 4) == [
        ("queued", 4, 4, 5, 5, 1),
        ("waited", 5, 6, "no_blocks", 3, (1, 1), (0, 0), (1, 1), False),
        ("waited", 7, 11, "no_blocks", 2, (5, 5), (0, 3), (1, 1), False),
        ("waited", 12, 12, "token_budget", 4, (1, 1), (0, 0), (0, 0), False),
        ("admitted", 13, 13, 5, 4, 0, (), 2, (0,), 1, False),
        ("prefilled", 13, 13, 4, 4, 5, 0, (2, 2), True),
        ("decoded", 14, 14, (2, 2)),
        ("preempted", 15, 15, 4, 2, 3, 6, False),
        ("waited", 16, 17, "no_blocks", 4, (4, 4), (2, 2), (0, 0), True),
        ("admitted", 18, 18, 7, 2, 0, (), 1, (0,), 3, True),
        ("prefilled", 18, 18, 2, 6, 7, 4, (1, 1), True),
        ("decoded", 19, 20, (1, 1)),
        ("ended", 20, 20, "max_tokens", 5, 5, 2, False),
    ]


def test_who_shares_a_page_is_everybody_who_had_it_before() -> None:
    """Two are admitted in one step, and find the pages of a third."""
    later = [Request([1, 2, 1, 2, 2], max_tokens=2, arrival=1) for _ in range(2)]
    workload = Workload(
        Settings(kvcache_block_size=2), [Request([1, 2, 1, 2, 2], max_tokens=4), *later]
    )
    records = Recording(workload).records
    assert told(records, 1)[1] == ("admitted", 2, 2, 5, 4, 2, (0,), 0, (), 1, False)
    assert told(records, 2)[1] == ("admitted", 2, 2, 5, 4, 2, (0, 1), 0, (), 1, False)


def test_a_request_that_is_aborted_in_the_queue_never_did_anything_else(busy: list[Record]) -> None:
    assert told(busy, 3) == [
        ("queued", 3, 3, 2, 9, 0),
        ("waited", 4, 6, "no_blocks", 3, (1, 1), (0, 0), (0, 0), False),
        ("ended", 6, 6, "aborted", 0, 9, None, True),
    ]
    times = explain_request(busy, 3).times
    assert times is not None
    assert times.queue_ns == times.total_ns > 0


def test_a_request_may_be_preempted_before_its_prompt_is_computed() -> None:
    assert told(Recording(STRUCK_IN_PREFILL).records, 1) == [
        ("queued", 1, 1, 8, 1, 0),
        ("admitted", 2, 2, 8, 0, 0, (), 0, (), 4, False),
        ("prefilled", 2, 3, 0, 5, 8, 0, (2, 2), False),
        ("preempted", 4, 4, 1, 0, 4, 6, True),
        ("waited", 5, 6, "no_blocks", 1, (4, 4), (2, 3), (0, 0), True),
        ("admitted", 7, 7, 8, 4, 0, (), 2, (1,), 2, True),
        ("prefilled", 7, 7, 4, 7, 8, 2, (1, 1), True),
        ("ended", 7, 7, "max_tokens", 1, 1, 1, False),
    ]


def test_under_the_static_policy_a_request_waits_for_the_whole_batch() -> None:
    records = Recording(STATIC).records
    assert told(records, 1)[:3] == [
        ("queued", 1, 1, 2, 2, 0),
        ("waited", 2, 3, "static_batch", 1, (1, 1), (0, 0), (0, 0), False),
        ("admitted", 4, 4, 2, 0, 0, (), 0, (), 1, False),
    ]


def test_a_request_waits_for_a_place_and_behind_one_that_does() -> None:
    records = Recording(FULL_HOUSE).records
    assert told(records, 1)[1] == ("waited", 1, 2, "max_num_seqs", 1, (2, 2), (1, 1), (0, 0), False)
    assert told(records, 2)[1:3] == [
        ("waited", 1, 2, "max_num_seqs", 1, (2, 2), (1, 1), (1, 1), False),
        ("waited", 3, 3, "max_num_seqs", 2, (2, 2), (1, 1), (0, 0), False),
    ]


def test_a_prompt_beyond_the_budget_is_not_cut_unless_it_comes_first() -> None:
    records = Recording(TIGHT_BUDGET).records
    assert told(records, 0)[2] == ("prefilled", 1, 2, 0, 3, 4, 0, (1, 1), True)
    assert told(records, 1)[1:4] == [
        ("waited", 1, 2, "chunk_not_first", 1, (4, 4), (0, 2), (0, 0), False),
        ("admitted", 3, 3, 4, 0, 0, (), 0, (), 1, False),
        ("prefilled", 3, 4, 0, 3, 4, 0, (1, 1), True),
    ]


def test_an_error_breaks_a_step_off_and_ends_everybody() -> None:
    records = Recording(BUSY, Interruption(7, "ran")).records
    assert told(records, 2)[-2:] == [
        ("broken", 7, 7, "InjectedError"),
        ("ended", 7, 7, "aborted", 2, 7, None, False),
    ]
    assert told_of_step(records, 7)[-1] == ("broken", 7, 7, "InjectedError")


def test_a_trace_that_ends_early_leaves_a_request_where_it_is(busy: list[Record]) -> None:
    until_6 = [r for r in busy if not isinstance(r, ev.Event) or (r.step or 0) <= 6]
    cut = until_6[: max(i for i, r in enumerate(until_6) if isinstance(r, ev.StepEnd)) + 1]
    assert told(cut, 2)[-1] == ("unended", 6, 6, "WAITING", 2, 7)
    assert told(cut, 0)[-1] == ("unended", 6, 6, "RUNNING", 3, 6)


def test_one_step_of_a_life_is_told_with_its_own_numbers(busy: list[Record]) -> None:
    story = explain_request(busy, 4, step=9)
    assert [_told(link) for link in story.chain] == [
        ("waited", 9, 9, "no_blocks", 2, (5, 5), (0, 0), (1, 1), False)
    ]
    assert story.times is None
    at_its_end = explain_request(busy, 3, step=6)
    assert [kind_of(link) for link in at_its_end.chain] == ["waited"]


def test_a_request_that_is_not_there_is_said_to_be_missing(busy: list[Record]) -> None:
    refused = "it has 0 to 4; 1 refused .* prompt_too_long: it needs 21, but there is 16"
    with pytest.raises(NotInTraceError, match=f"no request 9 in the trace: {refused}"):
        explain_request(busy, 9)
    with pytest.raises(NotInTraceError, match="request 3 did not exist in step 12"):
        explain_request(busy, 3, step=12)
    with pytest.raises(NotInTraceError, match="no step 99 in the trace: it has steps 1 to 20"):
        explain_step(busy, 99)


def test_no_more_is_read_than_the_request_lived(busy: list[Record]) -> None:
    records = iter(busy)
    explain_request(records, 0)
    read_on = next(records)
    assert isinstance(read_on, ev.Event)
    assert read_on.step == 10  # of 20; it ended in step 9


# -- what holds for every run ----------------------------------------------------------------------


@given(workloads(with_aborts=True), st.none() | st.integers(1, 300))
@example(BUSY, None)
@example(BUSY_MIXED, 100)
@settings(max_examples=60)
def test_every_step_and_nanosecond_of_a_life_is_accounted_for_once(
    workload: Workload, cut: int | None
) -> None:
    """Whole traces, and traces that end anywhere."""
    assert_lives_are_accounted_for(Recording(workload).records[:cut])


@pytest.mark.parametrize("is_noted", [False, True])
@pytest.mark.parametrize("at", ["scheduled", "ran", "sampled", *HOOKS_OF_A_STEP])
@pytest.mark.parametrize("workload", [BUSY, BUSY_MIXED], ids=["prefill_first", "mixed"])
def test_a_life_that_an_error_ends_is_accounted_for_as_well(
    workload: Workload, at: str, is_noted: bool
) -> None:
    records = Recording(workload, Interruption(5, at, is_noted)).records
    assert_lives_are_accounted_for(records)


def assert_lives_are_accounted_for(records: list[Record]) -> None:
    for arrival in [r for r in records if isinstance(r, ev.RequestEnqueue)]:
        story = explain_request(records, arrival.seq_id)
        life = list(_life(records, arrival))
        steps = [step for link in story.chain if link.num_steps for step in _steps(link)]
        assert steps == sorted({event.step for event in life if event.step is not None})
        whole = life[-1].ts_ns - arrival.ts_ns
        assert sum(link.time_ns for link in story.chain) == whole
        assert story.times is not None
        assert story.times.total_ns == whole
        assert min(story.times.queue_ns, story.times.prefill_ns, story.times.decode_ns) >= 0
        assert isinstance(story.chain[0], links.Queued)
        assert isinstance(story.chain[-1], links.Ended | links.Unended)
        _assert_proved(story.chain, life)


def _life(records: list[Record], arrival: ev.RequestEnqueue) -> Iterator[ev.Event]:
    """The events from a request's arrival to the end of its last step."""
    has_ended, last_step = False, None
    for record in records[records.index(arrival) :]:
        if not isinstance(record, ev.Event):
            continue
        if has_ended and (last_step is None or record.step != last_step):
            return
        yield record
        if _ends(record, arrival.seq_id):
            has_ended, last_step = True, record.step


def _ends(event: ev.Event, seq_id: int) -> bool:
    match event:
        case ev.StateTransition():
            return event.seq_id == seq_id and event.status == "FINISHED"
        case ev.EngineReset():
            return seq_id in event.seq_ids
    return False


def _steps(link: links.Link) -> list[int]:
    steps = list(range(link.first_step, link.last_step + 1))
    assert len(steps) == link.num_steps
    return steps


def _assert_proved(chain: Iterable[links.AnyLife], life: list[ev.Event]) -> None:
    """Each proof is an event of the link's own steps, and of a kind that can prove it."""
    events = {event.event_id: event for event in life}
    for link in chain:
        assert link.event_ids or isinstance(link, links.Broken)
        for event_id in link.event_ids:
            event = events[event_id]
            if link.num_steps:
                assert event.step in _steps(link)
            if isinstance(link, links.Waited) and link.reason is not None:
                assert isinstance(event, ev.AdmissionStop)
                assert (event.reason, event.seq_id) == (link.reason, link.head_seq_id)
            if isinstance(link, links.Preempted):
                assert isinstance(event, ev.Preempt)


@given(workloads(with_aborts=True))
@example(BUSY)
@settings(max_examples=60)
def test_a_chain_tells_the_same_tokens_as_the_metrics_do(workload: Workload) -> None:
    records = Recording(workload).records
    measure = Measure()
    measured = {m.seq_id: m for record in records for m in measure.apply(record)}
    for seq_id, metrics in measured.items():
        chain = explain_request(records, seq_id).chain
        ending = chain[-1]
        assert isinstance(ending, links.Ended)
        assert ending.reason == metrics.finish_reason
        assert ending.num_completion_tokens == metrics.num_generation_tokens
        preempted = [link for link in chain if isinstance(link, links.Preempted)]
        assert len(preempted) == metrics.num_preemptions
        again = sum(link.num_recomputed for link in chain if isinstance(link, links.Prefilled))
        assert again <= metrics.num_recomputed_tokens
        if metrics.finish_reason != "aborted" and len(preempted) <= 1:
            assert again == metrics.num_recomputed_tokens
        admitted = [link for link in chain if isinstance(link, links.Admitted)]
        assert not admitted or admitted[0].num_cached_tokens == metrics.num_cached_tokens


@given(workloads(with_aborts=True))
@example(BUSY)
@example(BUSY_MIXED)
@example(TIGHT_BUDGET)
@settings(max_examples=40)
def test_who_left_and_who_joined_make_the_batch_before_the_batch_now(workload: Workload) -> None:
    records = Recording(workload).records
    batches: dict[int, set[int]] = {}
    for step in range(1, max(r.step or 0 for r in records if isinstance(r, ev.Event)) + 1):
        chain = explain_step(records, step).chain
        (computed,) = [link for link in chain if isinstance(link, links.Computed)]
        left = {i for link in chain if isinstance(link, links.Left) for i in link.seq_ids}
        joined = {i for link in chain if isinstance(link, links.Joined) for i in link.seq_ids}
        aside = [i for link in chain if isinstance(link, links.Aside) for i in link.seq_ids]
        now = set(computed.decode_ids)
        if computed.before_step is None:
            assert not left
            assert not joined
        else:
            before = batches[computed.before_step]
            assert (left, joined) == (before - now, now - before)
            assert computed.before_batch == len(before)
        if now:
            batches[step] = now
        in_batch = len(computed.decode_ids) + len(computed.prefill_ids)
        assert computed.num_running == in_batch + len(aside)
        assert isinstance(chain[-1], links.Paced)


@pytest.mark.parametrize("place", range(1, 185, 3))
def test_a_trace_with_a_hole_is_explained_or_refused(busy: list[Record], place: int) -> None:
    holed = [*busy[:place], *busy[place + 1 :]]
    with suppress(InconsistentTraceError, NotInTraceError):
        assert explain_request(holed, 4).chain
    with suppress(InconsistentTraceError, NotInTraceError):
        assert explain_step(holed, 15).chain


# -- a step, by hand -------------------------------------------------------------------------------


def test_the_articles_step_is_a_batch_of_one_since_the_other_had_ended() -> None:
    """Step 149 of the article; in the golden run request 0 ends in step 176."""
    assert told_of_step(golden_records(), 177) == [
        ("chosen", 177, 177, "decode", "no_prefill_admissible"),
        ("computed", 177, 177, (1,), (), 1, 16384, 0, 0, 1, 176, 2),
        ("left", 176, 176, (0,), "eos"),
        ("eager", 177, 177, "device_has_no_graphs", 1),
    ]


def golden_records() -> list[Record]:
    """The golden trace with a machine put back into its header."""
    first, *lines = GOLDEN.read_text("utf-8").splitlines()
    machine: dict[str, Any] = {"run_id": "", "created": "", "clock": {}, "environment": {}}
    header = json.loads(first) | machine | {"engine": {"name": "nanovllm", "version": "0"}}
    budget = {"total_bytes": 0, "free_bytes": 0, "used_bytes": 0, "available_bytes": 0}
    text = [json.dumps(header)]
    for line in lines:
        fields = json.loads(line)
        missing = {name: 0 for name in budget if name in fields}
        text.append(json.dumps(fields | missing | ({"model": ""} if "model" in fields else {})))
    return list(read_trace(io.BytesIO("\n".join([*text, ""]).encode())))


def test_a_decode_step_says_who_was_preempted_and_who_is_kept_out(busy: list[Record]) -> None:
    assert told_of_step(busy, 6) == [
        ("chosen", 6, 6, "decode", "no_prefill_admissible"),
        ("computed", 6, 6, (0, 1), (), 2, 6, 0, 3, 2, 5, 3),
        ("left", 6, 6, (2,), "preempted"),
        ("stopped", 6, 6, 3, "no_blocks", 1, 0, 2),
        ("preempted", 6, 6, 2, 0, 4, 8, False),
        ("eager", 6, 6, "device_has_no_graphs", 2),
    ]


def test_a_prefill_step_says_who_came_who_stands_aside_and_what_was_cached(
    busy: list[Record],
) -> None:
    assert told_of_step(busy, 2) == [
        ("chosen", 2, 2, "prefill", "waiting_admissible"),
        ("computed", 2, 2, (), (1,), 1, 6, 4, 0, 2, None, None),
        ("aside", 2, 2, (0,), "prefills_first"),
        ("eager", 2, 2, "prefill", 1),
    ]
    assert told_of_step(busy, 3)[0] == ("came", 3, 3, (2,))


def test_a_mixed_step_says_who_is_back_and_whose_prompt_goes_beside() -> None:
    records = Recording(BUSY_MIXED).records
    kinds = {step: [line[0] for line in told_of_step(records, step)] for step in range(1, 8)}
    assert "joined" in kinds[6]
    assert ("joined", 5, 5, (1,), "recomputed") in told_of_step(records, 6)
    mixed = [r.step for r in records if isinstance(r, ev.ScheduleMixed) and r.step]
    (computed,) = [line for line in told_of_step(records, mixed[0]) if line[0] == "computed"]
    assert computed[3]
    assert computed[4]


def test_a_step_says_who_ended_with_it(busy: list[Record]) -> None:
    assert told_of_step(busy, 9)[-1] == ("finished", 9, 9, (0,), "max_tokens")


# -- pace ------------------------------------------------------------------------------------------


def step_end(step: int, phase: str = "decode", num_tokens: int = 1, **times: int | None) -> Any:  # noqa: ANN401 - an event
    parts: dict[str, Any] = {f"{name}_ns": 10 for name in PARTS} | {"gpu_ns": None} | times
    host = [value for name, value in parts.items() if name not in {"gpu_ns", "wall_ns"}]
    lists: dict[str, Any] = {"finished": []}
    numbers = dict.fromkeys(("num_tokens_stat", "waiting_len", "running_len", "free_blocks"), 0)
    return ev.StepEnd(
        event_id=step,
        ts_ns=step,
        step=step,
        phase="postprocess",
        batch_phase=phase,
        num_seqs=1,
        num_batched_tokens=num_tokens,
        **lists | numbers | {"wall_ns": sum(host)} | parts,
    )


def graph(rows: int) -> ev.CudagraphReplay:
    return ev.CudagraphReplay(
        event_id=0,
        ts_ns=0,
        step=1,
        phase="decode",
        batch_size=1,
        graph_batch_size=rows,
        padding=rows - 1,
        is_ahead=False,
    )


def verdict(
    own: tuple[ev.StepEnd, ev.CudagraphReplay | None],
    *others: tuple[ev.StepEnd, ev.CudagraphReplay | None],
) -> links.Paced:
    pace = Pace(own[0].step or 0)
    for end, replay in sorted([own, *others], key=lambda pair: pair[0].event_id):
        pace.take(end, replay)
    found = pace.verdict()
    assert found is not None
    return found


def test_slow_is_more_than_six_fifths_of_the_median_of_the_others() -> None:
    others = [(step_end(step), None) for step in (1, 2, 3)]  # 50 ns each
    at_the_limit = verdict((step_end(9, forward_ns=20), None), *others)
    assert (at_the_limit.wall_ns, at_the_limit.median_ns) == (60, 50)
    assert not at_the_limit.is_slow
    beyond = verdict((step_end(9, forward_ns=21), None), *others)
    assert beyond.is_slow
    assert (beyond.grown, beyond.num_others, beyond.is_first) == ("forward", 3, False)
    assert beyond.parts["forward"] == links.Part(time_ns=21, median_ns=10)
    assert (HIGH_FACTOR, at_the_limit.limit_ns) == (1.2, 60)


def test_slow_stands_out_of_the_noise_of_the_others() -> None:
    """Half of the others take 50 to 54 ns, the rest up to 80: what takes 85 is none too slow."""
    noise = (0, 0, 2, 4, 12, 14, 20, 30)
    others = [(step_end(step, forward_ns=10 + more), None) for step, more in enumerate(noise, 1)]
    usual = verdict((step_end(99, forward_ns=45), None), *others)
    assert (usual.wall_ns, usual.median_ns, usual.limit_ns) == (85, 58, 58 + 5 * 7.5)
    assert usual.wall_ns > HIGH_FACTOR * 58
    assert not usual.is_slow
    assert verdict((step_end(99, forward_ns=56), None), *others).is_slow


def test_the_help_tells_what_slow_is(capsys: pytest.CaptureFixture[str]) -> None:
    told = " ".join(call(capsys, "explain", "--help").out.split())
    assert f"more than {HIGH_FACTOR} times the median" in told
    assert f"than {HIGH_QUARTILES} times the distance" in told
    for language, median in (("en", "median"), ("zh", "中位数")):
        page = (ROOT / "docs" / language / "metrics.md").read_text("utf-8")
        assert f"max({HIGH_FACTOR} x {median}, {median} + {HIGH_QUARTILES} x" in page


TWINS = Workload(  # the second shares two of its pages, gives way, and waits
    Settings(kvcache_block_size=2, num_kvcache_blocks=7),
    [
        Request([1, 2, 1, 2, 1], max_tokens=8),
        Request([1, 2, 1, 2, 1], max_tokens=12, arrival=2),
        Request([1, 2, 1, 2, 1, 1, 1], max_tokens=4, arrival=4),
    ],
)


def test_pages_that_are_shared_are_told_of_where_pages_are_given_back_and_needed() -> None:
    records, english = Recording(TWINS).records, load_catalog("en")
    chain = explain_request(records, 1).chain
    preempted = next(link for link in chain if isinstance(link, links.Preempted))
    assert (preempted.num_blocks_held, preempted.num_blocks_freed) == (4, 2)
    assert preempted.kept_by == (0,)
    text = note(preempted, english).text.replace("\u00a0", " ")
    assert "gives back 4 blocks, 2 of them still used by request 0, so 2 become free" in text
    waited = next(link for link in chain if isinstance(link, links.Waited))
    assert (waited.need, waited.whole, waited.have) == ((3, 3), (5, 5), (1, 2))
    assert note(waited, english).text == "waits: 3 blocks (5 less 2 shared) needed, 1 to 2 free"
    of_step = explain_step(records, preempted.first_step).chain
    assert preempted.kept_by in [link.kept_by for link in of_step if hasattr(link, "kept_by")]
    of_step = explain_step(records, waited.first_step).chain
    stopped = next(link for link in of_step if isinstance(link, links.Stopped))
    assert (stopped.need, stopped.whole) == (3, 5)
    assert "3 blocks (5 less 2 shared) needed" in note(stopped, english).text
    run = summarize(iter(records))
    (step,) = (step for step in run.steps if step.index == preempted.first_step)
    told = "; ".join(found.text for found in notes(AlikeSteps((step,)), english))
    assert "blocks freed 2 (4 less 2 that others use)" in told.replace("\u00a0", " ")


@pytest.mark.parametrize("part", ["schedule", "prepare", "forward", "sample", "postprocess"])
def test_the_part_that_grew_most_is_named(part: str) -> None:
    others = [(step_end(step, schedule_ns=40), None) for step in (1, 2, 3)]
    times: dict[str, Any] = {"schedule_ns": 40} | {f"{part}_ns": 140}
    own = step_end(9, **times)
    assert verdict((own, None), *others).grown == part


def test_the_gpu_is_named_if_it_grew_by_half_of_what_the_step_did() -> None:
    others = [(step_end(step, gpu_ns=20), graph(1)) for step in (1, 2, 3)]
    assert verdict((step_end(9, sample_ns=110, gpu_ns=70), graph(1)), *others).grown == "gpu"
    assert verdict((step_end(9, sample_ns=110, gpu_ns=69), graph(1)), *others).grown == "sample"


def test_a_step_is_compared_with_its_phase_and_graph_or_number_of_tokens_only() -> None:
    own = step_end(9, num_tokens=8, forward_ns=10_000)
    strangers = [
        (step_end(1, num_tokens=4), None),
        (step_end(2, num_tokens=9), None),
        (step_end(3, "prefill", num_tokens=8), None),
        (step_end(4, num_tokens=8), graph(8)),
    ]
    alone = verdict((own, None), *strangers)
    assert (alone.bucket, alone.num_others, alone.median_ns) == (8, 0, None)
    assert (alone.is_first, alone.is_slow, alone.grown) == (True, False, None)
    assert verdict((own, None), *strangers, (step_end(5, num_tokens=5), None)).is_slow
    replayed = verdict((step_end(9, num_tokens=8), graph(8)), *strangers)
    assert (replayed.graph_batch_size, replayed.bucket, replayed.num_others) == (8, None, 1)


def test_the_first_replay_of_a_graph_is_known_as_such() -> None:
    """The article's step 149: 74 ms, where the others of one row take 3."""
    own = step_end(149, forward_ns=71_000_000), graph(1)
    before = [(step_end(step), graph(2)) for step in (147, 148)]
    after = [(step_end(step), graph(1)) for step in (150, 151)]
    first = verdict(own, *before, *after)
    assert (first.is_first, first.is_slow, first.grown) == (True, True, "forward")
    assert not verdict((step_end(150), graph(1)), own, *before).is_first


# -- words -----------------------------------------------------------------------------------------


def everything_told() -> list[tuple[links.Link, bool]]:
    """Links of every kind, from runs of every policy, and whether they are a step's."""
    found: list[tuple[links.Link, bool]] = []
    broken = Recording(BUSY, Interruption(7, "ran")).records
    runs = [BUSY, BUSY_MIXED, STATIC, FULL_HOUSE, TIGHT_BUDGET, STRUCK_IN_PREFILL]
    for records in [*(Recording(workload).records for workload in runs), broken]:
        cut = records[: len(records) // 2]
        for seq_id in {r.seq_id for r in records if isinstance(r, ev.RequestEnqueue)}:
            found += [(link, False) for link in explain_request(records, seq_id).chain]
        for seq_id in {r.seq_id for r in cut if isinstance(r, ev.RequestEnqueue)}:
            found += [(link, False) for link in explain_request(cut, seq_id).chain]
        for step in {r.step for r in records if isinstance(r, ev.Event) and r.step}:
            found += [(link, True) for link in explain_step(records, step).chain]
    place: dict[str, Any] = {"first_step": 2, "last_step": 2}
    place |= {"batch_size": 3, "graph_batch_size": 4, "padding": 1}
    for reason in (None, *get_args(links.LateReason)):
        replayed = links.Replayed(**place, is_ahead=reason is None, late_reason=reason)
        found.append((replayed, True))
    return found


def test_every_kind_of_link_has_a_sentence_in_both_languages() -> None:
    told_links = everything_told()
    kinds = {type(link) for link, _ in told_links}
    assert kinds == set(get_args(links.AnyLife)) | set(get_args(links.AnyStep))
    catalogs = [load_catalog(language) for language in LANGUAGES]
    for link, is_of_step in told_links:
        tell = step_note if is_of_step else note
        english, chinese = (tell(link, catalog).text for catalog in catalogs)
        assert english.isascii() or "\u00a0" in english
        assert not chinese.isascii()
        assert "{" not in english + chinese


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_reason_that_an_event_may_give_has_a_sentence(language: Any) -> None:  # noqa: ANN401 - a code
    catalog = load_catalog(language)
    place: dict[str, Any] = {"first_step": 2, "last_step": 3, "num_steps": 2}
    numbers: dict[str, Any] = {"need": (1, 4), "have": (0, 2), "head_seq_id": 7}
    for reason in (*codes(ev.AdmissionStop), None):
        for num_ahead in ((0, 0), (1, 1), (3, 4)):
            waited = links.Waited(
                **place, **numbers, reason=reason, num_ahead=num_ahead, is_preempted=False
            )
            assert_said(waited, catalog, "7" if reason and num_ahead[0] else "")
    for reason in (*codes(ev.StateTransition), "token_budget"):
        assert_said(links.Left(**place, seq_ids=(7,), reason=reason), catalog, "7")
        assert_said(links.Finished(**place, seq_ids=(7, 8), reason=reason), catalog, "7, 8")
    for reason in ("prefilled", "recomputed", "token_budget"):
        assert_said(links.Joined(**place, seq_ids=(7,), reason=reason), catalog, "7")
    for reason in ("prefills_first", "token_budget"):
        assert_said(links.Aside(**place, seq_ids=(7,), reason=reason), catalog, "7")
        assert_said(links.Idled(**place, reason=reason, batch=(1, 2)), catalog, "")
    for reason in codes(ev.RunEager):
        assert_said(links.Eager(**place, reason=reason, num_tokens=1), catalog, "eager")
    for grown in PARTS:
        parts = {grown: links.Part(time_ns=900, median_ns=10)}
        for median_ns, factor in ((10, "90.0"), (0, "0")):
            slow = links.Paced(
                **place,
                phase="decode",
                graph_batch_size=None,
                bucket=8,
                wall_ns=900,
                median_ns=median_ns,
                limit_ns=1.2 * median_ns,
                num_others=3,
                is_first=True,
                is_slow=True,
                grown=grown,
                parts=parts,
            )
            assert_said(slow, catalog, factor)


def codes(cls: type[ev.Event]) -> tuple[str, ...]:
    """The codes that an event's reason may be."""
    return ev.codes_of(get_type_hints(cls, include_extras=True)["reason"])


def assert_said(link: links.Link, catalog: Catalog, what: str) -> None:
    text = note(link, catalog).text.replace("\u00a0", " ")
    assert what in text
    assert "{" not in text
    assert "explain_" not in text


def test_equal_waits_are_one_sentence_that_names_the_head(busy: list[Record]) -> None:
    waits = [link for link in explain_request(busy, 4).chain if isinstance(link, links.Waited)]
    english, chinese = load_catalog("en"), load_catalog("zh")
    assert note(waits[0], english).text == (
        "waits behind request\u00a03, which needs 1 block; 0 free"
    )
    assert note(waits[1], english).text == (
        "waits behind request\u00a02, which needs 5 blocks; 0 to 3 free"
    )
    assert note(waits[2], english).text == (
        "waits: 1 token (5 less 4 cached) needed, 0 left of the step's budget"
    )
    words = "请求\u00a02 后面等待：请求\u00a02 要 5 个 KV 块，空闲 0 到 3"  # noqa: RUF001 - Chinese marks
    assert words in note(waits[1], chinese).text


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "busy.jsonl"
    path.write_bytes(Recording(BUSY).data)
    return path


@pytest.fixture(scope="module")
def article(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("explain") / "article.jsonl", article_run())


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("what", [("--seq", "4"), ("--step", "6"), ("--seq", "4", "--step", "15")])
def test_an_explanation_fits_into_80_columns(
    trace: Path, what: tuple[str, ...], lang: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "explain", trace, *what, "--lang", lang, "--proof")
    assert outcome.code == 0
    assert outcome.err == ""
    assert ("proof: " if lang == "en" else "依据") in outcome.out
    assert all(cell_len(line) <= 80 for line in outcome.out.splitlines())


def admission_stops(records: list[Record], head: int) -> list[str]:
    """The numbers of the events that say that this request, the waiting queue's head, must wait."""
    stops = [event for event in records if isinstance(event, ev.AdmissionStop)]
    return [str(stop.event_id) for stop in stops if stop.seq_id == head]


def test_the_proof_is_named_only_if_it_is_asked_for(
    trace: Path, busy: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "proof" not in call(capsys, "explain", trace, "--seq", "4").out
    stops = admission_stops(busy, 2)
    assert len(stops) == 5
    proved = call(capsys, "explain", trace, "--seq", "4", "--proof").out
    assert f"proof: {', '.join(stops)}" in proved


def test_a_life_shows_where_its_time_went(
    article: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, "explain", article, "--seq", "0").out
    assert "2 - 148" in out
    assert "generates 147 tokens in a batch of 2" in out
    assert "ends with 148 tokens of 148: reached max_tokens" in out
    assert "total       1.22 s  100.0%" in out


def test_the_articles_step_is_explained_in_words(
    article: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "slow.jsonl"
    lines = article.read_text("utf-8").splitlines()
    fields = [json.loads(line) for line in lines]
    for event in fields:
        if event["event"] == "STEP_END" and event["step"] == 149:
            event["wall_ns"] = 73_780_000
            event["forward_ns"] = 71_364_000
    slow.write_text("".join(json.dumps(event) + "\n" for event in fields), "utf-8")
    out = " ".join(call(capsys, "explain", slow, "--step", "149").out.split())
    assert "a batch of 1: a token each for request 1; in step 148 it was 2; no request waits" in out
    assert "request 0 left: ended in step 148, reached max_tokens" in out
    assert "one CUDA graph of 1 row, padding 0; run ahead" in out
    assert "slow: took 73.8 ms, 24.4 times the median (3.02 ms) of 107 other decode" in out
    assert "the largest increase is in forward: 71.4 ms instead of 604 us" in out
    assert "it is the first of them" in out


def test_json_is_the_story_and_comes_back_as_it_was(
    trace: Path, busy: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    request = call(capsys, "explain", trace, "--seq", "4", "--json").out
    story = msgspec.json.decode(request, type=links.RequestStory)
    assert [_told(link) for link in story.chain] == told(busy, 4)
    assert json.loads(request)["chain"][1]["kind"] == "waited"
    step = call(capsys, "explain", trace, "--step", "6", "--json").out
    told_step = msgspec.json.decode(step, type=links.StepStory)
    assert _told(told_step.chain[0]) == told_of_step(busy, 6)[0]


def test_plain_is_one_link_a_line_and_then_the_times(
    trace: Path, busy: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "explain", trace, "--seq", "3", "--plain", "--lang", "en")
    lines = [line.split("	") for line in outcome.out.splitlines()]
    assert lines[0] == ["first_step", "last_step", "kind", "time_ns", "event_ids", "text"]
    assert [line[2] for line in lines[1:4]] == ["queued", "waited", "ended"]
    assert lines[2][4:] == [",".join(admission_stops(busy, 3)), "waits: 1 block needed, 0 free"]
    assert [line[0] for line in lines[5:]] == [
        "queue_ns",
        "prefill_ns",
        "decode_ns",
        "preempted_ns",
    ]
    assert sum(int(line[3]) for line in lines[1:4]) == sum(int(line[1]) for line in lines[5:])
    step = call(capsys, "explain", trace, "--step", "6", "--plain", "--lang", "en").out
    [preempt] = [r.event_id for r in busy if isinstance(r, ev.Preempt) and r.step == 6]
    assert f"\tpreempted\t0\t{preempt}\trequest 2: preempted so that request 0 can go on" in step


def test_a_long_life_is_cut_in_the_middle_unless_all_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [Request([1, 2], max_tokens=2, arrival=2 * number) for number in range(40)]
    workload = Workload(Settings(), [Request([2, 1], max_tokens=100), *others])
    path = tmp_path / "long.jsonl"
    path.write_bytes(Recording(workload).data)
    cut = call(capsys, "explain", path, "--seq", "0").out.splitlines()
    whole = call(capsys, "explain", path, "--seq", "0", "--all").out.splitlines()
    assert any(line.startswith("...") and "more lines: --all" in line for line in cut)
    assert not any(line.startswith("...") for line in whole)
    assert len(whole) > len(cut)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to explain: give --seq ID (a request), --step N, or both"),
        (["--seq", "1", "--json", "--plain"], "cannot be used together"),
        (["--seq", "9"], "no request 9 in the trace: it has 0 to 4; 1 refused"),
        (["--step", "21"], "no step 21 in the trace: it has steps 1 to 20"),
        (["--seq", "3", "--step", "12"], "request 3 did not exist in step 12"),
    ],
)
def test_what_cannot_be_explained_is_wrong_usage(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "explain", trace, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_trace_that_disagrees_with_itself_is_unreadable(
    busy: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.jsonl"
    lines = Recording(BUSY).data.splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"REQUEST_ENQUEUE"' not in line))
    outcome = call(capsys, "explain", path, "--seq", "0")
    assert outcome.code == 3
    assert str(path) in outcome.err
    assert isinstance(busy[0], Header)


def test_stdin_is_read_too(trace: Path) -> None:
    outcome = spawn("explain", "-", "--seq", "3", "--plain", stdin=trace.read_bytes())
    assert outcome.code == 0
    assert "aborted" in outcome.out


def test_the_words_of_an_error_cannot_move_the_cursor() -> None:
    broken = links.Broken(first_step=1, last_step=1, error=HOSTILE_TEXT)
    assert "\x1b" not in note(broken, load_catalog("en")).text


def test_explaining_loads_no_torch(trace: Path) -> None:
    script = (
        "import sys\n"
        "from nvtrace_cli.main import run_command\n"
        f"assert run_command(['explain', {str(trace)!r}, '--step', '6']) == 0\n"
        "assert not {'torch', 'pandas', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment(), check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_step_of_another_rank_says_how_it_ran(busy: list[Record]) -> None:
    """A worker's trace has no decisions."""
    decisions = (ev.SchedulePrefill, ev.ScheduleDecode, ev.ScheduleMixed)
    ran = (Header, ev.EngineInit, ev.EngineReady, ev.RunEager, ev.StepEnd)
    worker = [replace(r) for r in busy if isinstance(r, ran) and not isinstance(r, decisions)]
    assert [kind_of(link) for link in explain_step(worker, 6).chain] == ["eager", "paced"]


@pytest.mark.parametrize(
    ("step", "reason"), [(10, "first"), (11, None), (150, "other_graph"), (187, "other_graph")]
)
def test_a_decode_that_was_not_launched_ahead_says_why(step: int, reason: str | None) -> None:
    records = list(read_trace(ROOT / "docs" / "traces" / "gpu-benchmark.jsonl.zst"))
    (replayed,) = (
        link for link in explain_step(records, step).chain if isinstance(link, links.Replayed)
    )
    assert replayed.late_reason == reason
