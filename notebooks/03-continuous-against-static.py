# %% [markdown]
# # 3. Continuous against static batching
#
# **Question:** What does it cost to keep a batch closed until its slowest request has ended?
#
# The same six requests, twice: once with a batch that no request may join or leave (*static*), once
# with one that can change between any two steps (*continuous*). The model, the prompts and all
# tokens are the same. Four of the requests arrive at once, two while these run, and a batch has
# room for four.
#
# Before: the page on [continuous batching](../docs/en/concepts/continuous-batching.md), which has a
# picture of what is counted here.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import nvtrace
from exercise import check
from nvtrace.analysis import latency_breakdown, plots, request_spans, static_waste
from nvtrace.whatif import read_recording, rerun, simulated_row

TRACES = Path("../docs/traces")
runs = {
    "static": nvtrace.load(TRACES / "static.jsonl.zst"),
    "continuous": nvtrace.load(TRACES / "static-vs-continuous.jsonl.zst"),
}
NUM_SEATS = 4
assert {run.header.config["max_num_seqs"] for run in runs.values()} == {NUM_SEATS}

# %% [markdown]
# ## The same work
#
# Is it really the same? The requests and their answers:

# %%
arrivals = runs["static"].table("REQUEST_ENQUEUE")[["seq_id", "prompt_len", "max_tokens"]]
same = ["seq_id", "index", "token_id"]
answers = {
    name: run.tokens[same].sort_values(same, ignore_index=True) for name, run in runs.items()
}
assert answers["static"].equals(answers["continuous"])
print(len(answers["static"]), "tokens")
arrivals

# %% [markdown]
# 856 tokens, token for token the same. (The lengths are the article's: 20, 80, 200 and 256, and two
# that arrive later. They ignore end-of-sequence tokens, so the lengths are exact.)
#
# ## Two runs of six requests

# %%
figure, axes = plt.subplots(2, figsize=(9, 5), layout="constrained", sharex=True)
for ax, (name, run) in zip(axes, runs.items(), strict=True):
    spans = request_spans(run.requests, run.table("STATE_TRANSITION"))
    plots.request_gantt(spans, ax).set_title(name, loc="right", fontsize="medium")
axes[0].set(xlabel="")
_ = axes[0].set_xlim(0, 3.4)  # seconds

# %% [markdown]
# The bars are as long as the users wait. Requests 4 and 5 arrive early in both pictures: in the
# upper one they are in the queue (grey) until the slowest of the first four, request 3, has ended.

# %%
figure, axes = plt.subplots(2, figsize=(9, 4.5), layout="constrained", sharex=True)
for ax, (name, run) in zip(axes, runs.items(), strict=True):
    plots.queue_and_batch(run.steps, ax).set_title(name, loc="right", fontsize="medium")
_ = axes[0].set(xlabel="")

# %% [markdown]
# The thin white gaps in the lower picture are the prefills of the two late requests: for one step
# the others compute nothing.

# %%
num_steps = {name: len(run.steps) for name, run in runs.items()}
seconds = {name: run.steps["wall_ns"].sum() / 1e9 for name, run in runs.items()}
print(num_steps, {name: f"{time:.2f} s" for name, time in seconds.items()})
print(f"{1 - num_steps['continuous'] / num_steps['static']:.0%} fewer steps")

# %% [markdown]
# 258 steps instead of 456, 43% fewer. A step for one takes not much less time than a step for four,
# as notebook 1 found for two, so most of this is also saved time:

# %%
print(f"{1 - seconds['continuous'] / seconds['static']:.0%} less time")
alone, four = (
    runs["continuous"].steps.query(f"phase == 'decode' and num_seqs == {size}")["wall_ns"].median()
    for size in (1, 4)
)
assert alone > 0.75 * four
assert num_steps == {"static": 456, "continuous": 258}
assert num_steps["static"] - num_steps["continuous"] == 198
assert seconds["continuous"] < 0.75 * seconds["static"]

# %% [markdown]
# ## Waste one: ended early
#
# Think of the batch as four seats. In every decode each seat computes a token, or is empty.

# %%
waste = {name: static_waste(run.steps, NUM_SEATS) for name, run in runs.items()}
totals = pd.DataFrame(
    {
        "decode steps": {name: len(seats) for name, seats in waste.items()},
        "seats in them": {name: seats["num_seats"].sum() for name, seats in waste.items()},
        "empty": {name: seats["num_empty"].sum() for name, seats in waste.items()},
        "while somebody waits": {
            name: seats["num_joinable"].sum() for name, seats in waste.items()
        },
    }
)
totals.assign(share_empty=(totals["empty"] / totals["seats in them"]).round(2))

# %% [markdown]
# More than half of the static run's seats compute nothing: 966 of 1,816. Whose seats were they?
# Request 0 ends after 20 tokens, and its seat stays empty until the batch's last step:

# %%
steps = runs["static"].steps
ends = runs["static"].tokens.groupby("seq_id")["step"].max()
first_batch = [0, 1, 2, 3]
batch_end = ends[first_batch].max()
print({seq_id: int(batch_end - ends[seq_id]) for seq_id in first_batch})
in_first = waste["static"][waste["static"]["step"] <= batch_end]
assert in_first["num_empty"].sum() == (batch_end - ends[first_batch]).sum() == 468

# %% [markdown]
# 236 steps for request 0 alone: that is the article's number (it has the same lengths). The four
# requests of the first batch leave 468 seats empty. The other 498 are of the second batch, which
# began with two of four seats taken: it too would not accept requests that arrive after it began.

# %%
assert waste["static"]["num_empty"].sum() - 468 == 498
assert ends[3] - ends[0] == 236

# %% [markdown]
# The continuous run has empty seats as well, 170 of them. But look at the table: none was empty
# while a request waited. They are empty because there is no more work, near the end. No scheduler
# can fill these.

# %%
assert waste["continuous"]["num_empty"].sum() == 170
assert waste["continuous"]["num_joinable"].sum() == 0
assert waste["static"]["num_joinable"].sum() == 412

# %% [markdown]
# ## Waste two: come late
#
# For requests 4 and 5 it means this: the time until their first token.

# %%
waits = pd.DataFrame(
    {
        f"{name}, {what}": run.requests.set_index("seq_id")[column] / 1e6
        for name, run in runs.items()
        for what, column in [
            ("queue ms", "request_queue_time_ns"),
            ("first token ms", "time_to_first_token_ns"),
        ]
    }
)
waits.sort_index().round(0)

# %%
ratio = waits["static, queue ms"] / waits["continuous, queue ms"]
print({seq_id: round(float(ratio[seq_id])) for seq_id in (4, 5)})
assert ratio[4] > 15
assert ratio[5] > 3

# %% [markdown]
# Request 4 waits for a *seat* in one run, for the *whole batch* in the other: that is the time
# until the shortest of four has ended against the time until the longest has, and the second is
# many times the first.
#
# ## Is any request slower?
#
# Some are, a little. A new request's prefill is a step in which the others get no token, and a
# larger batch makes each step a little slower:

# %%
latency = pd.DataFrame(
    {
        name: latency_breakdown(run.requests).set_index("seq_id")["e2e_request_latency_ns"] / 1e6
        for name, run in runs.items()
    }
).sort_index()
latency["difference"] = latency["continuous"] - latency["static"]
latency.loc["mean"] = latency.mean()
latency.round(0)

# %% [markdown]
# Requests 0 to 3 end later than in the static run, 1 to 3 by about a tenth, because they share
# their steps with new requests. Requests 4 and 5 end much earlier, and so does the average.

# %%
assert (latency["difference"][[0, 1, 2, 3]] > 0).all()
assert (latency["difference"][[4, 5]] < -1000).all()
assert latency["difference"]["mean"] < 0
assert (latency["continuous"] / latency["static"])[[0, 1, 2, 3]].max() < 1.2

# %% [markdown]
# ## Your turn
#
# ### Exercise 1
#
# Write the waste of early ends as a function: how many seats stay empty if requests of these
# lengths are run in one closed batch? (Only seats that a request had, and only in decodes: the
# first token comes from the prefill.)


# %% tags=["exercise"]
def num_empty_seats(lengths: list[int]) -> int:
    """The empty seats of a closed batch, over all its decodes."""
    raise NotImplementedError  # your code


# %% tags=["check"]
second = waste["static"][waste["static"]["step"] > batch_end]
never_taken = (NUM_SEATS - 2) * len(second)
check(
    num_empty_seats,
    lambda count: (
        count([20, 80, 200, 256]) == in_first["num_empty"].sum()
        and count([200, 100]) == second["num_empty"].sum() - never_taken
        and count([5]) == 0
    ),
    hint="a request of 20 tokens in a batch whose longest has 256 leaves its seat for 236 steps",
)

# %% [markdown]
# ### Exercise 2
#
# What if a batch had two seats instead of four, still static? The requests arrive in the order of
# their numbers, and all six have arrived before the first batch has ended. How many steps does the
# run take? (A batch's prefill is one step, and gives the first token to each.) The check asks the
# engine's own scheduler, with the recorded arrivals and tokens (that is `nvtrace whatif`; notebook
# 9 has more of it).

# %% tags=["exercise"]
num_steps_with_two_seats: int | None = None  # your number

# %% tags=["check"]
recording = read_recording(nvtrace.read_trace(TRACES / "static.jsonl.zst"))
with_two = rerun(
    recording, recording.settings.changed({"max_num_seqs": "2"}), recording.step_times()
)
check(
    num_steps_with_two_seats,
    lambda n: n == simulated_row("two seats", with_two).num_steps,
    hint="three batches, one after the other, each as long as its longest answer",
)

# %% [markdown]
# ### Exercise 3
#
# With a given number of seats and given lengths, no scheduler can take fewer steps than how many?
# Two things bound it from below.


# %% tags=["exercise"]
def fewest_steps(lengths: list[int], num_seats: int) -> int:
    """A number of steps that no scheduler can do with less of."""
    raise NotImplementedError  # your code


# %% tags=["check"]
lengths = list(arrivals["max_tokens"])
check(
    fewest_steps,
    lambda bound: [bound(lengths, 4), bound([10] * 8, 4), bound([9] * 3, 2)] == [256, 20, 14],
    hint="a request gets one token a step, and a step has so many seats: eight requests of ten "
    "tokens need 20 steps with four seats",
)

# %% [markdown]
# ## Answer
#
# Here it costs 198 of 456 steps (and a third of the time). In the closed batch 966 of 1,816 seats
# computed nothing, 412 of them while a request was in the queue; with continuous batching no seat
# was empty while a request waited. The price is small: requests already in the batch take a little
# longer, because they share it with new ones. And the result is close to the optimum of any
# scheduler: 258 steps, while the longest answer alone has 256 tokens.
