"""Batches: how full steps are, and how long they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from msgspec import structs

from nvtrace.analysis.columns import ANALYSES
from nvtrace.analysis.frames import frame_of
from nvtrace.bench.steps import Floor

if TYPE_CHECKING:
    from nvtrace.envelope import Header

_NS_PER_MS = 1e6
_BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2, "float16": 2}


def batch_occupancy(steps: pd.DataFrame) -> pd.DataFrame:
    """Count steps by phase and batch size, and add up their time.

    Args:
        steps: `Trace.steps`.
    """
    sizes = steps.groupby(["phase", "num_seqs"], observed=True).agg(
        num_steps=("step", "size"),
        num_batched_tokens=("num_batched_tokens", "sum"),
        wall_ns=("wall_ns", "sum"),
    )
    sizes["share_of_time"] = sizes["wall_ns"] / (sizes["wall_ns"].sum() or 1)
    return frame_of(ANALYSES["batch_occupancy"], sizes.reset_index())


def static_waste(steps: pd.DataFrame, num_seats: int | None = None) -> pd.DataFrame:
    """Count the empty seats of each decode, and those that a waiting request could take.

    This is what static batching wastes: requests that have ended leave their seats empty
    (`num_empty`) while others wait (`num_joinable`). Continuous batching fills these seats.

    Args:
        steps: `Trace.steps`.
        num_seats: seats of a batch; the largest decode batch if None.
    """
    decodes = steps[steps["phase"] != "prefill"].reset_index(drop=True)
    seats = num_seats if num_seats is not None else decodes["num_seqs"].max()
    decodes = decodes.assign(num_seats=seats)
    decodes["num_empty"] = (decodes["num_seats"] - decodes["num_seqs"]).clip(lower=0)
    decodes["num_joinable"] = decodes[["num_empty", "num_waiting"]].min(axis=1)
    return frame_of(ANALYSES["static_waste"], decodes)


def graph_padding(steps: pd.DataFrame) -> pd.DataFrame:
    """Count the rows of CUDA graphs, and those that are padding.

    Args:
        steps: `Trace.steps`.
    """
    replays = steps[steps["graph_batch_size"].notna()]
    sizes = replays.groupby("graph_batch_size").agg(
        num_steps=("step", "size"),
        num_rows=("graph_batch_size", "sum"),
        num_padding_rows=("num_padding_rows", "sum"),
        median_wall_ns=("wall_ns", "median"),
        median_gpu_ns=("gpu_ns", "median"),
    )
    sizes["graph_padding"] = sizes["num_padding_rows"] / sizes["num_rows"]
    return frame_of(ANALYSES["graph_padding"], sizes.reset_index())


def step_time_by_class(steps: pd.DataFrame, floor: Floor | None = None) -> pd.DataFrame:
    """Measure how long steps take, by phase and batch size, beside the time to read their bytes.

    A decode step must read every weight once, and every key and value of every context:

        floor = (weight bytes + context tokens x KV bytes of a token) / bandwidth

    Args:
        steps: `Trace.steps`.
        floor: see `byte_floor`; floors are NA if None.
    """
    steps = steps[steps["wall_ns"].notna()]
    _, size_class = np.frexp(steps["num_seqs"])  # 1 | 2, 3 | 4 ... 7 | 8 ...
    classes = steps.groupby(["phase", size_class.rename("size_class")], observed=True).agg(
        smallest_batch=("num_seqs", "min"),
        largest_batch=("num_seqs", "max"),
        num_steps=("step", "size"),
        median_wall_ns=("wall_ns", "median"),
        median_gpu_ns=("gpu_ns", "median"),
        median_context_tokens=("num_context_tokens", "median"),
    )
    classes = classes.reset_index()
    classes["floor_ns"] = pd.Series(pd.NA, classes.index, "Float64")
    if floor is not None:
        is_decode = classes["phase"] == "decode"
        contexts = classes.loc[is_decode, "median_context_tokens"]
        floors = [floor.step_ms(round(tokens)) * _NS_PER_MS for tokens in contexts]
        classes.loc[is_decode, "floor_ns"] = floors
    classes["times_floor"] = classes["median_wall_ns"] / classes["floor_ns"]
    return frame_of(ANALYSES["step_time_by_class"], classes)


def byte_floor(header: Header, bytes_per_second: float) -> Floor:
    """The bytes that a decode step must read on each rank, and the time that this takes.

    Args:
        header: `Trace.header`.
        bytes_per_second: of the device's memory, such as 4.8e12 for an H200.

    Raises:
        ValueError: the header does not have the model's shape.
    """
    facts = structs.asdict(header.facts.model) | {"dtype": header.facts.config.dtype}
    model: dict[str, Any] = {name: value for name, value in facts.items() if value is not None}
    try:
        hidden, head_dim = model["hidden_size"], model["head_dim"]
        num_heads, num_kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
        attention = hidden * 2 * head_dim * (num_heads + num_kv_heads)  # q, o; k, v
        mlp = hidden * 3 * model["intermediate_size"]  # gate, up, down
        norms = 2 * hidden + 2 * head_dim
        layers = model["num_hidden_layers"] * (attention + mlp + norms)
        # A step reads only a few rows of the input embedding, but the whole head.
        num_read = layers + hidden + model["vocab_size"] * hidden
        num_bytes = _BYTES_PER_NUMBER[model["dtype"]]
        kv_heads_here = max(num_kv_heads // header.world_size, 1)
        per_token = 2 * model["num_hidden_layers"] * kv_heads_here * head_dim
    except KeyError as error:
        raise ValueError(f"the trace's header does not have the model's {error}") from error
    weight_bytes = num_read * num_bytes // header.world_size
    return Floor(weight_bytes, per_token * num_bytes, bytes_per_second)
