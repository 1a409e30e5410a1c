"""Folding: links with the same facts about consecutive steps become one link.

waited 4 5 2 | waited 4 5 2 | waited 4 5 1  ->  waited, steps 3 to 5, need 4, have 1 to 2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nvtrace.explain import links

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def fold(chain: Iterable[links.AnyLife]) -> Iterator[links.AnyLife]:
    """Fold a chain of links, each about one step."""
    group: list[links.AnyLife] = []
    for link in chain:
        if group and not _is_alike(group[-1], link):
            yield _merged(group)
            group = []
        group.append(link)
    if group:
        yield _merged(group)


def _is_alike(link: links.AnyLife, after: links.AnyLife) -> bool:
    if not after.num_steps or after.first_step != link.last_step + 1:
        return False
    match link, after:
        case links.Waited(), links.Waited():
            return _wait_key(link) == _wait_key(after)
        case links.Idled(), links.Idled():
            return link.reason == after.reason
        case (links.Prefilled(), links.Prefilled()) | (links.Decoded(), links.Decoded()):
            return True
    return False


def _wait_key(link: links.Waited) -> tuple[str | None, int | None, bool, bool]:
    return link.reason, link.head_seq_id, link.is_preempted, link.whole is None


def _merged(group: list[links.AnyLife]) -> links.AnyLife:
    first, last = group[0], group[-1]
    if first is last:
        return first
    common = {
        "last_step": last.last_step,
        "num_steps": sum(link.num_steps for link in group),
        "time_ns": sum(link.time_ns for link in group),
        "event_ids": tuple(event_id for link in group for event_id in link.event_ids),
    }
    return msgspec.structs.replace(first, **common, **_merged_facts(group))


def _merged_facts(group: list[links.AnyLife]) -> dict[str, object]:
    """The numbers of links that are alike: their range, their sum, or the last of them."""
    facts: dict[str, object] = {
        name: _span([getattr(link, name) for link in group])
        for name in ("need", "have", "whole", "num_ahead", "batch")
        if hasattr(group[0], name) and getattr(group[0], name) is not None
    }
    last = group[-1]
    if isinstance(last, links.Prefilled):
        parts = [link for link in group if isinstance(link, links.Prefilled)]
        facts["last_token"], facts["is_complete"] = last.last_token, last.is_complete
        facts["num_recomputed"] = sum(part.num_recomputed for part in parts)
    return facts


def _span(spans: list[links.Span]) -> links.Span:
    return min(least for least, _ in spans), max(most for _, most in spans)
