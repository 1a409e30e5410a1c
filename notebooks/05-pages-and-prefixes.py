# %% [markdown]
# # 5. Blocks and prefixes
#
# **Question:** Which requests hold a block of the KV cache, how is it found again, and when is it
# evicted?
#
# Two runs with very small blocks, of 4 tokens each, so that much happens to them: in one there are
# too few blocks, in the other the same question is asked four times.
#
# Before: the pages on [the paged KV cache](../docs/en/concepts/paged-kv-cache.md) and on [prefix
# caching](../docs/en/concepts/prefix-caching.md). The code is [one
# file](../nanovllm/engine/block_manager.py).

# %%
from array import array
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import matplotlib.pyplot as plt

import nvtrace
from exercise import check
from nvtrace.analysis import plots, prefix_hits
from nvtrace.events import BlocksRelease

TRACES = Path("../docs/traces")
crowded = nvtrace.load(TRACES / "preemption.jsonl.zst")
shared = nvtrace.load(TRACES / "shared-prefix.jsonl.zst")
BLOCK_SIZE = 4
assert {run.header.config["kvcache_block_size"] for run in (crowded, shared)} == {BLOCK_SIZE}

# %% [markdown]
# ## A block table
#
# A request does not have one piece of memory; it has a list of block numbers, its *block table*.
# Token i is in the block `table[i // 4]`, at offset `i % 4`. The blocks may be anywhere in the
# pool.

# %%
state = crowded.at(10)
tables = {seq_id: state.sequences[seq_id].block_table for seq_id in state.running}
tables

# %% [markdown]
# Where is token 19 of request 0? In the block at place 4 of its table, and it is the last of the
# four there.

# %%
page, place = tables[0][19 // BLOCK_SIZE], 19 % BLOCK_SIZE
print("block", page, "place", place)
assert (page, place) == (14, 3)

# %% [markdown]
# A table grows by a block whenever a token does not fit any more. Here is every block of that run,
# over its 132 steps. Each line is a block; white means free and empty, grey means free with
# something worth keeping, green means in a table.

# %%
figure, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
_ = plots.kv_block_map(crowded.blocks, ax)
assert len(crowded.steps) == 132

# %% [markdown]
# Two things to see. Blocks are taken from the bottom up at first, because any free block will do.
# And from step 19 on almost nothing is white again: a block that is released keeps its contents
# (grey) until it is taken for other tokens.
#
# ## A block's hash
#
# What is the use of a block that no request holds? The next request with the same beginning can use
# it. So it must be found by its contents. But the same four tokens have different keys and values
# in every text: they depend on all tokens before them. So a block's hash is a hash of its tokens
# *and of the hash of the block before it*.


# %%
def chain(token_ids: list[int]) -> list[str]:
    """The names of the full blocks that hold these tokens."""
    names, parent = [], b""
    for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
        tokens = array("I", token_ids[end - BLOCK_SIZE : end]).tobytes()
        parent = blake2b(parent + tokens, digest_size=16).digest()
        names.append(parent.hex())
    return names


prompt = shared.table("REQUEST_ENQUEUE")["prompt_token_ids"][0]
hashed = shared.table("BLOCKS_HASH").iloc[0]
print(len(prompt), "tokens:", prompt)
print(dict(zip(hashed["block_ids"][0], chain(prompt), strict=True)))
assert chain(prompt) == hashed["hashes"][0]

# %% [markdown]
# The prompt has 13 tokens: three full blocks with hashes, and one token in a fourth that has none
# yet. We have computed the same hashes as the engine, from the tokens alone. Change the first
# token, and all three are different:

# %%
changed = chain([prompt[0] + 1, *prompt[1:]])
print([before == after for before, after in zip(chain(prompt), changed, strict=True)])

# %% [markdown]
# ## What happens to block 0
#
# `shared-prefix` asks the same question twice at once, once more while these run, and once more
# after all have ended. This is all that happens to block 0, which holds its first four tokens:

# %%
life = shared.blocks.query("block_id == 0")
life[["step", "operation", "seq_id", "ref_count", "is_hashed"]]

# %% [markdown]
# Request 0 allocates it, and it is hashed as soon as it is computed. Request 2 finds it in use and
# *shares* it: the count goes to 2. When both have ended the count is 0 and the block is free, but
# still in the prefix cache; request 3 *revives* it. Nothing was copied.

# %%
assert list(life["operation"]) == [
    *("allocate", "hash", "share", "release", "release", "revive", "release")
]
assert list(life["ref_count"]) == [1, 1, 2, 1, 0, 1, 0]
assert life["is_hashed"].iloc[1:].all()

# %%
figure, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
_ = plots.kv_block_map(shared.blocks, ax)

# %% [markdown]
# The thin purple strip at the bottom, from step 5 to 65, is the shared blocks 0 to 2. What did
# sharing save?

# %%
hits = prefix_hits(shared.requests)
hits.drop(columns="scheduled_ns").round(2)

# %% [markdown]
# Requests 2 and 3 had to compute one token of 13. That one is always computed, even if its block is
# cached: without it there would be no logits to sample from.
#
# ## Computed twice
#
# But request 1 asked the same, in the same step as request 0, and found nothing. When the two were
# admitted, nothing had been computed, and a block is hashed after it is computed, never before: a
# block that is found must hold keys and values. So both computed the same, into blocks of their
# own. This did not change later: even their answers were the same, but no block of request 1 was
# ever hashed.

# %%
answers = shared.tokens.sort_values(["seq_id", "index"]).groupby("seq_id")["token_id"].agg(list)
hashing_seqs = shared.blocks.query("operation == 'hash'")["seq_id"].unique().tolist()
print("answers of 0 and 1 alike:", answers[0] == answers[1], "; hashed by:", hashing_seqs)
assert answers[0] == answers[1]
assert hashing_seqs == [0]

# %% [markdown]
# In the picture above this is the comb at the right: three requests took blocks in turn, and only
# those of request 0 are still grey when all have ended.
#
# A hash belongs to one block. The prefix cache keeps the first block with it; the second copy is
# only a block in a request's table, and is freed with it.
#
# ## Which block is evicted first
#
# There is one list of free blocks, and new ones are taken from its head. So its order decides what
# is evicted, and the order is made when blocks are released: a block without a hash goes to the
# head (nothing is lost with it), a hashed one to the tail. And a request releases its *last* block
# first.
#
# In the crowded run request 2 gives up everything in step 73, and comes back in step 95:

# %%
window = crowded.blocks.query("73 <= step <= 95")
given_back = window.query("step == 73 and operation == 'release'")["block_id"].tolist()
evicted = window.query("step < 95 and operation == 'evict'")[["step", "block_id"]]
revived = window.query("step == 95 and operation == 'revive'")["block_id"].tolist()
print("given back, deepest first", given_back)
print("evicted since, [step, block]", evicted.to_numpy().tolist())
print("found again, first block first", revived)

# %% [markdown]
# Every fourth step request 1 takes a block, and each time it is the next of that list: first the
# last one of the table, then the one before. In step 95 the *first* four blocks are still there,
# and these are the prefix. If they had been released in the order of the table, the first block
# would have been evicted first, and the others would be there, full, and of no use: a chain of
# hashes is found from its beginning.

# %%
assert given_back == [*evicted["block_id"], *reversed(revived)]
assert len(revived) * BLOCK_SIZE == 16

# %% [markdown]
# So 16 tokens of request 2 were not computed again. Over the whole run:

# %%
operations = crowded.blocks["operation"].value_counts()
operations[operations > 0].to_frame("blocks")

# %% [markdown]
# 52 blocks were evicted, 9 were found again. That is little, as expected: with 24 blocks for three
# requests that need more, there is no memory to keep anything. A prefix cache uses memory that is
# free at the moment.

# %%
assert operations["evict"] == 52
assert operations["revive"] == 9
assert crowded.at().num_blocks == 24

# %% [markdown]
# ## Your turn
#
# ### Exercise 1
#
# All full blocks of a new prompt are in the prefix cache. How many of its tokens need not be
# computed? (At least one must be computed.)


# %% tags=["exercise"]
def num_spared(num_tokens: int, block_size: int) -> int:
    """Tokens of a prompt that need not be computed if all its full blocks are known."""
    raise NotImplementedError  # your code


# %% tags=["check"]
last = hits.iloc[-1]
check(
    num_spared,
    lambda spared: (
        spared(int(last["num_prompt_tokens"]), BLOCK_SIZE) == last["num_cached_tokens"]
        and [spared(n, 4) for n in (1, 4, 5, 12)] == [0, 0, 4, 8]
        and [spared(n, 256) for n in (256, 257)] == [0, 256]
    ),
    hint="whole blocks only, and never the last token: with 12 tokens in blocks of 4 the third "
    "block has it",
)

# %% [markdown]
# ### Exercise 2
#
# Write what a release does to the free list. You get the list as it is (next taken first), the
# blocks that become free (the table's last one first), and the set of all hashed blocks; return the
# new list. Blocks without a hash go to the head one by one, hashed ones to the tail. It is checked
# against every release in both traces.


# %% tags=["exercise"]
def after_release(free: list[int], freed: list[int], hashed: set[int]) -> list[int]:
    """The free list after a request has given its blocks back."""
    raise NotImplementedError  # your code


# %% tags=["check"]
def releases(path: Path) -> list[tuple[list[int], list[int], set[int], list[int]]]:
    """Of each release: the free list before, the blocks, what is hashed, the list after."""
    state, cases = nvtrace.State(), []
    for record in nvtrace.read_trace(path):
        before = list(state.free_blocks)
        state.apply(record)
        if isinstance(record, BlocksRelease):
            freed = [page for pages in record.freed for page in pages]
            cases.append((before, freed, set(state.block_hashes), list(state.free_blocks)))
    return cases


def is_as_recorded(rule: Callable[[list[int], list[int], set[int]], list[int]]) -> bool:
    """Does a rule order the free list as the engine did?"""
    cases = [*releases(crowded.path), *releases(shared.path)]
    return all(
        list(rule(list(before), list(freed), set(known))) == after
        for before, freed, known, after in cases
    )


check(
    after_release,
    is_as_recorded,
    hint="take the freed blocks one by one. A block without a name is put before all others, so of "
    "two such blocks the second one is taken first",
)

# %% [markdown]
# ### Exercise 3
#
# At the end of step 68 of `shared-prefix` every block is free. Which block will be taken next, and
# which one of all would be the last? Answer with the two numbers.

# %% tags=["exercise"]
next_and_last: tuple[int, int] | None = None  # your numbers

# %% tags=["check"]
check(
    next_and_last,
    lambda pages: list(pages) == [list(shared.at(68).free_blocks)[place] for place in (0, -1)],
    hint="`shared.at(68).free_blocks` is in the order of taking. Why is the last one the last?",
)

# %% [markdown]
# ## Answer
#
# A block is held by every request whose block table has it, and its ref count says how many those
# are. When it is full and computed it is hashed: its hash, of all tokens from the beginning to its
# end, is entered in the prefix cache, and later requests find it there: in use (they share it) or
# free (they revive it). It is evicted only when it is taken for other tokens, and blocks are taken
# from the head of the free list: first those without a hash, then those that were released longest
# ago, and of one request the last one first, so that what remains is a prefix.
