"""Explain: why a request lived as it did, and why a step was what it was.

    story = explain_request(read_trace("trace.jsonl"), seq_id=3)
    for link in story.chain:
        ...  # Queued, Waited, Admitted, Prefilled, Decoded, Preempted, Ended

    links     what a chain is made of: facts, each with the ids of the events that prove it
    follower  the state beside the trace, and who has which block from whom
    folding   links that say the same become one
    life      what one step says of a request
    request   the chain of one request
    pace      how long steps of a kind take; which is slow, and what part of it
    step      the chain of one step

Facts only: the words are in the catalogs. Knows an engine by its trace alone: no engine, no torch.
Does not know files (`nvtrace.reader`).
"""

from nvtrace.explain.links import Link, RequestStory, StepStory, Times, kind_of
from nvtrace.explain.origins import NotInTraceError
from nvtrace.explain.request import explain_request
from nvtrace.explain.step import explain_step

__all__ = [
    "Link",
    "NotInTraceError",
    "RequestStory",
    "StepStory",
    "Times",
    "explain_request",
    "explain_step",
    "kind_of",
]
