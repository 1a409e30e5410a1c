"""Policies: what goes into a step. Each fills the batch from the scheduler's parts.

Knows the order in which a step's budget is spent. Does not know queues, pages or budgets from
within: `Scheduler.continue_prefill`, `admit` and `decode` keep those. A policy of your own is a
function like these: `POLICIES["mine"] = mine`, then `LLM(..., policy="mine")`.

`decode` comes first or alone, since it may preempt whoever runs, somebody in the batch as well.
A chunk that is under way must be continued before anybody is admitted: it is the running queue's
tail, and must stay that until its prefill is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.scheduler import Scheduler

Policy = Callable[["Scheduler", "Batch"], None]


def prefill_first(scheduler: Scheduler, batch: Batch) -> None:
    """The article's: prompts if there are any to compute, else one token for everybody."""
    scheduler.continue_prefill(batch)
    scheduler.admit(batch)
    if not batch:
        scheduler.decode(batch)


def mixed(scheduler: Scheduler, batch: Batch) -> None:
    """Close to vLLM V1: one token for everybody who runs, and the rest of the budget for prompts.

    Nobody who runs waits for somebody else's prompt. (A budget smaller than the running queue
    reaches the oldest only; that holds for every policy.) What vLLM 0.32.0 does otherwise, such as
    taking pages chunk by chunk, is listed in `docs/en/vllm.md`.
    """
    scheduler.decode(batch)
    scheduler.continue_prefill(batch)
    scheduler.admit(batch, chunk_any=True)


def static(scheduler: Scheduler, batch: Batch) -> None:
    """The old way, for comparison: nobody joins until the whole batch has ended."""
    if not scheduler.running:
        scheduler.admit(batch)
        return
    scheduler.hold("static_batch")
    scheduler.continue_prefill(batch)
    if not batch:
        scheduler.decode(batch)


POLICIES: dict[str, Policy] = {"prefill_first": prefill_first, "mixed": mixed, "static": static}
