"""Moving KVs inside the pool in plain JAX: a gather and a scatter."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Num


def move_kvs(
    k: Num[Array, "N b d"],
    v: Num[Array, "N b d"],
    source: Int32[Array, "rows U"],
    target: Int32[Array, "rows U"],
    count: Int32[Array, " rows"],
) -> tuple[Num[Array, "N b d"], Num[Array, "N b d"]]:
    """See `kvjax.kernels.move_kvs`."""
    n, b, _ = k.shape
    moves = jnp.arange(source.shape[1]) < count[:, None]
    block, offset = jnp.where(moves, target // b, n), target % b

    def moved(pool):
        values = pool.at[source // b, source % b].get(mode="fill", fill_value=0)
        return pool.at[block, offset].set(values, mode="drop")

    return moved(k), moved(v)
