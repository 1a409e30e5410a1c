# %% [markdown]
# # 4. The scheduler
#
# **Question:** Which requests compute in this step, and why do the others have to wait?
#
# Before each step the scheduler looks at two queues and three budgets, and decides. While a step
# runs, nothing can be changed. This notebook shows its decisions in five runs, each made to show a
# different rule.
#
# Before: the pages on [chunked prefill](../docs/en/concepts/chunked-prefill.md) and
# [preemption](../docs/en/concepts/preemption.md). The code is [one
# file](../nanovllm/engine/scheduler.py).

# %%
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import nvtrace
from exercise import check
from nvtrace.analysis import plots, preemption_cost, request_spans, waiting_by_reason

TRACES = Path("../docs/traces")
NAMES = ["gpu-benchmark", "static-vs-continuous", "preemption", "chunked-prefill"]
runs = {name: nvtrace.load(TRACES / f"{name}.jsonl.zst") for name in NAMES}

# %% [markdown]
# ## Three budgets, and one more rule
#
# When the head of the waiting queue cannot be admitted, the scheduler reports which budget was too
# small: an `ADMISSION_STOP`. The first one of each run:

# %%
stops = pd.concat(
    run.table("ADMISSION_STOP").head(1).assign(run=name) for name, run in runs.items()
)
stops[["run", "step", "reason", "seq_id", "need", "have", "waiting_len"]]

# %% [markdown]
# - `token_budget`: a step computes at most so many tokens (`max_num_batched_tokens`). The head has
#   a prompt of 727, and 679 are left.
# - `max_num_seqs`: at most so many requests run at once. It would be the fifth, and four may run.
# - `no_blocks`: too few free blocks. It needs 8, and 7 are free.
# - `chunk_not_first` is not a budget but a rule, explained below.
#
# `need` and `have` are always in the budget's own unit. And `waiting_len` is more than one in the
# first row: **no request overtakes** a head that does not fit, however small it is. If small
# requests could pass, a large one would starve.

# %%
assert list(stops["need"]) == [727, 5, 8, 17]
assert list(stops["have"]) == [679, 4, 7, 0]
assert stops["waiting_len"].iloc[0] == 225

# %% [markdown]
# ## The token budget, by hand
#
# 256 prompts arrive at once. How many fit into the first step's budget of 16,384 tokens? Add them
# up in their order until one does not fit.

# %%
benchmark = runs["gpu-benchmark"]
prompt_lens = list(benchmark.table("REQUEST_ENQUEUE")["prompt_len"])
budget = benchmark.header.config["max_num_batched_tokens"]
sums = list(accumulate(prompt_lens))
num_fit = sum(total <= budget for total in sums)
print(f"{num_fit} prompts have {sums[num_fit - 1]:,} tokens, one more has {sums[num_fit]:,}")
print(f"left over {budget - sums[num_fit - 1]}, the next one needs {prompt_lens[num_fit]}")
assert budget == 16_384
assert num_fit == benchmark.steps["num_seqs"][0] == 31

# %% [markdown]
# 31 requests in the first step, and the sum explains `need` and `have` in the table above. Nine
# such steps, and all are running:

# %%
figure, ax = plt.subplots(figsize=(9, 2.8), layout="constrained")
_ = plots.queue_and_batch(benchmark.steps.head(20), ax)

# %%
prefills = benchmark.steps.query("phase == 'prefill'")
columns = ["step", "num_seqs", "num_batched_tokens", "num_waiting", "num_running"]
prefills[columns]

# %%
assert len(prefills) == 9
assert list(prefills["num_running"])[-1] == len(prompt_lens) == 256

# %% [markdown]
# While these are admitted, no request decodes: this policy (`prefill_first`, the article's) admits
# new requests before anything else, because each makes every later batch larger. The first requests
# pay the price. The first 31 have their first token after step 1, and their second one after step
# 10.
#
# ## A prompt in chunks
#
# In `chunked-prefill` a step may compute 8 tokens, and the prompts have 11 and 17. What now?

# %%
chunked = runs["chunked-prefill"]
columns = [
    "step",
    "reason",
    "seq_ids",
    "num_computed_tokens",
    "num_scheduled_tokens",
    "waiting_len",
]
chunked.table("SCHEDULE_PREFILL")[columns]

# %% [markdown]
# They are cut into chunks. Request 0 computes 8 tokens in step 1 and the other 3 in step 2; request
# 1 computes 8, 8 and 1. But step 2 had room for 5 more tokens, and request 1 waited for step 3.
# That is the rule `chunk_not_first`: only the *first* prompt of a step may be cut. A prompt that is
# not first and would have to be cut waits, so that there is never more than one unfinished prompt.

# %%
chunk_stops = chunked.table("ADMISSION_STOP")
assert list(chunk_stops["reason"]) == ["chunk_not_first"] * 2
assert list(chunk_stops["have"]) == [0, 5]
tokens_a_step = chunked.table("SCHEDULE_PREFILL")["num_scheduled_tokens"]
assert list(tokens_a_step) == [[8], [3], [8], [8], [1]]

# %% [markdown]
# Nothing is sampled after a chunk that is not the last: the token that it predicts is already
# known. Request 1 has its first token after its third chunk, in step 5.

# %%
first_tokens = chunked.tokens[chunked.tokens["index"] == 0]
print(first_tokens[["seq_id", "step"]].to_dict("records"))
assert list(first_tokens["step"]) == [2, 5]

# %% [markdown]
# ## Mixed steps
#
# Chunks have a second use. If a prompt can be cut anywhere, a step can first compute one token for
# each running request, and use the *rest* of its budget for prompts. That is the policy `mixed`,
# close to vLLM's rule. The same three requests, arriving in the same steps, under both policies:

# %%
policies = {
    "prefill_first": nvtrace.load(TRACES / "late-join.jsonl.zst"),
    "mixed": nvtrace.load(TRACES / "mixed.jsonl.zst"),
}
columns = ["step", "phase", "num_seqs", "num_prefill_tokens", "num_decode_tokens"]
pd.concat(
    run.steps.query("step in (11, 12, 13)")[columns].assign(policy=name)
    for name, run in policies.items()
)

# %% [markdown]
# In step 12 a request arrives. Under `prefill_first` it computes its 11 tokens alone, and request 0
# has no token from this step. Under `mixed` they share the step. For request 0 it changes the time
# between two of its tokens:

# %%
figure, ax = plt.subplots(figsize=(9, 2.8), layout="constrained")
for (name, run), color in zip(policies.items(), ("prefill", "mixed"), strict=True):
    its = run.tokens.query("seq_id == 0 and index > 0")
    ax.plot(its["index"], its["itl_ns"] / 1e6, color=plots.COLORS[color], lw=1.2, label=name)
ax.set(xlabel="token of request 0", ylabel="ms since the one before", ylim=(0, None))
ax.spines[["top", "right"]].set_visible(False)
legend = ax.legend(frameon=False, ncols=2, loc="upper right")

# %%
gaps = pd.DataFrame(
    {
        name: {
            "median ms": its["itl_ns"].median() / 1e6,
            "longest ms": its["itl_ns"].max() / 1e6,
            "steps": len(run.steps),
        }
        for name, run in policies.items()
        for its in [run.tokens.query("seq_id == 0")]
    }
)
gaps.round(1)

# %% [markdown]
# Two spikes, one for each new request. With `prefill_first` such a gap is a prefill *and* a decode,
# more than three times the median; with `mixed` it is a single step, about twice as long as others.
# The number of steps is 109 in both runs: the same work is computed, only divided differently.

# %%
longest = gaps.loc["longest ms"] / gaps.loc["median ms"]
assert longest["prefill_first"] > 3
assert longest["mixed"] < 2.5
assert set(gaps.loc["steps"]) == {109}

# %% [markdown]
# ## Too few blocks
#
# Three requests, 24 blocks of 4 tokens. They all fit when they arrive, and then they grow.

# %%
crowded = runs["preemption"]
assert crowded.at().num_blocks == 24
figure, (lives, batch) = plt.subplots(2, figsize=(9, 4.6), layout="constrained")
spans = request_spans(crowded.requests, crowded.table("STATE_TRANSITION"))
_ = plots.request_gantt(spans, lives)
_ = plots.queue_and_batch(crowded.steps, batch)

# %%
preemptions = crowded.table("PREEMPT")
preemptions[["step", "seq_id", "for_seq_id", "num_blocks_freed", "num_tokens_to_recompute"]]

# %% [markdown]
# The red spans are *preemptions*: a request needs a block, none is free, and the request that was
# admitted last gives up all of its own. Twice that is request 2 itself: in steps 19 and 73 request
# 2 needs the block, and there is none behind it to take one from. In step 35 request 0 needs one;
# request 2 is already preempted, so request 1 is preempted. The oldest is never preempted, so some
# request always finishes.

# %%
before = crowded.at(34)
print("before step 35: running", before.running, "waiting", before.waiting)
after = crowded.at(35)
print("after it:       running", after.running, "waiting", after.waiting)
assert list(preemptions["seq_id"]) == [2, 1, 2]
assert list(preemptions["step"]) == [19, 35, 73]

# %% [markdown]
# They go to the *head* of the waiting queue, so the order of arrival is kept. What did it cost
# them?

# %%
cost = preemption_cost(crowded.requests, preemptions)
cost.round({"share_of_latency": 2})

# %%
waiting_by_reason(crowded.table("ADMISSION_STOP"), crowded.steps)

# %% [markdown]
# Request 2 spent half of its time waiting to be admitted again: `no_blocks` stopped the queue's
# head for 66 steps. Recomputing is the smaller part of the cost, 78 tokens in total.

# %%
assert cost["num_recomputed_tokens"].sum() == 78
assert 0.45 < cost["share_of_latency"].max() < 0.55
assert len(crowded.table("ADMISSION_STOP")) == 66

# %% [markdown]
# ## Your turn
#
# ### Exercise 1
#
# Write the admission of `prefill_first` for one step, with enough blocks and places: given the
# lengths of the waiting prompts in their order and the step's budget, how many prompts are in the
# step? Note that the first may be cut. It is checked against the nine prefills of the benchmark,
# and a few more.


# %% tags=["exercise"]
def num_admitted(prompt_lens: list[int], budget: int) -> int:
    """How many of the waiting prompts are admitted in a step."""
    raise NotImplementedError  # your code


# %% tags=["check"]
def admits_as_recorded(rule: Callable[[list[int], int], int]) -> bool:
    """Does a rule fill the benchmark's prefills as the scheduler did?"""
    waiting = list(prompt_lens)
    for num_seqs in prefills["num_seqs"]:
        if rule(list(waiting), budget) != num_seqs:
            return False
        del waiting[:num_seqs]
    return not waiting


check(
    num_admitted,
    lambda rule: (
        admits_as_recorded(rule)
        and [rule([11, 17], 8), rule([3, 17], 8), rule([3, 5], 8), rule([], 8)] == [1, 1, 2, 0]
    ),
    hint="a first prompt is let in however long it is, and takes what there is; a later one if it "
    "fits into what is left, and the first that does not ends it",
)

# %% [markdown]
# ### Exercise 2
#
# The three preemptions gave up the keys and values of 28, 50 and 36 tokens, as the table says. Only
# 78 tokens were computed a second time. Where are the others? Find the column of
# `crowded.table("SCHEDULE_PREFILL")` that tells, and put its sum here.

# %% tags=["exercise"]
num_tokens_not_lost: int | None = None  # your number

# %% tags=["check"]
given_up = preemptions["num_tokens_to_recompute"]
assert list(given_up) == [28, 50, 36]
check(
    num_tokens_not_lost,
    lambda n: n == given_up.sum() - crowded.requests["num_recomputed_tokens"].sum(),
    hint="blocks that were given up keep their contents until somebody takes them, and the prefix "
    "cache still finds them",
)

# %% [markdown]
# ### Exercise 3
#
# Which request is preempted? Write the choice: the input is the running queue (oldest first) and
# the request that needs a block, the output is the request that gives up its blocks. It is checked
# against every preemption of two traces.


# %% tags=["exercise"]
def victim(running: list[int], in_need: int) -> int:
    """The request that is preempted."""
    raise NotImplementedError  # your code


# %% tags=["check"]
def queues(run: nvtrace.Trace) -> list[tuple[list[int], int, int]]:
    """Of each preemption: the running queue before its step, who needs a block, who was hit."""
    return [
        (run.at(row.step - 1).running, row.for_seq_id, row.seq_id)
        for row in run.table("PREEMPT").itertuples()
    ]


on_gpu = nvtrace.load(TRACES / "gpu-preemption.jsonl.zst")
check(
    victim,
    lambda choose: all(
        choose(list(running), in_need) == hit
        for running, in_need, hit in [*queues(crowded), *queues(on_gpu), ([3, 5, 4], 5, 4)]
    ),
    hint="the order is that of admission, not of numbers; who needs the block may be hit, too",
)

# %% [markdown]
# ## Answer
#
# Under `prefill_first` a step is a prefill if a request can be admitted; if not, every running
# request computes a token. Admission goes through the waiting queue from its head, and stops at the
# first request that would exceed a budget: the tokens of a step, the requests at once, or the free
# blocks. No request overtakes another. A prompt that is too long for any step is cut into chunks if
# it is the first in the step; under `mixed` any prompt is, and decodes share the step with it. When
# a decode finds no free block, the request that was admitted last gives up its own and waits at the
# head of the queue until there are enough blocks: in our run that was half of a request's time.
