"""The benchmark: the engine, untraced and traced, beside what transformers makes of the same work.

    report      what comes out: structs that are the JSON          (pure)
    workloads   which prompts, and how many tokens are asked for   (pure)
    steps       where a step's time went, and its byte floor       (pure, reads a trace)
    rounds      who runs when, medians, ratios, equal tokens       (pure)
    models      the shipped model, random ones, or a folder
    contenders  who does the work
    machine     where all of it ran
    benchmark   puts them together

`nvtrace bench` shows what it finds. Importing this package loads nothing.
"""

from __future__ import annotations


class BenchmarkError(ValueError):
    """What was asked for cannot be measured: a model, a workload or a device that does not fit."""
