"""KV cache: how it is used, how much of each prompt it has, and where its size comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nvtrace.analysis.columns import ANALYSES
from nvtrace.analysis.frames import frame_of, of_first_rank

if TYPE_CHECKING:
    import numpy.typing as npt


def kv_use(steps: pd.DataFrame, blocks: pd.DataFrame, num_blocks: int) -> pd.DataFrame:
    """Count used, shared, free and cached blocks in each step, while it computes.

    Args:
        steps: `Trace.steps`.
        blocks: `Trace.blocks`.
        num_blocks: blocks in the pool: ENGINE_READY.num_kvcache_blocks.
    """
    is_used = blocks["ref_count"] > 0
    states = {
        "num_used_blocks": is_used,
        "num_shared_blocks": blocks["ref_count"] > 1,
        "num_cached_blocks": ~is_used & blocks["is_hashed"],
    }
    # The schedule is the event `event_id`: only events before it count.
    num_before = np.searchsorted(blocks["event_id"], steps["event_id"])
    counts = {
        name: _count_over_time(blocks["block_id"], state)[num_before]
        for name, state in states.items()
    }
    num_used = counts["num_used_blocks"]
    return frame_of(
        ANALYSES["kv_use"],
        counts
        | {
            "step": steps["step"].to_numpy(),
            "ts_ns": steps["ts_ns"].to_numpy(),
            "num_free_blocks": num_blocks - num_used,
            "kv_cache_usage": num_used / max(num_blocks, 1),
        },
    )


def _count_over_time(block_ids: pd.Series, state: pd.Series) -> npt.NDArray[np.int64]:
    """(num_rows + 1,) how many blocks are in a state after 0, 1 ... rows.

    Args:
        block_ids: of each row.
        state: is the row's block in that state, after the row?
    """
    before = state.groupby(block_ids).shift(fill_value=False)
    changes = state.astype("int64") - before.astype("int64")
    return np.concatenate([[0], changes.cumsum().to_numpy()])


def prefix_hits(requests: pd.DataFrame) -> pd.DataFrame:
    """Measure how much of each prompt the prefix cache had, in the order of admission.

    Args:
        requests: `Trace.requests`.
    """
    admitted = requests[requests["scheduled_ns"].notna()]
    admitted = admitted.sort_values("scheduled_ns", kind="stable", ignore_index=True)
    num_hits, num_queries = admitted["num_cached_tokens"], admitted["num_prompt_tokens"]
    admitted["hit_rate"] = num_hits / num_queries
    admitted["hit_rate_so_far"] = num_hits.cumsum() / num_queries.cumsum()
    return frame_of(ANALYSES["prefix_hits"], admitted)


def memory_budget(estimates: pd.DataFrame) -> pd.DataFrame:
    """List the terms of the sum that gives the number of KV blocks, of the first rank.

        total - kept back - used - ... = available        available - blocks = unused

    Args:
        estimates: `Trace.table("KV_BUDGET_ESTIMATE")`.

    Raises:
        ValueError: there is none.
    """
    if estimates.empty:
        raise ValueError("the trace has no KV_BUDGET_ESTIMATE")
    budget = of_first_rank(estimates).iloc[-1]
    total, available = int(budget["total_bytes"]), int(budget["available_bytes"])
    used = int(budget["used_bytes"])
    kept_back = total - int(total * budget["utilization"])
    terms = [("total", "total", total), ("kept back", "less", kept_back), ("used", "less", used)]
    if pd.notna(budget["peak_bytes"]):
        step = int(budget["peak_bytes"] - budget["current_bytes"])
        terms += [("a step's tensors", "less", step)]
        terms += [("CUDA graphs", "less", int(budget["graph_pool_bytes"]))]
    else:
        room = total - kept_back - used
        limited = min(room, int(budget["limit_bytes"]))
        terms += [("beyond the limit", "less", room - limited)]
        terms += [("other ranks", "less", limited - available)]
    pages = int(budget["num_blocks"] * budget["block_bytes"])
    terms += [("available", "left", available), ("KV blocks", "less", pages)]
    terms += [("unused", "left", available - pages)]
    return frame_of(
        ANALYSES["memory_budget"], pd.DataFrame(terms, columns=["term", "kind", "num_bytes"])
    )
