"""A compressed cache without model or engine: write a prompt, compress it, append, release.

    python examples/compress_by_hand.py

Every operation is a pure function `cache -> cache`; donated, it works in place.
"""

import jax
import jax.numpy as jnp

from kvjax.cache import append, compress, free_blocks, init_cache, release, write_prompt
from kvjax.kernels import window_metrics

LAYERS, KV_HEADS, GROUP, DIM = 4, 2, 4, 64
TOKENS, WINDOW, BLOCK = 1024, 8, 16

write = jax.jit(write_prompt, donate_argnums=0)
evict = jax.jit(compress, donate_argnums=0)
extend = jax.jit(append, donate_argnums=0)
forget = jax.jit(release, donate_argnums=0)


@jax.jit
def received(q, k):
    """What the last queries gave each key, [L, H, T]: squared attention, summed over the group."""
    position = jnp.arange(TOKENS - WINDOW, TOKENS, dtype=jnp.int32)
    each = jax.vmap(lambda q, k: window_metrics(q, k, query_position=position))(q, k)
    return each.reshape(LAYERS, KV_HEADS, GROUP, TOKENS).sum(axis=2)


def main() -> None:
    whole = LAYERS * KV_HEADS * TOKENS // BLOCK
    cache = init_cache(
        num_slots=2, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM,
        num_blocks=2 * whole, max_blocks_per_head=2 * TOKENS // BLOCK, block_size=BLOCK,
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (jax.random.normal(key, (LAYERS, TOKENS, KV_HEADS, DIM)) for key in keys[:2])
    # Some layers look at a few keys, others at all of them: they keep unlike numbers of KVs.
    sharpness = jnp.linspace(0.5, 4.0, LAYERS)[:, None, None, None]
    q = sharpness * jax.random.normal(keys[2], (LAYERS, WINDOW, KV_HEADS * GROUP, DIM))

    cache, ok = write(cache, 0, k, v, received(q, k), TOKENS)
    assert ok, "too few free blocks"
    before, used = cache.metric.sum(), 2 * whole - free_blocks(cache)
    print(f"prompt of {TOKENS} tokens: {used} blocks of {BLOCK} KVs")

    cache, report = evict(cache, jnp.array([0]), jnp.array([whole // 8]))
    kept = [int(n) for n in cache.context_len[0].sum(axis=1)]
    share = float(cache.metric.sum() / before)
    print(f"compressed 8 times: {report.freed[0]} blocks are free again; {share:.0%} of the")
    print(f"squared attention is kept, in layers 0 to {LAYERS - 1} with {kept} KVs")

    active = jnp.array([True, False])
    for step in range(40):
        new = jax.random.normal(jax.random.key(step), (2, LAYERS, 2, KV_HEADS, DIM))
        cache, ok = extend(cache, *new, active)
        assert ok, "too few free blocks"
    print(f"40 tokens later: {2 * whole - free_blocks(cache)} blocks, length {cache.seq_len[0]}")

    cache = forget(cache, active)
    print(f"released: {2 * whole - free_blocks(cache)} blocks")


if __name__ == "__main__":
    main()
