"""Explain: why a request waited, ran and ended, and why a step had its batch and its time.

    story = explain_request(read_trace("trace.jsonl"), seq_id=3)
    for link in story.chain:
        ...  # Queued, Waited, Admitted, Prefilled, Decoded, Preempted, Ended

    links     the links of a chain: facts, each with the ids of the events that prove it
    origins   the fold, with who computed and who shares each block
    folding   equal links of consecutive steps become one
    life      the events of one step about a request -> links
    request   the chain of one request
    pace      step times by phase and size: is a step slow, and which part of it
    step      the chain of one step

The links hold facts; the words are in the catalogs. Only the trace is needed: no engine, no torch.
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
