"""The article's example.py: `python docs/example.py [FOLDER OF A QWEN3 MODEL]`."""

import os
import sys

from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.assets import TINY_QWEN3

path = os.path.expanduser(sys.argv[1] if sys.argv[1:] else str(TINY_QWEN3))
tokenizer = AutoTokenizer.from_pretrained(path)
llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)

sampling_params = SamplingParams(temperature=0.6, max_tokens=256)
prompts = ["introduce yourself", "list all prime numbers within 100"]

prompts = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    for prompt in prompts
]

outputs = llm.generate(prompts, sampling_params)
for prompt, output in zip(prompts, outputs, strict=True):
    print(f"Prompt: {prompt!r}")
    print(f"Completion: {output['text']!r}\n")
