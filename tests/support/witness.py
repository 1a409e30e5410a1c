"""Witness: an observer that remembers decisions; and engines in which a few prompts wait.

Knows what a scheduler says of itself. Does not know what it should have said.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.engine.sequence import SequenceStatus
from nanovllm.observer import Observer
from nanovllm.sampling_params import SamplingParams
from support.fake_runner import Settings, make_engine

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence


class Witness(Observer):
    """Hears why somebody waits, who gave way to whom, and who was admitted."""

    def __init__(self) -> None:
        self.stops: list[tuple[int, str, int, int]] = []  # seq_id, reason, need, have
        self.preempted: list[tuple[int, int]] = []  # victim, for whom
        self.admitted: list[int] = []
        self.cached: list[int] = []  # tokens, of each admission
        self.batches: list[tuple[str, list[int], list[int]]] = []  # phase, seq_ids, num_tokens

    def admission_stop(
        self, scheduler: Scheduler, seq: Sequence, reason: str, need: int, have: int
    ) -> None:
        assert seq is scheduler.waiting[0]
        assert need > have
        self.stops.append((seq.seq_id, reason, need, have))

    def preempt(
        self, victim: Sequence, for_seq: Sequence, freed: list[int], num_computed_tokens: int
    ) -> None:
        assert freed or num_computed_tokens
        self.preempted.append((victim.seq_id, for_seq.seq_id))

    def state_transition(self, seq: Sequence, previous: SequenceStatus, reason: str) -> None:
        if reason == "admitted":
            assert previous is SequenceStatus.WAITING
            self.admitted.append(seq.seq_id)
            self.cached.append(seq.num_cached_tokens)

    def schedule_prefill(self, batch: Batch, scheduler: Scheduler) -> None:
        assert scheduler.running
        self.batches.append(_row(batch))

    def schedule_decode(self, batch: Batch, scheduler: Scheduler) -> None:
        assert batch.seqs == scheduler.running[: scheduler.max_num_batched_tokens]
        self.batches.append(_row(batch))

    def schedule_mixed(self, batch: Batch, scheduler: Scheduler) -> None:
        assert scheduler.running
        self.batches.append(_row(batch))


def _row(batch: Batch) -> tuple[str, list[int], list[int]]:
    return batch.phase, [seq.seq_id for seq in batch.seqs], list(batch.num_scheduled_tokens)


def engine_with(observer: Observer, *prompts: int | list[int], **settings: int | str) -> LLMEngine:
    """An engine in which each prompt waits; a number stands for that many tokens."""
    options: dict[str, Any] = {"enable_prefix_caching": False, **settings}
    engine = make_engine(replace(Settings(), **options), observer)
    for prompt in prompts:
        add(engine, prompt)
    return engine


def add(engine: LLMEngine, prompt: int | list[int], max_tokens: int = 50) -> Sequence:
    tokens = prompt if isinstance(prompt, list) else [index % 5 + 1 for index in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return engine.requests[engine.add_request(tokens, params)]
