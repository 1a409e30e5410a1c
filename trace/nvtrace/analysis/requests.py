"""Requests and tokens: the frames `requests` and `tokens`.

`nvtrace.metrics` defines the metrics. A token counts when its step ends.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nvtrace.analysis.columns import REQUESTS, TOKENS
from nvtrace.analysis.frames import frame_of, masked
from nvtrace.measure import Measure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvtrace.analysis.records import Records
    from nvtrace.envelope import Record


def requests_frame(records: Iterable[Record]) -> pd.DataFrame:
    """The frame `requests`: see `columns.py`.

    Args:
        records: what `read_trace` yields, of the rank that decides.
    """
    measure = Measure()
    ended = [request for record in records for request in measure.apply(record)]
    return frame_of(REQUESTS, {name: list(map(attrgetter(name), ended)) for name in REQUESTS.names})


def tokens_frame(records: Records) -> pd.DataFrame:
    """The frame `tokens`: see `columns.py`."""
    samples = records.table("SAMPLE_TOKENS")
    ends = records.table("STEP_END").set_index(["rank", "step"])["ts_ns"]
    samples = samples[samples["rank"] == records.header.rank].join(
        ends.rename("end_ns"), on=["rank", "step"]
    )
    samples = samples[samples["end_ns"].notna()]  # tokens of a failed step do not count
    counts = [len(seq_ids) for seq_ids in samples["seq_ids"]]
    seq_ids = np.fromiter(chain.from_iterable(samples["seq_ids"]), np.int64)
    ts_ns = np.repeat(samples["end_ns"].to_numpy(np.int64), counts)
    by_seq = pd.Series(ts_ns).groupby(seq_ids, sort=False)
    index = by_seq.cumcount().to_numpy()
    before = by_seq.shift(fill_value=0).to_numpy()
    return frame_of(
        TOKENS,
        {
            "seq_id": seq_ids,
            "index": index,
            "token_id": np.fromiter(chain.from_iterable(samples["token_ids"]), np.int64),
            "step": np.repeat(samples["step"].to_numpy(np.int64), counts),
            "ts_ns": ts_ns,
            "itl_ns": masked(ts_ns - before, index > 0),
        },
    )
