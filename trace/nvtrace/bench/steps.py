"""Step classes: where the time of a step went, and how it compares to reading its bytes.

The times measured outside of the engine come from `rounds.py`, the bandwidth from `machine.py`.

A decode step must read every weight once, and every key and value of every context:

    floor = (weight bytes + context tokens x KV bytes of a token) / bandwidth

The bandwidth is that of a copy. Reading alone can be a few percent faster.

Scheduling does not depend on time. So step 17 of the traced engine and step 17 of the untraced one
compute the same, and the trace describes both.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from nvtrace import events as ev
from nvtrace.bench.report import ModelSize, Shares, StepClass

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nvtrace.envelope import Record

_NS_PER_MS = 1e6
_PHASES = ("prefill", "mixed", "decode")


@dataclass(frozen=True, slots=True)
class Floor:
    """What a decode step must read, and the bandwidth.

    Attributes:
        weight_bytes: of all weights that a step reads.
        kv_bytes_per_token: of one token's keys and values, in all layers.
        bytes_per_second: of the device's memory.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    bytes_per_second: float

    @classmethod
    def of(cls, model: ModelSize, bytes_per_second: float) -> Floor:
        """The floor of a model on a device."""
        return cls(model.weight_bytes, model.kv_bytes_per_token, bytes_per_second)

    def step_ms(self, num_context_tokens: int) -> float:
        """Milliseconds to read the bytes of a decode step with so many tokens of context."""
        num_bytes = self.weight_bytes + num_context_tokens * self.kv_bytes_per_token
        return num_bytes / self.bytes_per_second * 1e3


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a trace has about one step.

    Attributes:
        end: its last event.
        num_context_tokens: of all sequences together, including those computed in this step; None
            if it is not a decode step.
    """

    end: ev.StepEnd
    num_context_tokens: int | None


def read_steps(records: Iterable[Record]) -> dict[int, StepFacts]:
    """The complete steps of a trace, by their number."""
    steps: dict[int, StepFacts] = {}
    contexts: dict[int | None, int] = {}
    for record in records:
        match record:
            case ev.PrepareDecodeTensors():
                contexts[record.step] = sum(record.context_lens)
            case ev.StepEnd(step=int(step)):
                num_context_tokens = contexts.pop(step, None)
                is_decode = record.batch_phase == "decode"
                steps[step] = StepFacts(record, num_context_tokens if is_decode else None)
            case _:
                pass
    return steps


def step_classes(
    steps: Mapping[int, StepFacts],
    traced_ns: Mapping[int, int],
    untraced_ns: Mapping[int, int],
    floor: Floor,
) -> list[StepClass]:
    """Group steps into classes: the same phase, and batch sizes between two powers of 2.

    Args:
        steps: from the trace, by step number.
        traced_ns: the time of each step, measured outside of the engine. Only these steps are used.
        untraced_ns: the same for the untraced engine; empty if it did not run.
        floor: for decode steps.

    Returns:
        Prefill before decode, small batches first.
    """
    classes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number in sorted(traced_ns.keys() & steps.keys()):
        end = steps[number].end
        classes[_PHASES.index(end.batch_phase), end.num_seqs.bit_length()].append(number)
    return [
        _step_class(
            [steps[number] for number in numbers],
            [traced_ns[number] for number in numbers],
            [untraced_ns[number] for number in numbers if number in untraced_ns],
            floor,
        )
        for _, numbers in sorted(classes.items())
    ]


def _step_class(
    steps: Sequence[StepFacts], traced_ns: Sequence[int], untraced_ns: Sequence[int], floor: Floor
) -> StepClass:
    batch_sizes = [step.end.num_seqs for step in steps]
    contexts = [s.num_context_tokens for s in steps if s.num_context_tokens is not None]
    floor_ms = floor.step_ms(round(median(contexts))) if contexts else None
    traced_ms, untraced_ms = _median_ms(traced_ns), _median_ms(untraced_ns)
    return StepClass(
        phase=steps[0].end.batch_phase,
        smallest_batch=min(batch_sizes),
        largest_batch=max(batch_sizes),
        num_steps=len(steps),
        untraced_ms=untraced_ms,
        traced_ms=traced_ms,
        gpu_ms=_median_ms([step.end.gpu_ns for step in steps if step.end.gpu_ns is not None]),
        floor_ms=floor_ms,
        untraced_times_floor=_by(untraced_ms, floor_ms),
        traced_times_floor=_by(traced_ms, floor_ms),
        shares=_shares([step.end for step in steps], traced_ns),
    )


def _shares(ends: Sequence[ev.StepEnd], traced_ns: Sequence[int]) -> Shares:
    """The median time of each part, divided by their sum: one slow step changes little."""
    rests = [max(ns - end.wall_ns, 0) for ns, end in zip(traced_ns, ends, strict=True)]
    parts = {
        "schedule": median(end.schedule_ns for end in ends),
        "prepare": median(end.prepare_ns for end in ends),
        "model": median(end.forward_ns for end in ends),
        "sample": median(end.sample_ns for end in ends),
        "postprocess": median(end.postprocess_ns for end in ends),
        "rest": median(rests),
    }
    total = sum(parts.values()) or 1
    return Shares(**{name: part / total for name, part in parts.items()})


def _median_ms(nanoseconds: Sequence[int]) -> float | None:
    return median(nanoseconds) / _NS_PER_MS if nanoseconds else None


def _by(value: float | None, floor: float | None) -> float | None:
    return None if value is None or floor is None else value / floor
