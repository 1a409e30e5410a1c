"""Hypothesis profiles: `default` for every day, `ci` (the same examples each time), `fuzz` (long).

HYPOTHESIS_PROFILE chooses one: `HYPOTHESIS_PROFILE=fuzz pytest tests/test_fold.py`.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Threads that wait sleep instead of spinning: tests must not crawl on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile(
    "default",
    max_examples=150,
    stateful_step_count=30,
    deadline=None,  # a busy machine is no fault
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None)
settings.register_profile(
    "fuzz", settings.get_profile("default"), max_examples=5000, stateful_step_count=80
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
