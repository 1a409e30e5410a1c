"""The parts of the views: numbers, prose, the scale of the timeline, folding, log lines."""

# ruff: noqa: RUF001 - Chinese has marks of its own

from __future__ import annotations

import io
import unicodedata
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from nvtrace import events as ev
from nvtrace.catalog import load_catalog
from nvtrace.envelope import ModelFacts
from nvtrace.progress import Progress
from nvtrace.reader import read_trace
from nvtrace.summarize import summarize
from nvtrace.summary import BlockCounts, Share, StepSummary, fold_alike
from nvtrace_cli.failures import UsageError
from nvtrace_cli.views.console import THEME
from nvtrace_cli.views.log import log_line, log_lines
from nvtrace_cli.views.player import Pacer, frame
from nvtrace_cli.views.prose import NO_BREAK_SPACE, wrap
from nvtrace_cli.views.replay import parse_speed
from nvtrace_cli.views.text import duration, escape, flow, ids, parameters, shorten, size
from nvtrace_cli.views.timeline import Scale, Timeline
from support.cli import ROOT
from support.cli_traces import MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGLISH, CHINESE = load_catalog("en"), load_catalog("zh")
MS = 1_000_000


def step(index: int, seq_ids: Sequence[int] = (0, 1), **changes: Any) -> StepSummary:  # noqa: ANN401 - any field
    """A decode step in which nothing happens."""
    is_prefill = changes.get("phase", "decode") == "prefill"
    plain = StepSummary(
        index=index,
        phase="decode",
        reason="no_prefill_admissible",
        shares=tuple(Share(seq_id, 0, 1, 1, 1, is_prefill=is_prefill) for seq_id in seq_ids),
        num_batched_tokens=len(seq_ids),
        waiting_len=0,
        running_len=len(seq_ids),
        free_blocks=9,
        waiting=(),
        running=tuple(seq_ids),
        arrived=(),
        aborted=(),
        admitted=(),
        preempted=(),
        finished=(),
        stop=None,
        error=None,
        blocks=BlockCounts(),
        tags=frozenset(),
        start_ns=index * 10 * MS,
        end_ns=index * 10 * MS + 3 * MS,
        wall_ns=3 * MS,
    )
    changed = replace(plain, **changes)
    held = tuple(victim.num_blocks_freed for victim in changed.preempted)
    return replace(changed, scheduled=len(changed.shares), num_blocks_held=held)


def event(cls: type[ev.Event], phase: ev.Phase, **fields: Any) -> ev.Event:  # noqa: ANN401 - any field
    """An event of step 1."""
    return cls(event_id=1, ts_ns=0, step=1, phase=phase, **fields)


# -- numbers and foreign text ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0.00 us"),
        (850_000, "850 us"),
        (999_600, "1.00 ms"),
        (3_020_000, "3.02 ms"),
        (73_780_000, "73.8 ms"),
        (772_240_000, "772 ms"),
        (12_345_678_900, "12.3 s"),
        (125e9, "2 min 5 s"),
        (59.99e9, "1 min 0 s"),
    ],
)
def test_durations_have_three_digits(nanoseconds: float, text: str) -> None:
    assert duration(nanoseconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (29360128, "28 MiB"),
        (1835008, "1.75 MiB"),
        (25232932864, "23.5 GiB"),
    ],
)
def test_sizes_are_in_binary_units(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0, 1"),
        ([0, 1, 2, 5], "0-2, 5"),
        ([5, 4, 3], "5, 4, 3"),
        ([0, 2, 4, 6, 8, 10, 12, 14], "0, 2, 4, 6, 8, 10, ..."),
    ],
)
def test_runs_of_numbers_are_drawn_together(numbers: list[int], text: str) -> None:
    assert ids(numbers) == text


def test_a_models_parameters_are_counted_from_its_shape() -> None:
    tied = msgspec.convert(MODEL, ModelFacts).num_weights
    assert tied == (310, 596_049_920)  # what Qwen3-0.6B has
    assert parameters(tied[1]) == "596 M"
    untied = msgspec.convert(MODEL | {"tie_word_embeddings": False}, ModelFacts).num_weights
    assert untied == (311, tied[1] + 151936 * 1024)
    assert ModelFacts().num_weights is None


@given(st.text())
def test_escaped_text_moves_no_cursor_and_breaks_no_line(text: str) -> None:
    joiners = "\u200c\u200d"  # parts of emoji and of some scripts
    for character in escape(text):
        hidden = unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
        assert not hidden or character in joiners


def test_text_in_any_language_passes_unescaped() -> None:
    text = "质数 2, 3 и 5 — 👩\u200d💻 [bold]"
    assert escape(text) == text


@given(st.text(alphabet="ab质数 ，", max_size=30), st.integers(3, 12))
def test_shortened_text_fits(text: str, width: int) -> None:
    shortened = shorten(text, width)
    assert cell_len(shortened) <= width
    assert shortened == text or shortened.endswith("...")


@given(st.lists(st.integers(0, 10**6), min_size=1), st.integers(3, 30))
def test_a_shortened_list_has_whole_numbers_only(numbers: list[int], width: int) -> None:
    shortened = shorten(" ".join(map(str, numbers)), width).removesuffix("...").split()
    assert shortened == [str(number) for number in numbers[: len(shortened)]]


def test_parts_flow_into_lines_without_breaking() -> None:
    assert flow(["aaa", "bbb", "cc dd"], "-", 9) == "aaa - bbb\ncc dd"
    assert flow(["a part that is too long"], "-", 9) == "a part that is too long"


# -- prose -----------------------------------------------------------------------------------------


def test_english_breaks_at_spaces() -> None:
    assert wrap("seq 3 waits: needs 6 blocks", 13) == ["seq 3 waits:", "needs 6", "blocks"]


def test_chinese_breaks_anywhere_but_not_in_front_of_a_mark() -> None:
    assert wrap("序列等待，空闲块不够", 8) == ["序列等", "待，空闲", "块不够"]
    assert wrap("甲（乙）丙", 6) == ["甲", "（乙）", "丙"]


def test_a_number_stays_with_its_word() -> None:
    assert wrap(f"now seq{NO_BREAK_SPACE}3 waits", 8) == ["now", "seq 3", "waits"]


@given(st.text(alphabet="ab 质数，。（）", max_size=60), st.integers(4, 20))
def test_wrapped_lines_fit_and_lose_nothing(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


# -- folding ---------------------------------------------------------------------------------------


def spans(steps: Sequence[StepSummary]) -> list[tuple[int, int]]:
    return [(row.first.index, row.last.index) for row in fold_alike(steps)]


def test_steps_that_look_alike_fold_into_one_row() -> None:
    [row] = fold_alike([step(index) for index in range(2, 148)])
    assert (row.first.index, row.last.index) == (2, 147)
    assert row.wall_ns == 3 * MS


def test_a_step_that_matters_stands_alone() -> None:
    steps = [step(index) for index in range(1, 10)]
    steps[4] = step(5, finished=((0, "eos"),))
    assert spans(steps) == [(1, 4), (5, 5), (6, 9)]


def test_the_first_step_of_a_smaller_batch_stands_alone() -> None:
    steps = [step(1), step(2), step(3, [1]), step(4, [1]), step(5, [1])]
    assert spans(steps) == [(1, 2), (3, 3), (4, 5)]
    assert [row.batch_before for row in fold_alike(steps)] == [None, 2, None]


def test_a_gap_is_never_folded_over() -> None:
    assert spans([step(1), step(2), step(7), step(8)]) == [(1, 2), (7, 8)]


def test_another_queue_or_another_reason_to_wait_begins_a_new_row() -> None:
    stop = event(
        ev.AdmissionStop, "decode", reason="no_blocks", seq_id=4, need=2, have=1, waiting_len=1
    )
    steps = [
        step(1),
        step(2, waiting=(4,)),
        step(3, waiting=(4,), stop=stop),
        step(4, waiting=(4,), stop=stop),
        step(5, waiting=(4, 5), stop=stop),
    ]
    assert spans(steps) == [(1, 1), (2, 2), (3, 4), (5, 5)]


def test_a_folded_row_shows_the_median_time() -> None:
    times = [3 * MS, 3 * MS, 90 * MS]
    [row] = fold_alike([step(index, wall_ns=time) for index, time in enumerate(times, start=2)])
    assert row.wall_ns == 3 * MS


def test_unfolded_steps_keep_their_rows() -> None:
    rows = fold_alike([step(1), step(2), step(3, [1])], is_unfolded=True)
    assert [row.is_folded for row in rows] == [False] * 3
    assert rows[2].batch_before == 2


# -- the timeline ----------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 200))
def test_every_step_has_a_column_and_columns_never_run_over(
    first: int, num_steps: int, width: int
) -> None:
    last = first + num_steps - 1
    scale = Scale.fit(first, last, width)
    assert scale.column(first) == 0
    assert scale.column(last) + scale.columns_per_step == scale.num_columns
    assert scale.num_columns <= width
    assert scale.steps_per_column == 1 or scale.columns_per_step == 1


def drawn(timeline: Timeline, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, theme=THEME)
    with console.capture() as capture:
        console.print(timeline)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_rarest_state_of_a_column_is_drawn() -> None:
    preempt = event(
        ev.Preempt, "decode", seq_id=1, for_seq_id=0, num_blocks_freed=1, num_tokens_to_recompute=4
    )
    steps = [step(index) for index in range(1, 7)]
    steps += [step(7, [0], waiting=(1,), preempted=(preempt,))]
    steps += [step(index, [0], waiting=(1,)) for index in range(8, 13)]
    lines = drawn(Timeline(steps, [0, 1], ENGLISH), width=11)  # 4 columns of 3 steps
    assert "seq 1  ━━x·" in lines


def test_a_run_in_progress_leaves_room_for_what_comes() -> None:
    lines = drawn(Timeline([step(1), step(2)], [0, 1], ENGLISH, last=70), width=77)
    assert lines[1] == "seq 0  ━━"
    assert "steps 1 to 70" in lines[0]
    assert lines[5].split() == ["step", "1", *(str(index) for index in range(5, 66, 5))]


def test_batch_sizes_of_two_digits_are_written_where_they_fit() -> None:
    crowd = list(range(12))
    steps = [step(1, crowd), step(2, crowd), *(step(index, [0]) for index in range(3, 21))]
    lines = drawn(Timeline(steps, [0], ENGLISH), width=27)
    assert lines[2] == "batch  ██" + "▁" * 18
    assert lines[3] == "       12 1"  # a gap between them, so one column late


# -- the log ---------------------------------------------------------------------------------------


SCHEDULE = event(
    ev.SchedulePrefill,
    "prefill",
    reason="waiting_admissible",
    engine_step=1,
    scheduled=2,
    seq_ids=[4, 5],
    num_scheduled_tokens=[11, 17],
    num_computed_tokens=[0, 0],
    num_cached_tokens=[0, 0],
    num_batched_tokens=28,
    token_budget=16384,
    waiting_len=0,
    running_len=2,
    free_blocks=3050,
)


def test_a_schedule_is_logged_as_in_the_article() -> None:
    rest = "stats={engine_step=1, scheduled=2, waiting_len=0, running_len=2}"
    assert log_line(SCHEDULE, CHINESE) == (
        f"TEACHING/SCHEDULE_PREFILL | phase=prefill | reason=waiting 队列有可准入请求 | {rest}"
    )
    assert log_line(SCHEDULE, ENGLISH) == (
        "TEACHING/SCHEDULE_PREFILL | phase=prefill | "
        f"reason=waiting queue has admissible requests | {rest}"
    )


def test_a_transition_is_logged_with_its_result() -> None:
    finished = event(
        ev.StateTransition,
        "postprocess",
        reason="eos",
        seq_id=4,
        previous="RUNNING",
        status="FINISHED",
        token_id=151645,
        num_completion_tokens=148,
        max_tokens=256,
    )
    assert log_line(finished, CHINESE) == (
        "TEACHING/STATE_TRANSITION | phase=postprocess | reason=命中 eos | "
        "result=RUNNING -> FINISHED | "
        "stats={seq_id=4, token_id=151645, num_completion_tokens=148, max_tokens=256}"
    )


def test_a_steps_end_and_its_tokens_are_logged_as_in_the_article() -> None:
    end = event(
        ev.StepEnd,
        "postprocess",
        batch_phase="prefill",
        num_seqs=2,
        num_batched_tokens=28,
        num_tokens_stat=30,
        finished=[],
        waiting_len=0,
        running_len=2,
        free_blocks=3050,
        wall_ns=772_240_000,
        schedule_ns=0,
        prepare_ns=0,
        forward_ns=0,
        sample_ns=0,
        postprocess_ns=0,
        gpu_ns=None,
    )
    assert log_line(end, ENGLISH) == (
        "step#1 prefill done in 772.24ms num_tokens_stat=30 finished_this_step=[]"
    )
    tokens = event(
        ev.SampleTokens, "prefill", seq_ids=[4, 5], temperatures=[0.6, 0.6], token_ids=[151667, 8]
    )
    assert log_line(tokens, ENGLISH) == (
        "temperatures=[0.6, 0.6] -> token_ids=[151667, 8] seq_ids=[4, 5]"
    )


def test_tuples_and_booleans_are_logged_as_python_writes_them() -> None:
    decode = event(
        ev.PrepareDecodeTensors,
        "decode",
        batch_size=2,
        context_lens=[12, 18],
        slot_mapping=[11, 273],
        block_tables_shape=(2, 1),
    )
    assert log_line(decode, ENGLISH) == (
        "TEACHING/PREPARE_DECODE_TENSORS | phase=decode | stats={batch_size=2, "
        "context_lens_shape=(2,), slot_mapping_shape=(2,), block_tables_shape=(2, 1)}"
    )
    assert log_lines(decode, CHINESE, rank=1)[1] == (  # the article's own line
        "rank=1 | decode 详单：bs=2 input_ids.shape=(2,) context_lens=[12, 18] "
        "slot_mapping=[11, 273] block_tables.shape=(2, 1)"
    )
    many = msgspec.structs.replace(
        decode, batch_size=9, context_lens=[*range(9)], slot_mapping=[*range(9)]
    )
    assert "context_lens=[0, 1, 2, 3, 4, 5, 6, 7, ...] slot" in log_lines(many, ENGLISH)[1]


def test_the_budget_has_the_line_of_the_article() -> None:
    budget = event(
        ev.KvBudgetEstimate,
        "init",
        rule="gpu_measured",
        total_bytes=round(95.09 * 2**30),
        free_bytes=round(93.43 * 2**30),
        used_bytes=round(1.66 * 2**30),
        peak_bytes=round(1.60 * 2**30),
        current_bytes=round(1.16 * 2**30),
        utilization=0.9,
        limit_bytes=None,
        available_bytes=0,
        num_layers=28,
        block_size=256,
        num_kv_heads=8,
        head_dim=128,
        dtype_bytes=2,
        block_bytes=29360128,
        num_blocks=3052,
    )
    assert log_lines(budget, CHINESE)[1] == (
        "allocate_kv_cache：total_mem=95.09GiB free=93.43GiB used=1.66GiB peak_alloc=1.60GiB "
        "curr_alloc=1.16GiB gpu_memory_utilization=0.9 -> num_kvcache_blocks=3052 block_size=256 "
        "kv_cache.shape=(2, 28, 3052, 256, 8, 128)"
    )
    on_a_cpu = log_lines(
        msgspec.structs.replace(budget, peak_bytes=None, current_bytes=None), ENGLISH
    )
    assert "used=1.66GiB gpu_memory_utilization" in on_a_cpu[1]


def test_a_log_line_is_one_line_whatever_the_data() -> None:
    error = event(
        ev.EngineError, "postprocess", error_type="ValueError", message="two\nlines \x1b[1m[b]"
    )
    assert log_line(error, ENGLISH) == (
        "TEACHING/ENGINE_ERROR | phase=postprocess | "
        r"stats={error_type=ValueError, message=two\nlines \x1b[1m[b]}"
    )


# -- playing and watching --------------------------------------------------------------------------


def test_the_pacer_waits_as_long_as_the_run_did_divided_by_the_speed() -> None:
    now = [100.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds

    pacer = Pacer(2.0, clock=lambda: now[0], sleep=sleep)
    for ts_ns in (500, 1_000_000_500, None, 3_000_000_500):
        pacer.wait_until(ts_ns)
    now[0] += 60.0  # drawing took long: no wait
    pacer.wait_until(4_000_000_500)
    assert slept == [0.5, 1.0]


@pytest.mark.parametrize("height", [12, 24, 40])
def test_the_player_shows_the_newest_steps_that_fit(height: int) -> None:
    """Rows may take several lines: what is cut at the bottom would be the step under way."""
    run = summarize(read_trace(ROOT / "docs" / "traces" / "preemption.jsonl.zst"))
    console = Console(width=80, height=height, file=io.StringIO(), theme=THEME)
    shown = set()
    for end in range(1, len(run.steps) + 1, 5):
        timeline = Timeline(run.steps[:end], [0, 1, 2], ENGLISH, len(run.steps))
        lines = console.render_lines(frame(run.steps[:end], timeline, ENGLISH, console, 132))
        assert height == 12 or len(lines) <= height
        rows = ["".join(segment.text for segment in line).split() for line in lines[12:]]
        steps = [row for row in rows if {"prefill", "decode"} & {*row}]
        if steps:
            row = steps[-1]
            assert row[row.index("decode" if "decode" in row else "prefill") - 1] == str(end)
            shown.add(end)
    assert len(shown) == {12: 0, 24: 27, 40: 27}[height]


def test_at_full_speed_nothing_waits() -> None:
    pacer = Pacer(parse_speed("max"), clock=lambda: 0.0, sleep=lambda _: pytest.fail("it slept"))
    for ts_ns in (0, 10**12):
        pacer.wait_until(ts_ns)


@pytest.mark.parametrize(("text", "speed"), [("1x", 1.0), ("10x", 10.0), ("0.5x", 0.5), ("2", 2.0)])
def test_speeds_are_read(text: str, speed: float) -> None:
    assert parse_speed(text) == speed


@pytest.mark.parametrize("text", ["", "x", "-1x", "0", "nan", "infx", "fast"])
def test_what_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--speed"):
        parse_speed(text)


def test_progress_follows_the_events() -> None:
    progress = Progress()
    enqueue = event(
        ev.RequestEnqueue,
        "ingress",
        seq_id=4,
        prompt_len=11,
        max_tokens=8,
        temperature=0.6,
        top_k=None,
        top_p=1.0,
        seed=0,
        ignore_eos=False,
        waiting_len=1,
        prompt_token_ids=[1] * 11,
    )
    other = event(
        ev.RequestEnqueue, "ingress", **{**fields_of(enqueue), "seq_id": 5, "waiting_len": 2}
    )
    progress.apply([enqueue, other])
    assert progress.waiting_len == 2
    assert progress.requests[4].state == "waiting"
    progress.apply([SCHEDULE])
    assert progress.requests[5].state == "prefill"
    tokens = event(
        ev.SampleTokens, "prefill", seq_ids=[4, 5], temperatures=[1, 1], token_ids=[1, 2]
    )
    progress.apply([tokens])
    assert [request.num_tokens for request in progress.requests.values()] == [1, 1]
    progress.apply([event(ev.EngineReset, "postprocess", seq_ids=[4, 5], num_tokens=[3, 4])])
    assert {request.reason for request in progress.requests.values()} == {"aborted"}
    assert progress.waiting_len == progress.running_len == 0


def fields_of(event_: ev.Event) -> dict[str, Any]:
    """An event's own fields."""
    envelope = {"event_id", "ts_ns", "step", "phase"}
    return {
        name: getattr(event_, name) for name in event_.__struct_fields__ if name not in envelope
    }
