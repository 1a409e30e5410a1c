"""The golden trace: the article's run, recorded once, with times and the machine taken out.

`make golden` records it anew; look at the difference first.
"""

from __future__ import annotations

import difflib
import json
import tempfile
from pathlib import Path
from typing import Any

from nvtrace import record
from nvtrace.reader import open_trace, raw_lines
from nvtrace.scenarios import SCENARIOS, Options, run_scenario

GOLDEN = Path(__file__).parent.parent / "golden" / "example.jsonl"
NUM_BLOCKS = 64  # fixed, since the rule asks the machine how much memory it has
_MACHINE = {
    "run_id",
    "created",
    "clock",
    "environment",
    "model",
    "total_bytes",
    "free_bytes",
    "used_bytes",
    "available_bytes",
}


def record_example(path: Path) -> None:
    """Run the article's two requests on the tiny Qwen3 and record them."""
    options = Options(config={"num_kvcache_blocks": NUM_BLOCKS})
    with record(path, existing="replace") as recorder:
        run_scenario(SCENARIOS["example"], recorder, options)


def without_machine(line: str) -> str:
    """A trace line with everything taken out that differs from machine to machine."""
    fields: dict[str, Any] = json.loads(line)
    for name, value in fields.items():
        if name in _MACHINE and (name != "model" or isinstance(value, str)):
            fields[name] = None
        elif name.endswith("_ns") and value is not None:
            fields[name] = 0
    if "config" in fields:
        fields["config"]["model"] = None
    if "engine" in fields:
        fields["engine"]["version"] = None
    return json.dumps(fields, ensure_ascii=False)


def normalised(path: Path) -> list[str]:
    """All lines of a trace, without the machine."""
    with open_trace(path) as file:
        return [without_machine(line.decode()) for _, line, _ in raw_lines(file, path)]


def difference(expected: list[str], actual: list[str], most: int = 20) -> str:
    """The first lines in which two traces differ, readably; "" if they are equal."""
    lines = difflib.unified_diff(expected, actual, "golden", "this run", n=1, lineterm="")
    shown = [line[:300] for _, line in zip(range(most), lines, strict=False)]
    return "\n".join(shown)


def main() -> None:
    """Record the golden trace anew."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        record_example(path)
        GOLDEN.write_text("\n".join(normalised(path)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
