"""The analyses: each worked by hand, and each against the columns that are documented."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from msgspec.structs import replace

import nvtrace
from nanovllm.utils.model_config import ModelConfig
from nvtrace import analysis
from nvtrace.analysis import (
    batch_occupancy,
    byte_floor,
    graph_padding,
    kv_use,
    latency_breakdown,
    memory_budget,
    preemption_cost,
    prefix_hits,
    request_spans,
    static_waste,
    step_time_by_class,
    waiting_by_reason,
)
from nvtrace.analysis.columns import ANALYSES
from nvtrace.bench.steps import Floor
from support.cli_traces import GIB, MODEL
from support.every import every

if TYPE_CHECKING:
    from pathlib import Path

    from nvtrace.envelope import Header


def table(text: str, **dtypes: str) -> pd.DataFrame:
    """A frame as one writes it: a line of names, lines of values; "-" is missing, rank is 0."""
    names, *rows = (line.split() for line in text.strip().splitlines())
    frame = pd.DataFrame(rows, columns=names).replace("-", None)
    kinds = {name: dtypes.get(name, "Int64") for name in names}
    return frame.astype(kinds).assign(rank=0)


def rows(frame: pd.DataFrame, *names: str) -> list[tuple[Any, ...]]:
    """Columns of a frame as tuples; what is missing as None."""
    chosen = frame[list(names)].astype(object)
    return [
        tuple(None if pd.isna(value) else value for value in row)
        for row in chosen.itertuples(index=False)
    ]


@pytest.mark.parametrize("trace", ["article.jsonl", "crowded.jsonl", "chunked.jsonl"])
@every("name", ANALYSES)
def test_an_analysis_returns_exactly_the_documented_columns(
    folder: Path, trace: str, name: str
) -> None:
    asked = nvtrace.load(folder / trace)
    arguments: dict[str, tuple[Any, ...]] = {
        "request_spans": (asked.requests, asked.table("STATE_TRANSITION")),
        "waiting_by_reason": (asked.table("ADMISSION_STOP"), asked.steps),
        "preemption_cost": (asked.requests, asked.table("PREEMPT")),
        "kv_use": (asked.steps, asked.blocks, 20),
        "memory_budget": (asked.table("KV_BUDGET_ESTIMATE"),),
    }
    of_requests = name in {"latency_breakdown", "prefix_hits"}
    given = arguments.get(name, (asked.requests if of_requests else asked.steps,))
    frame = getattr(analysis, name)(*given)
    documented = {column.name: column.dtype for column in ANALYSES[name].columns}
    assert {column: str(dtype) for column, dtype in frame.dtypes.items()} == documented
    assert list(frame.columns) == list(documented)
    assert list(frame.index) == list(range(len(frame)))


def test_every_analysis_is_documented_and_there() -> None:
    assert set(ANALYSES) == set(analysis.__all__) - {"Trace", "load", "byte_floor"}
    assert all(getattr(analysis, name).__doc__ for name in analysis.__all__)
    with pytest.raises(AttributeError, match="no attribute 'horoscope'"):
        _ = analysis.horoscope  # type: ignore[attr-defined]  # there is none


# -- latency ---------------------------------------------------------------------------------------

# Request 0 arrives at 10, is admitted at 30, has its first token at 60 and its last at 100; it was
# preempted from 70 to 85. Request 1 is aborted in the queue.
LIVES = table(
    """
seq_id finish_reason arrival_ns scheduled_ns first_token_ns finished_ns num_preemptions
0      eos           10         30           60             100         1
1      aborted       20         -            -              50          0
""",
    finish_reason="category",
).assign(
    preempted_in_prefill_ns=0,
    preempted_in_decode_ns=[15, 0],
    request_preempted_time_ns=[15, 0],
    request_queue_time_ns=[20, 30],
    request_prefill_time_ns=pd.array([30, None], dtype="Int64"),
    request_decode_time_ns=pd.array([40, None], dtype="Int64"),
    e2e_request_latency_ns=[90, 30],
    num_recomputed_tokens=[7, 0],
)
MOVES = table(
    """
seq_id status    ts_ns
0      RUNNING   30
0      WAITING   70
0      RUNNING   85
0      FINISHED  99
""",
    status="str",
)


def test_a_latency_is_the_sum_of_its_parts_without_what_never_was() -> None:
    parts = ("queue_ns", "prefill_ns", "decode_ns", "preempted_ns", "e2e_request_latency_ns")
    assert rows(latency_breakdown(LIVES), *parts) == [(20, 30, 25, 15, 90), (30, None, None, 0, 30)]


def test_spans_follow_one_another_and_a_preemption_cuts_the_span_it_strikes() -> None:
    spans = request_spans(LIVES, MOVES)
    assert rows(spans, "seq_id", "span", "start_ns", "end_ns") == [
        (0, "queue", 10, 30),
        (0, "prefill", 30, 60),
        (0, "decode", 60, 70),
        (0, "preempted", 70, 85),
        (0, "decode", 85, 100),
        (1, "queue", 20, 50),
    ]


def test_a_preemption_before_the_first_token_is_within_prefill() -> None:
    moves = table(
        """
seq_id status    ts_ns
0      RUNNING   30
0      WAITING   35
0      RUNNING   50
""",
        status="str",
    )
    spans = request_spans(LIVES[:1], moves)
    assert rows(spans, "span", "start_ns")[1:] == [
        ("prefill", 30),
        ("preempted", 35),
        ("prefill", 50),
        ("decode", 60),
    ]


def test_waiting_costs_everybody_in_the_queue_the_steps_time() -> None:
    stops = table(
        """
step reason       waiting_len
1    token_budget 3
2    no_blocks    2
3    no_blocks    1
4    no_blocks    5
""",
        reason="category",
    )
    steps = table("step wall_ns\n1 10\n2 100\n3 1000\n4 -")  # step 4 broke off
    waiting = waiting_by_reason(stops, steps)
    assert rows(waiting, "reason", "num_steps", "num_request_steps", "waiting_ns") == [
        ("no_blocks", 3, 8, 2 * 100 + 1 * 1000),
        ("token_budget", 1, 3, 3 * 10),
    ]


def test_a_preemption_costs_time_and_tokens_and_gives_pages() -> None:
    preemptions = table("seq_id num_blocks_freed\n0 3\n0 4")
    cost = preemption_cost(LIVES, preemptions)
    names = ("seq_id", "num_blocks_freed", "num_recomputed_tokens", "preempted_ns")
    assert rows(cost, *names) == [(0, 7, 7, 15)]
    assert cost["share_of_latency"].tolist() == [15 / 90]


# -- batches ---------------------------------------------------------------------------------------

STEPS = table(
    """
step phase   num_seqs num_batched_tokens num_context_tokens num_waiting wall_ns gpu_ns
1    prefill 2        30                 30                 2           50      -
2    decode  4        4                  104                1           10      5
3    decode  4        4                  108                0           20      7
4    decode  5        5                  200                2           90      30
5    decode  1        1                  40                 3           30      -
""",
    phase="category",
).assign(graph_batch_size=pd.array([None, 4, 4, 8, None], dtype="Int64"))
STEPS["num_padding_rows"] = STEPS["graph_batch_size"] - STEPS["num_seqs"]


def test_occupancy_counts_steps_and_their_time_by_batch_size() -> None:
    sizes = batch_occupancy(STEPS)
    assert rows(sizes, "phase", "num_seqs", "num_steps", "num_batched_tokens", "wall_ns") == [
        ("decode", 1, 1, 1, 30),
        ("decode", 4, 2, 8, 30),
        ("decode", 5, 1, 5, 90),
        ("prefill", 2, 1, 30, 50),
    ]
    assert sizes["share_of_time"].tolist() == [0.15, 0.15, 0.45, 0.25]


def test_an_empty_seat_is_waste_and_one_that_somebody_waits_for_is_worse() -> None:
    names = ("step", "num_seats", "num_seqs", "num_empty", "num_waiting", "num_joinable")
    assert rows(static_waste(STEPS), *names) == [
        (2, 5, 4, 1, 1, 1),
        (3, 5, 4, 1, 0, 0),
        (4, 5, 5, 0, 2, 0),
        (5, 5, 1, 4, 3, 3),
    ]
    assert static_waste(STEPS, num_seats=6)["num_empty"].tolist() == [2, 2, 1, 5]


def test_padding_is_told_by_size_of_graph() -> None:
    sizes = graph_padding(STEPS)
    names = ("graph_batch_size", "num_steps", "num_rows", "num_padding_rows", "graph_padding")
    assert rows(sizes, *names) == [(4, 2, 8, 0, 0.0), (8, 1, 8, 3, 3 / 8)]
    assert rows(sizes, "median_wall_ns", "median_gpu_ns") == [(15.0, 6.0), (90.0, 30.0)]


def test_steps_are_classed_between_powers_of_2_and_decodes_have_a_floor() -> None:
    floor = Floor(weight_bytes=1000, kv_bytes_per_token=10, bytes_per_second=1e9)  # 1 byte a ns
    classes = step_time_by_class(STEPS, floor)
    names = ("phase", "smallest_batch", "largest_batch", "num_steps", "median_wall_ns")
    assert rows(classes, *names) == [
        ("decode", 1, 1, 1, 30.0),
        ("decode", 4, 5, 3, 20.0),
        ("prefill", 2, 2, 1, 50.0),
    ]
    assert classes["median_gpu_ns"].astype(object).fillna(0).tolist() == [0, 7.0, 0]
    assert classes["floor_ns"][:2].tolist() == [1000 + 40 * 10, 1000 + 108 * 10]
    assert classes["floor_ns"].isna().tolist() == [False, False, True]
    assert classes["times_floor"][:2].tolist() == [30 / 1400, 20 / 2080]
    assert step_time_by_class(STEPS)["floor_ns"].isna().all()


def test_the_floor_is_every_weight_and_the_contexts_keys_and_values(folder: Path) -> None:
    header = nvtrace.load(folder / "article.jsonl").header
    floor = byte_floor(with_dtype(header, "bfloat16"), bytes_per_second=1e12)
    shape: dict[str, Any] = MODEL
    model = ModelConfig(
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=4096,
        attention_bias=False,
        hidden_act="silu",
        dtype="bfloat16",
        eos_token_ids=(),
        **shape,
    )
    assert floor.weight_bytes == 2 * model.num_parameters
    assert floor.kv_bytes_per_token == 2 * 28 * 8 * 128 * 2
    assert floor.step_ms(0) == floor.weight_bytes / 1e12 * 1e3


def test_two_ranks_share_what_a_step_reads(folder: Path) -> None:
    header = with_dtype(nvtrace.load(folder / "article.jsonl").header, "float32")
    alone, one_of_two = byte_floor(header, 1e12), byte_floor(replaced(header, world_size=2), 1e12)
    assert one_of_two.weight_bytes == alone.weight_bytes // 2
    assert one_of_two.kv_bytes_per_token == alone.kv_bytes_per_token // 2


def test_a_header_without_a_shape_has_no_floor(folder: Path) -> None:
    header = nvtrace.load(folder / "article.jsonl").header
    with pytest.raises(ValueError, match="does not have the model's 'hidden_size'"):
        byte_floor(replaced(header, model={}), 1e12)


def with_dtype(header: Header, dtype: str) -> Header:
    """The header of a run in another dtype."""
    return replaced(header, config={"dtype": dtype})


def replaced(header: Header, **changes: object) -> Header:
    """The header with other fields."""
    return replace(header, **changes)


# -- pages -----------------------------------------------------------------------------------------


def test_pages_are_counted_at_each_schedule_by_what_they_are() -> None:
    steps = table("step event_id ts_ns\n1 4 10\n2 8 20\n3 9 30")
    blocks = table(
        """
event_id block_id ref_count is_hashed
1        0        1         0
1        1        1         0
5        0        1         1
6        0        2         1
7        2        1         0
8        1        0         0
8        0        1         1
8        0        0         1
""",
        is_hashed="str",
    )
    blocks["is_hashed"] = blocks["is_hashed"] == "1"
    use = kv_use(steps, blocks, num_blocks=4)
    names = ("num_used_blocks", "num_shared_blocks", "num_free_blocks", "num_cached_blocks")
    assert rows(use, *names) == [(2, 0, 2, 0), (3, 1, 1, 0), (1, 0, 3, 1)]
    assert use["kv_cache_usage"].tolist() == [0.5, 0.75, 0.25]


def test_hits_are_in_the_order_of_admission_and_those_who_never_were_do_not_count() -> None:
    requests = table(
        """
seq_id scheduled_ns num_prompt_tokens num_cached_tokens
2      30           10                8
0      10           20                0
1      -            99                0
"""
    )
    hits = prefix_hits(requests)
    assert hits["seq_id"].tolist() == [0, 2]
    assert hits["hit_rate"].tolist() == [0.0, 0.8]
    assert hits["hit_rate_so_far"].tolist() == [0.0, 8 / 30]


def test_the_sum_that_ends_in_the_pages_of_a_gpu() -> None:
    budget = pd.DataFrame(
        [
            {
                "rank": 0,
                "total_bytes": 1000,
                "utilization": 0.9,
                "used_bytes": 200,
                "peak_bytes": 150,
                "current_bytes": 100,
                "graph_pool_bytes": 30,
                "available_bytes": 620,
                "num_blocks": 6,
                "block_bytes": 100,
            }
        ]
    )
    assert rows(memory_budget(budget), "term", "kind", "num_bytes") == [
        ("total", "total", 1000),
        ("kept back", "less", 100),
        ("used", "less", 200),
        ("a step's tensors", "less", 50),
        ("CUDA graphs", "less", 30),
        ("available", "left", 620),
        ("KV blocks", "less", 600),
        ("unused", "left", 20),
    ]


def test_the_sum_of_a_cpu_ends_at_its_limit(folder: Path) -> None:
    """16 GiB, 6 in use, 0.9 of it asked for, and a limit of 2."""
    terms = memory_budget(nvtrace.load(folder / "article.jsonl").table("KV_BUDGET_ESTIMATE"))
    by_term = terms.set_index("term")["num_bytes"]
    whole = int(16 * GIB * 0.9)
    assert by_term["kept back"] == 16 * GIB - whole
    assert by_term["beyond the limit"] == whole - 6 * GIB - 2 * GIB
    assert by_term["other ranks"] == 0
    assert by_term["available"] == 2 * GIB
    less = terms[terms["kind"] == "less"]["num_bytes"].sum() - by_term["KV blocks"]
    assert by_term["total"] - less == by_term["available"]
    assert by_term["available"] - by_term["KV blocks"] == by_term["unused"]


def test_a_trace_without_a_budget_has_no_sum() -> None:
    with pytest.raises(ValueError, match="no KV_BUDGET_ESTIMATE"):
        memory_budget(pd.DataFrame())
