"""PrefixCacheStats: how many tokens were looked up in the prefix cache, and found.

Knows counts. Does not know blocks (`block_manager.py`). vLLM's counterpart is `PrefixCacheStats` in
`vllm/v1/metrics/stats.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixCacheStats:
    """Counted at each admission, since the engine's start or the last reset_prefix_cache().

    A request that comes back from a preemption finds blocks of its own in the cache. Such hits say
    nothing about shared prefixes, and are counted separately ("resumed").

    Attributes:
        num_queries: first admissions.
        num_query_tokens: tokens of these requests.
        num_hit_tokens: those of them that were in the cache, and need not be computed.
        num_resumed_queries: admissions after a preemption.
        num_resumed_query_tokens: as above, with the tokens that were generated before.
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
