"""What the engine and the loaders need of a model, whatever its family.

A family is two Flax NNX modules: the `Model` around the layers and one `Layer`. Their tables
describe every parameter: shape, axes, initial values and the checkpoint tensors that fill it. From
these follow dummy weights, shardings (`kvjax.models.decoder`) and what the loaders read
(`kvjax.models.layout`); `kvjax.models.decoder.forward` runs any family.

`kvjax.models.families` holds one file per family. What checkpoints call them, and what their
config.json says, stands in `kvjax.models.architectures`.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.models.config import ModelConfig
from kvjax.models.narrow import MOST


@runtime_checkable
class Attend[Carry](Protocol):
    """Attention of one layer: ``(carry, layer, q, k, v, hidden) -> (carry, out, aux)``.

    ``layer`` is an i32 scalar; q is [B, T, H r, d], k and v are [B, T, H, d], q and k after RoPE;
    ``hidden`` [B, T, D] is what queries, keys and values are made of: the residual stream after the
    layer's first norm. out has the shape of q, or this replica's share of it
    (``kvjax.models.parallel.own_share``). ``aux`` is any pytree of arrays, stacked over the
    layers afterwards.
    """

    def __call__(
        self, carry: Carry, layer: Array, q: Array, k: Array, v: Array, hidden: Array, /
    ) -> tuple[Carry, Array, Any]: ...


@runtime_checkable
class AttendSome[Carry](Protocol):
    """Attention of a layer that has some tokens of one sequence, and which of them the next has.

    As `Attend`, but: ``positions`` [T] i32 are those of the tokens; instead of ``aux`` it returns
    ``stay`` [T] i32, the rows of the next layer, as indices. Of rows that are padding it may say
    anything in range.
    """

    def __call__(
        self,
        carry: Carry,
        layer: Array,
        positions: Array,
        q: Array,
        k: Array,
        v: Array,
        hidden: Array,
        /,
    ) -> tuple[Carry, Array, Array]: ...


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint that fills a parameter or a part of it.

    Attributes:
        hf, gguf: its names in safetensors and in GGUF files; of a layer's without the layer.
        part: the slices of the parameter's first axes that it fills; all of it by default.
        rotated: whether its rows are those of rotated heads (q or k): GGUF files of some
            architectures interleave the two halves of each head there.
    """

    hf: str
    gguf: str
    part: tuple[slice, ...] = ()
    rotated: bool = False


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, the name of each axis, its initial values, where it is stored.

    Attributes:
        shape, axes: its axes, and what each of them is called.
        std: standard deviation of its random initial values; None means ones.
        index: tells apart the parameters of a family when they are initialised.
        tensors: the checkpoint tensors that fill it.
        inputs: how many of its first axes are those that a matrix multiplies by: it lies in the
            file as [other axes, these]. 0 for what lies there as it is.
        rows: whether it is a table of rows, which a product takes for its outputs.
        dtype: of what is stored; None for that of the activations.
        value: initial value where there is no `std`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    std: float | None
    index: int
    tensors: tuple[CheckpointTensor, ...]
    inputs: int = 0
    rows: bool = False
    dtype: str | None = None
    value: float = 1.0

    @property
    def outputs(self) -> slice | None:
        """The axes of a matrix that are the outputs of a product; None for what is no matrix."""
        if self.inputs:
            return slice(self.inputs, None)
        return slice(0, 1) if self.rows else None

    def init(self, dtype: DTypeLike, seed: Array | int, layer: Array | int) -> Array:
        """Initial values, uniform with standard deviation ``std``.

        They come from hashing the coordinates, so that a device writes them in one pass without
        a buffer of random bits beside them, and each shard of a mesh can make its own part.
        """
        if self.std is None:
            return jnp.full(self.shape, self.value, dtype)
        bits = jnp.uint32(self.index)
        for salt in (jnp.asarray(seed), jnp.asarray(layer)):
            bits = _mix(bits * jnp.uint32(0x85157AF5) + salt.astype(jnp.uint32))
        for axis in range(len(self.shape)):
            coordinate = jax.lax.broadcasted_iota(jnp.uint32, self.shape, axis)
            bits = _mix(bits + coordinate * jnp.uint32(0x9E3779B1))
        # The upper 24 bits fill a f32 in [-1, 1) exactly.
        unit = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - jnp.float32(1.0)
        if self.dtype is not None:
            number = unit * jnp.float32(MOST[self.dtype])
            return (jnp.round(number) if self.dtype == "int8" else number).astype(self.dtype)
        return (unit * jnp.float32(self.std * math.sqrt(3.0))).astype(dtype)


def stored(table: dict[str, ParamSpec], config: ModelConfig) -> dict[str, ParamSpec]:
    """The parameters of a table, where matrices of few bits have their scales beside them."""
    dtype = config.weight_dtype
    if dtype is None:
        return table
    found = {}
    for name, spec in table.items():
        found[name] = spec
        if (outputs := spec.outputs) is not None and spec.std is not None:
            found[name] = dataclasses.replace(spec, dtype=dtype)
            value = spec.std * math.sqrt(3.0) / MOST[dtype]
            shape, axes = spec.shape[outputs], spec.axes[outputs]
            found[scale_of(name)] = ParamSpec(shape, axes, None, spec.index, (), value=value)
    return found


def scale_of(name: str) -> str:
    """What the scales of a matrix are called."""
    return f"{name}_scale"


def _mix(x: Array) -> Array:
    """A 32-bit integer hash: xor-shifts and odd multiplications."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


class Layer(nnx.Module):
    """One decoder layer: the parameters of its table, and the two halves around attention."""

    def __init__(
        self, config: ModelConfig, dtype: DTypeLike, seed: Array | int, layer: Array | int
    ):
        for name, spec in stored(self.table(config), config).items():
            setattr(self, name, nnx.Param(spec.init(dtype, seed, layer)))

    @classmethod
    def table(cls, config: ModelConfig) -> dict[str, ParamSpec]:
        """The parameters of one layer by name."""
        raise NotImplementedError

    def enter(self, config: ModelConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The residual stream before a layer -> what enters its attention block."""
        raise NotImplementedError

    def project(
        self,
        config: ModelConfig,
        hidden: Float[Array, "B T D"],
        cos: Float[Array, "B T half"],
        sin: Float[Array, "B T half"],
    ) -> tuple[Float[Array, "B T Q d"], Float[Array, "B T H d"], Float[Array, "B T H d"]]:
        """What enters the attention block -> rotated queries, rotated keys, values."""
        raise NotImplementedError

    def added(
        self, config: ModelConfig, attended: Float[Array, "B T Q d"]
    ) -> Float[Array, "B T D"]:
        """What attention gave -> what that adds to the residual stream."""
        raise NotImplementedError

    def finish(
        self, config: ModelConfig, x: Float[Array, "B T D"], attended: Float[Array, "B T Q d"]
    ) -> Float[Array, "B T D"]:
        """The residual stream after a layer, from that before it and what attention gave."""
        raise NotImplementedError


class Model(nnx.Module):
    """What stands around the layers: the parameters of its table, the first step and the last."""

    layer_class: ClassVar[type[Layer]]
    layers: Any

    def __init__(self, config: ModelConfig, dtype: DTypeLike, seed: Array | int):
        for name, spec in stored(self.table(config), config).items():
            setattr(self, name, nnx.Param(spec.init(dtype, seed, 0)))

    @classmethod
    def table(cls, config: ModelConfig) -> dict[str, ParamSpec]:
        """The parameters outside the layers by name."""
        raise NotImplementedError

    def embed_tokens(self, config: ModelConfig, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token ids -> the residual stream before the first layer."""
        raise NotImplementedError

    def last_hidden(self, config: ModelConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The residual stream after the last layer -> the hidden states that logits are of."""
        raise NotImplementedError

    def logits(self, config: ModelConfig, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Vocabulary logits, f32, of hidden states."""
        raise NotImplementedError
