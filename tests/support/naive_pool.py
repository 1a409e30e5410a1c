"""NaivePool: the page pool written as simply as possible, to hold the real one against.

Lists and linear searches, no hashes: a published page remembers the very tokens it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.engine.block_manager import hash_block

Prefix = tuple[int, ...]


@dataclass(slots=True)
class NaiveSequence:
    """A request's tokens and pages."""

    tokens: list[int]
    table: list[int] = field(default_factory=list)
    num_computed: int = 0


@dataclass(slots=True)
class NaivePool:
    """The pool: which pages are free, next taken first, and what published pages hold."""

    num_blocks: int
    block_size: int
    is_caching: bool
    sequences: dict[int, NaiveSequence] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    contents: dict[int, Prefix] = field(default_factory=dict)  # page -> all tokens to its end

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))

    def num_users(self, page: int) -> int:
        """How many tables hold `page`."""
        return sum(page in seq.table for seq in self.sequences.values())

    def match(self, tokens: list[int]) -> list[int]:
        """Published pages of a prefix that leaves at least one token over."""
        pages: list[int] = []
        while self.is_caching and (len(pages) + 1) * self.block_size < len(tokens):
            wanted = tuple(tokens[: (len(pages) + 1) * self.block_size])
            found = [page for page, held in self.contents.items() if held == wanted]
            if not found:
                break
            pages += found
        return pages

    def num_to_take(self, tokens: list[int]) -> int:
        """Free pages that an admission would take."""
        shared = [page for page in self.match(tokens) if page not in self.free]
        return -(-len(tokens) // self.block_size) - len(shared)

    def admit(self, seq_id: int, tokens: list[int]) -> None:
        """Give a new sequence its pages."""
        table = self.match(tokens)
        self.free = [page for page in self.free if page not in table]
        num_cached = len(table) * self.block_size
        while len(table) * self.block_size < len(tokens):
            table.append(self._take())
        self.sequences[seq_id] = NaiveSequence(list(tokens), table, num_cached)

    def append(self, seq_id: int, token: int) -> None:
        """Add a token, and a page if it starts one."""
        seq = self.sequences[seq_id]
        seq.tokens.append(token)
        if len(seq.tokens) > len(seq.table) * self.block_size:
            seq.table.append(self._take())

    def compute(self, seq_id: int, num_tokens: int) -> None:
        """Compute tokens, and publish each page that they complete unless its like is known."""
        seq = self.sequences[seq_id]
        for _ in range(num_tokens):
            seq.num_computed += 1
            prefix = tuple(seq.tokens[: seq.num_computed])
            is_full = seq.num_computed % self.block_size == 0
            if is_full and self.is_caching and prefix not in self.contents.values():
                self.contents[seq.table[seq.num_computed // self.block_size - 1]] = prefix

    def release(self, seq_id: int) -> list[int]:
        """Take a sequence's pages, the deepest first. Returns those that are free now."""
        freed = []
        for page in reversed(self.sequences.pop(seq_id).table):
            if self.num_users(page) == 0:
                self.free.insert(len(self.free) if page in self.contents else 0, page)
                freed.append(page)
        return freed

    def cached_blocks(self) -> dict[bytes, int]:
        """The published pages by the hash that the real pool must know them by."""
        return {self._hash(prefix): page for page, prefix in self.contents.items()}

    def _take(self) -> int:
        page = self.free.pop(0)
        self.contents.pop(page, None)
        return page

    def _hash(self, prefix: Prefix) -> bytes:
        chain = b""
        for start in range(0, len(prefix), self.block_size):
            chain = hash_block(chain, list(prefix[start : start + self.block_size]))
        return chain
