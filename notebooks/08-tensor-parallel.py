# %% [markdown]
# # 8. Tensor parallel
#
# **Question:** One model is split between two processes. What does each of them hold, what do they
# have to communicate, and what does it cost?
#
# It reads the article's two requests, four times: on a CPU with one process (`example`) and with
# two (`two-ranks`), on an H200 (`gpu-example`) and on two (`gpu-two-gpus`). Each process is a
# *rank*, and has written a trace of its own. Before it: [tensor
# parallelism](../docs/en/concepts/tensor-parallel.md).

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

import nvtrace
from exercise import check
from nvtrace.analysis import byte_floor, plots

TRACES = Path("../docs/traces")
alone = nvtrace.load(TRACES / "example.jsonl.zst")
pair = nvtrace.load(TRACES / "two-ranks.jsonl.zst")
gpu_alone = nvtrace.load(TRACES / "gpu-example.jsonl.zst")
gpu_pair = nvtrace.load(TRACES / "gpu-two-gpus.jsonl.zst")
pair

# %% [markdown]
# ## What each rank records
#
# `nvtrace.load` has found rank 1's file beside rank 0's. Let us count the events of each.

# %%
counts = pd.crosstab(pair.events["event"], pair.events["rank"])
counts

# %% [markdown]
# Rank 1 records how it was started, and then, for each step, its inputs and how it ran. It
# schedules nothing, has no queue, samples no token, and ends no step: it does not know what a
# request is. Rank 0 makes all decisions, and sends rank 1 the few rows of numbers of notebook 6.
# All of them are the same:

# %%
for kind in ("PREPARE_PREFILL_TENSORS", "PREPARE_DECODE_TENSORS"):
    layouts = pair.table(kind).drop(columns=["event_id", "ts_ns"])
    mine, its = (layouts[layouts["rank"] == rank].drop(columns="rank") for rank in (0, 1))
    assert mine.reset_index(drop=True).equals(its.reset_index(drop=True))
    print(f"{kind}: {len(mine)} steps, the same on both ranks")
assert set(counts.index[counts[1] == 0]) >= {"SCHEDULE_DECODE", "SAMPLE_TOKENS", "STEP_END"}

# %% [markdown]
# And the answers are those of a single process, token for token. That is not guaranteed: adding in
# another order may change the last bit of a float, and that may change a token. It did not here.

# %%
for one, two in ((alone, pair), (gpu_alone, gpu_pair)):
    assert one.tokens["token_id"].equals(two.tokens["token_id"])
    print(len(one.tokens), "tokens, the same")

# %% [markdown]
# ## What is split
#
# Nearly everything. A rank has some of the attention heads, some of the MLP's columns, and some of
# the vocabulary. Only the norms are complete on each: they are tiny, and each rank needs them. Here
# is the model by hand, from the shape in the trace's header.

# %%
shape = pair.header.model
hidden, wide, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
head_dim, num_layers = shape["head_dim"], shape["num_hidden_layers"]

weights = pd.DataFrame(
    [
        ("q_proj", heads * head_dim, hidden, "rows", num_layers),
        ("k_proj, v_proj", kv_heads * head_dim, hidden, "rows", 2 * num_layers),
        ("o_proj", hidden, heads * head_dim, "columns", num_layers),
        ("gate_proj, up_proj", wide, hidden, "rows", 2 * num_layers),
        ("down_proj", hidden, wide, "columns", num_layers),
        ("embedding = head", vocab, hidden, "rows", 1),
        ("norms", 1, hidden, "not", 2 * num_layers + 1),
        ("norms of q and k", 1, head_dim, "not", 2 * num_layers),
    ],
    columns=["matrix", "rows", "columns", "cut by", "how many"],
)
weights["numbers"] = weights["rows"] * weights["columns"] * weights["how many"]
weights["on each of 2"] = weights["numbers"] // np.where(weights["cut by"] == "not", 1, 2)
weights

# %%
whole, half = int(weights["numbers"].sum()), int(weights["on each of 2"].sum())
print(f"{whole:,} numbers in all, {half:,} on each of 2: {half / whole:.2%}")
assert whole * 2 == pair.table("MODEL_WEIGHTS_LOADED")["num_bytes"][0]  # bfloat16, in the file

# %% [markdown]
# The count is exact: twice as many bytes are in the file. (Both ranks report the whole file: each
# has read all of it, and kept its part.) On a GPU, where the memory is measured, one can see that a
# rank really holds a half: `current_bytes` is the memory in use when all is loaded.

# %%
memory = pd.concat(
    trace.table("KV_BUDGET_ESTIMATE").assign(gpus=trace.header.world_size)
    for trace in (gpu_alone, gpu_pair)
)
memory[["gpus", "rank", "current_bytes", "num_kv_heads", "block_bytes", "num_blocks"]]

# %% [markdown]
# The blocks, too: a block keeps the keys and values of 256 tokens, but on each rank only those of
# *its* heads. So a block takes half of the bytes, the pool has about twice the blocks, and block 7
# holds the same tokens on both. That is why one block table is enough for all ranks, and the
# scheduler needs to know nothing about ranks. The pool's size must be the same, so the rank with
# less memory decides.

# %%
assert memory["block_bytes"].tolist() == [786432, 393216, 393216]
assert memory["num_blocks"].iloc[1] == memory["num_blocks"].iloc[2]
by_rank = gpu_pair.table("KV_BUDGET_ESTIMATE")
pages_that_fit = by_rank["available_bytes"] // by_rank["block_bytes"]
print("blocks that would fit on each rank:", pages_that_fit.tolist())
assert by_rank["num_blocks"].iloc[0] == pages_that_fit.min()

# %% [markdown]
# ## What must be communicated
#
# Take an MLP. Split `gate` and `up` by rows: each rank computes some of the columns in between,
# alone. Split `down` by columns: each rank multiplies what it has, and gets a matrix of the full
# size, a *partial sum* of the result. One sum over the ranks, and both have the result.


# %%
def mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """(num_tokens, hidden) -> (num_tokens, hidden): down(silu(gate(x)) * up(x))."""
    gated = x @ gate.T
    between = gated / (1 + np.exp(-gated)) * (x @ up.T)
    return np.asarray(between @ down.T)


random = np.random.default_rng(0)
x = random.normal(size=(2, hidden))
gate, up = random.normal(size=(2, wide, hidden)) / np.sqrt(hidden)
down = random.normal(size=(hidden, wide)) / np.sqrt(wide)

summands = []
for rank in (0, 1):
    part = slice(rank * wide // 2, (rank + 1) * wide // 2)
    summands.append(mlp(x, gate[part], up[part], down[:, part]))
assert np.allclose(sum(summands), mlp(x, gate, up, down))
assert not np.allclose(summands[0], summands[1])
print("two summands of shape", summands[0].shape, "add up to the whole")

# %% [markdown]
# Attention is split the same way: `q`, `k` and `v` by heads, which are independent, `o_proj` by
# columns. So a layer needs two sums (`all_reduce`). The embedding needs one more (the rank that has
# a token's row gives it, the others give zeros), and at the end rank 0 gathers the logits, because
# it samples. For a decode of two requests that is, in float32:

# %%
num_sums = 2 * num_layers + 1
bytes_of_a_sum = 2 * hidden * 4
print(f"{num_sums} sums of {bytes_of_a_sum:,} bytes = {num_sums * bytes_of_a_sum:,} bytes")
print(f"and {2 * vocab // 2 * 4:,} bytes of logits from rank 1")

# %% [markdown]
# ## Side by side
#
# A few kilobytes are sent quickly. The cost is that each sum is a *synchronization*: no rank goes
# on before all have arrived. Both headers have the time at which the trace began, so the two can be
# drawn on one axis. Three decode steps on the CPU:

# %%
anchors = {rank: header.clock["anchor_unix_ns"] for rank, header in pair.headers.items()}
events = pair.events[pair.events["step"].notna()].copy()
events["unix_ns"] = events["ts_ns"] + events["rank"].map(anchors)
moments = events.pivot_table(
    index=["rank", "step"], columns="event", values="unix_ns", observed=True
)


def draw_steps(steps: range, ax: Axes) -> None:
    """Draw what each rank does in some decode steps."""
    zero = moments.loc[(0, steps[0]), "SCHEDULE_DECODE"]
    spans = [
        ("decide, lay out", 0, "SCHEDULE_DECODE", "PREPARE_DECODE_TENSORS", "#ddaa33"),
        ("compute", 0, "PREPARE_DECODE_TENSORS", "RUN_EAGER", plots.COLORS["decode"]),
        ("draw, end", 0, "RUN_EAGER", "STEP_END", plots.COLORS["prefill"]),
        ("", 1, "PREPARE_DECODE_TENSORS", "RUN_EAGER", plots.COLORS["decode"]),
    ]
    for label, rank, first, last, color in spans:
        rows = moments.loc[[(rank, step) for step in steps]]
        left, right = (rows[first] - zero) / 1e6, (rows[last] - zero) / 1e6
        ax.barh([f"rank {rank}"] * len(rows), right - left, left=left, color=color, label=label)
    ax.invert_yaxis()
    ax.set(xlabel="ms")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize="small")


figure, ax = plt.subplots(figsize=(9, 2), layout="constrained")
three_steps = pair.steps.query("rank == 0")["wall_ns"].rolling(3).sum()
last = int(pair.steps.loc[three_steps.idxmin(), "step"])  # where nobody disturbed them
draw_steps(range(last - 2, last + 1), ax)
plt.show()

# %%
lag_us = (moments.loc[1] - moments.loc[0])["PREPARE_DECODE_TENSORS"].dropna() / 1e3
print(f"rank 1 is told {lag_us.median():.0f} us after rank 0 has laid the step out")
assert (lag_us > 0).all()

# %% [markdown]
# Rank 1 begins as soon as it gets the step, and both compute until the last sum. Then rank 0
# samples, ends the step and schedules the next one, and rank 1 has nothing to do.
#
# ## What it costs, and when it pays


# %%
def decode_us(trace: nvtrace.Trace, column: str) -> float:
    """The median of a time of rank 0's decode steps, in microseconds."""
    steps = trace.steps.query("rank == 0 and phase == 'decode'")
    return float(steps[column].median()) / 1e3


cpu = [decode_us(trace, "wall_ns") for trace in (alone, pair)]
gpu = [decode_us(trace, "gpu_ns") for trace in (gpu_alone, gpu_pair)]
print(f"CPU:  {cpu[0]:,.0f} us a decode with one process, {cpu[1]:,.0f} with two")
print(f"H200: {gpu[0]:,.0f} us with one GPU, {gpu[1]:,.0f} with two")
assert cpu[1] > cpu[0]
assert pair.header.environment["num_cpus"] == 2
assert gpu[1] > gpu[0]
tiny = byte_floor(gpu_alone.header, bytes_per_second=4.8e12)
print(f"reading all weights once would take {tiny.step_ms(0) * 1e3:.1f} us")

# %% [markdown]
# Slower, both times. (On the CPU, the two processes share two cores.) The weights of this model
# could be read in two microseconds; halving that gains nothing, and the synchronizations take time.
# If all the extra time on the GPUs were spent on them:

# %%
num_meetings = num_sums + 1  # and the logits
meeting_us = (gpu[1] - gpu[0]) / num_meetings
print(f"{num_meetings} meetings in a step, {meeting_us:.0f} us each")

# %% [markdown]
# Now the same for a model of real size: the recorded benchmark, 256 requests on Qwen3-0.6B's shape.
# With two GPUs each reads half of the weights, and half of every key and value.

# %%
benchmark = nvtrace.load(TRACES / "gpu-benchmark.jsonl.zst")
floor = byte_floor(benchmark.header, bytes_per_second=4.8e12)
contexts = round(benchmark.steps.query("phase == 'decode'")["num_context_tokens"].median())
saved_us = floor.step_ms(contexts) / 2 * 1e3
layers = benchmark.header.model["num_hidden_layers"]
num_meetings = 2 * layers + 2
spent_us = num_meetings * meeting_us
print(f"{saved_us:,.0f} us of reading less, {spent_us:,.0f} us of meetings more")
assert 1 < saved_us / spent_us < 2

# %% [markdown]
# By this estimate the gain is small: a model this small does not need two such GPUs. The weights of
# a layer grow with the square of the model's width, but the number of synchronizations does not
# grow at all. So a wider model gains; one that does not fit into one GPU must be split.
#
# ## Your turn
#
# ### Exercise 1
#
# How many bytes of a block does each rank keep? Write it for any number of ranks that this model
# can be split between (1, 2, 4, 8), in float32, as on the CPU. There are 4 KV heads. If there are
# fewer of them than ranks, each is kept more than once.


# %% tags=["exercise"]
def page_bytes(num_ranks: int) -> int:
    """The bytes of a block of 256 tokens on each rank."""
    raise NotImplementedError  # your code


# %% tags=["check"]
recorded = [int(trace.table("KV_BUDGET_ESTIMATE")["block_bytes"][0]) for trace in (alone, pair)]
check(
    page_bytes,
    lambda function: (
        [function(ranks) for ranks in (1, 2, 4, 8)]
        == [recorded[0], recorded[1], recorded[0] // 4, recorded[0] // 4]
    ),
    hint="keys and values x layers x tokens x the rank's KV heads (at least one) x head_dim x 4",
)

# %% [markdown]
# ### Exercise 2
#
# How many bytes are summed up (`all_reduce`) in step 1, the prefill of 28 tokens, in float32?

# %% tags=["exercise"]
summed_bytes: int | None = None  # your number

# %% tags=["check"]
tokens_of_step_1 = int(alone.steps["num_batched_tokens"].iloc[0])
assert tokens_of_step_1 == 28
check(
    summed_bytes,
    lambda num_bytes: num_bytes == num_sums * tokens_of_step_1 * hidden * 4,
    hint="two sums a layer and one for the embedding, each of (num_tokens, hidden_size) numbers",
)

# %% [markdown]
# ### Exercise 3
#
# Write a rank's part of a product that is split by its input, as `o_proj` and `down_proj` are. All
# ranks' parts must add up to `x @ weight.T`, and each may use only its own columns of the weight.


# %% tags=["exercise"]
def row_parallel(x: np.ndarray, weight: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """(num_tokens, in), (out, in) -> (num_tokens, out), this rank's summand."""
    raise NotImplementedError  # your code


# %% tags=["check"]
def adds_up(function: object) -> bool:
    assert callable(function)
    inputs = random.normal(size=(3, wide))
    for num_ranks in (2, 4):
        size = wide // num_ranks
        parts = []
        for rank in range(num_ranks):
            only_mine = np.full_like(down, np.nan)
            columns = slice(rank * size, (rank + 1) * size)
            only_mine[:, columns] = down[:, columns]
            parts.append(function(inputs, only_mine, rank, num_ranks))
        if not np.allclose(sum(parts), inputs @ down.T):
            return False
    return True


check(row_parallel, adds_up, hint="the same slice of x's columns and of the weight's columns")

# %% [markdown]
# ## Answer
#
# Each rank holds its share of the heads, of the MLP and of the vocabulary, the keys and values of
# its own heads, and all norms. It gets the layout of each step, and nothing about requests, because
# one scheduler decides for all. The ranks communicate two sums per layer, one for the embedding,
# and the logits at the end: few bytes, but a synchronization each time. Each of two processes reads
# half as much, and they synchronize often. So it is worth it if reading takes long, or if one
# device is too small; for a tiny model two are slower than one.
