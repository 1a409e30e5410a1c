"""Which files are the afternoon's, and how long they are.

The engine's rooms that a first reader may skip are folders: gpu, parallel, utils, assets. All other
files of `nanovllm/` are the afternoon's.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "nanovllm"
ROOMS = {"assets", "gpu", "parallel", "utils"}
ENGINE_FILES = sorted(f for f in ENGINE.rglob("*.py") if "assets" not in f.parts)
AFTERNOON_FILES = [f for f in ENGINE_FILES if f.relative_to(ENGINE).parts[0] not in ROOMS]


def code_lines(file: Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    source = file.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in skipped and token.string
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
            case _:
                pass
    return len(lines)
