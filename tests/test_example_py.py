"""The article's example.py and scripts for nano-vllm and vLLM run, on the model that ships."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nanovllm
from nanovllm.assets import TINY_QWEN3

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE_PY = Path(__file__).parents[1] / "docs" / "example.py"


def test_example_py_of_the_article_runs_as_printed(tmp_path: Path) -> None:
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "Qwen3-0.6B").symlink_to(TINY_QWEN3)
    root = Path(nanovllm.__file__).parents[1]
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(root),
        "PYTHONUTF8": "1",
        "HF_HUB_OFFLINE": "1",
    }

    done = subprocess.run(
        [sys.executable, EXAMPLE_PY, "~/huggingface/Qwen3-0.6B/"],  # as in the article
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


# nano-vllm's way to measure, and vLLM's: `prompt_token_ids` as a list or as a dict.
BENCH_PY = """\
import time
from random import randint, seed
from nanovllm import LLM, SamplingParams

seed(0)
llm = LLM(PATH, enforce_eager=False, max_model_len=4096)
prompt_token_ids = [[randint(0, 300) for _ in range(randint(10, 20))] for _ in range(6)]
sampling_params = [
    SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(5, 9)) for _ in range(6)
]
prompt_token_ids = [AS_PROMPT(p) for p in prompt_token_ids]
llm.generate(["Benchmark: "], SamplingParams())
start = time.time()
llm.generate(prompt_token_ids, sampling_params, use_tqdm=False)
throughput = sum(sp.max_tokens for sp in sampling_params) / (time.time() - start)
print(f"Throughput: {throughput:.2f}tok/s")
"""

# What scripts for vLLM read of an output, and the ways in which they give prompts.
VLLM_PY = """\
from nanovllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, ignore_eos=True)
llm = LLM(model=PATH, tensor_parallel_size=1, enforce_eager=True, max_model_len=256)
tokenizer = llm.get_tokenizer()
outputs = llm.generate(prompts, sampling_params=sampling_params, use_tqdm=True)
outputs += llm.generate("Hello", sampling_params)
outputs += llm.generate({"prompt": "Hello"}, sampling_params)
for prompt, output in zip([*prompts, "Hello", "Hello"], outputs, strict=True):
    assert output.finished and output.prompt == prompt
    assert output.prompt_token_ids == tokenizer.encode(prompt)
    [completion] = output.outputs
    assert completion.index == 0 and completion.finish_reason == "length"
    assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
[output] = llm.generate(dict(prompt_token_ids=tokenizer.encode("Hello")), sampling_params)
assert output.prompt is None and len(output.outputs[0].token_ids) == 16
total = sum(len(output.outputs[0].token_ids) for output in outputs)
print(f"{total} tokens")
"""


@pytest.fixture
def run_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[str], list[str]]:
    """Run it with the model that ships as PATH, and return its lines; nothing goes to stderr."""

    def run(script: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(f"PATH = {str(TINY_QWEN3)!r}\n{script}", encoding="utf-8")
        runpy.run_path(str(path), run_name="__main__")
        captured = capfd.readouterr()
        assert captured.err == ""
        return captured.out.splitlines()

    return run


@pytest.mark.parametrize("as_prompt", ["list", "lambda p: dict(prompt_token_ids=p)"])
def test_a_bench_py_for_nano_vllm_runs_as_it_is(
    as_prompt: str, run_script: Callable[[str], list[str]]
) -> None:
    [line] = run_script(f"AS_PROMPT = {as_prompt}\n{BENCH_PY}")
    assert float(line.removeprefix("Throughput: ").removesuffix("tok/s")) > 0


def test_a_script_for_vllm_runs_with_the_import_changed(
    run_script: Callable[[str], list[str]],
) -> None:
    *lines, total = run_script(VLLM_PY)
    assert [line.split(", Generated")[0] for line in lines] == [
        "Prompt: 'Hello, my name is'",
        "Prompt: 'The capital of France is'",
        "Prompt: 'Hello'",
        "Prompt: 'Hello'",
    ]
    assert total == "64 tokens"
