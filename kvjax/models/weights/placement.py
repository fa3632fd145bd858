"""Puts parameters where they stay, as they are read one by one."""

import functools
import math
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import abstract_params, logical_axes
from kvjax.models.families import family_of
from kvjax.models.family import scale_of, stored
from kvjax.models.narrow import narrowed
from kvjax.models.parallel import Dealing, Split, layer_of

ParamPath = tuple[str | int, ...]
Lying = Mapping[ParamPath, jax.sharding.Sharding] | Split | None
"""Where parameters are to lie: a sharding of each by its path, or dealt to the devices of a mesh;
by default on the device that new arrays go to."""

# What XLA's CPU client asks of memory that it takes over without a copy.
_ALIGNMENT = 64


class Placement:
    """Takes the parameters outside the layers and of each layer, and puts them as they are asked
    for: as they are or into stacks of all layers, on one device or several."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: np.dtype,
        stacked: bool,
        lying: Lying = None,
    ):
        self.config = config
        self.leaves = abstract_leaves(config, dtype, stacked)
        self.stacked, self.on_host = stacked, not lying and default_platform() == "cpu"
        self.split = lying if isinstance(lying, Split) else None
        self.axes = logical_axes(config, stacked)
        if self.split is not None:
            self.shardings: Mapping[ParamPath, Any] = {
                path: self.split.sharding(names) for path, names in self.axes.items()
            }
        else:
            self.shardings = cast(Mapping[ParamPath, Any], lying or {})
        self.device = jax.sharding.SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
        self.values: dict[ParamPath, Any] = {}
        self._writers: dict[ParamPath, Any] = {}

    def sharding_of_single(self, path: ParamPath) -> jax.sharding.Sharding:
        """Of what `put` takes: that of the stack less its first axis; whole where it is dealt
        afterwards."""
        if self.split is not None:
            return whole_in_every_process()
        if not self.stacked or path[0] != "layers":
            return self.shardings.get(path, self.device)
        sharding = self.shardings.get((path[0], path[2]), self.device)
        if isinstance(sharding, jax.sharding.NamedSharding):
            spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
            return jax.sharding.NamedSharding(sharding.mesh, spec)
        return sharding

    def room(self, path: ParamPath) -> np.ndarray:
        """Host memory to fill with what `put` is to take: where it stays, if the host is the
        device."""
        if not self.stacked or path[0] != "layers":
            return empty_on_host(self.leaves[path])
        stack = (path[0], path[2])
        if not self.on_host:
            return np.empty(self.leaves[stack].shape[1:], self.leaves[stack].dtype)
        return self._host_stack(stack)[int(path[1])]

    def put(self, path: ParamPath, value: jax.Array | np.ndarray) -> None:
        """Take over one parameter, of one layer if it has any: ("layers", 3, "qkv")."""
        if self.split is not None:
            value = self.split.put(value, self.names_of(path), layer_of(path))
        if not self.stacked or path[0] != "layers":
            if self.on_host and path not in self.shardings:
                # An array that was restored to a device is committed to it, and steps that were
                # compiled for one that is not would be compiled again.
                value = np.asarray(value)
            if not isinstance(value, jax.Array):
                # The memory becomes the array's own: it is not touched again.
                value = jax.device_put(value, self.shardings.get(path), may_alias=True)
            self.values[path] = value
            return
        layer, stack = int(path[1]), (path[0], path[2])
        if self.on_host:
            whole = self._host_stack(stack)
            if not np.may_share_memory(whole, value := np.asarray(value)):
                whole[layer] = value
            return
        if stack not in self.values:
            shape = (self.config.num_layers, *value.shape)
            make, self._writers[stack] = _stack_functions(
                shape, value.dtype, self.shardings.get(stack)
            )
            self.values[stack] = make()
        self.values[stack] = self._writers[stack](self.values[stack], value, np.int32(layer))

    def put_whole(self, path: ParamPath, value: jax.Array | np.ndarray) -> None:
        """Take over one parameter as a checkpoint has it; what is to have few bits gets them."""
        if not self.is_narrow(path):
            self.put(path, value)
            return
        family = family_of(self.config)
        table = family.table if path[0] != "layers" else family.layer_class.table
        spec = table(self.config)[str(path[-1])]
        assert spec.outputs is not None
        wide = np.asarray(value)
        rows = wide if spec.rows else wide.reshape(math.prod(spec.shape[: spec.inputs]), -1).T
        leaf, of = self._leaf(path), scale_path(path)
        numbers, scales = narrowed(rows, leaf.dtype, self._leaf(of).dtype)
        numbers = numbers if spec.rows else np.ascontiguousarray(numbers.T)
        self.put(path, numbers.reshape(spec.shape))
        self.put(of, scales.reshape(spec.shape[spec.outputs]))

    def names_of(self, path: ParamPath) -> tuple[str, ...]:
        """Of the axes of what `put` takes."""
        if not self.stacked or path[0] != "layers":
            return self.axes[path]
        return self.axes[path[0], path[2]][1:]

    def reads_itself(self, dealing: Dealing) -> bool:
        """Whether parameters are to lie as they are stored by a model that is dealt like that."""
        narrow = self.config.weight_dtype is not None
        return not narrow and self.split is not None and dealing.same_as(self.split.dealing)

    def is_narrow(self, path: ParamPath) -> bool:
        """Whether it has scales beside it."""
        return self._leaf(scale_path(path)) is not None

    def _leaf(self, path: ParamPath) -> Any:
        stacks = self.stacked and path[0] == "layers"
        return self.leaves.get((path[0], path[2]) if stacks else path)

    @property
    def num_bytes(self) -> int:
        """Of all parameters."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.leaves.values())

    def _host_stack(self, path: ParamPath) -> np.ndarray:
        if path not in self.values:
            self.values[path] = empty_on_host(self.leaves[path])
        return self.values[path]

    def state(self) -> nnx.State:
        """All parameters, once every one was put."""
        values = {
            path: jax.device_put(value, may_alias=True) if isinstance(value, np.ndarray) else value
            for path, value in self.values.items()
        }
        return nnx.from_flat_state(
            [(path, leaf.replace(values[path])) for path, leaf in self.leaves.items()]
        )


def dummies(
    config: ModelConfig, dtype: np.dtype, seed: int, stacked: bool, split: Split
) -> nnx.State:
    """What `init_params` makes, dealt to several devices as it is made."""
    place, family = Placement(config, dtype, stacked, split), family_of(config)
    salt = np.uint32(seed & 0xFFFFFFFF)
    for name, spec in stored(family.table(config), config).items():
        place.put((name,), jax.jit(functools.partial(spec.init, dtype))(salt, 0))
    for name, spec in stored(family.layer_class.table(config), config).items():
        make = jax.jit(functools.partial(spec.init, dtype))
        for layer in range(config.num_layers):
            place.put(("layers", layer, name), make(salt, np.int32(layer)))
    return place.state()


def whole_in_every_process() -> jax.sharding.Sharding:
    """How an array lies that the host is to read: on a device of each process."""
    own = next(iter(jnp.zeros(()).devices()))
    if jax.process_count() == 1:
        return jax.sharding.SingleDeviceSharding(own)
    first = {device.process_index: device for device in reversed(jax.devices())}
    devices = np.array([first[index] for index in sorted(first)])
    mesh = jax.sharding.Mesh(devices, ("processes",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def scale_path(path: ParamPath) -> ParamPath:
    """Where the scales of a matrix of few bits are."""
    return (*path[:-1], scale_of(str(path[-1])))


def abstract_leaves(config: ModelConfig, dtype: np.dtype, stacked: bool) -> dict[ParamPath, Any]:
    """Abstract parameters by path.

    Single layers are made from the stack: to trace the model with each of them takes a second.
    """
    leaves: dict[ParamPath, Any] = {}
    flat = cast(list[tuple[ParamPath, Any]], nnx.to_flat_state(abstract_params(config, dtype)))
    for path, leaf in flat:
        if stacked or path[0] != "layers":
            leaves[path] = leaf
            continue
        layer = leaf.replace(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype))
        leaves.update({("layers", i, *path[1:]): layer for i in range(config.num_layers)})
    return leaves


def default_platform() -> str:
    """Platform of the device that new arrays go to."""
    return next(iter(jnp.zeros(()).devices())).platform


def empty_on_host(leaf: Any) -> np.ndarray:
    """Uninitialised host memory of the leaf's shape and dtype, aligned for XLA."""
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(leaf.dtype).reshape(leaf.shape)


def _stack_functions(shape: tuple[int, ...], dtype: Any, sharding: Any) -> tuple[Any, Any]:
    """A function that makes the stack of all layers, and one that writes a layer in place."""

    def write(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)

    make = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return make, jax.jit(write, donate_argnums=0, out_shardings=sharding)
