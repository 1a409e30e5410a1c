"""Check: the invariants of an engine, held against its trace.

    for finding in check(read_trace("trace.jsonl")):
        ...  # two facts that disagree, the step, the event

    finding    what a finding and a rule are
    ledger     what is known when an event comes, and what must follow from it
    stream     numbers, times, order of the events        } the rules; each yields
    startup    settings, size of the pool                 } facts that disagree
    queues     who comes, waits, runs and ends            }
    pages      free list, tables, hashes                  }
    steps      batch, layout, sums                        }
    checker    asks every rule about every event

Knows an engine by its trace alone: no engine, no torch. Does not know files (`nvtrace.reader`) or
words (`nvtrace.catalog`).
"""

from nvtrace.check.checker import INVARIANTS, Checker, check
from nvtrace.check.finding import Fact, Finding

__all__ = ["INVARIANTS", "Checker", "Fact", "Finding", "check"]
