"""Which KV heads a device has, where an axis of a mesh splits them over several devices.

Functions on caches run on every device of the mesh, each on its own heads and its own part of the
pool (`jax.shard_map`). Where all heads have a say, they ask the others through a `HeadShard`; with
None, on a single device, nothing is asked and nothing is compiled for it.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Num


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadShard:
    """The heads of one device. A device may have more places than heads: those stay empty."""

    number: Int32[Array, "*L H"]
    """Which of its layer's heads lies in each place; `total` in a place that is empty."""
    axis: str = dataclasses.field(metadata={"static": True})
    """The mesh axis."""
    total: int = dataclasses.field(metadata={"static": True})
    """KV heads of a layer, over all devices."""

    @property
    def present(self) -> Bool[Array, "*L H"]:
        """Which places are not empty."""
        return self.number < self.total

    def sum(self, x: Num[Array, "..."]) -> Num[Array, "..."]:
        """The sum over all devices."""
        return jax.lax.psum(x, self.axis)

    def max(self, x: Num[Array, "..."]) -> Num[Array, "..."]:
        """The largest over all devices."""
        return jax.lax.pmax(x, self.axis)

    def all(self, flag: Bool[Array, "*dims"]) -> Bool[Array, "*dims"]:
        """Whether it is so on every device."""
        return jax.lax.pmin(flag.astype(jnp.int32), self.axis) > 0

    def whole(self, x: Num[Array, "*L H n"]) -> Num[Array, "*L total n"]:
        """Some numbers of each head of all devices, in the order of the model's heads."""
        places = x.reshape(-1, *x.shape[-2:])
        row = jnp.arange(places.shape[0])[:, None]
        out = jnp.zeros((places.shape[0], self.total, x.shape[-1]), x.dtype)
        out = out.at[row, self.number.reshape(places.shape[:2])].set(places, mode="drop")
        return self.sum(out.reshape(*x.shape[:-2], *out.shape[1:]))

    def own(self, x: Num[Array, "*L total"]) -> Num[Array, "*L H"]:
        """A number of each of its heads, given those of all heads; 0 in empty places."""
        found = jnp.take_along_axis(x, jnp.minimum(self.number, self.total - 1), axis=-1)
        return jnp.where(self.present, found, 0)


def summed(shard: HeadShard | None, x: Num[Array, "..."]) -> Num[Array, "..."]:
    """A sum over heads, with those of the other devices."""
    return x if shard is None else shard.sum(x)


def agreed(shard: HeadShard | None, flag: Bool[Array, "*dims"]) -> Bool[Array, "*dims"]:
    """A flag that has to be True for the heads of every device."""
    return flag if shard is None else shard.all(flag)
