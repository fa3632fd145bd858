"""What a slot holds as arrays on the host, and back: for files."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from kvjax.cache.store.grow import grow
from kvjax.cache.store.paged import PagedCache

Held = dict[str, np.ndarray]
"""`context_len` [L, H], `seq_len` [], and of each block, head after head, what the pool stores."""


def _pools(cache: PagedCache) -> dict[str, Any]:
    """Every array of the pool by a name that files can have."""
    pools: dict[str, Any] = {"metric": cache.metric, "position": cache.position}
    pools |= {f"state.{name}": plane for name, plane in cache.state.items()}
    for name, stored in (("k", cache.kv.stored_k), ("v", cache.kv.stored_v)):
        pools |= {f"{name}.{i}": leaf for i, leaf in enumerate(jax.tree.leaves(stored))}
    return pools


def saved(cache: PagedCache, slot: int) -> Held:
    """What a slot holds, as bytes where NumPy has no such type."""
    context_len = np.asarray(cache.context_len[slot])
    owned = np.arange(cache.max_blocks) < -(-context_len // cache.block_size)[..., None]
    ids = np.asarray(cache.block_table[slot])[owned]

    def rows(pool: Array) -> np.ndarray:
        found = np.asarray(pool[ids])
        return found if found.dtype.isbuiltin == 1 else found.view(np.uint8)

    held = {name: rows(pool) for name, pool in _pools(cache).items()}
    return {"context_len": context_len, "seq_len": np.asarray(cache.seq_len[slot]), **held}


def typed(cache: PagedCache, held: Mapping[str, np.ndarray]) -> Held:
    """What `saved` gave, in the types of a cache.

    Raises:
        ValueError: it is not of a cache of this kind.
    """
    found: Held = {}
    heads = (cache.num_layers, cache.num_kv_heads)
    kinds = {"context_len": (np.dtype(np.int32), heads), "seq_len": (np.dtype(np.int32), ())}
    if other := {*held} ^ {*kinds, *_pools(cache)}:
        names = ", ".join(sorted(other))
        raise ValueError(f"it was saved beside other methods or types: {names} is in one alone")
    for name, (dtype, shape) in kinds.items():
        if held[name].dtype != dtype or held[name].shape != shape:
            raise ValueError(f"{name} has shape {list(held[name].shape)}")
        found[name] = held[name]
    lengths = found["context_len"]
    if (lengths < 0).any() or (lengths > int(found["seq_len"])).any():
        raise ValueError("its heads hold more KVs than it has tokens")
    blocks = int((-(-lengths // cache.block_size)).sum())
    for name, pool in _pools(cache).items():
        rows = held[name]
        rows = rows if rows.dtype == pool.dtype else rows.view(np.dtype(pool.dtype))
        if rows.shape != (blocks, *pool.shape[1:]):
            raise ValueError(f"{name} has shape {list(rows.shape)}")
        found[name] = rows
    return found


def restored(
    cache: PagedCache, slot: Int32[Array, ""], held: Mapping[str, Array]
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Let an empty slot hold what was saved.

    Args:
        cache: the cache (donate it).
        slot: an empty slot.
        held: what `typed` gave for this cache.

    Returns:
        The cache and ``ok``: False, and the cache unchanged, when the blocks do not suffice, when
        there is no such slot or it is not empty.
    """
    length, old_len, old_seq = held["context_len"], cache.context_len[slot], cache.seq_len[slot]
    good = (slot >= 0) & (slot < cache.num_slots) & (old_seq == 0) & ~jnp.any(old_len)
    # More than any head can hold, for what must not be written: its blocks would be nobody's.
    wanted = jnp.where(good, length, (cache.max_blocks + 1) * cache.block_size)
    cache, table, ok = grow(cache, cache.block_table[slot], jnp.zeros_like(length), wanted)
    owned = ok & (table < cache.num_blocks).reshape(-1)
    size = held["metric"].shape[0]
    at = jnp.where(owned, jnp.cumsum(owned, dtype=jnp.int32) - 1, size)
    ids = jnp.full(size, cache.num_blocks, jnp.int32).at[at].set(table.reshape(-1), mode="drop")
    pools = {
        name: pool.at[ids].set(held[name], mode="drop") for name, pool in _pools(cache).items()
    }

    def stored(name: str, old: Any) -> Any:
        leaves, tree = jax.tree.flatten(old)
        return jax.tree.unflatten(tree, [pools[f"{name}.{i}"] for i in range(len(leaves))])

    kv = dataclasses.replace(
        cache.kv, stored_k=stored("k", cache.kv.stored_k), stored_v=stored("v", cache.kv.stored_v)
    )
    return dataclasses.replace(
        cache,
        kv=kv,
        metric=pools["metric"],
        position=pools["position"],
        state={name: pools[f"state.{name}"] for name in cache.state},
        block_table=cache.block_table.at[slot].set(table),
        context_len=cache.context_len.at[slot].set(jnp.where(ok, length, old_len)),
        seq_len=cache.seq_len.at[slot].set(jnp.where(ok, held["seq_len"], old_seq)),
    ), ok
