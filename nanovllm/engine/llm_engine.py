"""LLMEngine: takes requests, runs `EngineCore` step by step, returns text.

vLLM's counterpart is `vllm/v1/engine/llm_engine.py`.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore, Runner
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.policies import POLICIES
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import RequestRefusedError
from nanovllm.observer import SILENT, Observer
from nanovllm.outputs import (
    RequestOutput,
    StreamOutput,
    refused_output,
    request_output,
    stream_output,
)
from nanovllm.utils.input_processor import InputProcessor, Request, check_fits
from nanovllm.utils.progress import progress_bar
from nanovllm.utils.vllm_names import accepts_vllm_options

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from collections.abc import Sequence as Seq

    from transformers import PreTrainedTokenizerBase

    from nanovllm.config import Config
    from nanovllm.engine.prefix_cache_stats import PrefixCacheStats
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.utils.model_config import ModelConfig
    from nanovllm.utils.tokenizer import Tokenizer

    Prompt = str | Seq[int] | dict[str, Any]
    Prompts = str | dict[str, Any] | Seq[Prompt]
    Stream = Generator[StreamOutput, None, None]


@accepts_vllm_options("generate", "stream", "add_request")
class LLMEngine:
    """Takes requests and returns their text. `LLM` is an LLMEngine, made from a model's folder.

    Threads can share it: a lock lets one in at a time. A call waits for the calls of other threads:
    for `generate` until it returns, for `stream` until its next output. `exit` does not wait, nor
    does what only reads (`is_finished`, `engine_step`, `prefix_cache_stats`, `get_tokenizer`).

    Args:
        config: the settings, resolved.
        model_config: the model's config.
        runner: computes batches.
        num_kvcache_blocks: number of blocks in the runner's KV cache.
        eos_token_ids: any of these ends a sequence.
        tokenizer: text -> tokens -> text.
        observer: called for everything the engine does.
    """

    def __init__(
        self,
        *,
        config: Config,
        model_config: ModelConfig,
        runner: Runner,
        num_kvcache_blocks: int,
        eos_token_ids: Seq[int],
        tokenizer: Tokenizer,
        observer: Observer = SILENT,
    ) -> None:
        self.config = config
        self.observer = observer
        self.max_positions = model_config.max_position_embeddings
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(tokenizer, model_config.vocab_size)
        self.output_processor = OutputProcessor(tokenizer)
        block_manager = BlockManager(
            num_kvcache_blocks,
            config.kvcache_block_size,
            observer,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            eos_token_ids=eos_token_ids,
            observer=observer,
            policy=POLICIES[config.policy],
        )
        self.core = EngineCore(self.scheduler, runner, self.output_processor.process, observer)
        self.requests: dict[int, Sequence] = {}  # not yet ended
        self.num_requests = 0
        self._lock = RLock()  # not a Lock: an observer may call the engine back
        self._handled: BaseException | None = None  # the last exception that _recovering handled

    # -- request by request ----------------------------------------------------------------------

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one request.

        Args:
            prompt: text, or token ids; or, as for vLLM, a dict with one of them as "prompt" or
                "prompt_token_ids".
            sampling_params: SamplingParams() if None.

        Returns:
            The request's seq_id.

        Raises:
            TypeError, ValueError: the prompt or the sampling params are malformed.
            RequestRefusedError: the request could never finish. Nothing was queued.

        Any other exception while it is queued (Ctrl-C, say) ends every unfinished request, as in
        `step`.
        """
        with self._lock:
            return self._enqueue(*self.input_processor.one(prompt, sampling_params)[:2])

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the outputs of the requests that ended in it.

        An exception in it (from the model, or Ctrl-C) ends every unfinished request; after that the
        engine can be used again. (Not with tensor parallelism, if the forward pass
        raised it: then every later step raises WorkerError.)
        """
        with self._lock, self._recovering():
            if self.is_finished():
                return []
            finished = self.core.step_ahead() if self.core.runner.runs_ahead else self.core.step()
            return [self._output(seq) for seq in finished]

    def abort(self, seq_id: int) -> RequestOutput:
        """End a request now. Returns what it has so far.

        Raises:
            KeyError: no unfinished request has this seq_id.
        """
        with self._lock:
            if seq_id not in self.requests:
                raise KeyError(f"no unfinished request has seq_id {seq_id}")
            seq = self.requests[seq_id]
            with self._recovering():
                self.scheduler.abort(seq)
                return self._output(seq)

    @property
    def engine_step(self) -> int:
        """How many steps have begun."""
        return self.core.engine_step

    def is_finished(self) -> bool:
        """Has every request ended?"""
        return self.scheduler.is_finished()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return transformers' tokenizer of this model, or raise TokenizerError."""
        return self.tokenizer.of_transformers

    # -- the prefix cache ------------------------------------------------------------------------

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """How many tokens were looked up in the prefix cache, and found. All 0 if it is off."""
        return dataclasses.replace(self.scheduler.block_manager.stats)

    def reset_prefix_cache(self) -> None:
        """Remove all prefixes from the cache, and reset its statistics.

        Raises:
            RuntimeError: requests are unfinished, and use their blocks.
        """
        with self._lock:
            self._check_finished("reset_prefix_cache()")
            self.scheduler.block_manager.reset_prefix_cache()

    # -- all at once -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run all prompts until they have finished.

        Args:
            prompts: each as for `add_request`; a single text or dict is one prompt.
            sampling_params: one for all, or a list with one for each.
            use_tqdm: show a progress bar, if stderr is a terminal.

        Returns:
            One output for each prompt, in the prompts' order. A request that could never finish is
            refused (finish_reason "refused"); the others run.

        Raises:
            TypeError, ValueError: an argument is malformed; nothing was queued.
            RequestRefusedError: all requests were refused.
            RuntimeError: requests from `add_request` are unfinished, or a `stream` is open.
        """
        with self._lock:
            self._check_idle()
            requests = self.input_processor.batch(prompts, sampling_params)
            num_prompts = len(requests)
            self.observer.generate_start(num_prompts)
            with self._recovering(), progress_bar(num_prompts, shows=use_tqdm) as advance:
                place_of, outputs = self._enqueue_all(requests)
                advance(len(outputs))
                while not self.is_finished():
                    finished = self.step()
                    outputs.update((place_of[output.seq_id], output) for output in finished)
                    advance(len(finished))
            self.observer.generate_finish(num_prompts)
        for place, (token_ids, _, text) in enumerate(requests):
            outputs[place].prompt, outputs[place].prompt_token_ids = text, token_ids
        return [outputs[place] for place in range(num_prompts)]

    def stream(
        self, prompts: Prompts, sampling_params: SamplingParams | list[SamplingParams] | None = None
    ) -> Stream:
        """Run all prompts until they have finished, and yield the new text after each step.

        Between two outputs, requests may be added and aborted: the stream yields their outputs
        too. It ends when all requests have ended; closing it earlier aborts the unfinished ones.

        Args:
            prompts: as for `generate`. They are checked at once, and queued when the first output
                is requested.
            sampling_params: as for `generate`.

        Yields:
            First an output for each refused request; then, after each step, one for each request
            that got new text or has ended.

        Raises:
            As `generate`; and TokenizerError, if the tokenizer cannot decode token by token.
        """
        with self._lock:
            self._check_idle()
            self.tokenizer.check_detokenizable("streaming needs")
            requests = self.input_processor.batch(prompts, sampling_params)
        return self._locked(self._stream(requests))

    def _locked(self, stream: Stream) -> Stream:
        """The same outputs. The lock is held while one is made, and free between two of them."""
        try:
            while True:
                with self._lock:
                    output = next(stream, None)
                if output is None:
                    return
                yield output
        finally:
            with self._lock:
                stream.close()

    def _stream(self, requests: list[Request]) -> Stream:
        self._check_idle()
        num_prompts = len(requests)
        self.observer.generate_start(num_prompts)
        self.output_processor.is_streaming = True
        try:
            place_of, refused = self._enqueue_all(requests)
            num_outputs = len(refused)
            for place, output in refused.items():
                yield stream_output(output, "", place)
            while not self.is_finished() or self.output_processor.updates:
                self.step()  # nothing, if abort() has ended the last request
                # All are made before the first is yielded: the caller may call abort() in between.
                updates = [
                    stream_output(request_output(seq), delta, place_of.get(seq.seq_id))
                    for seq, delta in self.output_processor.take_updates()
                ]
                for update in updates:
                    num_outputs += update["finish_reason"] is not None
                    yield update
        finally:
            self.output_processor.stop_streaming()
            # If the stream was closed before its end, no one needs the rest.
            for seq_id in [*self.requests]:
                self.abort(seq_id)
        self.observer.generate_finish(num_outputs)

    # -- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """Reset everything after an exception, which may come at any point of a step."""
        try:
            yield
        except RequestRefusedError:
            raise  # nothing was queued, nothing has changed
        except BaseException as error:
            if error is not self._handled:  # not handled by an inner _recovering
                self._handled = error
                seqs = list(self.requests.values())
                self.requests.clear()
                self.output_processor.reset(seqs)
                try:  # an observer may raise as well: reset all the same
                    self.observer.engine_error(error)
                finally:
                    self.scheduler.reset(seqs)
            raise

    def _check_idle(self) -> None:
        if self.output_processor.is_streaming:
            raise RuntimeError("a stream() is open: run it to its end or close() it first")
        self._check_finished("generate() or stream()")

    def _check_finished(self, what: str) -> None:
        if not self.is_finished():
            raise RuntimeError(
                f"{len(self.requests)} requests are unfinished: run step() until is_finished(), or "
                f"abort() them, before {what}"
            )

    def _enqueue_all(
        self, requests: list[Request]
    ) -> tuple[dict[int | None, int], dict[int, RequestOutput]]:
        """Returns seq_id -> index of the prompt, and index -> output of the refused ones."""
        place_of: dict[int | None, int] = {}
        refused: dict[int, RequestOutput] = {}
        for place, (token_ids, params, _) in enumerate(requests):
            try:
                place_of[self._enqueue(token_ids, params)] = place
            except RequestRefusedError as error:
                refused[place] = refused_output(len(token_ids), error)
                if len(refused) == len(requests):
                    raise
        return place_of, refused

    def _enqueue(self, token_ids: list[int], params: SamplingParams) -> int:
        try:
            check_fits(len(token_ids), params.max_tokens, self.scheduler, self.max_positions)
        except RequestRefusedError as error:
            self.observer.request_refused(token_ids, error)
            raise
        seq_id = self.num_requests
        self.num_requests += 1
        # An odd factor modulo 2**64: different engine seeds give a request different seeds.
        own_seed = (self.config.seed * 0x9E3779B97F4A7C15 + seq_id) % 2**64
        seed = own_seed if params.seed is None else params.seed
        seq = Sequence(seq_id, token_ids, params, seed)
        self._handled = None
        with self._recovering():
            self.requests[seq_id] = seq
            self.output_processor.add(seq)
            self.scheduler.add(seq)
        return seq_id

    def _output(self, seq: Sequence) -> RequestOutput:
        del self.requests[seq.seq_id]
        text = self.output_processor.finish(seq)
        self.observer.request_output(seq, text)
        return request_output(seq, text)
