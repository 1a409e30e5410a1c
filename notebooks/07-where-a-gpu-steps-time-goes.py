# %% [markdown]
# # 7. CUDA graphs, and where a GPU step's time goes
#
# **Question:** Where does the time of a decode step on a GPU go: the host, the GPU or the memory,
# and which waits for which?
#
# It reads runs on an NVIDIA H200: `gpu-example` (the article's two requests, with the included
# model), `gpu-benchmark` (256 requests, Qwen3-0.6B's shape) and `gpu-preemption` (three requests in
# too few blocks); in an exercise also `gpu-two-gpus`. Before it: [CUDA
# graphs](../docs/en/concepts/cuda-graphs.md).

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import nvtrace
from exercise import check
from nvtrace.analysis import byte_floor, graph_padding, plots, step_time_by_class

TRACES = Path("../docs/traces")
example = nvtrace.load(TRACES / "gpu-example.jsonl.zst")
benchmark = nvtrace.load(TRACES / "gpu-benchmark.jsonl.zst")
preemption = nvtrace.load(TRACES / "gpu-preemption.jsonl.zst")

# %% [markdown]
# ## Two clocks
#
# `wall_ns` is the host's time for a step, and five parts add up to it. `gpu_ns` is the device's own
# time, measured between two marks in its queue. The GPU works at the same time as the host, so the
# two must never be added. One more number is needed: the *period*, from the end of a step to the
# end of the next. It is the time that a user sees between two tokens.

# %%
PARTS = ["schedule_ns", "prepare_ns", "forward_ns", "sample_ns", "postprocess_ns"]


def decodes_of(trace: nvtrace.Trace) -> pd.DataFrame:
    """The decode steps of the deciding rank, with each one's period; times as floats."""
    steps = trace.steps[trace.steps["rank"] == 0].copy()
    steps["period_ns"] = steps["ts_ns"].diff()
    times = [*PARTS, "wall_ns", "gpu_ns", "period_ns"]
    steps[times] = steps[times].astype("float64")
    return steps[steps["phase"] == "decode"]


decodes = {"gpu-example": decodes_of(example), "gpu-benchmark": decodes_of(benchmark)}
medians = pd.DataFrame(
    {
        name: frame[[*PARTS, "wall_ns", "period_ns", "gpu_ns"]].median() / 1e3
        for name, frame in decodes.items()
    }
)
medians.round(1).rename_axis("median, in microseconds")

# %%
figure, axes = plt.subplots(2, 1, figsize=(9, 3.4), layout="constrained")
SHADES = ["#4477aa", "#88aacc", "#cc6677", "#d5d8dc", "#8899a6"]
for ax, name in zip(axes, decodes, strict=True):
    left = 0.0
    for part, shade in zip(PARTS, SHADES, strict=True):
        ax.barh("host", medians.loc[part, name], left=left, color=shade, label=part[:-3])
        left += medians.loc[part, name]
    between = medians.loc["period_ns", name] - left
    ax.barh("host", between, left=left, color="white", edgecolor="#8899a6", label="between steps")
    ax.barh("GPU", medians.loc["gpu_ns", name], color=plots.COLORS["decode"], label="GPU")
    ax.set(xlabel=f"{name}: microseconds", xlim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=7, frameon=False, fontsize="small")
plt.show()

# %% [markdown]
# In the grey part, `sample`, the host launches the next step and waits for this one's tokens. It is
# the longest in both runs, but for opposite reasons: with the large batch it is nearly all waiting,
# with the tiny model nearly all launching. So look at the GPU: for which share of the period is it
# busy?

# %%
later = {name: frame.iloc[1:] for name, frame in decodes.items()}  # the first waits for a prefill
busy = {name: frame["gpu_ns"].sum() / frame["period_ns"].sum() for name, frame in later.items()}
for name, share in busy.items():
    print(f"{name}: in its decodes, the GPU is at work for {share:.0%} of the time")
assert busy["gpu-benchmark"] > 0.97
assert 0.3 < busy["gpu-example"] < 0.5

# %% [markdown]
# **With the large batch the GPU is the bottleneck.** It is almost never idle: the host schedules,
# lays out tensors, reads tokens and writes this trace *while* the GPU computes. Faster Python would
# gain nothing.
#
# **With the tiny model the host is the bottleneck.** More than half of the time the GPU has nothing
# to do. A faster GPU would gain little.
#
# ## Why is it almost never idle? The engine runs ahead
#
# Between two steps the host must schedule, and the GPU would have to wait. To avoid this, the
# engine runs ahead: if it can predict that the next step will be this batch, or the rest of it, one
# token further, it launches that step's graph behind this one. `is_ahead` records it, and
# `forward_ns`, the launch, is then almost zero: the launch was done in the previous step.

# %%
for name, frame in decodes.items():
    ahead = frame["is_ahead"].astype(bool)
    launch = frame.loc[ahead, "forward_ns"].median() / 1e3
    print(f"{name}: {ahead.sum()} of {len(frame)} decodes launched ahead; forward {launch:.1f} us")
assert (decodes["gpu-benchmark"]["is_ahead"]).sum() == 188
assert (decodes["gpu-example"]["is_ahead"]).sum() == 253

# %% [markdown]
# ## The batch-1 surprise
#
# The article's step 149 took 73.78 ms, while other steps took about 2.7 ms: the batch had just
# shrunk from two to one. In this run the batch shrinks in step 177. The engine could not predict
# that request 0 would end, so the step had been launched already, on the graph of two rows. The
# first step on the graph of one row is the next. Is it slow?

# %%
alone = decodes["gpu-example"].query("graph_batch_size == 1")
surprise = alone.iloc[0]
print(f"step {surprise['step']}, launched ahead: {surprise['is_ahead']}")
print(
    f"{surprise['wall_ns'] / 1e3:.0f} us; the article's step 149: 73.78 ms among others of 2.7 ms"
)
comparison = pd.DataFrame(
    {"that step": surprise, "median of the others": alone.iloc[1:][[*PARTS, "gpu_ns"]].median()},
    index=[*PARTS, "gpu_ns"],
)
(comparison.astype("float64") / 1e3).round(1).rename_axis("in microseconds")

# %% [markdown]
# It is a little slower, in two parts: `prepare` and `forward`. Two things are new in that step. It
# was *not run ahead*, because another graph is needed: the host must copy the batch into that
# graph's inputs, and launch. And it is the *first* replay of that graph. Which of the two is the
# reason? `gpu-preemption` can tell: there, requests wait in most steps, and a waiting request might
# be admitted next, so the next step cannot be predicted.

# %%
crowded = decodes_of(preemption)
waits = (crowded["num_waiting"] > 0).rename("somebody waits")
pd.crosstab(waits, crowded["is_ahead"].astype(bool).rename("launched ahead"))

# %%
assert not crowded.loc[waits, "is_ahead"].any()
crowded["is_first"] = ~crowded["graph_batch_size"].duplicated()
kinds = crowded.groupby(["graph_batch_size", "is_ahead", "is_first"])
typical = kinds[["prepare_ns", "forward_ns", "sample_ns", "wall_ns", "gpu_ns"]].median()
launching = typical["prepare_ns"] + typical["forward_ns"]
assert 0.1e6 < launching[1, False, False] - launching[1, True, False] < 0.2e6
table = (typical / 1e3).round(0).astype(int)
table.columns = [name.replace("_ns", " (us)") for name in table.columns]
table.insert(0, "num_steps", kinds.size())
table

# %% [markdown]
# Read the rows of the graph with one row. Run ahead: both are short. Not run ahead, but replayed
# before: the copies and the launch take about 140 microseconds more. And the first replay costs the
# host still more, and twice the *GPU's* usual time. It is the same with two rows. So both are
# reasons, and both are small:

# %%
for rows, steps in crowded.groupby("graph_batch_size"):
    first = steps["gpu_ns"].iloc[0] / steps["gpu_ns"].iloc[1:].median()
    print(f"graph of {rows}: the first replay takes {first:.1f} times the GPU's usual time")
    assert first > 1.3

slow = decodes["gpu-benchmark"].query("wall_ns > 1.2 * wall_ns.median()")
first_of_graph = decodes["gpu-benchmark"].drop_duplicates("graph_batch_size")
print("slow decodes of gpu-benchmark:", slow["step"].tolist())
assert slow["step"].tolist() == first_of_graph["step"].tolist()
assert not slow["is_ahead"].any()
extra_ms = (slow["wall_ns"] - decodes["gpu-benchmark"]["wall_ns"].median()) / 1e6
print("milliseconds more than the median:", extra_ms.round(1).tolist())
print(f"and in the article: {73.78 - 2.7:.0f} ms")
assert 1 < extra_ms.min() <= extra_ms.max() < 2

# %% [markdown]
# In `gpu-benchmark` the slow decodes are exactly the first ones of their graphs, steps 10, 150 and
# 187, and each takes a little more than a millisecond longer. The article's 71 ms must have been
# something else that a first replay there had to do, such as loading kernels; a log with one time
# per step cannot tell. Here each graph is *run* once before it is recorded, and that time is spent
# at the start:

# %%
capture = benchmark.table("CUDAGRAPH_CAPTURE").iloc[0]
sizes = capture["batch_sizes"]
seconds = capture["duration_ns"] / 1e9
print(f"{len(sizes)} graphs in {seconds:.1f} s: {sizes[:7]} ... {sizes[-1]}")

# %% [markdown]
# ## Padding
#
# A graph has a fixed number of rows: 1, 2, 4, 8, then every 16. A batch takes the smallest that
# holds it, and the remaining rows are padding: computed and discarded.

# %%
padding = graph_padding(benchmark.steps)
padding[["graph_batch_size", "num_steps", "num_rows", "num_padding_rows", "graph_padding"]]

# %%
share = padding["num_padding_rows"].sum() / padding["num_rows"].sum()
print(f"{share:.1%} of all rows are padding")

# %% [markdown]
# Little, because 16 rows are few compared with 240. And 16 is the height of a tensor core's tile:
# fewer rows would hardly be faster.
#
# ## What runs eagerly
#
# Prefills. Each has another shape, so there is no graph for them, and their kernels are launched
# one by one. That costs nothing: there are thousands of tokens in each kernel, so the GPU is busy
# for longer than a launch takes. Each dot is a step:

# %%
eager = benchmark.steps[benchmark.steps["eager_reason"].notna()]
print(len(eager), "eager steps:", set(eager["eager_reason"]))
tokens = eager["num_batched_tokens"].median() / 256
time = eager["gpu_ns"].median() / decodes["gpu-benchmark"]["gpu_ns"].median()
print(f"a prefill computes {tokens:.0f} times the tokens of a decode, in {time:.1f} times the time")
figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
_ = plots.step_time_scatter(benchmark.steps, ax, y="gpu_ns")

# %% [markdown]
# ## The floor
#
# A decode step must read all weights once, and the keys and values of every context. Divided by the
# memory bandwidth (4.8 TB/s in the H200's data sheet), this is the shortest possible time, the
# floor.

# %%
floor = byte_floor(benchmark.header, bytes_per_second=4.8e12)
print(
    f"weights {floor.weight_bytes / 1e9:.2f} GB; a token {floor.kv_bytes_per_token / 1024:.0f} KiB"
)
classes = step_time_by_class(benchmark.steps, floor).query("phase == 'decode'")
classes[["largest_batch", "num_steps", "median_gpu_ns", "floor_ns", "times_floor"]]

# %% [markdown]
# 1.4 times the floor. Where is the rest? While the batch is 256, only one thing grows from step to
# step: the contexts. So plot the GPU's time against them, and fit a line.

# %%
full = decodes["gpu-benchmark"].query("num_seqs == 256 and is_ahead")
contexts = full["num_context_tokens"].to_numpy(np.float64)
slope, constant = np.polyfit(contexts, full["gpu_ns"].to_numpy(), 1)
bandwidth = floor.kv_bytes_per_token / slope * 1e9
print(f"{slope:.1f} ns a context token = keys and values at {bandwidth / 1e12:.1f} TB/s")
print(f"{constant / 1e6:.1f} ms besides; the weights alone need {floor.step_ms(0):.2f} ms")

# %%
figure, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
color = plots.COLORS["decode"]
ax.scatter(contexts / 1e3, full["gpu_ns"] / 1e6, s=14, color=color, label="decode, batch 256")
ends = np.array([0, contexts.max()])
ax.plot(ends / 1e3, (constant + slope * ends) / 1e6, color="#333940", lw=1, label="line")
floors = [floor.step_ms(round(end)) for end in ends]
ax.plot(ends / 1e3, floors, color="#cc6677", lw=1, label="floor")
ax.set(xlabel="context tokens (thousands)", ylabel="GPU (ms)", xlim=(0, None), ylim=(0, None))
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small")
plt.show()

# %%
assert 4.2e12 < bandwidth < 5.2e12
assert contexts.max() < 1.2 * contexts.min()
assert 1.0 < constant / 1e6 < 3.0
kv_share = 1 - floor.step_ms(0) / floor.step_ms(round(np.median(contexts)))
print(f"keys and values are {kv_share:.0%} of the bytes of such a step")

# %% [markdown]
# The line is nearly parallel to the floor: attention reads keys and values about as fast as the
# memory allows. (The slope is not exact: the contexts grow by less than a fifth here, and the line
# is drawn far beyond its dots.) So the time above the floor hardly depends on the contexts: with
# 256 rows the matrix products have real work to do, which is not in the bytes, and there are the
# norms, the head and sampling.
#
# And the tiny model?

# %%
tiny = byte_floor(example.header, bytes_per_second=4.8e12)
gpu_ns = decodes["gpu-example"]["gpu_ns"].median()
floor_ns = tiny.step_ms(200) * 1e6
print(f"floor {floor_ns / 1e3:.1f} us, GPU {gpu_ns / 1e3:.0f} us: {gpu_ns / floor_ns:.0f} times")
assert gpu_ns > 40 * floor_ns

# %% [markdown]
# Its weights could be read in two microseconds. The time is not spent on memory, but in a long
# chain of kernels, each too small to fill the device, each waiting for the one before.
#
# ## Your turn
#
# ### Exercise 1
#
# Of all batches that the recorded graphs hold, which one has the largest *share* of padding?

# %% tags=["exercise"]
worst_batch: int | None = None  # your number


# %% tags=["check"]
def padding_of(batch_size: int) -> float:
    size: int = min(size for size in sizes if size >= batch_size)
    return 1 - batch_size / size


check(
    worst_batch,
    lambda batch: padding_of(batch) == max(map(padding_of, range(1, sizes[-1] + 1))),
    hint="the worst batches are those that are one too large for a graph; compare a few of them",
)

# %% [markdown]
# ### Exercise 2
#
# Write the floor yourself, from fields of the trace: `num_bytes` of MODEL_WEIGHTS_LOADED, and
# `block_bytes` and `block_size` of KV_BUDGET_ESTIMATE (a block's bytes, and its tokens).

# %%
weight_bytes = int(benchmark.table("MODEL_WEIGHTS_LOADED")["num_bytes"].iloc[0])
block_bytes = int(benchmark.table("KV_BUDGET_ESTIMATE")["block_bytes"].iloc[0])
block_size = int(benchmark.table("KV_BUDGET_ESTIMATE")["block_size"].iloc[0])


# %% tags=["exercise"]
def floor_ms(num_context_tokens: int, bytes_per_second: float) -> float:
    """The least time of a decode step, in milliseconds."""
    raise NotImplementedError  # your code


# %% tags=["check"]
check(
    floor_ms,
    lambda function: all(
        abs(function(tokens, 4.8e12) / floor.step_ms(tokens) - 1) < 0.01
        for tokens in (0, 512, 131072, 200000)
    ),
    hint="bytes are the weights' and block_bytes / block_size for each token; a second has 1000 ms",
)

# %% [markdown]
# ### Exercise 3
#
# `gpu-two-gpus` is the article's run on two GPUs, where the engine does not run ahead. For which
# share of the period (between 0 and 1) is rank 0's GPU idle? Take medians of all its decodes.

# %%
pair = decodes_of(nvtrace.load(TRACES / "gpu-two-gpus.jsonl.zst", rank=0))

# %% tags=["exercise"]
idle_share: float | None = None  # your number

# %% tags=["check"]
check(
    idle_share,
    lambda share: abs(share - (1 - pair["gpu_ns"].median() / pair["period_ns"].median())) < 0.01,
    hint='idle is what remains of pair["period_ns"] when pair["gpu_ns"] is taken off',
)

# %% [markdown]
# ## Answer
#
# It depends on the size of model and batch. With 256 requests on a model of real size the GPU is
# busy all the time, and most of its time goes into reading keys and values, nearly as fast as its
# memory allows; the host's work is hidden, because the next step is launched before this one's
# tokens are known. With two requests on a tiny model the memory does not matter, the GPU runs a
# chain of small kernels, and more than half of the time it waits for the host. A graph turns
# hundreds of launches into one; the first step of a graph costs a few hundred microseconds more, or
# a millisecond with a large batch. The surprise of step 149 does not happen here.
