"""A model split over the devices of a mesh axis, and the three places where they meet.

Each device has some KV heads with their query heads, columns of the MLP, and rows of the
vocabulary (both as many as the others, zeros at the end). The residual stream is the same
everywhere. Devices add up what attention and what the MLP give to it, and what they find of tokens'
embeddings, and put the logits together from those of their parts of the vocabulary.

A KV head may lie on several devices, its replicas. Each has its key and value and a share of its
query heads: of their columns of Q and their rows of the output projection. Queries are gathered
among the replicas, so that all of them measure what all queries of a head read, and hold the same.
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
BESIDE_QUERIES = {"group": 0, "group_and_kv": 2}
"""Names of the axes behind that of KV heads, which have the query heads of each: and what they have
behind these, which every replica has."""

_WORST = 5
"""Shares count squared so often: of a shard and a rate that have more than others, most of all."""
_KICKS = 400
"""So often are some heads exchanged at random, to see whether more exchanges then help."""


@dataclasses.dataclass(frozen=True)
class ModelShard(ModelConfig):
    """What one device has of a model: heads and MLP columns are its own, the vocabulary the whole
    model's."""

    axes: tuple[str, str] = ("", "")
    """The mesh axes: of heads, and of the replicas of each."""
    replicas: int = 1
    """Devices that have the same KV heads, and a share of their query heads each."""

    @classmethod
    def of(cls, config: ModelConfig, dealing: "Dealing", axes: tuple[str, str]) -> "ModelShard":
        """That of each device of a dealing; query heads are those of all its replicas."""
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        fields["num_kv_heads"] = dealing.places
        fields["num_heads"] = dealing.places * config.group_size
        fields["intermediate_size"] = -(-config.intermediate_size // dealing.devices)
        return cls(**fields, axes=axes, replicas=dealing.replicas)


def added_up(config: ModelConfig, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sum of what the devices have of it; x itself on a single device."""
    return jax.lax.psum(x, config.axes) if isinstance(config, ModelShard) else x


def whole_groups(config: ModelConfig, q: Float[Array, "... H s d"]) -> Float[Array, "... H r d"]:
    """All queries of each KV head's group, from the share that each of its replicas has; q itself
    where none has any."""
    if not isinstance(config, ModelShard) or config.replicas == 1:
        return q
    found = jax.lax.all_gather(q, config.axes[1], axis=q.ndim - 2, tiled=True)
    return found[..., : config.group_size, :]


def own_share(config: ModelConfig, x: Float[Array, "*n Q d"]) -> Float[Array, "*n S d"]:
    """This replica's share of what belongs to all query heads of its KV heads, zeros at the end
    of a group that does not divide; x itself where KV heads have no replicas."""
    if not isinstance(config, ModelShard) or config.replicas == 1:
        return x
    share = -(-config.group_size // config.replicas)
    groups = x.reshape(*x.shape[:-2], config.num_kv_heads, config.group_size, x.shape[-1])
    short = share * config.replicas - config.group_size
    groups = jnp.pad(groups, [(0, 0)] * (groups.ndim - 2) + [(0, short), (0, 0)])
    first = jax.lax.axis_index(config.axes[1]) * share
    own = jax.lax.dynamic_slice_in_dim(groups, first, share, axis=-2)
    return own.reshape(*x.shape[:-2], -1, x.shape[-1])


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
    row = tokens - jax.lax.axis_index(config.axes) * size
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
    whole = jax.lax.all_gather(logits, config.axes, axis=logits.ndim - 1, tiled=True)
    return whole[..., : config.vocab_size]


@dataclasses.dataclass(frozen=True)
class Dealing:
    """Which device has which KV heads.

    They are dealt to shards. A shard is what lies on one device, or on each of some `replicas`.
    """

    number: np.ndarray
    """[L, shards × places] int32: the head in each place, or H, the number of heads, in one that
    stays empty. A shard has as many places in a row as the others."""
    heads: int
    """H, KV heads of a layer."""
    shards: int
    replicas: int = 1
    """Devices that have each shard. They come one after the other."""

    @classmethod
    def even(cls, num_layers: int, heads: int, shards: int, replicas: int = 1) -> "Dealing":
        """In order. Where the heads do not come out even, some shards have one more, and which
        these are changes from layer to layer."""
        places = -(-heads // shards)
        number = np.full((num_layers, shards, places), heads, np.int32)
        least, more = divmod(heads, shards)
        for layer in range(num_layers):
            first = 0
            for shard in range(shards):
                has = least + ((shard - layer * more) % shards < more)
                number[layer, shard, :has] = np.arange(first, first + has)
                first += has
        return cls(number.reshape(num_layers, -1), heads, shards, replicas)

    @classmethod
    def by_load(cls, load: np.ndarray, shards: int, replicas: int = 1) -> "Dealing":
        """So that shards get about as much of each of some loads, and as many heads, as far as
        their places allow: at the highest rates each head has one block, and no head has less.

        The heaviest heads of all layers come first, each to the shard that has least; then heads
        of one layer are exchanged (`_exchanged`). The same loads are always dealt alike.

        Args:
            load: [L, H] or [L, H, R], what each head is expected to hold, in any unit: a load for
                each of R rates. The worst of them counts.
            shards: how many there are.
            replicas: devices that have each of them.
        """
        layers, heads = load.shape[:2]
        places = -(-heads // shards)
        loads = load.reshape(layers, heads, -1).astype(np.float64)
        loads = np.concatenate([loads, np.ones((layers, heads, 1))], axis=-1)
        # Of each the mean shard has 1; where one head alone has more, the shard with it.
        share = loads * shards / np.maximum(loads.sum((0, 1)), np.finfo(np.float64).tiny)
        share = share / np.maximum(share.max((0, 1)), 1)
        number = np.full((layers, shards, places), heads, np.int32)
        room, total = np.full((layers, shards), places), np.zeros((shards, share.shape[-1]))
        for at in np.argsort(-share.sum(-1), axis=None, kind="stable"):
            layer, head = divmod(int(at), heads)
            fullest = (total + share[layer, head]).max(-1)
            to = int(np.argmin(np.where(room[layer] > 0, fullest, np.inf)))
            number[layer, to, places - room[layer, to]] = head
            room[layer, to] -= 1
            total[to] += share[layer, head]
        number = _exchanged(number.reshape(layers, -1), share, shards)
        order = np.sort(number.reshape(layers, shards, places), axis=-1)
        return cls(order.reshape(layers, -1), heads, shards, replicas)

    def same_as(self, other: "Dealing") -> bool:
        """Whether every head lies in the same place."""
        counts = self.shards, self.replicas
        return counts == (other.shards, other.replicas) and np.array_equal(
            self.number, other.number
        )

    @property
    def whole(self) -> bool:
        """Whether every head of every layer has one place."""
        heads = np.minimum(np.arange(self.number.shape[1]), self.heads)
        return bool((np.sort(self.number, axis=1) == heads).all())

    def loads(self, load: np.ndarray) -> np.ndarray:
        """What each shard gets of a load [L, H]."""
        padded = np.pad(load, ((0, 0), (0, 1)))
        placed = padded[np.arange(len(load))[:, None], self.number]
        return placed.reshape(len(load), self.shards, -1).sum((0, 2))

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.shards * self.replicas

    @property
    def places(self) -> int:
        """Places of a shard for KV heads of a layer."""
        return self.number.shape[1] // self.shards

    @property
    def heads_of_shards(self) -> np.ndarray:
        """KV heads of each shard, over all layers [shards]."""
        present = self.number < self.heads
        return present.reshape(len(present), self.shards, -1).sum((0, 2))

    @property
    def share_number(self) -> np.ndarray:
        """[L, devices × places] int32: which share of its query heads is in each device's places,
        counted over all heads (head h's are h × replicas and those behind), or H × replicas."""
        rows = self.number.reshape(len(self.number), self.shards, 1, self.places)
        share = rows * self.replicas + np.arange(self.replicas, dtype=np.int32)[:, None]
        share = np.where(rows < self.heads, share, self.heads * self.replicas)
        return share.reshape(len(share), -1)

    @property
    def place(self) -> np.ndarray:
        """[L, H]: where each head lies."""
        return np.argsort(self.number, axis=1, kind="stable")[:, : self.heads]

    def by_head(self, x: np.ndarray, axis: int = 1) -> np.ndarray:
        """[L, …, shards × places × n, …] by place -> [L, …, H × n, …] by head, with n numbers of
        each."""
        shape = x.shape
        n = shape[axis] // self.number.shape[1]
        rows = x.reshape(*shape[:axis], -1, n, *shape[axis + 1 :])
        found = np.stack([row.take(at, axis - 1) for row, at in zip(rows, self.place)])
        return found.reshape(*shape[:axis], -1, *shape[axis + 1 :])


def _exchanged(number: np.ndarray, share: np.ndarray, shards: int) -> np.ndarray:
    """Heads by place after exchanges within layers, by which shards get more even shares.

    Whichever two places even out most are exchanged until none do; then some at random and again
    whichever, which is taken back if it comes out worse (iterated local search: Lourenço, Martin &
    Stützle 2003). Nothing here depends on the machine: every process finds the same.

    Args:
        number: [L, shards × places] the head in each place, H in an empty one.
        share: [L, H, R], of each of R loads what a head has; the mean shard has 1.
        shards: how many there are.
    """
    layers, width = number.shape
    on = np.arange(width) // (width // shards)
    one, other = (at.astype(int) for at in np.triu_indices(width, 1))
    apart = on[one] != on[other]
    one, other = one[apart], other[apart]
    if not len(one):
        return number
    number = number.copy()
    held = np.pad(share, ((0, 0), (0, 1), (0, 0)))[np.arange(layers)[:, None], number]
    total = held.reshape(layers, shards, -1, share.shape[-1]).sum((0, 2))

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


def spec_of(names: tuple[str | None, ...], axes: tuple[str, ...]) -> PartitionSpec:
    """How a parameter with axes of these names lies on a mesh of these axes."""
    return PartitionSpec(*(axes if name in SPLIT_AXES else None for name in names))


def deal(x: Array, axis: int, number: np.ndarray | Array) -> Array:
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
    """How a model's parameters lie on the devices of a mesh."""

    dealing: Dealing
    mesh: Mesh
    """As many devices as the dealing has, shard by shard."""

    def sharding(self, names: tuple[str | None, ...]) -> NamedSharding:
        """Of a parameter with axes of these names."""
        return NamedSharding(self.mesh, spec_of(names, self.mesh.axis_names))

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
    """A parameter with heads by place, those of a replica with its share of their query heads,
    and as much of what else is split for every device.

    Args:
        value: the whole model's; of all layers, or of one of them.
        names: of its axes, from `logical_axes`.
        dealing: which heads lie where.
        layer: of which layer it is, if of one.
    """
    xp = np if isinstance(value, np.ndarray) else jnp
    found: Any = value
    shares = dealing.share_number
    for at, name in enumerate(names):
        if name == "kv_heads":
            found = _in_shares(found, at, dealing.replicas, names[at + 1])
        if name == "kv_heads" and names[0] == "layers":
            if xp is np:
                rows = zip(found, shares)
                found = np.stack([_by_place(row, at - 1, number) for row, number in rows])
            else:
                found = deal(found, at, shares)
        elif name == "kv_heads":
            assert layer is not None
            number = shares[layer]
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
    sizes = []
    for n, name in zip(shape, names):
        if name == "kv_heads":
            n = dealing.devices * dealing.places
        elif name in SPLIT_AXES:
            n += -n % dealing.devices
        elif name in BESIDE_QUERIES and "kv_heads" in names:
            beside = BESIDE_QUERIES[name]
            n = -(-(n - beside) // dealing.replicas) + beside
        sizes.append(n)
    return tuple(sizes)


def _shares_of(size: int, replicas: int, beside: int) -> np.ndarray:
    """[replicas, S]: what of an axis of query heads and some beside them each replica has, in its
    order; the size where it has nothing."""
    queries = size - beside
    share = -(-queries // replicas)
    index = np.arange(replicas * share).reshape(replicas, share)
    index = np.where(index < queries, index, size)
    behind = np.broadcast_to(np.arange(queries, size), (replicas, beside))
    return np.concatenate([index, behind], axis=1)


def _in_shares(value: Any, at: int, replicas: int, name: str) -> Any:
    """[…, H, r, …] with heads at an axis and query heads behind it, of that name -> every replica's
    share of them [..., H × replicas, S, …]."""
    if replicas == 1:
        return value
    xp = np if isinstance(value, np.ndarray) else jnp
    size = value.shape[at + 1]
    index = _shares_of(size, replicas, BESIDE_QUERIES[name])
    padded = xp.pad(value, [(0, int(i == at + 1)) for i in range(value.ndim)])
    found = xp.take(padded, index, at + 1)
    return found.reshape(*value.shape[:at], -1, index.shape[1], *value.shape[at + 2 :])


def _of_shares(value: np.ndarray, at: int, replicas: int, name: str, size: int) -> np.ndarray:
    """What `_in_shares` had: so many query heads and what is beside them."""
    if replicas == 1:
        return value
    index = _shares_of(size, replicas, BESIDE_QUERIES[name]).ravel()
    first = np.unique(index, return_index=True)[1][:size]
    rows = value.reshape(*value.shape[:at], -1, len(index), *value.shape[at + 2 :])
    return rows.take(first, at + 1)


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
    place = np.argsort(dealing.share_number, axis=1, kind="stable")
    place = place[:, : dealing.heads * dealing.replicas]
    for at, name in enumerate(names):
        if name == "kv_heads" and names[0] == "layers":
            value = np.stack([row.take(own, at - 1) for row, own in zip(value, place)])
        elif name == "kv_heads":
            assert layer is not None
            value = value.take(place[layer], at)
        elif name in sizes:
            value = value.take(np.arange(sizes[name]), at)
        if name == "kv_heads":
            of_group = names[at + 1]
            size = config.group_size + BESIDE_QUERIES[of_group]
            value = _of_shares(value, at, dealing.replicas, of_group, size)
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
