# %% [markdown]
# # 2. Where the memory goes
#
# **Question:** How much of a GPU's memory is left for keys and values, and who has the rest?
#
# An engine has to answer this at its start, before it can accept a request. The article's log says
# 3,052 blocks, without the sum. We compute the number term by term: first for a machine of our own
# (an H200, Qwen3-0.6B's shape), then for the article's.
#
# Before: the page on [the KV budget](../docs/en/concepts/kv-budget.md).

# %%
from math import floor
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import nvtrace
from exercise import check
from nvtrace.analysis import kv_use, memory_budget, plots

TRACES = Path("../docs/traces")
trace = nvtrace.load(TRACES / "gpu-benchmark.jsonl.zst")
budget = trace.table("KV_BUDGET_ESTIMATE").iloc[0]
budget.drop(["rank", "event_id", "ts_ns", "step"]).to_frame("value")

# %% [markdown]
# Every term that follows is in this one event. (`total_bytes` is what the driver says the device
# has, `used_bytes` is what all programs use of it, `current_bytes` and `peak_bytes` are what the
# engine's own tensors use.)
#
# ## The weights
#
# A model's shape gives its size. The trace's header has the shape; let us compute it.

# %%
GIB = 2**30


def num_parameters(model: dict[str, int]) -> dict[str, int]:
    """How many numbers each part of a Qwen3 holds."""
    hidden, head = model["hidden_size"], model["head_dim"]
    num_q, num_kv = model["num_attention_heads"], model["num_key_value_heads"]
    num_layers = model["num_hidden_layers"]
    return {
        "embedding": model["vocab_size"] * hidden,  # the output head is the same matrix
        "attention": num_layers * hidden * head * (num_q + num_kv + num_kv + num_q),  # q, k, v, o
        "mlp": num_layers * hidden * 3 * model["intermediate_size"],  # gate, up, down
        "norms": num_layers * (2 * hidden + 2 * head) + hidden,
    }


counts = num_parameters(trace.header.model)
weights = trace.table("MODEL_WEIGHTS_LOADED").iloc[0]
print({part: f"{count / 1e6:.1f} million" for part, count in counts.items()})
print("in all", f"{sum(counts.values()):,}", "numbers of 2 bytes =", sum(counts.values()) * 2)
print("loaded", weights["num_keys"], "tensors, ", weights["num_bytes"], "bytes")
assert sum(counts.values()) * 2 == weights["num_bytes"]

# %% [markdown]
# Exact to the byte: 1.11 GiB are weights. That is less than 1% of this GPU: the weights of a small
# model need little of the memory.

# %%
print(f"{weights['num_bytes'] / GIB:.2f} GiB of {budget['total_bytes'] / GIB:.1f}")
assert weights["num_bytes"] < 0.01 * budget["total_bytes"]

# %% [markdown]
# ## A block
#
# A token leaves a key and a value in each layer and each KV head. A block holds 256 tokens.

# %%
token_bytes = 2 * 28 * 8 * 128 * 2  # K and V, layers, KV heads, head size, bytes of a bfloat16
print(token_bytes // 1024, "KiB a token,", token_bytes * 256 // 2**20, "MiB a block of 256 tokens")
assert token_bytes * 256 == budget["block_bytes"]

# %% [markdown]
# A token takes 112 KiB. In other words, ten thousand tokens of context take as much memory as all
# weights of the model. This is why the blocks get all memory that is left, and why it matters how
# much that is.

# %%
print(f"{weights['num_bytes'] / token_bytes:,.0f} tokens weigh as much as the weights")
assert round(weights["num_bytes"] / token_bytes, -3) == 10_000

# %% [markdown]
# ## What a step needs for itself
#
# While a step computes, it holds tensors between the layers. How many bytes? The engine measures
# it: before any block is allocated it runs a dummy step of the largest size, and reads the
# allocator's peak.

# %%
warmup = trace.table("WARMUP_MODEL").iloc[0]
step_bytes = budget["peak_bytes"] - budget["current_bytes"]
print(f"{warmup['num_seqs']} x {warmup['seq_len']} = {warmup['num_tokens']} tokens in one step")
print(
    f"take {step_bytes / GIB:.2f} GiB, {step_bytes / warmup['num_tokens'] / 1024:.0f} KiB a token"
)

# %% [markdown]
# 225 KiB for a token that is computed, 112 KiB for one in the KV cache. The first is freed when the
# step ends, but the memory must be available in every step.
#
# ## The sum
#
# Now the whole sum. Of the whole device nine tenths may be used (`gpu_memory_utilization`, 0.9 by
# default). Subtract what is already used, a step's tensors, and the recorded CUDA graphs. The rest
# is for blocks.

# %%
available = (
    floor(budget["total_bytes"] * budget["utilization"])
    - budget["used_bytes"]
    - (budget["peak_bytes"] - budget["current_bytes"])
    - budget["graph_pool_bytes"]
)
num_pages = available // budget["block_bytes"]
print(f"{available:,} bytes, {available / GIB:.0f} GiB, are {num_pages:,} blocks")
assert available == budget["available_bytes"]
assert num_pages == budget["num_blocks"] == 4389
print(f"{available / budget['total_bytes']:.0%} of {budget['total_bytes'] / GIB:.0f} GiB")

# %%
figure, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
_ = plots.memory_waterfall(memory_budget(trace.table("KV_BUDGET_ESTIMATE")), ax)

# %% [markdown]
# 4,389 blocks. The largest other part is not used by the engine at all: it is the tenth that is
# kept free for other programs. "Used" is more than the engine's tensors, too: it includes the
# driver, kernels and other programs. The engine sees only their sum.

# %%
left_alone = budget["total_bytes"] * (1 - budget["utilization"])
print(f"left alone {left_alone / GIB:.1f} GiB, {left_alone // budget['block_bytes']:.0f} blocks")
print(
    f"used {budget['used_bytes'] / GIB:.2f} GiB, of it {budget['current_bytes'] / GIB:.2f} tensors"
)

# %% [markdown]
# ## The article's 3,052
#
# The article's log says `total_mem=95.09GiB free=93.43GiB used=1.66GiB peak_alloc=1.60GiB
# curr_alloc=1.16GiB gpu_memory_utilization=0.9`, and one line above it has three decimals of the
# first ones. Its model has the same shape as ours, so its blocks have the same size.

# %%
total, free, peak, current, utilization = 95.085, 93.426, 1.599, 1.16, 0.9  # GiB
used = total - free
article_gib = total * utilization - used - (peak - current)
article_pages = article_gib * GIB / 29_360_128
print(f"{article_gib:.2f} GiB = {article_pages:.2f} blocks")
assert budget["block_bytes"] == 29_360_128  # the article's block_bytes

# %% [markdown]
# 3,052, and a fraction of one more. Why is the result right, although the log is rounded? The
# numbers are exact to half of their last digit: `current` to 0.005 GiB, the others to 0.0005. All
# rounding errors together change the result by less than a quarter of a block:

# %%
error_gib = 0.0005 * (1 - utilization) + 0.0005 + 0.0005 + 0.005  # total, free, peak, current
error_pages = error_gib * GIB / 29_360_128
print(f"{article_pages:.2f} blocks, give or take {error_pages:.2f}")
assert error_pages < 0.25
assert floor(article_pages) == 3052

# %% [markdown]
# (It might also have been one more. The log says that it was not, so now we know the third decimal
# of `curr_alloc` a little better than the log tells.)
#
# Beside each other:

# %%
article = trace.table("KV_BUDGET_ESTIMATE").assign(
    total_bytes=round(total * GIB),
    free_bytes=round(free * GIB),
    used_bytes=round(used * GIB),
    peak_bytes=round(peak * GIB),
    current_bytes=round(current * GIB),
    graph_pool_bytes=0,  # recorded later, and out of the tenth that was left alone
    available_bytes=round(article_gib * GIB),
    num_blocks=floor(article_pages),
)
both = pd.DataFrame(
    {
        "term": memory_budget(article)["term"],
        "article, GiB": memory_budget(article)["num_bytes"] / GIB,
        "H200, GiB": memory_budget(trace.table("KV_BUDGET_ESTIMATE"))["num_bytes"] / GIB,
    }
).round(3)
both

# %% [markdown]
# Two differences are worth knowing. A step takes more here, for as many tokens: it is another
# engine, and what it holds at its peak is a question for a memory profiler, not for a trace. And
# the article's engine records its graphs *after* it has allocated all blocks, so their memory comes
# from the tenth that should be kept free; here the largest graph's step is run before, and its
# memory is reserved for them.
#
# ## Is it enough?
#
# The recorded workload is 256 requests, with prompts of up to 1,024 tokens and answers of up to
# 1,024 more.

# %%
usage = kv_use(trace.steps, trace.blocks, budget["num_blocks"])
arrivals = trace.table("REQUEST_ENQUEUE")
print(len(arrivals), "requests, prompts up to", arrivals["prompt_len"].max())
print(f"{usage['num_used_blocks'].max()} blocks at most = {usage['kv_cache_usage'].max():.0%}")
assert arrivals["max_tokens"].max() <= 1024

# %%
figure, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
ax.fill_between(usage["step"], usage["num_used_blocks"], step="mid", color=plots.COLORS["decode"])
ax.axhline(budget["num_blocks"], color="#333940", lw=1, label="all there are")
ax.spines[["top", "right"]].set_visible(False)
ax.set(xlabel="step", ylabel="blocks in use", ylim=(0, None))
legend = ax.legend(frameon=False, loc="center right")

# %% [markdown]
# In the recorded 200 steps it never used more than 18% of the blocks. A model this small has more
# than enough memory on such a GPU; on a laptop with a longer conversation it may not, and notebook
# 4 has a trace in which 24 blocks are too few.

# %%
assert len(trace.steps) == 200
assert round(usage["kv_cache_usage"].max(), 2) == 0.18
assert nvtrace.load(TRACES / "preemption.jsonl.zst").at().num_blocks == 24

# %% [markdown]
# ## Your turn
#
# ### Exercise 1
#
# Suppose keys and values were kept in 8 bits instead of 16. How many blocks of 256 tokens would
# this H200 have?

# %% tags=["exercise"]
num_small_pages: int | None = None  # your number

# %% tags=["check"]
check(
    num_small_pages,
    lambda n: n == available // (budget["block_bytes"] // 2),
    hint="a block takes half the bytes. It is not quite twice the number: what was a rest may be a "
    "block now",
)

# %% [markdown]
# ### Exercise 2
#
# You want room for 256 requests of 4,096 tokens each on the H200, all at once. Which
# `gpu_memory_utilization` is enough? Give the least, in whole hundredths, as 0.9.

# %% tags=["exercise"]
least_utilization: float | None = None  # your number


# %% tags=["check"]
def num_pages_at(share: float) -> int:
    """The H200's blocks at another utilization."""
    others = floor(budget["total_bytes"] * budget["utilization"]) - available
    return int((floor(budget["total_bytes"] * share) - others) // budget["block_bytes"])


check(
    least_utilization,
    lambda share: num_pages_at(share) >= 256 * 4096 // 256 > num_pages_at(share - 0.01),
    hint="how many blocks are 256 requests of 4,096 tokens? Only the first term of the sum depends "
    "on the utilization",
)

# %% [markdown]
# ### Exercise 3
#
# Write the rule for engines on a CPU: a step is not measured there, and a laptop needs memory for
# other programs, so the blocks get what is free within the same share of the memory, but at most
# `limit_bytes`. It is checked against every recorded trace of a single CPU.


# %% tags=["exercise"]
def num_cpu_pages(
    total_bytes: int, used_bytes: int, utilization: float, limit_bytes: int, block_bytes: int
) -> int:
    """The number of blocks on a CPU."""
    raise NotImplementedError  # your code


# %% tags=["check"]
NAMES = ["total_bytes", "used_bytes", "utilization", "limit_bytes", "block_bytes"]
on_cpu = pd.concat(
    nvtrace.load(TRACES / f"{name}.jsonl.zst").table("KV_BUDGET_ESTIMATE")
    for name in ["example", "chunked-prefill", "late-join", "static"]
)
large = pd.DataFrame([[8e9, 7e9, 0.9, 2**31, 2**20]], columns=NAMES).assign(num_blocks=190)
check(
    num_cpu_pages,
    lambda rule: all(
        rule(*(row[name] for name in NAMES)) == row["num_blocks"]
        for _, row in pd.concat([on_cpu, large]).iterrows()
    ),
    hint="the least of two numbers of bytes, in whole blocks. Where a machine is nearly full, the "
    "limit is not what counts",
)

# %% [markdown]
# ## Answer
#
# On the H200 86% of the memory becomes blocks: 120 of 140 GiB, 4,389 blocks, each 256 tokens of
# keys and values. A tenth is kept free. The rest is 2.13 GiB that were already in use (1.11 of them
# weights), 3.51 GiB for the tensors of the largest step, and a little for CUDA graphs.
#
# For the article's GPU the same sum has other terms: 95.085 GiB x 0.9, less 1.659 in use, less
# 0.439 for a step, are 83.48 GiB, and 3,052 blocks of 28 MiB fit into that.
