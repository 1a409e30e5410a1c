"""Record the traces that docs and notebooks show: `python docs/traces/record.py NAME...`.

From the root. None of them is edited by hand, and what they ran on is in their first lines.

    cpu              the scenarios below, on the model that ships, each as NAME.jsonl.zst:
                     example, shared-prefix, chunked-prefill, preemption, late-join,
                     static-vs-continuous; static (the last one by the policy static), no-batch
                     (the same, one request at a time), mixed (late-join by the policy mixed),
                     two-ranks (example, shared by two processes)
    gpu-example      the article's two requests, on the model that ships
    gpu-preemption   the scenario of that name, on the model that ships
    gpu-two-gpus     the article's two requests, shared by two GPUs
    gpu-benchmark    the first 200 steps of nano-vllm's benchmark, on Qwen3-0.6B's shape, random
                     weights
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from nanovllm import LLM, SamplingParams
from nvtrace import record, scenarios
from nvtrace.bench.models import SHAPES, write_random_model
from nvtrace.scenarios import Options, run_scenario

FOLDER = Path("docs/traces")
MODEL = Path("nanovllm/assets/tiny-qwen3")
RANDOM_MODEL = Path("qwen3-0.6b-shape-random-weights")
NUM_STEPS = 200
SCENARIOS = {
    "example": ("example",),
    "shared-prefix": ("shared-prefix",),
    "chunked-prefill": ("chunked-prefill",),
    "preemption": ("preemption",),
    "late-join": ("late-join",),
    "static-vs-continuous": ("static-vs-continuous",),
    "static": ("static-vs-continuous", "--policy", "static"),
    "no-batch": ("static-vs-continuous",),
    "mixed": ("late-join", "--policy", "mixed"),
    "two-ranks": ("example", "--tp", "2"),
    "gpu-example": ("example",),
    "gpu-preemption": ("preemption",),
    "gpu-two-gpus": ("example", "--tp", "2"),
}


def run_one_at_a_time(out: Path) -> None:
    """The requests of static-vs-continuous without any batch, which the command line cannot ask."""
    options = Options(model=MODEL, config={"max_num_seqs": 1, "device": "cpu"})
    with record(out) as observer:
        run_scenario(scenarios.SCENARIOS["static-vs-continuous"], observer, options)


def run(name: str) -> None:
    """Let the command line record a scenario."""
    for rank_file in FOLDER.glob(f"{name}.rank*.jsonl.zst"):
        rank_file.unlink()
    command = [sys.executable, "-m", "nvtrace_cli", "run", *SCENARIOS[name], "--model", str(MODEL)]
    device = "cuda" if name.startswith("gpu-") else "cpu"
    options = ["--device", device, "--out", str(path_of(name)), "--quiet"]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command


def path_of(name: str) -> Path:
    """Where a trace lies."""
    return FOLDER / f"{name}.jsonl.zst"


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
    asked = [
        *(name for name in sys.argv[1:] if name != "cpu"),
        *(name for name in SCENARIOS if "cpu" in sys.argv[1:] and not name.startswith("gpu-")),
    ]
    for name in asked:
        path_of(name).unlink(missing_ok=True)
        if name == "gpu-benchmark":
            run_benchmark(path_of(name))
        elif name == "no-batch":
            run_one_at_a_time(path_of(name))
        else:
            run(name)
        print(path_of(name), path_of(name).stat().st_size)


if __name__ == "__main__":
    main()
