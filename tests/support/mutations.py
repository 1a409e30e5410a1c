"""Mutations: a trace with a single fact changed, as a fault or a bad disk would.

    python -m support.mutations --per-kind 200       how many are caught, by kind of event

Knows every way to change one fact of one event, and which facts nobody else's depend on. Does not
know what is right: `nvtrace.check` has to find it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import msgspec
from typing_extensions import override

from nanovllm.engine.kv_cache import KVBudget
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.loader import LoadedWeights
from nvtrace import events as ev
from nvtrace.check import check
from nvtrace.envelope import Footer, Record
from nvtrace.pipeline import Sink
from nvtrace.reader import read_trace
from nvtrace.recorder import Recorder
from support.fake_runner import Settings, make_engine
from support.recording import BUSY, BUSY_MIXED, Interruption, Recording
from support.workload import MemoryFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Measured, drawn or free text: said once, and nothing else in a trace follows from it.
FREE = {
    *(("MODEL_WEIGHTS_LOADED", name) for name in ("num_files", "num_keys", "num_bytes")),
    *(("REQUEST_ENQUEUE", name) for name in ("top_k", "top_p", "seed", "logprobs", "stop")),
    *(("ENGINE_ERROR", name) for name in ("error_type", "message")),
    ("REQUEST_OUTPUT", "text"),
    ("CUDAGRAPH_CAPTURE", "pool_bytes"),
    ("STEP_END", "gpu_ns"),
}
_FREE_EVERYWHERE = {"duration_ns", "ts_ns"}  # ts_ns is lowered below, not moved by a nanosecond


@dataclass(frozen=True, slots=True)
class Mutant:
    """A trace that is wrong in one place.

    Attributes:
        tag: the event that was changed.
        what: how.
        records: the trace.
    """

    tag: str
    what: str
    records: list[Record]


# -- traces to change ------------------------------------------------------------------------------


class GpuRecorder(Recorder):
    """Tells of a run on the fake model as if a GPU with CUDA graphs had run it."""

    graphs = (1, 2, 4)
    rows_before: int | None = None

    @override
    def engine_ready(self, num_kvcache_blocks: int, eos_token_ids: Sequence[int]) -> None:
        self.tp_runtime_init(0, 1, "cpu", None)
        self.model_weights_loaded(LoadedWeights(1, 2, 300))
        self.warmup_model(1, 6, 700)
        self.kv_budget_estimate(
            KVBudget(
                rule="given",
                total_bytes=9000,
                free_bytes=8000,
                used_bytes=1000,
                peak_bytes=700,
                current_bytes=500,
                graph_pool_bytes=50,
                utilization=0.9,
                limit_bytes=None,
                num_local_ranks=1,
                available_bytes=6850,
                num_layers=1,
                block_size=2,
                num_kv_heads=1,
                head_dim=1,
                dtype_bytes=4,
                block_bytes=16,
                num_blocks=num_kvcache_blocks,
            )
        )
        self.cudagraph_capture([*self.graphs], 50)
        super().engine_ready(num_kvcache_blocks, eos_token_ids)

    @override
    def run_eager(self, reason: str, num_tokens: int) -> None:
        if reason in {"prefill", "mixed"}:
            super().run_eager(reason, num_tokens)
        else:
            self.cudagraph_replay(num_tokens, num_tokens, is_ahead=False)

    @override
    def cudagraph_replay(self, batch_size: int, graph_batch_size: int, *, is_ahead: bool) -> None:
        rows = next((size for size in self.graphs if size >= graph_batch_size), None)
        is_ahead = is_ahead and rows == self.rows_before  # else another graph is launched anew
        self.rows_before = rows
        if rows is None:
            super().run_eager("batch_beyond_graphs", batch_size)
        else:
            super().cudagraph_replay(batch_size, rows, is_ahead=is_ahead)


class EagerRecorder(Recorder):
    """Tells why there are no graphs, as a CPU's engine does."""

    @override
    def engine_ready(self, num_kvcache_blocks: int, eos_token_ids: Sequence[int]) -> None:
        self.tp_runtime_init(0, 1, "cpu", None)
        self.model_weights_loaded(LoadedWeights(1, 2, 300))
        self.kv_budget_estimate(
            KVBudget(
                rule="given",
                total_bytes=9000,
                free_bytes=8000,
                used_bytes=1000,
                utilization=0.9,
                limit_bytes=2000,
                num_local_ranks=1,
                available_bytes=2000,
                num_layers=1,
                block_size=2,
                num_kv_heads=1,
                head_dim=1,
                dtype_bytes=4,
                block_bytes=16,
                num_blocks=num_kvcache_blocks,
            )
        )
        self.cudagraph_skip("device_has_no_graphs")
        super().engine_ready(num_kvcache_blocks, eos_token_ids)

    @override
    def cudagraph_replay(self, batch_size: int, graph_batch_size: int, *, is_ahead: bool) -> None:
        self.run_eager("device_has_no_graphs", batch_size)


def call_generate(recorder: Recorder, settings: Settings, file: MemoryFile) -> list[Record]:
    """Two calls of generate, one request too long, a cache reset in between."""
    engine = make_engine(settings, recorder)
    for _ in range(2):
        prompts = [[1, 2, 1, 2, 1], [1, 2, 1, 2, 1, 1], [2, 2], [1] * 20, [2, 1, 2, 1, 2, 1, 2]]
        params = [
            SamplingParams(temperature=0.5, max_tokens=length, ignore_eos=length > 5, stop=stop)
            for length, stop in ((6, None), (5, None), (9, ["ab"]), (1, None), (7, None))
        ]
        engine.generate(prompts, params)
        engine.reset_prefix_cache()
    recorder.close()
    return [*read_trace(_again(file))]


def _again(file: MemoryFile) -> MemoryFile:
    return MemoryFile(file.contents)


def traces() -> list[list[Record]]:
    """Traces in which every kind of event is found."""
    found = [
        Recording(BUSY).records,
        Recording(BUSY_MIXED).records,
        Recording(replace(BUSY, settings=replace(BUSY.settings, policy="static"))).records,
        Recording(BUSY, Interruption(4, "sample_tokens", is_noted=True)).records,
    ]
    for kind in (GpuRecorder, EagerRecorder):
        file = MemoryFile()
        found.append(call_generate(kind(Sink(file)), BUSY.settings, file))
    return found


# -- changing one fact -----------------------------------------------------------------------------


def mutate(records: list[Record], index: int, random: Random) -> Mutant | None:
    """The trace with one fact of one event changed; None if the drawn change changes nothing."""
    event = records[index]
    if not isinstance(event, ev.Event):
        raise TypeError("only events are changed")
    tag = ev.tag_of(event)
    names = [
        name
        for name in event.__struct_fields__
        if name not in _FREE_EVERYWHERE and (tag, name) not in FREE
    ]
    name = random.choice([*names, "drop", "duplicate", "swap", "lower"])
    match name:
        case "drop":
            return Mutant(tag, name, _renumbered([*records[:index], *records[index + 1 :]]))
        case "duplicate":
            return Mutant(tag, name, _renumbered([*records[:index], event, *records[index:]]))
        case "swap":
            return _swapped(records, index)
        case "lower":
            before = records[index - 1]
            if not isinstance(before, ev.Event) or before.ts_ns == 0:
                return None
            changed = msgspec.structs.replace(event, ts_ns=before.ts_ns - 1)
        case _:
            value = getattr(event, name)
            kind = ev.field_types(type(event))[name]
            new = _other(value, kind, random)
            if new == value:
                return None
            changed = msgspec.structs.replace(event, **{name: new})
            name = f"{name}: {value} -> {new}"
    return Mutant(tag, name, [*records[:index], changed, *records[index + 1 :]])


def _swapped(records: list[Record], index: int) -> Mutant | None:
    """Two neighbours exchange their places; numbers and times stay where they were."""
    first, second = records[index], records[index + 1]
    if not isinstance(first, ev.Event) or not isinstance(second, ev.Event):
        return None
    pair = [
        msgspec.structs.replace(second, event_id=first.event_id, ts_ns=first.ts_ns),
        msgspec.structs.replace(first, event_id=second.event_id, ts_ns=second.ts_ns),
    ]
    if pair == [first, second]:
        return None
    return Mutant(
        ev.tag_of(first),
        f"swap with {ev.tag_of(second)}",
        [*records[:index], *pair, *records[index + 2 :]],
    )


def _renumbered(records: list[Record]) -> list[Record]:
    """As if the trace had been written so: its numbers tell nothing."""
    renumbered: list[Record] = []
    for event_id, record in enumerate(records):
        match record:
            case ev.Event():
                renumbered.append(msgspec.structs.replace(record, event_id=event_id))
            case Footer():
                changed = msgspec.structs.replace(
                    record, event_id=event_id, num_events=event_id - 1
                )
                renumbered.append(changed)
            case _:
                renumbered.append(record)
    return renumbered


def _other(value: Any, kind: Any, random: Random) -> Any:  # noqa: ANN401, PLR0911 - of any field
    if get_origin(kind) is Literal:
        return random.choice([code for code in get_args(kind) if code != value] or [value])
    match value:
        case None:
            return [1] if "list" in str(kind) else "x" if "str" in str(kind) else 1
        case bool():
            return not value
        case int() | float():
            return value + random.choice([-1, 1])
        case str() if len(value) == 32:  # a hash
            return ("1" if value[0] == "0" else "0") + value[1:]
        case str():
            return value + "x"
        case list() | tuple():
            return _other_list(value, random)
    raise TypeError(f"{value!r} is of no type that a field has")


def _other_list(values: Any, random: Random) -> Any:  # noqa: ANN401 - a list or a tuple of anything
    changed = list(values)
    if not changed:
        return type(values)([1])
    place = random.randrange(len(changed))
    match random.choice(["change", "drop", "swap"]):
        case "drop" if isinstance(values, list):
            del changed[place]
        case "swap" if len(changed) > 1:
            other = (place + 1) % len(changed)
            changed[place], changed[other] = changed[other], changed[place]
        case _:
            changed[place] = _other(changed[place], type(changed[place]), random)
    return type(values)(changed)


# -- how many are caught ---------------------------------------------------------------------------


def mutants(sources: list[list[Record]], per_kind: int, seed: int) -> Iterator[Mutant]:
    """So many mutants of each kind of event that the traces hold."""
    random = Random(seed)
    places: dict[str, list[tuple[int, int]]] = {}
    for number, records in enumerate(sources):
        for index, record in enumerate(records):
            if isinstance(record, ev.Event):
                places.setdefault(ev.tag_of(record), []).append((number, index))
    for tag in ev.EVENT_TYPES:
        made = 0
        while made < per_kind and tag in places:
            number, index = random.choice(places[tag])
            mutant = mutate(sources[number], index, random)
            if mutant is not None:
                made += 1
                yield mutant


def is_caught(mutant: Mutant) -> bool:
    """Does the check find anything?"""
    return next(check(mutant.records), None) is not None


def caught_by_kind(
    sources: list[list[Record]], per_kind: int, seed: int = 0
) -> tuple[dict[str, tuple[int, int]], list[Mutant]]:
    """For each kind of event (caught, made); and the mutants that were not caught."""
    made: Counter[str] = Counter()
    missed: list[Mutant] = []
    for mutant in mutants(sources, per_kind, seed):
        made[mutant.tag] += 1
        if not is_caught(mutant):
            missed.append(mutant)
    lost = Counter(mutant.tag for mutant in missed)
    return {tag: (made[tag] - lost[tag], made[tag]) for tag in made}, missed


def table(by_kind: dict[str, tuple[int, int]]) -> str:
    """The counts as text, one kind a line, the whole last."""
    total = tuple(map(sum, zip(*by_kind.values(), strict=True)))
    lines = [
        f"{tag:24} {caught:5} of {made:5}  {100 * caught / made:5.1f} %"
        for tag, (caught, made) in [*by_kind.items(), ("all", (total[0], total[1]))]
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table, and what was missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    by_kind, missed = caught_by_kind(traces(), arguments.per_kind, arguments.seed)
    sys.stdout.write(table(by_kind) + "\n\nnot caught:\n")
    whats = Counter(f"{mutant.tag} {mutant.what.partition(':')[0]}" for mutant in missed)
    for what, count in whats.most_common():
        sys.stdout.write(f"{count:5} {what}\n")


if __name__ == "__main__":
    main()
