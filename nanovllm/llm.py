"""LLM: starts an engine for the model in a folder. Its interface is vLLM's and nano-vllm's.

The order of the start: settings, model config, tokenizer, ranks, the model and its KV cache. What
the engine does after that is in `LLMEngine`.
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
    """`LLM(model, observer=None, **options).generate(prompts, sampling_params)`.

    Args:
        model: folder of a Qwen3 checkpoint.
        observer: its methods are called for everything the engine does; None for no observer. If
            one raises an error, the first is printed on stderr, and the run goes on; only an error
            from `engine_init` or `for_workers` stops the start.
        **options: see `nanovllm.config.Config`.

    Raises:
        TypeError: an unknown option, one of the wrong type, or an observer that is no Observer.
        ValueError: an option is out of range, or the checkpoint cannot be run.
        KVCacheError: the KV cache does not fit into the memory.
        WorkerError: a process for another rank did not start.
    """

    @keep_global_state()  # undoes what libraries do to random generators and os.environ
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
        tokenizer.load(self.model_config.vocab_size)  # raises now if it is broken, not later
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

        They also end when this process ends, when the engine is garbage-collected, and after any
        error while a forward pass is computed. A second call does nothing.
        """
        self.ranks.exit()
