"""PrefixCacheStats: how many tokens were looked up in the prefix cache, and found.

vLLM's counterpart is `PrefixCacheStats` in `vllm/v1/metrics/stats.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixCacheStats:
    """Counted at each admission, since the engine's start or the last reset_prefix_cache().

    A request that was preempted may find its own blocks in the cache. Such hits do not come from
    shared prefixes, and are counted separately ("resumed").

    Attributes:
        num_queries: first admissions.
        num_query_tokens: tokens of these requests.
        num_hit_tokens: those of them that were in the cache, and need not be computed.
        num_resumed_queries: admissions after a preemption.
        num_resumed_query_tokens: as above, including the tokens that were generated before.
        num_resumed_hit_tokens: as above.
    """

    num_queries: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_resumed_queries: int = 0
    num_resumed_query_tokens: int = 0
    num_resumed_hit_tokens: int = 0

    def count(self, num_query_tokens: int, num_hit_tokens: int, *, is_resumed: bool) -> None:
        """Count one admission."""
        if is_resumed:
            self.num_resumed_queries += 1
            self.num_resumed_query_tokens += num_query_tokens
            self.num_resumed_hit_tokens += num_hit_tokens
        else:
            self.num_queries += 1
            self.num_query_tokens += num_query_tokens
            self.num_hit_tokens += num_hit_tokens
