"""OutputProcessor: sampled tokens -> text, and which requests their own text has stopped.

Knows the text of those requests that need it while they run: those with stop strings, and all while
somebody streams. Does not end a request: it tells the scheduler which ones are stopped. vLLM's
counterpart is `vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.engine.detokenizer import Detokenizer

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence
    from nanovllm.utils.tokenizer import Tokenizer


class OutputProcessor:
    """The texts of an engine's unfinished requests.

    Args:
        tokenizer: gives tokens their bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.detokenizers: dict[int, Detokenizer] = {}  # by seq_id

    def add(self, seq: Sequence) -> None:
        """A request was queued."""
        stop = seq.sampling_params.stop
        if stop:
            self.detokenizers[seq.seq_id] = Detokenizer(self.tokenizer.token_bytes, stop)

    def process(self, seqs: list[Sequence], token_ids: list[int]) -> list[Sequence]:
        """Take in a step's tokens, one for each of `seqs`.

        Returns:
            Those of `seqs` whose text has reached a stop string.
        """
        if not self.detokenizers:
            return []
        stopped = []
        for seq, token_id in zip(seqs, token_ids, strict=True):
            detokenizer = self.detokenizers.get(seq.seq_id)
            if detokenizer is not None and detokenizer.add(token_id):
                stopped.append(seq)
        return stopped

    def finish(self, seq: Sequence) -> str:
        """The whole text of a request that has ended. It is forgotten here."""
        detokenizer = self.detokenizers.pop(seq.seq_id, None)
        if detokenizer is None:
            return self.tokenizer.decode(seq.completion_token_ids)
        detokenizer.finish()
        return detokenizer.text

    def reset(self) -> None:
        """Forget every request."""
        self.detokenizers.clear()
