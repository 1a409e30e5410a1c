"""Faults: engines that are wrong in one place, and the traces that they leave.

    python -m support.faults        records docs/exercises/*.jsonl.zst anew, in tests/

Each fault is of a class that real schedulers and caches have had, put into the engine's own code by
a patch of a few lines. Knows how to put it in and what to ask such an engine. Does not know what
the check says of it (`test_check.py`).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from nanovllm.engine import model_inputs
from nanovllm.engine.batch import Batch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.sampling_params import SamplingParams
from nvtrace.recorder import record
from support import fake_runner
from support.fake_runner import FakeRunner, FakeStep, Settings, digests, make_engine
from support.golden import normalised
from support.workload import Request, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.model_inputs import DecodeInputs, PrefillInputs
    from nanovllm.engine.sequence import Sequence
    from nanovllm.observer import Observer

EXERCISES = Path(__file__).parents[2] / "docs" / "exercises"
_MOST_STEPS = 60  # an engine that is wrong may never come to its end

_SETTINGS = Settings(
    kvcache_block_size=4,
    num_kvcache_blocks=16,
    max_num_batched_tokens=16,
    max_num_seqs=4,
    max_model_len=48,
)
_STEM = [1, 2, 1, 2, 2, 1, 2, 2]
_SHARED = [
    Request([*_STEM, 1], max_tokens=6),
    Request([*_STEM, 2], max_tokens=14, arrival=2),
    Request([*_STEM, 1, 1], max_tokens=6, arrival=3),
    Request([2, 2, 2, 1, 1], max_tokens=12, arrival=9),
    Request([*_STEM, 1, 2], max_tokens=4, arrival=10),
]
_LONG = [
    Request([1, 2] * 11, max_tokens=5),
    Request([2, 1, 1], max_tokens=9),
    Request([*_STEM, *_STEM, 1], max_tokens=5, arrival=4),
    Request([1, 2] * 11, max_tokens=3, arrival=9),
]
_CROWD = [Request([1, 2, 1, 1, 2, number], max_tokens=20) for number in range(3)]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        name: of the exercise. It names the symptom, not the fault.
        workload: what makes it show.
        put_in: patches the engine.
        invariant: the first one that is found not to hold.
    """

    name: str
    workload: Workload
    put_in: Callable[[pytest.MonkeyPatch], None]
    invariant: str


class BlindRunner(FakeRunner):
    """A model that answers right whatever its pages hold, so that a fault runs on as it would.

    (The fake model looks at every slot that it reads, and would stop the engine at once.)
    """

    runs_ahead = False

    @override
    def launch(self, batch: Batch, _engine_step: int) -> FakeStep:
        inputs: PrefillInputs | DecodeInputs
        if batch.phase == "decode":
            inputs = model_inputs.prepare_decode(batch, self.block_size)
            self.observer.prepare_decode_tensors(inputs)
        else:
            inputs = model_inputs.prepare_prefill(batch, self.block_size)
            self.observer.prepare_prefill_tensors(inputs)
        reason = "device_has_no_graphs" if batch.phase == "decode" else batch.phase
        self.observer.run_eager(reason, len(inputs.input_ids))
        return FakeStep(self, batch, [digests(seq.token_ids)[-1] for seq in batch.sampled_seqs])


# -- pages -----------------------------------------------------------------------------------------


def _free_what_others_hold(patch: pytest.MonkeyPatch) -> None:
    def deallocate(self: BlockManager, seq: Sequence) -> list[int]:
        released = seq.block_table[::-1]
        for block_id in released:
            self.ref_counts[block_id] = 0  # whoever else holds it
            self.free_blocks[block_id] = None
        seq.block_table = []
        seq.num_computed_tokens = seq.num_cached_tokens = 0
        self.observer.blocks_release(seq, released, released)
        return released

    patch.setattr(BlockManager, "deallocate", deallocate)


def _keep_a_page_for_ever(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.deallocate

    def deallocate(self: BlockManager, seq: Sequence) -> list[int]:
        del seq.block_table[0]  # nobody has it any more, and nobody gives it back
        return original(self, seq)

    patch.setattr(BlockManager, "deallocate", deallocate)


def _take_the_newest_page_first(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.deallocate

    def deallocate(self: BlockManager, seq: Sequence) -> list[int]:
        freed = original(self, seq)
        for block_id in freed:
            self.free_blocks.move_to_end(block_id, last=False)
        return freed

    patch.setattr(BlockManager, "deallocate", deallocate)


def _hash_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.hash_full_blocks

    def hash_full_blocks(self: BlockManager, seq: Sequence, num_computed_before: int) -> None:
        num_computed, seq.num_computed_tokens = seq.num_computed_tokens, seq.num_tokens
        original(self, seq, num_computed_before)
        seq.num_computed_tokens = num_computed

    patch.setattr(BlockManager, "hash_full_blocks", hash_full_blocks)


def _take_a_page_one_token_early(patch: pytest.MonkeyPatch) -> None:
    def needs_block(self: BlockManager, seq: Sequence) -> bool:
        return seq.num_tokens >= len(seq.block_table) * self.block_size

    patch.setattr(BlockManager, "needs_block", needs_block)


# -- queues and budgets ----------------------------------------------------------------------------


def _admit_the_shortest_first(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._admit_head

    def admit_head(self: Scheduler, batch: Batch, chunk_any: bool) -> bool:
        self.waiting = deque(sorted(self.waiting, key=lambda seq: seq.num_tokens))
        return original(self, batch, chunk_any)

    patch.setattr(Scheduler, "_admit_head", admit_head)


def _compute_one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    original = Batch.add

    def add(self: Batch, seq: Sequence) -> None:
        self.token_budget += 1
        original(self, seq)
        self.token_budget -= 1

    patch.setattr(Batch, "add", add)


def _preempt_the_oldest(patch: pytest.MonkeyPatch) -> None:
    def make_room(self: Scheduler, seq: Sequence) -> bool:
        while not self.block_manager.can_append(seq):
            victim = self.running.pop(0)
            self._preempt(victim, for_seq=seq)
            if victim is seq:
                return False
        self.block_manager.may_append(seq)
        return True

    patch.setattr(Scheduler, "_make_room", make_room)


def _go_on_past_the_end(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.add

    def add(self: Scheduler, seq: Sequence) -> None:
        seq.max_num_tokens += 1
        original(self, seq)

    patch.setattr(Scheduler, "add", add)


# -- a step ----------------------------------------------------------------------------------------


def _compute_a_chunks_last_token_again(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.postprocess

    def postprocess(
        self: Scheduler, batch: Batch, token_ids: list[int], stopped: Container[Sequence] = ()
    ) -> list[Sequence]:
        finished = original(self, batch, token_ids, stopped)
        for seq in batch.seqs:
            seq.num_computed_tokens -= seq.is_prefilling
        return finished

    patch.setattr(Scheduler, "postprocess", postprocess)


def _write_to_the_next_slot(patch: pytest.MonkeyPatch) -> None:
    original = model_inputs.prepare_decode

    def prepare_decode(batch: Batch, block_size: int) -> DecodeInputs:
        inputs = original(batch, block_size)
        slots = [slot + (slot % block_size == block_size - 1) for slot in inputs.slot_mapping]
        return replace(inputs, slot_mapping=slots)

    patch.setattr(model_inputs, "prepare_decode", prepare_decode)


FAULTS = (
    Fault(
        "01-an-answer-turns-into-anothers",
        Workload(_SETTINGS, _SHARED),
        _free_what_others_hold,
        "ref_counts",
    ),
    Fault(
        "02-the-longer-it-runs-the-fewer-fit",
        Workload(_SETTINGS, _SHARED),
        _keep_a_page_for_ever,
        "ref_counts",
    ),
    Fault(
        "03-the-cache-forgets-what-was-just-used",
        Workload(_SETTINGS, _SHARED),
        _take_the_newest_page_first,
        "free_list",
    ),
    Fault(
        "04-the-second-of-two-equal-prompts-is-nonsense",
        Workload(replace(_SETTINGS, max_num_batched_tokens=8), _LONG),
        _hash_before_it_is_computed,
        "hash_chain",
    ),
    Fault(
        "05-preemptions-with-room-to-spare",
        Workload(replace(_SETTINGS, num_kvcache_blocks=8), _CROWD),
        _take_a_page_one_token_early,
        "table_length",
    ),
    Fault(
        "06-the-long-question-never-comes-on",
        Workload(replace(_SETTINGS, max_num_seqs=2), [*_LONG, *_SHARED]),
        _admit_the_shortest_first,
        "head_first",
    ),
    Fault(
        "07-a-buffer-is-one-too-small",
        Workload(replace(_SETTINGS, max_num_batched_tokens=8), [_LONG[0], *_LONG[2:]]),
        _compute_one_token_too_many,
        "budgets",
    ),
    Fault(
        "08-the-first-to-come-is-the-last-to-go",
        Workload(replace(_SETTINGS, num_kvcache_blocks=8), _CROWD),
        _preempt_the_oldest,
        "youngest_first",
    ),
    Fault("09-one-word-more", Workload(_SETTINGS, _SHARED), _go_on_past_the_end, "ends"),
    Fault(
        "10-long-prompts-take-too-long",
        Workload(replace(_SETTINGS, max_num_batched_tokens=8), _LONG),
        _compute_a_chunks_last_token_again,
        "covered_once",
    ),
    Fault(
        "11-every-fourth-word-is-wrong",
        Workload(_SETTINGS, _SHARED),
        _write_to_the_next_slot,
        "slots",
    ),
)


def record_fault(fault: Fault, path: Path) -> None:
    """Let an engine with this fault run, and record it."""
    with (
        pytest.MonkeyPatch.context() as patch,
        record(path, existing="replace") as recorder,
        suppress(Exception),  # a fault may end in one; then that is in the trace
    ):
        patch.setattr(fake_runner, "FakeRunner", BlindRunner)
        fault.put_in(patch)
        _run(fault.workload, recorder)


def record_sound(workload: Workload, path: Path) -> None:
    """The same without a fault."""
    with pytest.MonkeyPatch.context() as patch, record(path, existing="replace") as recorder:
        patch.setattr(fake_runner, "FakeRunner", BlindRunner)
        _run(workload, recorder)


def _run(workload: Workload, observer: Observer) -> None:
    engine = make_engine(workload.settings, observer)
    last_arrival = max(request.arrival for request in workload.requests)
    for now in range(_MOST_STEPS):
        for request in workload.requests:
            if request.arrival == now:
                _ask(engine, request)
        if now > last_arrival and engine.is_finished():
            return
        engine.step()


def _ask(engine: LLMEngine, request: Request) -> None:
    params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
    engine.add_request(request.prompt, params)


def main() -> None:
    """Record all exercises anew; those that differ in more than their times take their places."""
    with tempfile.TemporaryDirectory() as folder:
        for fault in FAULTS:
            path = EXERCISES / f"{fault.name}.jsonl.zst"
            made = Path(folder, path.name)
            record_fault(fault, made)
            if not path.exists() or normalised(made) != normalised(path):
                shutil.copy(made, path)
                sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
