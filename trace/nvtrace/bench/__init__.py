"""The benchmark: the engine, untraced and traced, compared with transformers on the same work.

    report      the results: structs that are the JSON             (pure)
    workloads   prompts, and how many tokens to generate           (pure)
    steps       where a step's time went, and its byte floor       (pure, reads a trace)
    rounds      the order of runs, medians, ratios, equal tokens   (pure)
    models      the shipped model, random ones, or a folder
    contenders  the engines that are compared
    machine     the machine that it ran on
    benchmark   runs all of it

`nvtrace bench` prints the results. Importing this package loads nothing.
"""

from __future__ import annotations


class BenchmarkError(ValueError):
    """A benchmark that cannot run: a model, a workload or a device that is not possible."""
