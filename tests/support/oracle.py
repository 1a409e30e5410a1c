"""The right greedy tokens of a checkpoint, by transformers, and listeners for an engine under test.

Knows prompts, tokens and the engine's public face. Does not know how the engine schedules or
computes: what a run did inside is heard from its moments alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, Observer, SamplingParams
from nanovllm.observer import SILENT
from support.models import VOCAB_SIZE, make_reference, random_tokens, save_reference

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from transformers import PreTrainedModel

    from nanovllm.engine.batch import Batch
    from nanovllm.engine.model_inputs import DecodeInputs, PrefillInputs
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence, SequenceStatus
    from nanovllm.outputs import RequestOutput

HOOKS = tuple(name for name in vars(Observer) if not name.startswith("_"))
"""The names of all moments."""

CLEAR_MARGIN = 2e-3
"""The likeliest token leads the second by this much at least, ten times what rounding may move."""


class Oracle:
    """A checkpoint in a folder, and transformers' greedy answers to prompts.

    Args:
        reference: transformers' model with the folder's weights, in fp32.
        folder: the same model, for the engine.
    """

    def __init__(self, reference: PreTrainedModel, folder: Path) -> None:
        self.reference = reference
        self.folder = folder
        self._answers: dict[tuple[tuple[int, ...], int], tuple[list[int], float]] = {}

    @classmethod
    def create(cls, folder: Path, changes: Mapping[str, object] | None = None) -> Oracle:
        """Make a tiny random Qwen3 (see `make_reference`) in `folder`."""
        reference = make_reference(changes)
        return cls(reference, save_reference(reference, folder))

    def greedy(self, prompt: Seq[int], max_tokens: int) -> list[int]:
        """What transformers' generate(do_sample=False) appends to a prompt that runs alone."""
        return self._answer(prompt, max_tokens)[0]

    def is_clear(self, prompt: Seq[int], max_tokens: int) -> bool:
        """Is none of these tokens so close to another that rounding could swap them?"""
        return self._answer(prompt, max_tokens)[1] > CLEAR_MARGIN

    def prompts(self, lengths: Seq[int], max_tokens: int, seed: int = 0) -> list[list[int]]:
        """Random prompts of these lengths whose answers are clear."""
        prompts = []
        for index, length in enumerate(lengths):
            candidates = (
                random_tokens(length, seed=1000 * seed + 100 * index + attempt)
                for attempt in range(100)
            )
            prompts.append(next(c for c in candidates if self.is_clear(c, max_tokens)))
        return prompts

    def _answer(self, prompt: Seq[int], max_tokens: int) -> tuple[list[int], float]:
        key = (tuple(prompt), max_tokens)
        if key not in self._answers:
            generate: Any = self.reference.generate
            answer = generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = torch.cat(answer.logits).float().topk(2, dim=-1).values
            margin = float((best[:, 0] - best[:, 1]).min())
            self._answers[key] = answer.sequences[0, len(prompt) :].tolist(), margin
        return self._answers[key]


class Narrator(Observer):
    """Keeps the name of each moment, in order."""

    def __init__(self) -> None:
        self.moments: list[str] = []
        for hook in HOOKS:
            setattr(self, hook, partial(self._hear, hook))

    def _hear(self, hook: str, *_args: object, **_kwargs: object) -> None:
        self.moments.append(hook)


class Watcher(Observer):
    """Keeps what a run did inside, and checks each step: who samples, and that no page is lost.

    Attributes:
        num_cached_tokens: seq_id -> how many tokens were found cached, at each admission.
        num_preemptions: seq_id -> how often it was preempted.
        prefills: the steps that computed prompts, each as [(seq_id, number of tokens)].
        num_sampled: seq_id -> tokens drawn.
        most_running: the most sequences that ran at once.
        highest_position: the highest position computed.
        widest_table: the most pages in a table that the model was shown.
    """

    def __init__(self) -> None:
        self.num_cached_tokens: dict[int, list[int]] = defaultdict(list)
        self.num_preemptions: Counter[int] = Counter()
        self.prefills: list[list[tuple[int, int]]] = []
        self.num_sampled: Counter[int] = Counter()
        self.most_running = 0
        self.highest_position = -1
        self.widest_table = 0
        self._due: list[Sequence] = []  # those that this step must sample

    def schedule_prefill(self, batch: Batch, scheduler: Scheduler) -> None:
        """Keep who computes how much; whoever computes its last token is due."""
        pairs = list(zip(batch.seqs, batch.num_scheduled_tokens, strict=True))
        self.prefills.append([(seq.seq_id, num_tokens) for seq, num_tokens in pairs])
        assert sum(batch.num_scheduled_tokens) <= scheduler.max_num_batched_tokens
        for seq, num_tokens in pairs:
            assert 0 < num_tokens <= seq.num_uncomputed_tokens
        self._due = [seq for seq, num_tokens in pairs if num_tokens == seq.num_uncomputed_tokens]
        self._keep_running(scheduler)

    def schedule_decode(self, batch: Batch, scheduler: Scheduler) -> None:
        """Everybody who runs is due, as far as the budget reaches."""
        assert batch.seqs == scheduler.running[: scheduler.max_num_batched_tokens]
        self._due = list(batch.seqs)
        self._keep_running(scheduler)

    def schedule_mixed(self, batch: Batch, scheduler: Scheduler) -> None:
        """Whoever computes its last token is due."""
        self.schedule_prefill(batch, scheduler)

    def _keep_running(self, scheduler: Scheduler) -> None:
        self.most_running = max(self.most_running, len(scheduler.running))
        for seq in scheduler.waiting:
            assert not seq.block_table, f"{seq} waits and holds pages"

    def state_transition(self, seq: Sequence, previous: SequenceStatus, reason: str) -> None:
        """Keep what was found cached."""
        assert previous is not seq.status
        if reason == "admitted":
            self.num_cached_tokens[seq.seq_id].append(seq.num_cached_tokens)

    def preempt(
        self, victim: Sequence, for_seq: Sequence, freed: list[int], num_computed_tokens: int
    ) -> None:
        """Count."""
        assert victim is not for_seq or freed
        assert num_computed_tokens > 0
        self.num_preemptions[victim.seq_id] += 1

    def prepare_prefill_tensors(self, inputs: PrefillInputs) -> None:
        """Keep the extremes."""
        self._keep_extremes(inputs.positions, inputs.block_tables or [[]])

    def prepare_decode_tensors(self, inputs: DecodeInputs) -> None:
        """Keep the extremes."""
        self._keep_extremes(inputs.positions, inputs.block_tables)

    def _keep_extremes(self, positions: list[int], block_tables: list[list[int]]) -> None:
        self.highest_position = max(self.highest_position, *positions)
        self.widest_table = max(self.widest_table, len(block_tables[0]))

    def sample_tokens(self, seqs: list[Sequence], token_ids: list[int]) -> None:
        """Count; exactly those that are due are sampled."""
        assert seqs == self._due
        assert len(seqs) == len(token_ids)
        self._due = []
        self.num_sampled.update(seq.seq_id for seq in seqs)

    def step_end(self, batch: Batch, finished: list[Sequence], scheduler: Scheduler) -> None:
        """Check that nobody was forgotten, and that queues, tables and pages agree."""
        assert batch.seqs
        assert not self._due
        assert all(seq.is_finished for seq in finished)
        scheduler.check()


def make_llm(folder: Path, observer: Observer | None = None, **options: object) -> LLM:
    """An engine with small pages and few of them, unless `options` say otherwise.

    What its observer raises reaches the test, unless that guards it.
    """
    settings: dict[str, Any] = {"kvcache_block_size": 4, "num_kvcache_blocks": 64, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanovllm.llm.guarded", lambda given: given or SILENT)
        return LLM(folder, observer, **settings)


def greedy_params(max_tokens: int, **changes: Any) -> SamplingParams:  # noqa: ANN401 - any of its options
    """Sampling parameters for a comparison with the oracle."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)


def tokens_of(outputs: Seq[RequestOutput]) -> list[list[int]]:
    """The generated tokens of each output."""
    return [output["token_ids"] for output in outputs]


def assert_empty(llm: LLM) -> None:
    """Nothing of any request is left in the engine: all pages are free."""
    llm.scheduler.check()
    assert llm.is_finished()
    assert llm.requests == {}
    assert llm.scheduler.block_manager.num_free_blocks == llm.scheduler.block_manager.num_blocks


def save_tokenizer(folder: Path, eos: str = "<end>", bos: str | None = None) -> None:
    """Give a folder a tokenizer with a word for each token: w0, <end> (of a turn), w2, w3 ...

    If it has a BOS token, it puts it before each text.
    """
    vocab = {f"w{token_id}": token_id for token_id in range(VOCAB_SIZE) if token_id != 1}
    words = Tokenizer(models.WordLevel(vocab | {"<end>": 1}, unk_token="w0"))  # noqa: S106 - no password
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos is not None:
        pairs = [(bos, words.token_to_id(bos))]
        words.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=pairs)
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=words, eos_token=eos, bos_token=bos).save_pretrained(folder)
