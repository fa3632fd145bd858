"""Between the stages: sequences give blocks back, some of them or all."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from kvjax.cache import PagedCache, compress, release
from kvjax.cache.policy import Method
from kvjax.cache.store import put_slots, take_slots
from kvjax.engine.decode import SlotState


def compress_slots(
    max_kvs_per_step: int,
    max_blocks: int,
    method: Method,
    artefacts: Mapping[str, Array],
    cache: PagedCache,
    slots: Int32[Array, " G"],
    keep_blocks: Int32[Array, " G"],
    protected: Int32[Array, " G"],
) -> tuple[PagedCache, Int32[Array, " G"]]:
    """Compress some slots whose heads own at most `max_blocks` (static) blocks each.

    Their `protected` newest tokens stay, if that is more than what the method protects.

    Returns the cache and the blocks that each gave back.
    """
    part = take_slots(cache, slots, max_blocks)
    own = jnp.arange(slots.shape[0], dtype=jnp.int32)
    own = jnp.where(slots < cache.num_slots, own, slots.shape[0])
    part, report = compress(
        part,
        own,
        keep_blocks,
        method.protecting(protected),
        artefacts=artefacts,
        max_kvs_per_step=max_kvs_per_step,
    )
    return put_slots(cache, slots, part), report.freed


def empty(
    cache: PagedCache, state: SlotState, marked: Bool[Array, " S"]
) -> tuple[PagedCache, SlotState]:
    """Free everything that the marked slots hold; nothing runs in them afterwards."""
    return release(cache, marked), dataclasses.replace(state, active=state.active & ~marked)
