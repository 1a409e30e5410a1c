"""OutputProcessor: sampled tokens -> text, and which requests have reached a stop string.

It decodes while a request runs only if the request has stop strings, or during a `stream`. The
scheduler ends the requests that have reached a stop string. vLLM's counterpart is
`vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.utils.detokenizer import Detokenizer

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence
    from nanovllm.utils.tokenizer import Tokenizer


class OutputProcessor:
    """The texts of an engine's unfinished requests.

    Args:
        tokenizer: has the bytes of each token.

    Attributes:
        is_streaming: while it is True, every request that is queued is decoded token by token;
            `stop_streaming` sets it to False.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.detokenizers: dict[int, Detokenizer] = {}  # by seq_id
        self.is_streaming = False
        # By seq_id, since the last `take_updates`.
        self.updates: dict[int, tuple[Sequence, Detokenizer]] = {}

    def add(self, seq: Sequence) -> None:
        """Decode this request's tokens as they come, if it has stop strings or is streamed."""
        stop = seq.sampling_params.stop or ()
        if stop or self.is_streaming:
            self.detokenizers[seq.seq_id] = Detokenizer(self.tokenizer.token_bytes, stop)

    def process(self, seqs: list[Sequence], token_ids: list[int]) -> list[Sequence]:
        """Decode a step's tokens, one for each of `seqs`.

        Returns:
            Those of `seqs` whose text has reached a stop string.
        """
        if not self.detokenizers:
            return []
        stopped = []
        for seq, token_id in zip(seqs, token_ids, strict=True):
            detokenizer = self.detokenizers.get(seq.seq_id)
            if detokenizer is not None:
                if detokenizer.add(token_id):
                    stopped.append(seq)
                self._note(seq, detokenizer)
        return stopped

    def finish(self, seq: Sequence) -> str:
        """Return the whole text of a request that has ended, and forget the request."""
        detokenizer = self.detokenizers.pop(seq.seq_id, None)
        if detokenizer is None:
            return self.tokenizer.decode(seq.completion_token_ids)
        detokenizer.finish()
        self._note(seq, detokenizer)
        return detokenizer.text

    def reset(self, seqs: list[Sequence]) -> None:
        """Finish the texts of `seqs`, which an exception has ended, and forget every request."""
        for seq in seqs:
            if seq.seq_id in self.detokenizers:
                self.finish(seq)
        self.detokenizers.clear()

    # -- streaming -------------------------------------------------------------------------------

    def stop_streaming(self) -> None:
        """Do not collect updates any more."""
        self.is_streaming = False
        self.updates.clear()

    def take_updates(self) -> list[tuple[Sequence, str]]:
        """The requests that got new text or ended since the last call, each with that text."""
        updates = [(seq, detokenizer.take()) for seq, detokenizer in self.updates.values()]
        self.updates.clear()
        return [(seq, delta) for seq, delta in updates if delta or seq.is_finished]

    def _note(self, seq: Sequence, detokenizer: Detokenizer) -> None:
        if self.is_streaming:
            self.updates[seq.seq_id] = seq, detokenizer
