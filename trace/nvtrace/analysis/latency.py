"""Latency: where requests spend their time, and why they wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from nvtrace.analysis.columns import ANALYSES
from nvtrace.analysis.frames import frame_of, of_first_rank

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPANS = ["queue", "prefill", "decode", "preempted"]


def latency_breakdown(requests: pd.DataFrame) -> pd.DataFrame:
    """Split each request's latency into queue, prefill, decode and preempted time.

    Args:
        requests: `Trace.requests`.
    """
    return frame_of(
        ANALYSES["latency_breakdown"],
        {
            "seq_id": requests["seq_id"],
            "finish_reason": requests["finish_reason"],
            "queue_ns": requests["request_queue_time_ns"],
            "prefill_ns": requests["request_prefill_time_ns"] - requests["preempted_in_prefill_ns"],
            "decode_ns": requests["request_decode_time_ns"] - requests["preempted_in_decode_ns"],
            "preempted_ns": requests["request_preempted_time_ns"],
            "e2e_request_latency_ns": requests["e2e_request_latency_ns"],
        },
    )


def request_spans(requests: pd.DataFrame, transitions: pd.DataFrame) -> pd.DataFrame:
    """Split each request into its spans: the bars of a Gantt chart.

    Args:
        requests: `Trace.requests`.
        transitions: `Trace.table("STATE_TRANSITION")`.
    """
    pauses = _pauses(of_first_rank(transitions))
    rows = [
        (request.seq_id, *span)
        for request in requests.sort_values("seq_id").itertuples()
        for span in _spans_of(request, pauses.get(request.seq_id, []))
        if span[1] < span[2]
    ]
    frame = ANALYSES["request_spans"]
    spans = pd.DataFrame(rows, columns=frame.names)
    spans["span"] = pd.Categorical(spans["span"], categories=_SPANS)
    return frame_of(frame, spans)


def _pauses(transitions: pd.DataFrame) -> dict[int, list[int]]:
    """For each preempted request: the times of its preemption, its resumption, and so on."""
    pauses: dict[int, list[int]] = {}
    moves = transitions[transitions["status"].isin(["WAITING", "RUNNING"])]
    for seq_id, status, ts_ns in moves[["seq_id", "status", "ts_ns"]].itertuples(index=False):
        if status == "WAITING":
            pauses.setdefault(seq_id, []).append(ts_ns)
        elif seq_id in pauses:  # not its first admission
            pauses[seq_id].append(ts_ns)
    return pauses


def _spans_of(request: Any, moments: list[int]) -> Iterator[tuple[str, int, int]]:  # noqa: ANN401 - a row
    """The spans of one request, in order. A missing time is taken to be the request's end.

    Args:
        request: its row.
        moments: the times of its preemption, its resumption, its next preemption ...
    """
    end = request.finished_ns
    scheduled = end if pd.isna(request.scheduled_ns) else request.scheduled_ns
    first_token = end if pd.isna(request.first_token_ns) else request.first_token_ns
    yield "queue", request.arrival_ns, scheduled
    for span, start, stop in (("prefill", scheduled, first_token), ("decode", first_token, end)):
        is_paused, last = False, start
        for moment in [*(m for m in moments if start <= m < stop), stop]:
            yield ("preempted" if is_paused else span), last, moment
            is_paused, last = not is_paused, moment


def waiting_by_reason(stops: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Measure why requests were in the waiting queue, and how long.

    In a step with an ADMISSION_STOP, each waiting request waits for the step's time.

    Args:
        stops: `Trace.table("ADMISSION_STOP")`.
        steps: `Trace.steps`.
    """
    wall_ns = steps.set_index("step")["wall_ns"]
    stops = of_first_rank(stops).join(wall_ns, on="step")
    stops["waiting_ns"] = stops["waiting_len"] * stops["wall_ns"].fillna(0)
    by_reason = stops.groupby("reason", observed=True).agg(
        num_steps=("step", "nunique"),
        num_request_steps=("waiting_len", "sum"),
        waiting_ns=("waiting_ns", "sum"),
    )
    by_reason = by_reason.sort_values("waiting_ns", ascending=False, kind="stable")
    return frame_of(ANALYSES["waiting_by_reason"], by_reason.reset_index())


def preemption_cost(requests: pd.DataFrame, preemptions: pd.DataFrame) -> pd.DataFrame:
    """Measure what preemptions cost the preempted requests, and the blocks that they freed.

    Args:
        requests: `Trace.requests`.
        preemptions: `Trace.table("PREEMPT")`.
    """
    num_freed = of_first_rank(preemptions).groupby("seq_id")["num_blocks_freed"].sum()
    struck = requests[requests["num_preemptions"] > 0].join(num_freed, on="seq_id")
    struck = struck.rename(columns={"request_preempted_time_ns": "preempted_ns"})
    struck["share_of_latency"] = struck["preempted_ns"] / struck["e2e_request_latency_ns"]
    return frame_of(ANALYSES["preemption_cost"], struck.reset_index(drop=True))
