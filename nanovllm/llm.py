"""LLM: the name that users of vLLM and nano-vllm know. All of it is `LLMEngine`."""

from __future__ import annotations

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """`LLM(model, observer=None, **config).generate(prompts, sampling_params)`."""
