# %% [markdown]
# # 1. First trace
#
# **Question:** What does an engine do, step by step, between two prompts and their two answers?
#
# Two people ask a small model something at the same moment. The engine that answers them reports
# each of its decisions as an event, and the events are recorded in a file: a *trace*. We open one
# and read it. Only pandas runs here: the engine ran earlier.
#
# The run is that of section 2.4 in the [article](../docs/en/article.md) that this project is based
# on, with the tiny Qwen3 that is included, on two CPU cores.

# %%
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
import pandas as pd

import nvtrace
from exercise import check
from nvtrace.analysis import batch_occupancy, plots, request_spans

TRACES = Path("../docs/traces")
trace = nvtrace.load(TRACES / "example.jsonl.zst")
trace

# %% [markdown]
# ## A trace is a list of events
#
# Each has a name, a number, a time, the step it belongs to (none between two steps) and the phase
# of the work. Here is how the run begins: the engine starts, two requests arrive.

# %%
trace.events.head(11)[["event_id", "event", "step", "phase", "reason", "seq_id"]]

# %% [markdown]
# The other fields of an event depend on its kind. `trace.table` has one kind with all its fields
# ([every field of every event](../docs/en/events.md)).

# %%
requests = trace.table("REQUEST_ENQUEUE")
requests[["seq_id", "prompt_len", "max_tokens", "temperature", "waiting_len"]]

# %% [markdown]
# "introduce yourself" has become 11 tokens and "list all prime numbers within 100" has become 17,
# with the special tokens that a chat model expects around them. Either answer may be up to 256
# tokens long.

# %%
assert list(requests["prompt_len"]) == [11, 17]
assert set(requests["max_tokens"]) == {256}

# %% [markdown]
# ## A step is three things
#
# `step()` schedules, runs the model, and postprocesses the result. The trace shows them in this
# order. These are all events of step 2:

# %%
trace.events[trace.events["step"] == 2][["event", "phase", "reason"]]

# %% [markdown]
# Schedule (`SCHEDULE_DECODE`); run (lay out the tensors, run, sample a token for each); postprocess
# (`STEP_END`). Step 1 has more events, because two requests are admitted: each gets a block for its
# keys and values, and moves from the waiting queue to the running queue.

# %%
trace.events[trace.events["step"] == 1][["event", "phase", "reason", "seq_id"]]

# %% [markdown]
# ## All steps, folded
#
# `trace.steps` has a row for each step. Most of them are like the one before, so let us fold
# similar steps: the same kind, the same batch, and no request ended.

# %%
steps = trace.steps
look = list(zip(steps["phase"], steps["num_seqs"], steps["num_finished"], strict=True))
is_new = [now != before for before, now in zip([None, *look], look, strict=False)]
folded = steps.groupby(pd.Series(is_new).cumsum()).agg(
    first=("step", "min"),
    last=("step", "max"),
    phase=("phase", "first"),
    num_seqs=("num_seqs", "first"),
    tokens_a_step=("num_batched_tokens", "first"),
    num_finished=("num_finished", "first"),
    median_ms=("wall_ns", lambda wall_ns: round(wall_ns.median() / 1e6, 1)),
)
folded

# %% [markdown]
# That is the whole run in five rows, and the table that ends the article's section 2.4. (There it
# has one row more, for a step that took long on the author's GPU: see notebook 7.)
#
# - **Step 1** is a *prefill*: both prompts at once, 28 tokens in one pass through the model. It
#   leaves the keys and values of 28 tokens in the cache, and one new token for each request.
# - **Steps 2 to 175** are *decodes*: each request brings its newest token, and gets one more.
# - **Step 176** is the last one for request 0.
# - **Steps 177 to 255** have a batch of one, and **step 256** ends the other.

# %%
assert list(folded["last"]) == [1, 175, 176, 255, 256]
assert list(folded["phase"]) == ["prefill", "decode", "decode", "decode", "decode"]
assert list(folded["num_seqs"]) == [2, 2, 2, 1, 1]
assert steps["num_batched_tokens"][0] == 28

# %% [markdown]
# The same as a picture: first the two requests, then the batch. No request waits in this run longer
# than until the first step is scheduled, and a prefill is short compared with 255 decodes.

# %%
figure, (lives, batch) = plt.subplots(
    2, figsize=(9, 4.5), layout="constrained", height_ratios=(2, 3)
)
_ = plots.request_gantt(request_spans(trace.requests, trace.table("STATE_TRANSITION")), lives)
_ = plots.queue_and_batch(steps, batch)

# %%
num_steps = steps.groupby("phase", observed=True).size()
assert num_steps.to_dict() == {"prefill": 1, "decode": 255}

# %% [markdown]
# ## Why a batch costs so little
#
# Where did the time go?

# %%
occupancy = batch_occupancy(steps)
occupancy["ms_a_step"] = occupancy["wall_ns"] / occupancy["num_steps"] / 1e6
occupancy.round(3)

# %% [markdown]
# Two things are important here. The prefill computes 14 times as many tokens as a decode of two,
# and takes less than 3 times as long. And a decode for two takes hardly longer than a decode for
# one. Every step goes through the same long chain of operations, layer by layer, and reads all
# weights of the model once. This trace cannot tell which of the two takes the time: it has the time
# of a forward pass, not what happens in it. In either case a step that computes many tokens is
# cheap *per token*. This is what scheduling is about.

# %%
alone, together = occupancy["ms_a_step"][occupancy["phase"] == "decode"]
prefill = occupancy["ms_a_step"][0]
assert 28 / 2 == 14
assert prefill / together < 3
assert together / alone < 1.2

# %% [markdown]
# ## How it ends
#
# A request ends for a reason. Request 0 sampled an end-of-sequence token. Request 1 did not; it had
# used up its 256 tokens.

# %%
ends = trace.table("STATE_TRANSITION").query("status == 'FINISHED'")
ends[["step", "seq_id", "reason", "token_id", "num_completion_tokens", "max_tokens"]]

# %%
for text in trace.table("REQUEST_OUTPUT")["text"]:
    print(fill(text, 88), end="\n\n")

# %% [markdown]
# After 176 steps request 0 has 176 tokens: one per step, including the prefill. That is true of
# every request that does not have to wait. And the run takes as many steps as its longest answer
# has tokens: 256.

# %%
assert list(ends["num_completion_tokens"]) == list(ends["step"]) == [176, 256]
assert trace.table("GENERATE_FINISH")["total_steps"].item() == 256

# %% [markdown]
# And at any moment in between, `trace.at` has the engine's whole state. In the step after the first
# end, one request is running, and its block is the only one in use:

# %%
state = trace.at(177)
print("running", state.running, "waiting", state.waiting)
print("tables ", {seq_id: state.sequences[seq_id].block_table for seq_id in state.running})
print("free blocks", len(state.free_blocks), "of", state.num_blocks)

# %% [markdown]
# ## Your turn
#
# Each exercise is a cell to fill in, and a cell that says whether you are right: it asks the trace.
#
# ### Exercise 1
#
# The article's log ends each step with a number, `num_tokens_stat`. After the prefill it is 30,
# though 28 tokens were computed; after a decode it is negative. Here are a few. Write the function
# that gives it for any step, from the step's phase and the lengths of its sequences (prompt and
# answer so far) when the step is over.

# %%
stats = trace.table("STEP_END")[["step", "batch_phase", "num_tokens_stat"]]
stats.iloc[[0, 1, 175, 176]]


# %% tags=["exercise"]
def num_tokens_stat(phase: str, lengths: list[int]) -> int:
    """The article's number: how large a step was, and of which kind."""
    raise NotImplementedError  # your code


# %% tags=["check"]
def recorded_lengths(step: int) -> list[int]:
    """How long each sequence of a step's batch is when the step is over."""
    drawn = trace.tokens[trace.tokens["step"] == step]
    prompts = requests.set_index("seq_id")["prompt_len"]
    return [int(prompts[row.seq_id]) + row.index + 1 for row in drawn.itertuples(index=False)]


check(
    num_tokens_stat,
    lambda stat: all(
        stat(row.batch_phase, recorded_lengths(row.step)) == row.num_tokens_stat
        for row in stats.itertuples()
    ),
    hint="12 + 18 after the prefill: each sequence has its first new token by then. A decode has "
    "one token for each sequence, and the sign says that it was a decode",
)

# %% [markdown]
# ### Exercise 2
#
# Request 1 has 17 tokens of prompt and 256 of answer. For how many tokens did the model compute
# keys and values? (Not all of them.)

# %% tags=["exercise"]
num_computed: int | None = None  # your number

# %% tags=["check"]
batches = trace.table("SCHEDULE_DECODE")["seq_ids"]
check(
    num_computed,
    lambda n: n == requests["prompt_len"][1] + sum(1 in seq_ids for seq_ids in batches),
    hint="a token is drawn by one step and computed by the next. Which one has no next step?",
)

# %% [markdown]
# ### Exercise 3
#
# A block holds the keys and values of 256 tokens, so for a long time one block is enough for
# request
# 1. Then it needs a second one. In which step?

# %% tags=["exercise"]
step_of_second_page: int | None = None  # your number

# %% tags=["check"]
appended = trace.blocks[trace.blocks["operation"] == "append"]
check(
    step_of_second_page,
    lambda step: step == appended["step"].item(),
    hint="step 1 computes positions 0 to 16, step 2 position 17, step n position 15 + n; the first "
    "block ends with position 255",
)

# %% [markdown]
# ## Answer
#
# It puts both into one batch. Step 1 computes all 28 tokens of both prompts and samples a first
# token for each. From then on every step computes one token for each request, the one that was
# sampled last, and samples the next: 175 steps for two, until request 0 ends, then 80 steps for
# request 1 alone, until it has its 256 tokens. That is 1 prefill and 255 decodes, 256 steps in
# total. The batch can change between any two steps, and here it changed once.
