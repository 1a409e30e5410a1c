"""Steps: the frame `steps`, joined from the events of each step.

SCHEDULE_*   what was decided                 rank 0 only
PREPARE_*    what was read and written        every rank
RUN_EAGER, CUDAGRAPH_REPLAY   how it ran      every rank
STEP_END     how long it took                 rank 0 only

All ranks compute the same batch, so a step is one row: the first rank's. How the others ran it is
in `table("RUN_EAGER")`, `table("CUDAGRAPH_REPLAY")` and `table("PREPARE_...")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from nvtrace.analysis.columns import STEPS
from nvtrace.analysis.frames import frame_of

if TYPE_CHECKING:
    from nvtrace.analysis.records import Records

_KEY = ["rank", "step"]
_PHASES = ["prefill", "decode", "mixed"]
_QUEUES = {
    "waiting_len": "num_waiting",
    "running_len": "num_running",
    "free_blocks": "num_free_blocks",
}
_TIMES = ["wall_ns", "schedule_ns", "prepare_ns", "forward_ns", "sample_ns", "postprocess_ns"]


def steps_frame(records: Records) -> pd.DataFrame:
    """The frame `steps`: see `columns.py`."""
    steps = _decisions(records).join(_runs(records), how="outer")
    steps = steps.join(_layouts(records)).join(_ends(records))
    steps = steps[steps.index.get_level_values("rank") == records.header.rank]
    for name in ("event_id", "phase", "ts_ns"):
        steps[name] = steps[name].fillna(steps[f"run_{name}"])
    for name in ("num_seqs", "num_batched_tokens"):
        steps[name] = steps[name].fillna(steps[f"prepared_{name}"]).fillna(0)
    steps["ts_ns"] = steps["end_ts_ns"].fillna(steps["ts_ns"])
    steps["start_ns"] = steps["ts_ns"] - steps["wall_ns"].fillna(0)
    others = {*steps["phase"].dropna()} - {*_PHASES}
    steps["phase"] = pd.Categorical(steps["phase"], categories=[*_PHASES, *sorted(others)])
    return frame_of(STEPS, steps.reset_index().sort_values("step", ignore_index=True))


def _decisions(records: Records) -> pd.DataFrame:
    """What was decided, by rank and step."""
    prefill = records.table("SCHEDULE_PREFILL")
    prefill = prefill.assign(phase="prefill", num_prefill_tokens=prefill["num_batched_tokens"])
    prefill["num_decode_tokens"] = 0
    decode = records.table("SCHEDULE_DECODE")
    decode = decode.assign(phase="decode", num_prefill_tokens=0)
    decode["num_batched_tokens"] = decode["num_decode_tokens"] = decode["scheduled"]
    mixed = records.table("SCHEDULE_MIXED").assign(phase="mixed")
    mixed["num_decode_tokens"] = mixed["num_decodes"]
    mixed["num_prefill_tokens"] = mixed["num_batched_tokens"] - mixed["num_decodes"]
    names = ["event_id", "ts_ns", "phase", "reason", "num_seqs", "num_batched_tokens"]
    names += ["num_prefill_tokens", "num_decode_tokens", "token_budget", *_QUEUES.values()]
    parts = [
        part.rename(columns={"scheduled": "num_seqs", **_QUEUES})
        for part in (prefill, decode, mixed)
    ]
    whole = [part.astype({"phase": "str", "reason": "str"})[[*_KEY, *names]] for part in parts]
    return _by_step(pd.concat(whole))


def _runs(records: Records) -> pd.DataFrame:
    """How the model ran, by rank and step."""
    eager = records.table("RUN_EAGER").rename(columns={"reason": "eager_reason"})
    replay = records.table("CUDAGRAPH_REPLAY").rename(columns={"padding": "num_padding_rows"})
    replay["phase"] = "decode"  # nothing else is a graph
    parts = [part.astype({"phase": "str"}) for part in (eager, replay)]
    names = ["event_id", "ts_ns", "phase", "eager_reason"]
    names += ["graph_batch_size", "num_padding_rows", "is_ahead"]
    runs = _by_step(pd.concat(parts).reindex(columns=[*_KEY, *names]))
    return runs.rename(columns={name: f"run_{name}" for name in ("event_id", "ts_ns", "phase")})


def _layouts(records: Records) -> pd.DataFrame:
    """What the model was given, by rank and step."""
    prefill = records.table("PREPARE_PREFILL_TENSORS")
    decode = records.table("PREPARE_DECODE_TENSORS")
    return _by_step(
        pd.concat(
            [
                prefill[_KEY].assign(
                    prepared_num_seqs=prefill["n_seqs"],
                    prepared_num_batched_tokens=prefill["flat_tokens"],
                    num_context_tokens=[ends[-1] for ends in prefill["cu_seqlens_k"]],
                ),
                decode[_KEY].assign(
                    prepared_num_seqs=decode["batch_size"],
                    prepared_num_batched_tokens=decode["batch_size"],
                    num_context_tokens=[sum(lens) for lens in decode["context_lens"]],
                ),
            ]
        )
    )


def _ends(records: Records) -> pd.DataFrame:
    """How long it took, by rank and step."""
    ends = records.table("STEP_END").rename(columns={"ts_ns": "end_ts_ns"})
    ends["num_finished"] = [len(seq_ids) for seq_ids in ends["finished"]]
    return _by_step(ends[[*_KEY, "end_ts_ns", "num_finished", *_TIMES, "gpu_ns"]])


def _by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by rank and step; the last one if a (broken) trace has several.

    Numbers become Int64: a join would turn int64 into float64 where a row is missing.
    """
    rows = rows[rows["step"].notna()].astype({"step": "int64"})
    rows = rows.drop_duplicates(_KEY, keep="last").set_index(_KEY)
    return rows.astype({name: "Int64" for name, dtype in rows.dtypes.items() if dtype == "int64"})
