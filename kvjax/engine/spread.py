"""Passes beside an engine's steps, on the device or the devices that a model's weights lie on.

Evaluation and calibration look at what steps do not show. Their passes are functions of one device,
as steps are, and run on several in the same way (`kvjax.engine.parallel`). What they are given lies
as it lies; how what they return does has to be said.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.cache import PagedCache, init_cache
from kvjax.cache.policy import Method
from kvjax.cache.store import HeadShard, KeySmoothing
from kvjax.engine.dense import DensePass
from kvjax.engine.parallel import AXIS, SAME, Parallel, check_on_devices
from kvjax.engine.probe import probe_artefacts
from kvjax.engine.smoothing import measured_smoothing, smooths
from kvjax.models import LoadedModel


def by_heads(axis: int) -> PartitionSpec:
    """How an array lies whose axis of KV heads, or of query heads, is this one."""
    return PartitionSpec(*(None,) * axis, AXIS)


DENSE = DensePass(by_heads(2), by_heads(2), by_heads(2), by_heads(1), SAME, SAME)  # type: ignore[arg-type]
"""How a dense pass lies."""


class Spread:
    """The device of a model, or the devices."""

    def __init__(self, model: LoadedModel):
        """Those that the model's weights lie on.

        Raises:
            UserError: this process has fewer devices.
        """
        split = model.split
        self.params = model.params
        self.parallel = None if split is None else Parallel(model.config, split.dealing)
        self.config = model.config if self.parallel is None else self.parallel.local
        """What passes get as their static configuration: a device's part of the model."""
        self.shard: HeadShard | None = None
        """Which heads a device has: an argument of passes in which all heads have a say."""
        if self.parallel is not None:
            dealing = self.parallel.dealing
            number = jax.device_put(dealing.number, self.parallel.lying(by_heads(1)))
            self.shard = HeadShard(number, AXIS, dealing.heads)

    @property
    def devices(self) -> int:
        return 1 if self.parallel is None else self.parallel.dealing.devices

    @property
    def shard_heads(self) -> np.ndarray:
        """KV heads of each shard, over all layers [shards]."""
        if self.parallel is None:
            return np.array([self.config.num_layers * self.config.num_kv_heads])
        return self.parallel.dealing.heads_of_shards

    def check_method(self, method: Method) -> None:
        """Raise `UserError` where a method cannot run on so many devices."""
        if self.parallel is not None:
            check_on_devices(method, self.parallel.dealing.devices)

    def specs(self, tree: Any) -> Any:
        """How arrays lie; what lies on no mesh, every device gets."""

        def lies(x: Any) -> PartitionSpec:
            where = getattr(x, "sharding", None)
            return where.spec if isinstance(where, NamedSharding) else SAME

        return jax.tree.map(lies, tree)

    def mapped(self, call: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
        """A pass on all devices, to be jitted; on a single one the pass itself.

        Args:
            call: the pass, of pytrees of arrays.
            specs: how its arguments lie, a pytree of `PartitionSpec` for each, or its beginning.
            out: how what it returns lies.
        """
        return call if self.parallel is None else self.parallel.mapped(call, specs, out)

    def jitted(self, call: Callable[..., Any], specs: Any, out: Any, **options: Any) -> Any:
        """The same, jitted: results lie as `out` says. `options` as of `jax.jit`."""
        if self.parallel is not None:
            options["out_shardings"] = self.parallel.lying(out)
        return jax.jit(self.mapped(call, specs, out), **options)

    def artefacts(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Calibrated arrays, those by head dealt as the heads are."""
        return dict(arrays) if self.parallel is None else self.parallel.artefacts(arrays)

    def probe_artefacts(self) -> dict[str, jax.Array]:
        """`kvjax.engine.probe.probe_artefacts`, by head."""
        if self.parallel is None:
            return probe_artefacts(self.config, self.params)
        return self.parallel.probe_artefacts(self.params)

    def new_cache(self, num_blocks: int, **sizes: Any) -> PagedCache:
        """An empty cache of so many blocks on each device; further sizes as of `init_cache`."""
        sizes |= {"num_layers": self.config.num_layers, "num_kv_heads": self.config.num_kv_heads}
        make = init_cache if self.parallel is None else self.parallel.new_cache
        smoothing = self._smoothing if smooths(self.config, sizes["codec"]) else None
        return make(num_blocks=num_blocks, smoothing=smoothing, **sizes)

    @functools.cached_property
    def _smoothing(self) -> KeySmoothing:
        return measured_smoothing(self.config, self.params, self.parallel)

    @property
    def cache_spec(self) -> Any:
        """How a cache lies."""
        return SAME if self.parallel is None else self.parallel.cache_spec

    def on_host(self, tree: Any) -> Any:
        """What arrays hold, the model's heads in their order (waits for the devices).

        Layers are the first axis of what has heads.
        """
        return jax.tree.map(self._whole, tree)

    def _whole(self, x: Any) -> np.ndarray:
        found, spec = np.asarray(x), tuple(self.specs(x))
        if self.parallel is None or AXIS not in spec:
            return found
        return self.parallel.dealing.by_head(found, spec.index(AXIS))
