"""The article's example.py runs as printed, on the model that ships."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import nanovllm
from nanovllm.assets import TINY_QWEN3

# Section 2.1 of the article; the model's path is the one that its readers have.
EXAMPLE_PY = """\
import os
from nanovllm import LLM, SamplingParams
from transformers import AutoTokenizer

path = os.path.expanduser("~/huggingface/Qwen3-0.6B/")
tokenizer = AutoTokenizer.from_pretrained(path)
llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)

sampling_params = SamplingParams(temperature=0.6, max_tokens=256)
prompts = ["introduce yourself", "list all prime numbers within 100"]

# 套用 chat template
prompts = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        tokenize=False, add_generation_prompt=True,
    )
    for prompt in prompts
]

outputs = llm.generate(prompts, sampling_params)
for prompt, output in zip(prompts, outputs):
    print(f"Prompt: {prompt!r}")
    print(f"Completion: {output['text']!r}\\n")
"""


def test_example_py_of_the_article_runs_as_printed(tmp_path: Path) -> None:
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "Qwen3-0.6B").symlink_to(TINY_QWEN3)
    (tmp_path / "example.py").write_text(EXAMPLE_PY, encoding="utf-8")
    root = Path(nanovllm.__file__).parents[1]
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(root),
        "PYTHONUTF8": "1",
        "HF_HUB_OFFLINE": "1",
    }

    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert [line.split(": ")[0] for line in lines] == ["Prompt", "Completion"] * 2
    texts = [ast.literal_eval(line.partition(": ")[2]) for line in lines]
    for question, prompt in zip(
        ("introduce yourself", "list all prime numbers within 100"), texts[::2], strict=True
    ):
        assert prompt == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for completion in texts[1::2]:
        assert completion.startswith("<think>")
        assert "<|im_end|>" not in completion
