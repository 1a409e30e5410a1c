"""Policies: what goes into a step. Each is a function that fills the batch.

A policy decides the order in which a step's budget is used, by calling
`Scheduler.continue_prefill`, `admit` and `decode`, which respect the queues, the blocks and the
budgets. To add your own: `POLICIES["mine"] = mine`, then `LLM(..., policy="mine")`.

`decode` must be called while the batch is empty, because it may preempt any running sequence, even
one that is in the batch already. A prompt that is computed in part must be continued before a
request is admitted: it must stay the last in the running queue until its prefill is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.scheduler import Scheduler

Policy = Callable[["Scheduler", "Batch"], None]


def prefill_first(scheduler: Scheduler, batch: Batch) -> None:
    """The article's policy: a prefill if there are prompts to compute, else a decode."""
    scheduler.continue_prefill(batch)
    scheduler.admit(batch)
    if not batch:
        scheduler.decode(batch)


def mixed(scheduler: Scheduler, batch: Batch) -> None:
    """Close to vLLM V1: one token for each running sequence, the rest of the budget for prompts.

    No running sequence waits for the prompt of another. (If the budget is smaller than the number
    of running sequences, only the oldest get a token; that is so with every policy.)
    `docs/en/vllm.md` lists what vLLM 0.32.0 does differently: blocks taken chunk by chunk, for one.
    """
    scheduler.decode(batch)
    scheduler.continue_prefill(batch)
    scheduler.admit(batch, chunk_any=True)


def static(scheduler: Scheduler, batch: Batch) -> None:
    """Static batching, for comparison: no request is admitted until the whole batch has ended."""
    if not scheduler.running:
        scheduler.admit(batch)
        return
    scheduler.hold("static_batch")
    scheduler.continue_prefill(batch)
    if not batch:
        scheduler.decode(batch)


POLICIES: dict[str, Policy] = {"prefill_first": prefill_first, "mixed": mixed, "static": static}
