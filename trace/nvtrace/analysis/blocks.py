"""Blocks: the frame `blocks`, one row for each operation on a KV block.

Only ref counts and hashes are followed here; `nvtrace.replay` has the whole state.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pandas as pd

from nvtrace.analysis.columns import BLOCKS
from nvtrace.analysis.frames import frame_of

if TYPE_CHECKING:
    from nvtrace.analysis.records import Records

_CHANGES = {"allocate": 1, "append": 1, "share": 1, "revive": 1, "hash": 0, "release": -1}


def blocks_frame(records: Records) -> pd.DataFrame:
    """The frame `blocks`: see `columns.py`."""
    operations = [_operations(records, f"BLOCKS_{name.upper()}", name) for name in _CHANGES]
    operations.append(_operations(records, "BLOCKS_EVICT", "evict"))
    operations.append(_operations(records, "ENGINE_RESET", "reset"))
    ledger = _Ledger()
    for row in pd.concat(operations).sort_values("event_id").itertuples():
        ledger.take(row)
    return frame_of(BLOCKS, ledger.columns)


def _operations(records: Records, kind: str, operation: str) -> pd.DataFrame:
    """The first rank's events of a kind, in the form that `_Ledger.take` takes."""
    events = records.table(kind).assign(operation=operation)
    names = ["event_id", "step", "ts_ns", "operation", "seq_ids", "block_ids"]
    return events[events["rank"] == records.header.rank].reindex(columns=names).astype(object)


class _Ledger:
    """Collects each operation, with the block's state after it."""

    def __init__(self) -> None:
        self.columns: dict[str, list[object]] = {name: [] for name in BLOCKS.names}
        self._lists = [*self.columns.values()]
        self._ref_counts: Counter[int] = Counter()
        self._hashed: set[int] = set()

    def take(self, row: Any) -> None:  # noqa: ANN401 - a row has no type of its own
        """Take in an event."""
        what = (row.event_id, row.step, row.ts_ns, row.operation)
        match row.operation:
            case "evict":
                self._hashed.difference_update(row.block_ids)
                self._write(what, None, row.block_ids)
            case "reset":
                held = {block_id for block_id, count in self._ref_counts.items() if count}
                lost = sorted(held | self._hashed)
                self._ref_counts, self._hashed = Counter(), set()
                self._write(what, None, lost)
            case operation:
                for seq_id, block_ids in zip(row.seq_ids, row.block_ids, strict=True):
                    for block_id in block_ids:
                        self._ref_counts[block_id] += _CHANGES[operation]
                    if operation == "hash":
                        self._hashed.update(block_ids)
                    self._write(what, seq_id, block_ids)

    def _write(self, what: tuple[object, ...], seq_id: int | None, block_ids: list[int]) -> None:
        """Add a row for each block."""
        for block_id in block_ids:
            after = (self._ref_counts[block_id], block_id in self._hashed)
            for column, value in zip(self._lists, (*what, block_id, seq_id, *after), strict=True):
                column.append(value)
