"""A model split over the devices of a mesh axis, and the three places where they meet.

Each device has some KV heads with their query heads, columns of the MLP, and rows of the
vocabulary (both as many as the others, zeros at the end). The residual stream is the same
everywhere. Devices add up what attention and what the MLP give to it, and what they find of tokens'
embeddings, and put the logits together from those of their parts of the vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num

from kvjax.models.config import ModelConfig

SPLIT_AXES = ("kv_heads", "mlp", "vocab")
"""Names of the axes of parameters that are split."""


_WORST = 5
"""Shares count squared so often: of a device and a rate that have more than others, most of all."""
_KICKS = 400
"""So often are some heads exchanged at random, to see whether more exchanges then help."""


@dataclasses.dataclass(frozen=True)
class ModelShard(ModelConfig):
    """What one device has of a model: heads and MLP columns are its own, the vocabulary the whole
    model's."""

    axis: str = ""
    """The mesh axis."""

    @classmethod
    def of(cls, config: ModelConfig, places: int, devices: int, axis: str) -> "ModelShard":
        """That of each of some devices with so many places for KV heads."""
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        fields["num_kv_heads"] = places
        fields["num_heads"] = places * config.group_size
        fields["intermediate_size"] = -(-config.intermediate_size // devices)
        return cls(**fields, axis=axis)


def added_up(config: ModelConfig, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sum of what the devices have of it; x itself on a single device."""
    return jax.lax.psum(x, config.axis) if isinstance(config, ModelShard) else x


def looked_up(
    config: ModelConfig,
    table: Num[Array, "V D"],
    tokens: Int[Array, "B T"],
    scale: Float[Array, " V"] | None = None,
) -> Float[Array, "B T D"]:
    """The rows of some tokens, times their scales; a device has as many rows as the others."""
    if not isinstance(config, ModelShard):
        return _rows(table, scale, tokens)
    size = table.shape[0]
    row = tokens - jax.lax.axis_index(config.axis) * size
    here = (row >= 0) & (row < size)
    found = _rows(table, scale, jnp.clip(row, 0, size - 1))
    return added_up(config, jnp.where(here[..., None], found, 0))


def _rows(table: Array, scale: Array | None, at: Array) -> Array:
    found = jnp.take(table, at, axis=0)
    return found if scale is None else found.astype(scale.dtype) * scale[at][..., None]


def of_vocabulary(config: ModelConfig, logits: Float[Array, "... V"]) -> Float[Array, "... W"]:
    """The logits of the whole vocabulary, from a device's part of them."""
    if not isinstance(config, ModelShard):
        return logits
    whole = jax.lax.all_gather(logits, config.axis, axis=logits.ndim - 1, tiled=True)
    return whole[..., : config.vocab_size]


@dataclasses.dataclass(frozen=True)
class Dealing:
    """Which device has which KV heads."""

    number: np.ndarray
    """[L, devices × places] int32: the head in each place, or H, the number of heads, in one that
    stays empty. A device has as many places in a row as the others."""
    heads: int
    """H, KV heads of a layer."""
    devices: int

    @classmethod
    def even(cls, num_layers: int, heads: int, devices: int) -> "Dealing":
        """In order. Where the heads do not come out even, some devices have one more, and which
        these are changes from layer to layer."""
        places = -(-heads // devices)
        number = np.full((num_layers, devices, places), heads, np.int32)
        least, more = divmod(heads, devices)
        for layer in range(num_layers):
            first = 0
            for device in range(devices):
                has = least + ((device - layer * more) % devices < more)
                number[layer, device, :has] = np.arange(first, first + has)
                first += has
        return cls(number.reshape(num_layers, -1), heads, devices)

    @classmethod
    def by_load(cls, load: np.ndarray, devices: int) -> "Dealing":
        """So that devices get about as much of each of some loads, and as many heads, as far as
        their places allow: at the highest rates each head has one block, and no head has less.

        The heaviest heads of all layers come first, each to the device that has least; then heads
        of one layer are exchanged (`_exchanged`). The same loads are always dealt alike.

        Args:
            load: [L, H] or [L, H, R], what each head is expected to hold, in any unit: a load for
                each of R rates. The worst of them counts.
            devices: how many there are.
        """
        layers, heads = load.shape[:2]
        places = -(-heads // devices)
        loads = load.reshape(layers, heads, -1).astype(np.float64)
        loads = np.concatenate([loads, np.ones((layers, heads, 1))], axis=-1)
        # Of each the mean device has 1; where one head alone has more, the device with it.
        share = loads * devices / np.maximum(loads.sum((0, 1)), np.finfo(np.float64).tiny)
        share = share / np.maximum(share.max((0, 1)), 1)
        number = np.full((layers, devices, places), heads, np.int32)
        room, total = np.full((layers, devices), places), np.zeros((devices, share.shape[-1]))
        for at in np.argsort(-share.sum(-1), axis=None, kind="stable"):
            layer, head = divmod(int(at), heads)
            fullest = (total + share[layer, head]).max(-1)
            to = int(np.argmin(np.where(room[layer] > 0, fullest, np.inf)))
            number[layer, to, places - room[layer, to]] = head
            room[layer, to] -= 1
            total[to] += share[layer, head]
        number = _exchanged(number.reshape(layers, -1), share, devices)
        order = np.sort(number.reshape(layers, devices, places), axis=-1)
        return cls(order.reshape(layers, -1), heads, devices)

    def same_as(self, other: "Dealing") -> bool:
        """Whether every head lies in the same place."""
        return self.devices == other.devices and np.array_equal(self.number, other.number)

    @property
    def whole(self) -> bool:
        """Whether every head of every layer has one place."""
        heads = np.minimum(np.arange(self.number.shape[1]), self.heads)
        return bool((np.sort(self.number, axis=1) == heads).all())

    def loads(self, load: np.ndarray) -> np.ndarray:
        """What each device gets of a load [L, H]."""
        padded = np.pad(load, ((0, 0), (0, 1)))
        placed = padded[np.arange(len(load))[:, None], self.number]
        return placed.reshape(len(load), self.devices, -1).sum((0, 2))

    @property
    def places(self) -> int:
        """Places of a device for KV heads of a layer."""
        return self.number.shape[1] // self.devices

    @property
    def heads_of_devices(self) -> np.ndarray:
        """KV heads of each device, over all layers [devices]."""
        present = self.number < self.heads
        return present.reshape(len(present), self.devices, -1).sum((0, 2))

    @property
    def place(self) -> np.ndarray:
        """[L, H]: where each head lies."""
        return np.argsort(self.number, axis=1, kind="stable")[:, : self.heads]

    def by_head(self, x: np.ndarray) -> np.ndarray:
        """[L, devices × places, …] by place -> [L, H, …] by head."""
        return x[np.arange(len(x))[:, None], self.place]


def _exchanged(number: np.ndarray, share: np.ndarray, devices: int) -> np.ndarray:
    """Heads by place after exchanges within layers, by which devices get more even shares.

    Whichever two places even out most are exchanged until none do; then some at random and again
    whichever, which is taken back if it comes out worse (iterated local search: Lourenço, Martin &
    Stützle 2003). Nothing here depends on the machine: every process finds the same.

    Args:
        number: [L, devices × places] the head in each place, H in an empty one.
        share: [L, H, R], of each of R loads what a head has; the mean device has 1.
        devices: how many there are.
    """
    layers, width = number.shape
    on = np.arange(width) // (width // devices)
    one, other = (at.astype(int) for at in np.triu_indices(width, 1))
    apart = on[one] != on[other]
    one, other = one[apart], other[apart]
    if not len(one):
        return number
    number = number.copy()
    held = np.pad(share, ((0, 0), (0, 1), (0, 0)))[np.arange(layers)[:, None], number]
    total = held.reshape(layers, devices, -1, share.shape[-1]).sum((0, 2))

    def uneven(x: np.ndarray) -> np.ndarray:
        for _ in range(_WORST):
            x = x * x
        return x.sum(-1)

    def exchange(layer: int, pair: int) -> None:
        both = [one[pair], other[pair]]
        moved = held[layer, both[0]] - held[layer, both[1]]
        total[on[both[0]]] -= moved
        total[on[both[1]]] += moved
        for rows in (held, number):
            rows[layer, both] = rows[layer, both[::-1]]

    def even_out() -> float:
        while True:
            moved = held[:, one] - held[:, other]
            now = uneven(total)
            gain = now[on[one]] + now[on[other]]
            gain = gain - uneven(total[on[one]] - moved) - uneven(total[on[other]] + moved)
            layer, pair = divmod(int(np.argmax(gain)), len(one))
            if gain[layer, pair] <= 1e-12 * (now[on[one[pair]]] + now[on[other[pair]]]):
                return now.sum()
            exchange(layer, pair)

    rng, least = np.random.default_rng(0), even_out()
    for _ in range(_KICKS):
        before = held.copy(), number.copy(), total.copy()
        for _ in range(rng.integers(2, 5)):
            exchange(int(rng.integers(layers)), int(rng.integers(len(one))))
        found = even_out()
        if found < least:
            least = found
        else:
            held, number, total = before
    return number


def spec_of(axes: tuple[str | None, ...], axis: str) -> PartitionSpec:
    """How a parameter with axes of these names lies on the mesh."""
    return PartitionSpec(*(axis if name in SPLIT_AXES else None for name in axes))


def deal(x: Array, axis: int, number: np.ndarray) -> Array:
    """An array of all layers [L, …] with its axis of KV heads by place; zeros where none is."""
    take = jax.vmap(lambda one, at: jnp.take(one, at, axis - 1, mode="fill", fill_value=0))
    return take(x, jnp.asarray(number))


def deal_query_heads(x: Array, axis: int, dealing: Dealing) -> Array:
    """The same for an axis of query heads, which lie one group after the other."""
    shape = x.shape
    groups = x.reshape(*shape[:axis], dealing.heads, -1, *shape[axis + 1 :])
    dealt = deal(groups, axis, dealing.number)
    return dealt.reshape(*shape[:axis], -1, *shape[axis + 1 :])


@dataclasses.dataclass(frozen=True)
class Split:
    """How a model's parameters lie on the devices of a mesh of one axis."""

    dealing: Dealing
    mesh: Mesh
    """As many devices as the dealing has."""

    def sharding(self, names: tuple[str | None, ...]) -> NamedSharding:
        """Of a parameter with axes of these names."""
        return NamedSharding(self.mesh, spec_of(names, self.mesh.axis_names[0]))

    def put(self, value: Array | np.ndarray, names: tuple[str, ...], layer: int | None) -> Array:
        """A parameter of the whole model, or of one layer, dealt to the devices."""
        return put_whole(dealt(value, names, self.dealing, layer), self.sharding(names))


def put_whole(value: Array | np.ndarray, sharding: NamedSharding) -> Array:
    """An array that every process has as a whole, put onto the devices of a mesh."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])


def dealt(
    value: Array | np.ndarray, names: tuple[str, ...], dealing: Dealing, layer: int | None = None
) -> Any:
    """A parameter with heads by place, and as much of what else is split for every device.

    Args:
        value: the whole model's; of all layers, or of one of them.
        names: of its axes, from `logical_axes`.
        dealing: which heads lie where.
        layer: of which layer it is, if of one.
    """
    xp = np if isinstance(value, np.ndarray) else jnp
    found: Any = value
    for at, name in enumerate(names):
        if name == "kv_heads" and names[0] == "layers":
            if xp is np:
                rows = zip(found, dealing.number)
                found = np.stack([_by_place(row, at - 1, number) for row, number in rows])
            else:
                found = deal(found, at, dealing.number)
        elif name == "kv_heads":
            assert layer is not None
            number = dealing.number[layer]
            if xp is np:
                found = _by_place(found, at, number)
            else:
                found = deal(found[None], at + 1, number[None])[0]
        elif name in SPLIT_AXES:
            short = -found.shape[at] % dealing.devices
            found = xp.pad(found, [(0, short * (i == at)) for i in range(found.ndim)])
    return found


def dealt_shape(
    shape: tuple[int, ...], names: tuple[str, ...], dealing: Dealing
) -> tuple[int, ...]:
    """That of what `dealt` makes."""
    places = dealing.number.shape[1]
    sizes = (
        places if name == "kv_heads" else n + -n % dealing.devices if name in SPLIT_AXES else n
        for n, name in zip(shape, names)
    )
    return tuple(sizes)


def _by_place(value: np.ndarray, axis: int, number: np.ndarray) -> np.ndarray:
    """`deal` of one layer, on the host."""
    found = value.take(np.minimum(number, value.shape[axis] - 1), axis)
    found[(slice(None),) * axis + (number >= value.shape[axis],)] = 0
    return found


def undealt(
    value: np.ndarray,
    names: tuple[str, ...],
    config: ModelConfig,
    dealing: Dealing,
    layer: int | None = None,
) -> np.ndarray:
    """The whole model's parameter, from what `dealt` made of it."""
    sizes = {"mlp": config.intermediate_size, "vocab": config.vocab_size}
    for at, name in enumerate(names):
        if name == "kv_heads" and names[0] == "layers":
            rows = zip(value, dealing.place)
            value = np.stack([row.take(place, at - 1) for row, place in rows])
        elif name == "kv_heads":
            assert layer is not None
            value = value.take(dealing.place[layer], at)
        elif name in sizes:
            value = value.take(np.arange(sizes[name]), at)
    return value


def split_params(
    params: nnx.State, axes: Mapping[tuple[str | int, ...], tuple[str, ...]], split: Split
) -> nnx.State:
    """The whole model's parameters, dealt to the devices one after the other; `axes` are their
    axes' names, from `logical_axes`."""
    flat = cast(list[tuple[tuple[str | int, ...], Any]], nnx.to_flat_state(params))
    return nnx.from_flat_state(
        [
            (path, leaf.replace(split.put(leaf[...], axes[path], layer_of(path))))
            for path, leaf in flat
        ]
    )


def join_params(
    params: nnx.State,
    axes: Mapping[tuple[str | int, ...], tuple[str, ...]],
    config: ModelConfig,
    dealing: Dealing,
) -> nnx.State:
    """The whole model's parameters on the host, from those that `split_params` dealt."""

    def join(path: tuple[str | int, ...], leaf: Any) -> Any:
        value = np.asarray(leaf[...])
        return leaf.replace(undealt(value, axes[path], config, dealing, layer_of(path)))

    flat = cast(list[tuple[tuple[str | int, ...], Any]], nnx.to_flat_state(params))
    return nnx.from_flat_state([(path, join(path, leaf)) for path, leaf in flat])


def layer_of(path: tuple[str | int, ...]) -> int | None:
    """Of which single layer a parameter is."""
    return int(path[1]) if len(path) == 3 else None
