"""What must hold of every `PagedCache`, checked on the host: for tests and debugging."""

import numpy as np

from kvjax.cache.store.paged import UNWRITTEN, PagedCache


def check_invariants(cache: PagedCache) -> None:
    """Check that tables, lengths, free blocks and metadata agree.

    Free and owned blocks partition {0 … N−1}; no block has two owners, or as many as `shared`
    says, each of another slot; every head owns exactly
    ⌈context_len / b⌉ blocks, at the front of its table row; free blocks carry no metadata; written
    KVs of a head have distinct positions below the sequence's length; nothing is written past a
    head's context length; finer codes of owned blocks are in free ones, near the bottom of their
    stack; the rows of a window are of the newest KVs of their heads, each once.

    Raises:
        AssertionError: names the violation and where it is.
    """
    table, context_len, seq_len, stack, count, position, metric = (
        np.asarray(x)
        for x in (
            cache.block_table,
            cache.context_len,
            cache.seq_len,
            cache.free.stack,
            cache.free.count,
            cache.position,
            cache.metric,
        )
    )
    n, b = cache.num_blocks, cache.block_size
    assert 0 <= count[0] <= n, "more blocks are free than there are"
    free = np.sort(stack[: count[0]])
    assert (free[1:] > free[:-1]).all(), "a block is free twice"
    assert (context_len >= 0).all(), "a context length is negative"
    owned_per_head = -(-context_len // b)
    column = np.arange(cache.max_blocks)
    is_owned = column < owned_per_head[..., None]
    assert (owned_per_head <= cache.max_blocks).all(), "a head holds more KVs than its table"
    assert (table[~is_owned] == n).all(), "a table entry past a head's length names a block"
    owned = table[is_owned]
    assert ((owned >= 0) & (owned < n)).all(), "a head owns a block outside the pool"
    if cache.shared is None:
        assert len(np.unique(owned)) == len(owned), "a block has two owners"
    else:
        owners = np.bincount(owned, minlength=n)
        assert (np.asarray(cache.shared) == np.maximum(owners - 1, 0)).all(), (
            "a block's owners are not counted right"
        )
        for row in range(len(table)):
            own = table[row][is_owned[row]]
            assert len(np.unique(own)) == len(own), "a slot owns a block twice"
        owned = np.unique(owned)
    assert not np.isin(owned, free).any(), "an owned block is free"
    assert len(free) + len(owned) == n, f"{len(free)} free + {len(owned)} owned blocks are not {n}"
    assert (position[free] == UNWRITTEN).all(), "a free block has token positions"
    assert (metric[free] == 0).all(), "a free block has metrics"

    longest = max(1, int(owned_per_head.max()))
    rows = np.where(is_owned, table, 0)[..., :longest]
    held = np.where(is_owned[..., :longest, None], position[rows], UNWRITTEN)
    held = held.reshape(*context_len.shape, longest * b)
    counted = np.arange(longest * b) < context_len[..., None]
    assert (held[~counted] == UNWRITTEN).all(), "something is written past a context length"
    assert (held < seq_len[:, None, None, None]).all(), "a KV is newer than its sequence"
    ordered = np.sort(held, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != UNWRITTEN)
    assert not twice.any(), "a head holds two KVs of one position"
    if cache.kv.fine is not None:
        tag, top = np.asarray(cache.kv.fine.tag), int(cache.kv.fine.count[0])
        paired = np.flatnonzero(tag < n)
        assert (tag[tag[paired]] == paired).all(), "two blocks are no pair"
        holders = np.setdiff1d(paired, owned)
        assert 2 * len(holders) == len(paired), "a pair is not of an owned and a free block"
        assert np.isin(tag[holders], owned).all(), "finer codes are of no block that is owned"
        assert np.isin(holders, stack[:top]).all(), "finer codes are where none are looked for"
        assert top <= count[0], "more blocks hold finer codes than are free"
    if cache.window is not None:
        new, index = np.asarray(cache.window.position), np.asarray(cache.window.index)
        assert ((new < 0) == (index < 0)).all(), "a row of the window is half there"
        assert (index < context_len[..., None]).all(), "the window has a KV that is not held"
        place = np.take_along_axis(held, np.maximum(index, 0), axis=-1)
        assert (place == new)[index >= 0].all(), "a row of the window is of another KV"
        ordered = np.sort(new, axis=-1)
        again = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        assert not again.any(), "the window has a KV twice"
        oldest = np.where(new < 0, np.iinfo(np.int32).max, new).min(axis=-1, keepdims=True)
        newer = (held >= oldest).sum(axis=-1)
        assert (newer == (new >= 0).sum(axis=-1)).all(), "the window misses a newer KV"
