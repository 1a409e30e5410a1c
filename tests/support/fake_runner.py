"""The real engine around a model that is a pure function of the tokens before.

Knows what each slot of a KV cache must hold, and looks at every slot that a step may read. Does not
know requests (`workload.py`). Everything but the model is the engine's own: queues, pages, layout.

The model's "K and V" of a position is a digest of all tokens up to it, made from the digest of the
position before (read from the cache) and the token's id, as attention makes a state from states.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, cast

from nanovllm.config import Config
from nanovllm.engine.core import Launched
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_inputs import prepare_decode, prepare_prefill
from nanovllm.observer import SILENT, Observer
from nanovllm.utils.model_config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanovllm.engine.batch import Batch
    from nanovllm.engine.model_inputs import DecodeInputs, PrefillInputs
    from nanovllm.engine.sequence import Sequence
    from nanovllm.gpu.run_ahead import NextStep
    from nanovllm.utils.tokenizer import Tokenizer

VOCAB_SIZE = 7
EOS_TOKEN_IDS = (0, 6)
START = 1  # the digest of no tokens
FAKE_MODEL = ModelConfig(
    architecture="Fake",
    vocab_size=VOCAB_SIZE,
    hidden_size=1,
    intermediate_size=1,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=1,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=10**6,
    tie_word_embeddings=False,
    attention_bias=False,
    hidden_act="silu",
    dtype=None,
    eos_token_ids=EOS_TOKEN_IDS,
    eos_by_file={"config.json": EOS_TOKEN_IDS},
)
Moment = Literal["scheduled", "ran", "sampled"]


class InjectedError(Exception):
    """What a test throws into a step."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine's options, under the names that `LLM` knows them by."""

    kvcache_block_size: int = 4
    num_kvcache_blocks: int = 1000
    max_num_batched_tokens: int = 1000
    max_num_seqs: int = 100
    max_model_len: int = 1000
    enable_prefix_caching: bool = True
    policy: str = "prefill_first"


def digests(token_ids: list[int]) -> list[int]:
    """For each position, what its slot must hold: a digest of all tokens up to it."""
    held, digest = [], START
    for token_id in token_ids:
        digest = hash((digest, token_id))  # of ints: the same in every process
        held.append(digest)
    return held


def next_token(digest: int) -> int:
    """What the model says after the tokens behind `digest`."""
    return digest % VOCAB_SIZE


@dataclass(slots=True, eq=False)
class FakeStep(Launched):
    """A step under way: its states, one for each token that is sampled."""

    runner: FakeRunner
    batch: Batch
    states: list[int]
    predicted: NextStep | None = None

    @property
    def can_be_followed(self) -> bool:
        """Decodes only, as with graphs."""
        return self.batch.num_prefills == 0

    def token_ids(self) -> list[int]:
        """What the model says."""
        token_ids = [next_token(state) for state in self.states] if self.batch.sampled_seqs else []
        self.runner.at("sampled", self.batch)
        return token_ids

    def gpu_ns(self) -> int | None:
        """There is no GPU."""
        return None

    def launch_next(self, next_step: NextStep) -> FakeStep:
        """See Launched."""
        return self.runner.launch_next(self, next_step)

    def is_step_of(self, batch: Batch) -> bool:
        """See Launched."""
        rows = None if self.predicted is None else self.predicted.rows_of(batch)
        if rows is None:
            self.runner.num_discarded += 1
            return False
        runner, batch_size = self.runner, len(batch.seqs)
        runner.num_ahead += 1
        runner.at("scheduled", batch)
        inputs = prepare_decode(batch, runner.block_size)
        runner.observer.prepare_decode_tensors(inputs)
        runner.observer.cudagraph_replay(batch_size, batch_size, is_ahead=True)
        runner.check_decode(batch, inputs)
        runner.at("ran", batch)
        self.batch, self.states = batch, [self.states[row] for row in rows]
        return True


class FakeRunner:
    """Stands in for ModelRunner: runs a batch on digests, and looks at every slot it may read.

    A step that is run ahead is computed at once, as on a GPU: its digests are in their slots before
    anybody has scheduled it, whatever becomes of the guess. If the guess came true, the step is not
    computed again: what is in the slots by then must do.

    Attributes:
        num_ahead: steps that were launched ahead and came true.
        num_discarded: steps that were launched ahead and turned out to be others.
        at: called as `at(moment, batch)` when the batch was scheduled, ran, and was sampled.
    """

    runs_ahead = True  # as a GPU with a graph for every batch

    def __init__(self, config: Config, observer: Observer) -> None:
        assert config.num_kvcache_blocks is not None
        self.block_size = config.kvcache_block_size
        self.num_kvcache_blocks = config.num_kvcache_blocks
        self.observer = observer
        self.cache: dict[int, int] = {}  # slot -> digest
        self.num_ahead = self.num_discarded = 0
        self.at: Callable[[Moment, Batch], None] = _pass_by

    def launch(self, batch: Batch, _engine_step: int) -> FakeStep:
        """What ModelRunner.launch does, with the same words to the observer."""
        self.at("scheduled", batch)
        assert batch, "an empty batch"
        self._check_contexts(batch.seqs)  # before this step writes anything
        inputs: PrefillInputs | DecodeInputs
        if batch.phase == "decode":
            inputs = prepare_decode(batch, self.block_size)
            self.observer.prepare_decode_tensors(inputs)
            states = self._decode(inputs)
            self.observer.run_eager("device_has_no_graphs", len(batch.seqs))
            self.check_decode(batch, inputs)
        else:
            inputs = prepare_prefill(batch, self.block_size)
            self.observer.prepare_prefill_tensors(inputs)
            states = self._prefill(inputs, batch.seqs)
            self.observer.run_eager(batch.phase, len(inputs.input_ids))
        self.at("ran", batch)
        return FakeStep(self, batch, states)

    def launch_next(self, step: FakeStep, next_step: NextStep) -> FakeStep:
        """What a GPU does with a step that is launched ahead: it computes it at once."""
        new_blocks = dict(next_step.new_blocks)
        states = []
        for index, seq, position in zip(
            next_step.continuing, next_step.seqs, next_step.positions, strict=True
        ):
            table = [*seq.block_table, *([new_blocks[index]] if index in new_blocks else [])]
            digest = digests(seq.token_ids)[-1]  # of what is computed: the new token is not there
            states.append(hash((digest, next_token(digest))))
            slot = table[position // self.block_size] * self.block_size
            self.cache[slot + position % self.block_size] = states[-1]
        return FakeStep(self, step.batch, states, next_step)

    def check_decode(self, batch: Batch, inputs: DecodeInputs) -> None:
        """After a decode: does every sequence find its own digests through its table?"""
        contexts = zip(batch.seqs, inputs.block_tables, inputs.context_lens, strict=True)
        for context in contexts:
            self._check_context(*context)

    def _prefill(self, inputs: PrefillInputs, seqs: list[Sequence]) -> list[int]:
        states = [0] * len(inputs.input_ids)
        context_lens = [stop - start for start, stop in pairwise(inputs.cu_seqlens_k)]
        for index, (first, stop) in enumerate(pairwise(inputs.cu_seqlens_q)):
            start = context_lens[index] - (stop - first)
            assert inputs.positions[first:stop] == list(range(start, start + stop - first))
            table = None if inputs.block_tables is None else inputs.block_tables[index]
            state = self._read(table, start - 1) if start else START
            for row in range(first, stop):
                state = states[row] = hash((state, inputs.input_ids[row]))
        self._write(inputs.slot_mapping, states)
        for index, (seq, context_len) in enumerate(zip(seqs, context_lens, strict=True)):
            if inputs.block_tables is None:  # attention takes K and V as they come
                first, stop = inputs.cu_seqlens_k[index : index + 2]
                assert states[first:stop] == digests(seq.token_ids[:context_len])
            else:
                self._check_context(seq, inputs.block_tables[index], context_len)
        return [states[row] for row in inputs.logits_indices]

    def _decode(self, inputs: DecodeInputs) -> list[int]:
        states = []
        for index, position in enumerate(inputs.positions):
            assert inputs.context_lens[index] == position + 1
            state = self._read(inputs.block_tables[index], position - 1) if position else START
            states.append(hash((state, inputs.input_ids[index])))
        self._write(inputs.slot_mapping, states)
        return states

    def _write(self, slot_mapping: list[int], states: list[int]) -> None:
        assert len(set(slot_mapping)) == len(slot_mapping), "two tokens share a slot"
        num_slots = self.num_kvcache_blocks * self.block_size
        assert all(0 <= slot < num_slots for slot in slot_mapping), "a slot outside the pool"
        self.cache.update(zip(slot_mapping, states, strict=True))

    def _read(self, table: list[int] | None, position: int) -> int:
        assert table is not None, "there is a context, but no table to find it by"
        block_id = table[position // self.block_size]
        return self.cache[block_id * self.block_size + position % self.block_size]

    def _check_contexts(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._check_context(seq, seq.block_table, seq.num_computed_tokens)

    def _check_context(self, seq: Sequence, table: list[int], length: int) -> None:
        """Does each of the first `length` positions find its own digest through the table?"""
        held = [self._read(table, position) for position in range(length)]
        assert held == digests(seq.token_ids[:length]), f"{seq} would attend to a wrong slot"


def text_of(token_ids: list[int]) -> str:
    """One letter a token."""
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


class FakeTokenizer:
    """One letter a token, and no files."""

    exists = True

    def check_detokenizable(self, _need: str) -> None:
        """Each token is a letter."""

    def token_bytes(self, token_id: int) -> bytes:
        return text_of([token_id]).encode()

    def load(self, vocab_size: int) -> None:
        """There are no files."""

    def eos_token_ids(self) -> tuple[int, ...]:
        return ()

    def decode(self, token_ids: list[int]) -> str:
        return text_of(token_ids)


def _pass_by(_moment: Moment, _batch: Batch) -> None:
    pass


def make_engine(
    settings: Settings, observer: Observer | None = None, runner: type[FakeRunner] | None = None
) -> LLMEngine:
    """Build the real engine around the fake model."""
    observer = SILENT if observer is None else observer
    config = Config.create("fake", {**asdict(settings), "device": "cpu"}).resolve(FAKE_MODEL)
    observer.engine_init(config, FAKE_MODEL)
    engine = LLMEngine(
        config=config,
        model_config=FAKE_MODEL,
        runner=(runner or FakeRunner)(config, observer),
        num_kvcache_blocks=settings.num_kvcache_blocks,
        eos_token_ids=EOS_TOKEN_IDS,
        tokenizer=cast("Tokenizer", FakeTokenizer()),
        observer=observer,
    )
    sources = ["config.json"] * len(EOS_TOKEN_IDS)
    observer.engine_ready(settings.num_kvcache_blocks, EOS_TOKEN_IDS, sources)
    return engine


def runner_of(engine: LLMEngine) -> FakeRunner:
    """The fake model of an engine from `make_engine`."""
    return cast("FakeRunner", engine.core.runner)
