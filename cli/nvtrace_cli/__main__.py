"""`python -m nvtrace_cli`: the same as `nvtrace`."""

from __future__ import annotations

from nvtrace_cli.failures import interrupts_end_it

with interrupts_end_it():
    from nvtrace_cli.main import main

main()
