"""What stores a prompt's keys and values in a way that no pool of blocks can hold."""

import dataclasses
from typing import ClassVar, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy import Artefacts, LayerView
from kvjax.cache.store.spec import KVShape
from kvjax.engine.dense import DensePass
from kvjax.models import LoadedModel

Rows = tuple[Float[Array, "*L T H d"], Float[Array, "*L T H d"]]
"""Keys and values of a layer, or of all, float32."""


class ModelShape(KVShape, Protocol):
    """What a model says of its KVs and of what they are made of."""

    @property
    def hidden_size(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class PromptCodec:
    """How a prompt is stored, and what attention reads of it: a frozen, hashable value that passes
    are compiled from, with what it keeps in bytes.

    What is stored of a KV may depend on the others of its prompt, on queries, and on other layers.
    A subclass gives `restore`, or `layer` where layers stand alone, and `stored_bytes`.
    """

    artefacts: ClassVar[tuple[str, ...]] = ()
    """Names of the arrays by layer that `layer` reads."""
    calibrated: ClassVar[tuple[str, ...]] = ()
    """Those of them that `kvjax calibrate --levels` finds."""
    peaks: ClassVar[bool] = False
    """Whether `restore` reads `DensePass.peak`."""

    @property
    def name(self) -> str:
        """What --kv-dtype calls it."""
        raise NotImplementedError

    def from_weights(self, model: LoadedModel) -> Artefacts:
        """Arrays by layer that are made of a model's weights and that it reads.

        Raises:
            UserError: it cannot store what this model computes.
        """
        return {}

    def restore(self, dense: DensePass, length: Int32[Array, ""], artefacts: Artefacts) -> Rows:
        """The keys, rotated, and the values of a prompt after it was stored.

        Args:
            dense: a pass with full attention over the prompt, and over more than it.
            length: tokens of the prompt. Nothing that follows them counts; what is returned of
                it is no one's.
            artefacts: arrays by layer: `ROPE_FREQUENCY`, and those of `artefacts`.
        """

        def of_layer(part):
            layer, q, k, v, log_sum, hidden, peak, of_weights = part
            k, v = (x.astype(jnp.float32) for x in (k, v))
            told = {"log_sum": log_sum, "v": v, "hidden": hidden, "peak": peak}
            return self.layer(LayerView(layer, q, k, length, jnp.int32(0), **told), of_weights)

        layers = jnp.arange(len(dense.k), dtype=jnp.int32)
        parts = layers, dense.q, dense.k, dense.v, dense.log_sum, dense.hidden, dense.peak
        return lax.map(of_layer, (*parts, {name: artefacts[name] for name in self.artefacts}))

    def layer(self, view: LayerView, artefacts: Artefacts) -> Rows:
        """The same of a layer, whose keys and values are float32, with its part of `artefacts`."""
        raise NotImplementedError

    def stored_bytes(self, shape: ModelShape, length: int) -> int:
        """Bytes that are stored of a prompt of `length` tokens, in all layers and heads."""
        raise NotImplementedError
