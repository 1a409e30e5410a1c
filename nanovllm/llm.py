"""LLM: a model's folder -> an engine that runs it. The name that users of vLLM and nano-vllm know.

Knows the order of the start: settings, the checkpoint's shape, the tokenizer, the ranks, the model
and its KV cache. What the engine does after that is in `LLMEngine`.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.parallel.worker_group import join_ranks
from nanovllm.utils.global_state import keep_global_state
from nanovllm.utils.guard import guarded
from nanovllm.utils.model_config import ModelConfig
from nanovllm.utils.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from nanovllm.observer import Observer


class LLM(LLMEngine):
    """`LLM(model, observer=None, **config).generate(prompts, sampling_params)`.

    Args:
        model: folder of a Qwen3 checkpoint.
        observer: told of everything the engine does; None for no observer. What it raises is said
            once on stderr, and the run goes on; only its `engine_init` may refuse the engine.
        **options: see `nanovllm.config.Config`.

    Raises:
        TypeError: an unknown option.
        ValueError: an option out of range, or a checkpoint that cannot be run as it is.
        WorkerError: a process for another rank did not start.
    """

    @keep_global_state()
    def __init__(
        self,
        model: str | Path,
        observer: Observer | None = None,
        **options: Any,  # noqa: ANN401 - Config.create checks each by name and type
    ) -> None:
        observer = guarded(observer)
        config = Config.create(model, options)
        self.model_config = ModelConfig.from_folder(config.model)
        config = config.resolve(self.model_config, options)
        observer.engine_init(config, self.model_config)
        tokenizer = Tokenizer(config.model)
        tokenizer.load(self.model_config.vocab_size)  # a broken one is refused now, not later
        eos = self.model_config.eos_by_file | {"tokenizer": tokenizer.eos_token_ids()}
        eos_token_ids = tuple(dict.fromkeys(chain(*eos.values())))
        self.ranks = join_ranks(config, self.model_config, observer)
        self.model_runner = ModelRunner(config, self.model_config, observer, self.ranks)
        super().__init__(
            config=config,
            model_config=self.model_config,
            runner=self.model_runner,
            num_kvcache_blocks=self.model_runner.num_kvcache_blocks,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            observer=observer,
        )
        sources = [", ".join(f for f in eos if i in eos[f]) for i in eos_token_ids]
        observer.engine_ready(self.model_runner.num_kvcache_blocks, eos_token_ids, sources)

    def exit(self) -> None:
        """End the processes of the other ranks, if the engine has started any.

        They also end with this process, with the engine's last reference, and with any error that
        leaves the ranks at different points. A second call does nothing.
        """
        self.ranks.exit()
