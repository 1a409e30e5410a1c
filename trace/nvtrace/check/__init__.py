"""Check: test an engine's trace against the invariants of the engine.

    for finding in check(read_trace("trace.jsonl")):
        ...  # two facts that conflict, the step, the event

    finding    what a finding and a rule are
    ledger     the state before an event, and what must follow from it
    fields     the values that each field can have        } the rules; each yields
    stream     numbers, times, order of the events        } facts that conflict
    startup    settings, size of the pool                 }
    queues     arrivals, waiting, running, ends           }
    blocks      free list, tables, hashes                  }
    steps      batch, layout, sums                        }
    ranks      the trace of a rank that does not schedule }
    checker    applies every rule to every event

Only the trace is needed: no engine, no torch. The words are in `nvtrace.catalog`.
"""

from nvtrace.check.checker import INVARIANTS, Checker, check
from nvtrace.check.finding import Fact, Finding

__all__ = ["INVARIANTS", "Checker", "Fact", "Finding", "check"]
