"""Rotary position embedding as scorers see it: queries and keys turned back, and turned on.

Views hold queries and keys as attention uses them. A scorer that wants them before RoPE asks for
the artefact `ROPE_FREQUENCY`, which is there for every model without any calibration.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

ROPE_FREQUENCY = "rope_frequency"
"""Artefact [L, d / 2], float32: radians per token of each rotated pair (i, i + d / 2)."""


def turned(
    x: Float[Array, "*rows d"],
    cos: Float[Array, "*#rows half"],
    sin: Float[Array, "*#rows half"],
) -> Float[Array, "*rows d"]:
    """x in float32 with each pair (i, i + d / 2) turned by an angle of this cosine and sine."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def sizes(x: Float[Array, "*rows d"]) -> Float[Array, "*rows half"]:
    """The norm of each pair (i, i + d / 2), which RoPE leaves as it is."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.sqrt(first * first + second * second)


def turned_back(
    x: Float[Array, "T heads d"],
    position: Int32[Array, " T"],
    frequency: Float[Array, " half"],
) -> Float[Array, "T heads d"]:
    """Queries or keys of consecutive tokens as they were before RoPE, in float32."""
    angle = (position[:, None].astype(jnp.float32) * frequency)[:, None]
    return turned(x, jnp.cos(angle), -jnp.sin(angle))
