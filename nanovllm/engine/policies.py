"""Policies: what goes into a step. Each fills the batch from the scheduler's parts.

Knows the order in which a step's budget is spent. Does not know queues, blocks or budgets:
`Scheduler.continue_prefill`, `admit` and `decode` keep to those. A policy of your own is a
function like these: `POLICIES["mine"] = mine`, then `LLM(..., policy="mine")`.

`decode` comes first or alone, since it may preempt any running sequence, even one in the batch.
A prompt that is computed in part must be continued before a request is admitted: it is the last in
the running queue, and must stay there until its prefill is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.scheduler import Scheduler

Policy = Callable[["Scheduler", "Batch"], None]


def prefill_first(scheduler: Scheduler, batch: Batch) -> None:
    """The article's policy: prompts if there are any to compute, else one token per sequence."""
    scheduler.continue_prefill(batch)
    scheduler.admit(batch)
    if not batch:
        scheduler.decode(batch)


def mixed(scheduler: Scheduler, batch: Batch) -> None:
    """Close to vLLM V1: one token for each running sequence, the rest of the budget for prompts.

    No running sequence waits for another one's prompt. (If the budget is smaller than the running
    queue, only the oldest get a token; that holds for every policy.) `docs/en/vllm.md` lists what
    vLLM 0.32.0 does differently, such as taking blocks chunk by chunk.
    """
    scheduler.decode(batch)
    scheduler.continue_prefill(batch)
    scheduler.admit(batch, chunk_any=True)


def static(scheduler: Scheduler, batch: Batch) -> None:
    """Static batching, for comparison: no request joins until the whole batch has ended."""
    if not scheduler.running:
        scheduler.admit(batch)
        return
    scheduler.hold("static_batch")
    scheduler.continue_prefill(batch)
    if not batch:
        scheduler.decode(batch)


POLICIES: dict[str, Policy] = {"prefill_first": prefill_first, "mixed": mixed, "static": static}
