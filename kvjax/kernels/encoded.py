"""A pool that attention reads through a decoder."""

import dataclasses
from typing import Any, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


@runtime_checkable
class Decoder(Protocol):
    """What makes rows of a floating-point type of what is stored; hashable."""

    def decode(self, stored: Any) -> Float[Array, "*n d"]: ...


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A pool [N, b, d] of keys or values in another form, in place of the array.

    Its shape and dtype are those of the rows. Device kernels that do not know the form leave it to
    the XLA path, which decodes the blocks that it gathers.
    """

    stored: Any
    """Arrays (a pytree) with leading axes [N, b]."""
    decoder: Decoder = dataclasses.field(metadata={"static": True})

    @property
    def _rows(self) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(self.decoder.decode, self.stored)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._rows.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        return self._rows.dtype

    def __getitem__(self, blocks: Int32[Array, "*n"]) -> Float[Array, "..."]:
        """The rows of some blocks."""
        return self.decoder.decode(jax.tree.map(lambda x: x[blocks], self.stored))
