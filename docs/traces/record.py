"""Record what the docs show of a GPU: `python docs/traces/record.py NAME...`, from the root.

    example      the article's two requests, on the model that ships
    preemption   the scenario of that name, on the model that ships
    two-gpus     the article's two requests, shared by two GPUs
    benchmark    the first 200 steps of nano-vllm's benchmark, on Qwen3-0.6B's shape, random weights

Each goes to docs/traces/gpu-NAME.jsonl.zst, and none is edited by hand. What they ran on is in
their first lines.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from nanovllm import LLM, SamplingParams
from nvtrace import record
from nvtrace.bench.models import SHAPES, write_random_model

FOLDER = Path("docs/traces")
MODEL = Path("nanovllm/assets/tiny-qwen3")
RANDOM_MODEL = Path("qwen3-0.6b-shape-random-weights")
NUM_STEPS = 200


def run(name: str, out: Path, *options: str) -> None:
    """Let the command line record a scenario."""
    command = [sys.executable, "-m", "nvtrace_cli", "run", name, "--model", str(MODEL)]
    subprocess.run([*command, "--out", str(out), "--quiet", *options], check=True)  # noqa: S603 - our own command


def run_benchmark(out: Path) -> None:
    """The requests of nano-vllm's bench.py, drawn in its order."""
    if not RANDOM_MODEL.is_dir():
        RANDOM_MODEL.mkdir()
        write_random_model(RANDOM_MODEL, SHAPES["0.6b"], seed=0)
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    with record(out, existing="replace") as observer:
        llm = LLM(RANDOM_MODEL, observer=observer, max_model_len=4096)
        for prompt in prompts:
            max_tokens = draw.randint(100, 1024)
            llm.add_request(
                prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens)
            )
        for _ in range(NUM_STEPS):
            llm.step()


def main() -> None:
    """Record what is named."""
    for name in sys.argv[1:]:
        out = FOLDER / f"gpu-{name}.jsonl.zst"
        out.unlink(missing_ok=True)
        match name:
            case "benchmark":
                run_benchmark(out)
            case "two-gpus":
                out.with_name("gpu-two-gpus.rank1.jsonl.zst").unlink(missing_ok=True)
                run("example", out, "--tp", "2")
            case _:
                run(name, out)
        print(out, out.stat().st_size)


if __name__ == "__main__":
    main()
