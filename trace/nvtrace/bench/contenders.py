"""Contenders: the engines that are compared.

    engine          nanovllm, without an observer
    engine traced   the same with a Recorder that writes a trace
    generate        transformers' `generate`: a static batch, padded on the left
    continuous      transformers' continuous batching

Each generates exactly the requested number of tokens for every prompt. All get the same token ids,
in one process, with the same weights, dtype, device and number of threads.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from nanovllm import LLM, SamplingParams
from nvtrace.bench import BenchmarkError
from nvtrace.bench.rounds import Outcome
from nvtrace.recorder import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from nvtrace.bench.workloads import Workload

ENGINE, TRACED, GENERATE, CONTINUOUS = "engine", "engine traced", "generate", "continuous"
REFERENCES = (GENERATE, CONTINUOUS)
_PADDING = 0
_RESULT_TIMEOUT_S = 1.0
_CPU_BLOCK_SIZE = 32  # on a CPU faster than the default of 256: transformers reads whole blocks


class Engine:
    """The engine under test, run step by step, as by `generate`.

    Attributes:
        llm: the engine.
    """

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm
        config = llm.config
        self.settings = f"{config.policy}, up to {config.max_num_seqs} at once"

    @contextmanager
    def ready(self, workload: Workload) -> Iterator[None]:  # noqa: ARG002 - the same for all
        """Empty the prefix cache: it would have the prompts of the previous round."""
        self.llm.reset_prefix_cache()
        yield

    def run(self, workload: Workload) -> Outcome:
        """Add all requests, then run steps until they have ended."""
        llm = self.llm
        seq_ids = [
            llm.add_request(
                list(request.prompt_token_ids),
                SamplingParams(
                    temperature=workload.temperature,
                    max_tokens=request.output_len,
                    ignore_eos=True,
                    seed=place,
                ),
            )
            for place, request in enumerate(workload.requests)
        ]
        token_ids: dict[int | None, list[int]] = {}
        step_ns: dict[int, int] = {}
        start = time.perf_counter_ns()
        while not llm.is_finished():
            for output in llm.step():
                token_ids[output["seq_id"]] = output["token_ids"]
            end = time.perf_counter_ns()
            step_ns[llm.engine_step], start = end - start, end
        return Outcome([token_ids[seq_id] for seq_id in seq_ids], step_ns)


@contextmanager
def running_engine(
    folder: Path, options: Mapping[str, Any], trace: Path | None = None
) -> Iterator[Engine]:
    """An engine, ended at the end of the `with` statement.

    Args:
        folder: the model's.
        options: see `nanovllm.config.Config`.
        trace: the file to record to; None to record nothing.
    """
    with ExitStack() as stack:
        recorder = None if trace is None else stack.enter_context(record(trace))
        llm = LLM(folder, observer=recorder, **options)
        stack.callback(llm.exit)
        yield Engine(ENGINE if trace is None else TRACED, llm)


class Generate:
    """transformers' `generate`: batches of `max_num_seqs`; each runs until its last has ended."""

    def __init__(self, model: Any, max_num_seqs: int) -> None:  # noqa: ANN401 - any causal LM
        self.name = GENERATE
        self.model = model
        self.max_num_seqs = max_num_seqs
        self.settings = f"static batches of up to {max_num_seqs}, padded on the left, sdpa"

    def ready(self, workload: Workload) -> AbstractContextManager[None]:  # noqa: ARG002 - for all
        """Nothing to prepare: there is no state between rounds."""
        return nullcontext()

    def run(self, workload: Workload) -> Outcome:
        """Run one batch after another. Tokens beyond a request's length are cut off."""
        token_ids: list[list[int]] = []
        for first in range(0, len(workload.requests), self.max_num_seqs):
            requests = workload.requests[first : first + self.max_num_seqs]
            width = max(len(request.prompt_token_ids) for request in requests)
            gaps = [width - len(request.prompt_token_ids) for request in requests]
            # (batch, width)    . . A B C     padded on the left, so that all end at the same place
            #                   D E F G H
            prompts = [
                [_PADDING] * gap + list(request.prompt_token_ids)
                for gap, request in zip(gaps, requests, strict=True)
            ]
            mask = [[0] * gap + [1] * (width - gap) for gap in gaps]
            num_steps = max(request.output_len for request in requests)
            answers = self.model.generate(
                torch.tensor(prompts, device=self.model.device),
                attention_mask=torch.tensor(mask, device=self.model.device),
                generation_config=_generation_config(workload.temperature, num_steps),
            )
            new = answers[:, width:].tolist()
            token_ids += [ids[: r.output_len] for ids, r in zip(new, requests, strict=True)]
        return Outcome(token_ids)


class Continuous:
    """transformers' continuous batching: its manager runs the model in a thread.

    For each round, a new manager with its blocks and its thread is created before the time starts.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - any causal LM
        self.name = CONTINUOUS
        self.model = model
        self.block_size = _CPU_BLOCK_SIZE if model.device.type == "cpu" else 256
        self.settings = f"blocks of {self.block_size} tokens, sdpa"
        self._manager: Any = None

    @contextmanager
    def ready(self, workload: Workload) -> Iterator[None]:
        """Allocate blocks for all requests, and start the thread."""
        longest_output = max(request.output_len for request in workload.requests)
        config = ContinuousBatchingConfig(
            page_size=self.block_size,
            # One more block for each request: it takes the next one before the last is full.
            num_blocks=workload.num_blocks(self.block_size) + len(workload.requests),
            allow_block_sharing=False,  # the prompts have no common prefixes
        )
        with (
            torch.inference_mode(),
            _silencing("ContinuousBatchingLogger"),
            self.model.continuous_batching_context_manager(
                generation_config=_generation_config(workload.temperature, longest_output),
                continuous_batching_config=config,
            ) as self._manager,
        ):
            try:
                yield
            except BaseException:  # Ctrl-C must not wait for the answers
                self._manager.stop(hard_stop=True)
                raise

    def run(self, workload: Workload) -> Outcome:
        """Add all requests, and wait for the last answer.

        Raises:
            BenchmarkError: the thread ended, or a request failed.
        """
        manager = self._manager
        names = [
            manager.add_request(list(request.prompt_token_ids), max_new_tokens=request.output_len)
            for request in workload.requests
        ]
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
            if result is not None and result.error is not None:
                raise BenchmarkError(f"transformers' continuous batching failed: {result.error}")
            if result is not None and result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise BenchmarkError("transformers' continuous batching stopped before its end")
        return Outcome([answers[name] for name in names])


def load_reference(folder: Path, device: str, dtype: str) -> Any:  # noqa: ANN401 - any causal LM
    """The model of transformers, for `Generate` and `Continuous`."""
    model: Any
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        )
    model = model.to(device).eval()
    # Without this, sampling options and eos tokens of the checkpoint would be used in every call.
    model.generation_config = _generation_config(0.0, 1)
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' warnings and progress bars, and restore them at the end."""
    verbosity = transformers.logging.get_verbosity()
    had_bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if had_bars:
            transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # theirs


@contextmanager
def _silencing(logger_name: str) -> Iterator[None]:
    """Turn off a logger. Its errors are also returned with the requests."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _generation_config(temperature: float, max_new_tokens: int) -> GenerationConfig:
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    return GenerationConfig.from_dict(
        {
            "do_sample": temperature > 0,
            "max_new_tokens": max_new_tokens,
            "pad_token_id": _PADDING,
            "eos_token_id": None,  # no token ends a sequence
            **sampling,
        }
    )
