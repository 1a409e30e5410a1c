# %% [markdown]
# # 6. From a batch to tensors
#
# **Question:** The scheduler chooses requests, and a number of tokens for each. Which few rows of
# numbers give the model everything else?
#
# It reads `example` (two prompts of 11 and 17 tokens), `preemption` (blocks of 4 tokens, too few of
# them) and `mixed`. Before it: [paged KV cache](../docs/en/concepts/paged-kv-cache.md).

# %%
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

import nvtrace
from exercise import check
from nvtrace.analysis import plots

TRACES = Path("../docs/traces")
example = nvtrace.load(TRACES / "example.jsonl.zst")
preemption = nvtrace.load(TRACES / "preemption.jsonl.zst")
mixed = nvtrace.load(TRACES / "mixed.jsonl.zst")

# %% [markdown]
# ## One row, and where it is cut
#
# A model could take a batch as a rectangle: a row for each request, the short ones filled up to the
# longest. Computing the padding is wasted work. So this engine, like vLLM, puts all new tokens one
# after the other, and records where each request begins: `cu_seqlens_q`, the *cumulative sequence
# lengths* of the queries.

# %%
prompts = example.table("REQUEST_ENQUEUE").set_index("seq_id")["prompt_token_ids"]
lengths = [len(prompt) for prompt in prompts]
input_ids = [token_id for prompt in prompts for token_id in prompt]
rectangle = len(lengths) * max(lengths)
print(f"lengths {lengths}: {len(input_ids)} tokens in a row, {rectangle} in a rectangle")
print("cu_seqlens_q by hand", [0, *np.cumsum(lengths).tolist()])

first = example.table("PREPARE_PREFILL_TENSORS").iloc[0]
print("cu_seqlens_q recorded", first["cu_seqlens_q"])
assert first["cu_seqlens_q"] == [0, *np.cumsum(lengths)]
assert first["flat_tokens"] == len(input_ids) == 28

# %% [markdown]
# Request 0 has the places from 0 up to 11 of the row, request 1 those from 11 up to 28. The article
# has the same numbers in its section 2.7.2, because its prompts have the same lengths.
#
# ## Which tokens attend to which
#
# In a flat row, a token of request 1 comes right after one of request 0, and must not attend to it.
# The attention kernel gets `cu_seqlens_q` and `cu_seqlens_k` (the same for the contexts), and
# allows exactly this: a query attends to the keys of its own request, up to its own position.


# %%
def may_look(cu_seqlens_q: list[int], cu_seqlens_k: list[int]) -> np.ndarray:
    """(num_tokens, num_context_tokens) is this key visible to this query?"""
    mask = np.zeros((cu_seqlens_q[-1], cu_seqlens_k[-1]), dtype=bool)
    for request in range(len(cu_seqlens_q) - 1):
        queries = slice(cu_seqlens_q[request], cu_seqlens_q[request + 1])
        keys = slice(cu_seqlens_k[request], cu_seqlens_k[request + 1])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        # The last query is the newest token: it sees all keys. Each one before it, one less.
        mask[queries, keys] = np.tri(num_queries, num_keys, num_keys - num_queries, dtype=bool)
    return mask


def draw_mask(layout: dict[str, Any], ax: Axes, title: str) -> None:
    """Draw who may look at whom, a colour for each request."""
    mask = may_look(layout["cu_seqlens_q"], layout["cu_seqlens_k"])
    request = np.searchsorted(layout["cu_seqlens_q"], np.arange(len(mask)), side="right")
    colors = ["white", *(plots.COLORS[name] for name in ("prefill", "decode", "mixed"))]
    ax.imshow(
        mask * request[:, None],
        cmap=ListedColormap(colors),
        vmin=0,
        vmax=3,
        aspect="auto",
        interpolation="nearest",
    )
    ax.set(title=title, xlabel="keys, by cu_seqlens_k", ylabel="queries, by cu_seqlens_q")
    ax.title.set_fontsize("medium")


later = preemption.table("PREPARE_PREFILL_TENSORS").iloc[1]
both = mixed.table("PREPARE_PREFILL_TENSORS").iloc[2]
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
draw_mask(first, axes[0], "two prompts")
draw_mask(later, axes[1], "the first has 20 tokens in blocks")
draw_mask(both, axes[2], "two decodes and a prompt")

# %% [markdown]
# Left: two prompts, nothing computed before, two triangles. Middle: step 65 of `preemption`.
# Request 1 is admitted again, and the prefix cache still has its first 20 tokens, so it has 31
# queries for 51 keys; the triangle has become a trapezoid, aligned to the *right* end, because the
# newest query sees everything. Right: step 40 of `mixed`. A decode is a request with one query, so
# it fits into the same layout as a prompt: two rows, and a triangle of 12.

# %%
for name, layout in (("example", first), ("preemption", later), ("mixed", both)):
    print(name, "step", layout["step"], layout["cu_seqlens_q"], layout["cu_seqlens_k"])
assert np.diff(later["cu_seqlens_q"]).tolist() == [31, 29]
assert np.diff(later["cu_seqlens_k"]).tolist() == [51, 29]
assert np.diff(both["cu_seqlens_q"]).tolist() == [1, 1, 12]
assert (later["step"], both["step"]) == (65, 40)

# %% [markdown]
# ## Positions
#
# Rotary embeddings need the position of each token within its request. That is not its place in the
# row: it continues from the tokens that are *already computed*. The trace has positions as ranges,
# first and last.

# %%
print("example ", first["position_ranges"])
print("preemption", later["position_ranges"])
print("mixed   ", both["position_ranges"])
assert later["position_ranges"] == [(20, 50), (0, 28)]

# %% [markdown]
# ## Slots
#
# Keys and values must be stored. A block of `block_size` tokens has that many *slots*, and a
# token's slot follows from its position and its request's block table:
#
#     slot = block_table[position // block_size] * block_size + position % block_size
#
# With blocks of 256 that is hard to see, with blocks of 4 it is not. Here are the blocks while step
# 65 computes: each square is a slot, its number the position stored in it.

# %%
assert example.header.config["kvcache_block_size"] == 256
assert preemption.header.config["kvcache_block_size"] == 4

state = preemption.at(65, "schedule")
tables = {seq_id: state.sequences[seq_id].block_table for seq_id in state.running}
for seq_id, table in tables.items():
    print(f"block table of request {seq_id}: {table}")


# %%
def draw_slots(tables: dict[int, list[int]], lengths: dict[int, int], ax: Axes) -> None:
    """Draw the pool: a column for each block, a square for each slot, the position in it."""
    colors = dict(zip(tables, (plots.COLORS["decode"], plots.COLORS["mixed"]), strict=True))
    for seq_id, table in tables.items():
        for position in range(lengths[seq_id]):
            page, offset = table[position // state.block_size], position % state.block_size
            ax.add_patch(Rectangle((page - 0.5, offset - 0.5), 1, 1, color=colors[seq_id]))
            ax.text(page, offset, str(position), ha="center", va="center", fontsize="x-small")
        ax.scatter([], [], marker="s", color=colors[seq_id], label=f"request {seq_id}")
    ax.set(xlim=(-0.5, state.num_blocks - 0.5), ylim=(state.block_size - 0.5, -0.5))
    ax.set(xlabel="block", ylabel="offset", xticks=range(state.num_blocks), yticks=range(4))
    ax.set_xticks(np.arange(state.num_blocks) + 0.5, minor=True)
    ax.tick_params(which="minor", length=0)
    ax.grid(which="minor", axis="x", color="#aab0b6", lw=0.6)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize="small")


num_tokens = dict(zip(state.running, np.diff(later["cu_seqlens_k"]).tolist(), strict=True))
figure, ax = plt.subplots(figsize=(11, 2.4), layout="constrained")
draw_slots(tables, num_tokens, ax)


# %% [markdown]
# Consecutive tokens of a request are consecutive within a block, but the blocks may be anywhere.
# Now the same by hand, for *every* step of three traces: the input is what the scheduler decided
# and the block tables, the result must be what the engine recorded.


# %%
def runs(table: list[int], start: int, stop: int, block_size: int) -> Iterator[tuple[int, int]]:
    """The slots of positions start to stop - 1: a (first, last) for each block they touch."""
    while start < stop:
        slot = table[start // block_size] * block_size + start % block_size
        in_page = min(stop - start, block_size - start % block_size)
        yield slot, slot + in_page - 1
        start += in_page


def lay_out(trace: nvtrace.Trace, schedule: dict[str, Any]) -> list[Any]:
    """cu_seqlens_q, cu_seqlens_k, position ranges and slot ranges of a step, by hand."""
    pool = trace.at(schedule["step"], "schedule")
    starts, counts = schedule["num_computed_tokens"], schedule["num_scheduled_tokens"]
    stops = [start + count for start, count in zip(starts, counts, strict=True)]
    slots: list[tuple[int, int]] = []
    for seq_id, start, stop in zip(schedule["seq_ids"], starts, stops, strict=True):
        slots += runs(pool.sequences[seq_id].block_table, start, stop, pool.block_size)
    cu_seqlens_q, cu_seqlens_k = [0, *np.cumsum(counts)], [0, *np.cumsum(stops)]
    positions = [(start, stop - 1) for start, stop in zip(starts, stops, strict=True)]
    return [cu_seqlens_q, cu_seqlens_k, positions, slots]


num_checked = 0
for trace in (example, preemption, mixed):
    recorded = trace.table("PREPARE_PREFILL_TENSORS").set_index("step")
    for kind in ("SCHEDULE_PREFILL", "SCHEDULE_MIXED"):
        for schedule in trace.table(kind).to_dict("records"):
            theirs = recorded.loc[schedule["step"]]
            names = ["cu_seqlens_q", "cu_seqlens_k", "position_ranges", "slot_ranges"]
            assert lay_out(trace, schedule) == [theirs[name] for name in names]
            num_checked += 1
print(num_checked, "steps with prompts in them, and each number as recorded")

# %% [markdown]
# ## A decode needs less
#
# In a decode step each request computes one token. Row i is request i, so no `cu_seqlens` are
# needed: only a position and a slot for each, and `context_lens`, how many tokens it attends to.
# The trace does not record the position: it is `context_lens - 1`.

# %%
decodes = preemption.table("PREPARE_DECODE_TENSORS")
decodes[["step", "batch_size", "context_lens", "slot_mapping", "block_tables_shape"]].head(4)

# %%
for decode in decodes.to_dict("records"):
    pool = preemption.at(decode["step"], "schedule")
    for seq_id, context_len, slot in zip(
        pool.running, decode["context_lens"], decode["slot_mapping"], strict=True
    ):
        position = context_len - 1
        page = pool.sequences[seq_id].block_table[position // pool.block_size]
        assert slot == page * pool.block_size + position % pool.block_size
print(len(decodes), "decode steps, and each slot as recorded")

# %% [markdown]
# `block_tables_shape` is the last field: attention must *read* the whole context, so it gets the
# block tables themselves, padded to the longest. A first prefill gets none (`has_block_tables` is
# false): it needs only the keys that it has just computed. Step 65 gets them, for the 20 tokens
# that were already in blocks.

# %%
prefills = preemption.table("PREPARE_PREFILL_TENSORS")
assert prefills["has_block_tables"].tolist() == [False, True, True]
prefills[["step", "flat_tokens", "n_seqs", "max_seqlen_q", "max_seqlen_k", "has_block_tables"]]

# %% [markdown]
# ## Your turn
#
# ### Exercise 1
#
# A pool has blocks of 4 tokens. A request's block table is `[7, 2, 9]`, and it has 10 tokens, the
# newest of which is computed in this step. Into which slot do its key and value go?

# %% tags=["exercise"]
tenth_slot: int | None = None  # your number

# %% tags=["check"]
check(
    tenth_slot,
    lambda answer: [(answer, answer)] == list(runs([7, 2, 9], 9, 10, 4)),
    hint="the tenth token is at position 9, and 9 // 4 says which entry of the table counts",
)

# %% [markdown]
# ### Exercise 2
#
# Write the function that makes a decode's `slot_mapping`. It gets each request's block table, each
# one's context length (with the new token), and the block size. It is checked on all decode steps
# of the trace.


# %% tags=["exercise"]
def slot_mapping(tables: list[list[int]], context_lens: list[int], block_size: int) -> list[int]:
    """(num_seqs,) the slot that each request's newest token is written to."""
    raise NotImplementedError  # your code


# %% tags=["check"]
def is_as_recorded(function: object) -> bool:
    assert callable(function)
    for decode in decodes.to_dict("records"):
        pool = preemption.at(decode["step"], "schedule")
        its_tables = [list(pool.sequences[seq_id].block_table) for seq_id in pool.running]
        mine = function(its_tables, list(decode["context_lens"]), pool.block_size)
        if list(mine) != decode["slot_mapping"]:
            return False
    return True


check(slot_mapping, is_as_recorded, hint="the newest token's position is context_len - 1")

# %% [markdown]
# ### Exercise 3
#
# Write `cu_seqlens_k` as a function of what the scheduler gives: for each request the tokens
# computed before, and the tokens scheduled now. (`cu_seqlens_q` needs only the second.)


# %% tags=["exercise"]
def cu_seqlens_k(num_computed_tokens: list[int], num_scheduled_tokens: list[int]) -> list[int]:
    """(num_seqs + 1,) where each request's context begins, and at last where all of them end."""
    raise NotImplementedError  # your code


# %% tags=["check"]
check(
    cu_seqlens_k,
    lambda function: all(
        list(function(schedule["num_computed_tokens"], schedule["num_scheduled_tokens"]))
        == prepared["cu_seqlens_k"]
        for schedule, prepared in zip(
            preemption.table("SCHEDULE_PREFILL").to_dict("records"),
            preemption.table("PREPARE_PREFILL_TENSORS").to_dict("records"),
            strict=True,
        )
    ),
    hint="it begins with 0, and a context is what was computed before and what is computed now",
)

# %% [markdown]
# ## Answer
#
# Four rows of numbers. The tokens, flat. A *position* for each: its place in its request. A *slot*
# for each, so that its key and value can be found again. And the borders: `cu_seqlens_q` and
# `cu_seqlens_k` where requests have any number of tokens, `context_lens` where each has one. Where
# keys are read from blocks, the block tables are added. Nothing in them says "prompt", "decode",
# "preempted" or "shared": only the scheduler knows that, and the model computes the same in each
# case. That is why a mixed step, a chunk and a revived prefix need no code of their own.
