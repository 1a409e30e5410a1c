"""HTML of what a notebook shows: a caption and a table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table. All text is escaped: a trace may hold anything."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = (
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><tr>{heads}</tr>{''.join(lines)}</table>"
