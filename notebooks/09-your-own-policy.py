# %% [markdown]
# # 9. Your own policy
#
# **Question:** You write your own rule for which requests compute in the next step, in twenty
# lines: how good is it, and does it break anything?
#
# You need neither a model nor a GPU to find out. It reads `gpu-benchmark`, the first 200 steps of
# 256 requests on an H200, and reruns it: the same requests and tokens with the engine's own
# scheduler, under other rules. Before it: [add a policy](../docs/en/change/add-a-policy.md).

# %%
from collections import Counter, deque
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import matplotlib.pyplot as plt
import pandas as pd

import nvtrace
from exercise import check
from nanovllm.engine.batch import Batch
from nanovllm.engine.policies import POLICIES, Policy, mixed, prefill_first
from nanovllm.engine.scheduler import Scheduler
from nvtrace.analysis import plots
from nvtrace.catalog import load_catalog
from nvtrace.check import Finding
from nvtrace.check import check as check_trace
from nvtrace.pipeline import Sink
from nvtrace.whatif import Recording, RerunResult, read_recording, rerun

TRACES = Path("../docs/traces")
trace = nvtrace.load(TRACES / "gpu-benchmark.jsonl.zst")
recording = read_recording(nvtrace.read_trace(TRACES / "gpu-benchmark.jsonl.zst"))

# %% [markdown]
# ## What is wrong with the default rule
#
# All 256 requests arrive at once. The default rule, `prefill_first`, is the article's: as long as
# there are prompts to compute, compute prompts. They fill nine steps. A request in the first one
# has its first token, and then waits for eight steps in which others get theirs.

# %%
prefills = trace.steps.query("phase == 'prefill'")
itl_ms = trace.tokens["itl_ns"].dropna() / 1e6
num_requests = len(trace.table("REQUEST_ENQUEUE"))
print(f"{num_requests} requests, {len(prefills)} prefills before the first decode")
print(f"between two tokens: median {itl_ms.median():.1f} ms, longest {itl_ms.max():.0f} ms")
assert len(prefills) == prefills["step"].max() == 9

# %% [markdown]
# A user sees a first word, and then nothing for a third of a second. Could the running requests not
# decode in between?
#
# ## The rule
#
# A policy is a function of the scheduler and an empty batch. Its parts (`continue_prefill`,
# `admit`, `decode`) keep all budgets, blocks and queues consistent; a policy only calls them in
# some order. Ours checks one thing: has the youngest running request decoded since its prompt? If
# it has only one token, it has not.


# %%
def taking_turns(scheduler: Scheduler, batch: Batch) -> None:
    """Between two steps of prompts, one decode: nobody who runs waits for two of them."""
    running = scheduler.running
    youngest = running[-1] if running else None
    if youngest and not youngest.is_prefilling and youngest.num_completion_tokens == 1:
        scheduler.decode(batch)
    else:
        scheduler.continue_prefill(batch)  # a prompt that was cut goes on first
        scheduler.admit(batch)
    if not batch:  # nobody could be admitted
        scheduler.decode(batch)


# %% [markdown]
# ## A way to try it
#
# `nvtrace.whatif` reruns the recording: requests arrive before the same steps, the scheduler is the
# real one, and instead of sampling it takes the recorded tokens. It writes a trace like any other,
# so all tools work on it.


# %%
class Result(NamedTuple):
    """What came of a re-run."""

    outcome: RerunResult
    steps: pd.DataFrame
    tokens: pd.DataFrame
    findings: list[Finding]


def try_out(policy: Policy, recording: Recording, changes: dict[str, str] | None = None) -> Result:
    """Run a recording again under a policy, and check the trace of that."""
    settings = recording.settings.changed({"policy": policy.__name__, **(changes or {})})
    with TemporaryDirectory() as folder, patch.dict(POLICIES, {policy.__name__: policy}):
        path = Path(folder, "again.jsonl")
        with path.open("wb") as file:
            outcome = rerun(recording, settings, recording.step_times(), sink=Sink(file))
        again = nvtrace.load(path)
        findings = list(check_trace(nvtrace.read_trace(path)))
        return Result(outcome, again.steps, again.tokens, findings)


# %% [markdown]
# First a check: under the recorded rule, the rerun must decide as the engine did. It does, step for
# step, down to the blocks.

# %%
as_it_was = try_out(prefill_first, recording)
assert as_it_was.outcome.first_other_step(recording) is None
print(len(as_it_was.steps), "steps, the same decisions;", len(as_it_was.findings), "findings")

# %% [markdown]
# ## Does it help?
#
# Now ours, and `mixed`, which the engine has too: all running requests decode in every step, and
# prompts get the rest of the budget.

# %%
results = {
    "prefill_first": as_it_was,
    "taking_turns": try_out(taking_turns, recording),
    "mixed": try_out(mixed, recording),
}


def summary(result: Result) -> dict[str, object]:
    """Steps by kind, and how many of them a request waits for what."""
    kinds = result.steps["phase"].value_counts()
    first_tokens = result.tokens[result.tokens["index"] == 0]["step"]
    gaps = result.tokens.groupby("seq_id")["step"].diff()
    return {
        **{f"{kind} steps": kinds[kind] for kind in ("prefill", "decode", "mixed")},
        "longest gap between tokens": int(gaps.max()),
        "last request begins in step": int(first_tokens.max()),
        "untimed steps": result.outcome.num_untimed,
        "findings": len(result.findings),
    }


pd.DataFrame({name: summary(result) for name, result in results.items()}).T

# %%
figure, axes = plt.subplots(3, 1, figsize=(9, 6.5), layout="constrained", sharex=True)
for ax, (name, result) in zip(axes, results.items(), strict=True):
    _ = plots.queue_and_batch(result.steps.query("step <= 24"), ax)
    ax.set(ylabel=name)
for ax in axes[:-1]:
    ax.set(xlabel="")

# %% [markdown]
# The picture shows the three policies. `prefill_first` lets all running requests wait (the blue
# steps), then has the largest batch as early as possible. `taking_turns` alternates until no
# request waits: no gap is longer than two steps, and the last request gets its first token in step
# 17 instead of step 9. `mixed` needs no turns, because every step of prompts also has the decodes.
#
# ## How long is a step?
#
# A gap of two steps, but how many milliseconds? What-if fits step times to the recorded steps, and
# gives no time for a step that is unlike all of them: `untimed steps` counts these. Here a decode
# of 31 requests is one, because the smallest recorded decode has 220.

# %%
for beyond in results["taking_turns"].outcome.beyond:
    recorded = f"recorded {beyond.low:,} to {beyond.high:,}"
    print(f"a {beyond.phase} with {beyond.quantity} {beyond.value:,}; {recorded}")
assert results["taking_turns"].outcome.beyond[0].value == 31
assert results["taking_turns"].outcome.beyond[0].low == 220

# %% [markdown]
# So there is no estimate. But a *bound* is easy: a gap is one step of prompts and one decode, and a
# decode of fewer requests does not take longer than a large one. The price is bounded as well:
# eight more decodes before the last first token.

# %%
slowest_ms = trace.steps.groupby("phase", observed=True)["wall_ns"].max() / 1e6
gap_ms = slowest_ms["prefill"] + slowest_ms["decode"]
first_tokens_ms = trace.tokens.query("index == 0")["ts_ns"] / 1e6
last_ms = first_tokens_ms.max() - trace.table("REQUEST_ENQUEUE")["ts_ns"].min() / 1e6
later_ms = (17 - 9) * slowest_ms["decode"]
print(f"longest gap: {itl_ms.max():.0f} ms before, about {gap_ms:.0f} ms at most now")
print(f"last first token: {last_ms:.0f} ms before, about {later_ms:.0f} ms later at most now")

# %% [markdown]
# That is a trade-off: no request waits long between tokens, and the last ones start a little later.
#
# ## Does it break anything?
#
# `nvtrace check` checks a trace against the invariants of the engine. It has findings.

# %%
catalog = load_catalog("en")
turns = results["taking_turns"]
for invariant, count in Counter(finding.invariant for finding in turns.findings).items():
    title, teaches = catalog.invariant(invariant)
    print(f"{count} x {title}: {teaches}")
found_in = [finding.step for finding in turns.findings]
print("in steps", found_in)
waiting = turns.steps.query("phase == 'decode' and num_waiting > 0")["step"].tolist()
assert found_in == waiting

# %% [markdown]
# Exactly the eight decodes in which we let prompts wait. All other invariants hold: budgets,
# blocks, queues, order, ends. The findings are the purpose of our rule, but the checker is right:
# an engine that lets a request wait must record why. The engine's policies do that with
# `scheduler.hold(reason)`, and the reason has its words in both catalogs. This turns an experiment
# into a policy: [the page](../docs/en/change/add-a-policy.md) has the list.
#
# ## A rule that does break something
#
# Another rule: the shortest prompt first. More requests fit into the first step, so on average
# requests get their first token sooner.


# %%
def shortest_first(scheduler: Scheduler, batch: Batch) -> None:
    """The default, but the shortest prompts come first."""
    scheduler.continue_prefill(batch)
    scheduler.waiting = deque(sorted(scheduler.waiting, key=lambda seq: seq.num_tokens))
    scheduler.admit(batch)
    if not batch:
        scheduler.decode(batch)


shortest = try_out(shortest_first, recording)
for name, result in (("prefill_first", as_it_was), ("shortest_first", shortest)):
    first_tokens = result.tokens.query("index == 0")["step"]
    print(f"{name}: the first token comes in step {first_tokens.mean():.1f} on average")
for invariant, count in Counter(finding.invariant for finding in shortest.findings).items():
    title, teaches = catalog.invariant(invariant)
    print(f"{count} x {title}: {teaches}")
assert "head_first" in {finding.invariant for finding in shortest.findings}
assert shortest.tokens.query("index == 0")["step"].mean() < 4.5

# %% [markdown]
# It is sooner, on average. But this finding is of another kind: as long as short prompts keep
# arriving, a long one may wait forever. In this recording no request arrived later, so none
# starved; a measurement alone would not have shown it.
#
# ## Your turn
#
# ### Exercise 1
#
# Write a policy like `taking_turns` that runs *three* decodes between two steps of prompts.


# %% tags=["exercise"]
def patient(scheduler: Scheduler, batch: Batch) -> None:
    """Between two steps of prompts, three decodes."""
    raise NotImplementedError  # your code


# %% tags=["check"]
def takes_three(policy: Policy) -> bool:
    kinds: list[str] = []

    def watched(scheduler: Scheduler, batch: Batch) -> None:
        policy(scheduler, batch)
        kinds.append(batch.phase)

    with patch.dict(POLICIES, watched=watched):
        settings = recording.settings.changed({"policy": "watched"})
        rerun(recording, settings, recording.step_times())
    pattern = ["prefill", "decode", "decode", "decode"] * len(prefills)
    return kinds[: len(pattern)] == pattern and "prefill" not in kinds[len(pattern) :]


check(patient, takes_three, hint="after three decodes the youngest has four tokens")

# %% [markdown]
# ### Exercise 2
#
# Write static batching: no request joins until all have ended. It must decide as the engine's
# `static` does, checked on `late-join`, where requests arrive one after the other. (The engine's
# also records why others wait. Yours need not.)

# %%
late_join = read_recording(nvtrace.read_trace(TRACES / "late-join.jsonl.zst"))
house = try_out(POLICIES["static"], late_join)
print("late-join:", len(late_join.steps), "steps as recorded,", len(house.steps), "under static")


# %% tags=["exercise"]
def old_way(scheduler: Scheduler, batch: Batch) -> None:
    """Nobody joins until the whole batch has ended."""
    raise NotImplementedError  # your code


# %% tags=["check"]
check(
    old_way,
    lambda policy: try_out(policy, late_join).outcome.schedule == house.outcome.schedule,
    hint="admit only if scheduler.running is empty; else go on with what runs",
)

# %% [markdown]
# ### Exercise 3
#
# A policy is not the only setting. `try_out` takes others: how many prefills does the benchmark
# need under `prefill_first` if a step computes at most 8,192 tokens, half as many as recorded? Try
# `try_out(prefill_first, recording, {"max_num_batched_tokens": "8192"})`, after you have guessed.

# %% tags=["exercise"]
num_prefills: int | None = None  # your number

# %% tags=["check"]
half = recording.settings.changed({"max_num_batched_tokens": "8192"})
assert recording.settings.max_num_batched_tokens == 2 * 8192
check(
    num_prefills,
    lambda number: (
        number == rerun(recording, half, recording.step_times()).metrics.phases["prefill"].num_steps
    ),
    hint="count the steps of the result whose phase is prefill; packing is not exact",
)

# %% [markdown]
# ## Answer
#
# A policy decides in which order the three parts of a step come, in twenty lines. What-if shows
# what it would have decided in a recorded run: `taking_turns` cuts the longest gap between two
# tokens from nine steps to two, and the last first token comes eight steps later. For a step that
# is unlike all recorded steps the time is unknown, and a bound must be enough. And the checker
# distinguishes two problems: a rule that only does not record its reason, and one that lets a
# request wait forever.
