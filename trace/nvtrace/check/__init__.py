"""Check: the invariants of an engine, held against its trace.

    for finding in check(read_trace("trace.jsonl")):
        ...  # two facts that disagree, the step, the event

    finding    what a finding and a rule are
    ledger     what is known when an event comes, and what must follow from it
    fields     what each field can hold                   } the rules; each yields
    stream     numbers, times, order of the events        } facts that disagree
    startup    settings, size of the pool                 }
    queues     who comes, waits, runs and ends            }
    blocks      free list, tables, hashes                  }
    steps      batch, layout, sums                        }
    ranks      the same of a rank that an engine started  }
    checker    asks every rule about every event

Knows an engine by its trace alone: no engine, no torch. Does not know files (`nvtrace.reader`) or
words (`nvtrace.catalog`).
"""

from nvtrace.check.checker import INVARIANTS, Checker, check
from nvtrace.check.finding import Fact, Finding

__all__ = ["INVARIANTS", "Checker", "Fact", "Finding", "check"]
