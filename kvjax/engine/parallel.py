"""An engine's steps on several devices: each runs them on its own heads, under `jax.shard_map`.

This is all that knows of devices. The steps are the functions of one device; they are told that
there are others by a model configuration that names the mesh axis (`kvjax.models.parallel`) and by
a cache that says which heads it has (`kvjax.cache.store.HeadShard`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.cache import PagedCache, init_cache
from kvjax.cache.calibration import HEAD_LOAD
from kvjax.cache.methods import METHODS
from kvjax.cache.policy import Method, Observer, Scores
from kvjax.cache.store import HeadShard, KeySmoothing
from kvjax.checks import check_whole
from kvjax.engine.compilation import StepName
from kvjax.engine.decode import DecodeReport
from kvjax.engine.insert import InsertReport
from kvjax.engine.prefill import PromptKV, empty_prompt
from kvjax.engine.probe import probe_artefacts
from kvjax.engine.smoothing import key_smoothing
from kvjax.engine.steps import FUNCTIONS, StepFunction
from kvjax.errors import UserError
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import is_stacked, logical_axes
from kvjax.models.parallel import (
    Dealing,
    ModelShard,
    Split,
    deal,
    deal_query_heads,
    put_whole,
    spec_of,
    split_params,
)

AXIS = "heads"
"""The mesh axis of shards: what has different KV heads."""
AXES = AXIS, "replicas"
"""All axes of the mesh: the second is of devices that have the same KV heads."""
SAME = PartitionSpec()
"""How an array lies that every device has."""
_REMEMBERED = 64
"""Arguments that are told to devices once: which sequences decode changes less often than not."""
_BY_BLOCK, _BY_HEAD = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
_PROMPT = PromptKV(
    k=PartitionSpec(None, None, AXIS),  # type: ignore[arg-type]
    v=PartitionSpec(None, None, AXIS),  # type: ignore[arg-type]
    scores=Scores(*[_BY_HEAD] * 5),  # type: ignore[arg-type]
    length=SAME,  # type: ignore[arg-type]
)


class Parallel:
    """The devices of an engine, and what of a model and its cache lies on which."""

    def __init__(
        self,
        model: ModelConfig,
        dealing: Dealing,
        methods: Iterable[Method] = (),
        devices: Sequence[Any] | None = None,
    ):
        """Take the first devices of the process.

        Args:
            model: the whole model.
            dealing: which of its heads lie where.
            methods: further ones whose calibrated arrays may be by head.
            devices: others, which need not be there to compile for them.

        Raises:
            UserError: there are not as many devices.
        """
        if devices is None:
            _check_devices(model, dealing.devices, dealing.replicas)
        self.model, self.dealing = model, dealing
        self.mesh = mesh_of(dealing, devices)
        self.local = ModelShard.of(model, dealing, AXES)
        """What each device has of the model."""
        self._head_axes = {}
        for method in (*METHODS.values(), *methods):
            self._head_axes |= method.head_axes
        self._prompt_makers: dict[Any, Callable[[], PromptKV]] = {}
        self._gathered = jax.jit(_as_is, out_shardings=self.everywhere)
        # To put what the host has costs it as much as a call, and once for each device.
        self.numbers = functools.lru_cache(_REMEMBERED)(self._numbers)
        """int32 numbers that every device has, of a number or of some (n of them make it [n]); what
        was given of late is there already."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        devices: int,
        methods: Iterable[Method],
        load: np.ndarray | None = None,
        dealing: Dealing | None = None,
        replicas: int = 1,
    ) -> "Parallel | None":
        """A model on so many devices; None for a single one.

        Args:
            model: the whole model.
            devices: how many.
            methods: those that requests may bring.
            load: the calibrated array `HEAD_LOAD`, by which heads are dealt; by default evenly.
            dealing: how they are dealt already, if they are.
            replicas: devices that have each KV head.

        Raises:
            UserError: there are not as many devices, or one of the methods needs a single one; the
                model is dealt to another number of them; heads cannot have so many replicas.
        """
        if dealing is not None and dealing.devices != devices:
            raise UserError(
                f"tensor_parallel {devices}: the weights were dealt to {dealing.devices} devices "
                "when they were read; load the model again"
            )
        if dealing is not None and dealing.replicas != replicas:
            raise UserError(
                f"kv_replicas {replicas}: the weights were dealt with {dealing.replicas} of each "
                "KV head when they were read; load the model again"
            )
        check_replicas(devices, replicas)
        if devices == 1:
            return None
        for method in methods:
            check_on_devices(method, devices)
        return cls(model, dealing or dealing_of(model, devices, load, replicas), methods)

    # What lies on the devices

    def split(self, params: nnx.State) -> nnx.State:
        """The whole model's parameters, dealt to the devices."""
        axes = logical_axes(self.model, is_stacked(params))
        return split_params(params, axes, Split(self.dealing, self.mesh))

    def artefacts(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Calibrated arrays, those by head dealt as the heads are."""
        found = {}
        for name, array in arrays.items():
            at = self._head_axes.get(name)
            if at is not None and at.grouped:
                array = deal_query_heads(array, at.axis, self.dealing)
            elif at is not None:
                array = deal(array, at.axis, self.dealing.number)
            found[name] = put_whole(array, NamedSharding(self.mesh, self._spec_of(name)))
        return found

    def _spec_of(self, name: str) -> PartitionSpec:
        at = self._head_axes.get(name)
        return SAME if at is None else PartitionSpec(*(None,) * at.axis, AXIS)

    def same(self, tree: Any) -> Any:
        """Arrays that every device has."""
        return jax.tree.map(lambda x: put_whole(x, self.everywhere), tree)

    def _numbers(self, given: int | tuple[int, ...]) -> jax.Array:
        return self.same(np.asarray(given, np.int32))

    def on_host(self, tree: Any) -> Any:
        """What arrays hold, for the host (waits for the devices). Of what lies on devices of
        several processes each gets all of it: all of them have to call it."""
        leaves, at = jax.tree.flatten(tree)
        apart = [n for n, x in enumerate(leaves) if not _is_here(x)]
        gathered = self._gathered([leaves[n] for n in apart]) if apart else []
        for n, x in zip(apart, gathered, strict=True):
            leaves[n] = x
        return jax.device_get(jax.tree.unflatten(at, leaves))

    @property
    def everywhere(self) -> NamedSharding:
        """How an array lies that every device has."""
        return NamedSharding(self.mesh, SAME)

    def new_cache(self, num_blocks: int, **sizes: Any) -> PagedCache:
        """An empty cache of so many blocks on each device; sizes as of `init_cache`."""
        number = put_whole(self.dealing.number, NamedSharding(self.mesh, _BY_HEAD))
        smoothing = sizes.pop("smoothing", None)
        return self._cache_maker(num_blocks, sizes)(number, smoothing)

    def shape_of_cache(self, num_blocks: int, **sizes: Any) -> Any:
        """The same as `jax.ShapeDtypeStruct` leaves; nothing is allocated."""
        return self._cache_maker(num_blocks, sizes).eval_shape(self.dealing.number, None)

    def _cache_maker(self, num_blocks: int, sizes: Mapping[str, Any]) -> Any:
        def local(number: jax.Array, smoothing: KeySmoothing | None) -> PagedCache:
            shard = HeadShard(number, AXIS, self.dealing.heads)
            return init_cache(num_blocks=num_blocks, shard=shard, smoothing=smoothing, **sizes)

        made = self.mapped(local, (_BY_HEAD, _BY_HEAD), self.cache_spec)
        return jax.jit(made, out_shardings=self.lying(self.cache_spec))

    def prompt_maker(self, observer: Observer, room: int, dtype: Any) -> Callable[[], PromptKV]:
        """What makes an empty scratch for a prompt, as `empty_prompt` does: jitted."""
        key = observer, room, dtype
        if key not in self._prompt_makers:
            make = functools.partial(empty_prompt, self.local, *key)
            made = jax.jit(self.mapped(make, (), _PROMPT), out_shardings=self.lying(_PROMPT))
            self._prompt_makers[key] = made
        return self._prompt_makers[key]

    # The steps

    def steps(self, params: nnx.State) -> dict[StepName, Callable[..., Any]]:
        """Every step jitted, for parameters that lie as these."""
        specs = self._params_spec(params)
        return {name: self._step(name, function, specs) for name, function in FUNCTIONS.items()}

    def _params_spec(self, params: nnx.State) -> Any:
        axes = logical_axes(self.model, is_stacked(params))
        flat = cast(list[tuple[tuple[str | int, ...], Any]], nnx.to_flat_state(params))
        return nnx.from_flat_state(
            [(path, leaf.replace(spec_of(axes[path], AXES))) for path, leaf in flat]
        )

    def probe_artefacts(self, params: nnx.State) -> dict[str, jax.Array]:
        """`kvjax.engine.probe.probe_artefacts`, by head."""
        specs = (self._params_spec(params),)
        made = self.mapped(functools.partial(probe_artefacts, self.local), specs, _BY_HEAD)
        return jax.jit(made, out_shardings=self.lying(_BY_HEAD))(params)

    def key_smoothing(self, params: nnx.State) -> KeySmoothing:
        """`kvjax.engine.smoothing.key_smoothing`, by head."""
        specs = (self._params_spec(params),)
        made = self.mapped(functools.partial(key_smoothing, self.local), specs, _BY_HEAD)
        return jax.jit(made, out_shardings=self.lying(_BY_HEAD))(params)

    def _step(self, name: StepName, function: StepFunction, params: Any) -> Callable[..., Any]:
        count = function.num_static
        told, out_specs = self._outputs.get(name, (_as_is, self._cache_and))

        def step(*args: Any) -> Any:
            static, given = args[:count], args[count:]
            if static and isinstance(static[0], ModelConfig):
                static = (self.local, *static[1:])

            def local(*own: Any) -> Any:
                return told(function.call(*static, *own))

            specs = tuple(self._input(arg, params) for arg in given)
            if name == "kept":
                specs = (_BY_BLOCK, _BY_HEAD)
            return self.mapped(local, specs, out_specs)(*given)

        step.__name__ = name.replace(" ", "_")
        # So that the shapes of what one step gives say how it lies, for what is compiled after it.
        return function.jitted(step, out_shardings=self.lying(out_specs))

    def lying(self, specs: Any) -> Any:
        """Partition specs, on these devices."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def mapped(self, call: Callable[..., Any], specs: Any, out_specs: Any) -> Callable[..., Any]:
        """A function of arrays as each device runs it, on what lies there; to be jitted."""
        return jax.shard_map(
            call, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )

    def _input(self, arg: Any, params: Any) -> Any:
        """How an argument of a step lies on the devices."""
        match arg:
            case PagedCache():
                return self.cache_spec
            case PromptKV():
                return _PROMPT
            case nnx.State():
                return params
            case dict():
                return {name: self._spec_of(name) for name in arg}
        return SAME

    @property
    def cache_spec(self) -> Any:
        """How a cache lies."""
        return PagedCache(
            kv=_BY_BLOCK,  # type: ignore[arg-type]
            metric=_BY_BLOCK,  # type: ignore[arg-type]
            position=_BY_BLOCK,  # type: ignore[arg-type]
            block_table=PartitionSpec(None, None, AXIS),  # type: ignore[arg-type]
            context_len=PartitionSpec(None, None, AXIS),  # type: ignore[arg-type]
            seq_len=SAME,  # type: ignore[arg-type]
            free=_BY_BLOCK,  # type: ignore[arg-type]
            state=_BY_BLOCK,  # type: ignore[arg-type]
            shared=_BY_BLOCK,  # type: ignore[arg-type]
            shard=HeadShard(_BY_HEAD, AXIS, self.dealing.heads),  # type: ignore[arg-type]
            window=PartitionSpec(None, None, AXIS),  # type: ignore[arg-type]
            smoothing=_BY_HEAD,  # type: ignore[arg-type]
        )

    @property
    def _cache_and(self) -> Any:
        return self.cache_spec, SAME

    @property
    def _outputs(self) -> dict[StepName, tuple[Callable[..., Any], Any]]:
        """What the host is told of each step's outputs, and how they lie on the devices.

        Steps that are not named here return a cache and what is the same on all devices.
        """
        cache = self.cache_spec
        started = dataclasses.replace(_of_fields(InsertReport), kept=_BY_HEAD, free=_BY_BLOCK)  # type: ignore[type-var]
        decoding = (lambda out: (*out[:2], _decoded(out[2])), (cache, SAME, SAME))
        return {
            "prefill": (_as_is, (_PROMPT, SAME)),
            "prefill in scratch": (_as_is, (_PROMPT, SAME)),
            "prefill in pool": (_as_is, (cache, SAME, SAME, _BY_HEAD)),
            "draft": (_as_is, SAME),
            "probe": (_as_is, _BY_HEAD),
            "start": (lambda out: (out[0], _started(out[1])), (SAME, started)),
            "place": (_placed, (cache, SAME, SAME, SAME)),
            "decode": decoding,
            "decode once": decoding,
            "compress": (lambda out: (out[0], out[1][:, None]), (cache, _BY_HEAD)),
            "kept": (_as_is, _BY_HEAD),
        }


def dealing_of(model: ModelConfig, devices: int, load: np.ndarray | None, replicas: int) -> Dealing:
    """How a model's heads are dealt to so many devices: by a load, or evenly.

    Raises:
        UserError: as of `Parallel.of`, or the load is not of the model's heads.
    """
    _check_devices(model, devices, replicas)
    shape, shards = (model.num_layers, model.num_kv_heads), devices // replicas
    if load is None:
        return Dealing.even(*shape, shards, replicas)
    if load.shape[:2] != shape or load.ndim > 3 or not (load >= 0).all():
        raise UserError(
            f"calibrated array {HEAD_LOAD}: wanted a number from 0 on for each of {shape[0]} "
            f"layers and {shape[1]} KV heads"
        )
    return Dealing.by_load(np.asarray(load, np.float64), shards, replicas)


def mesh_of(dealing: Dealing, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a dealing: of the first devices of the process, or of these."""
    shape, devices = (dealing.shards, dealing.replicas), devices or jax.devices()
    return jax.make_mesh(
        shape, AXES, (AxisType.Auto,) * 2, devices=tuple(devices[: dealing.devices])
    )


def _is_here(x: Any) -> bool:
    """Whether this process can read all of it."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def check_there(devices: int) -> None:
    """Raise `UserError` where there are fewer devices, or not all of several processes'."""
    there, processes = jax.devices(), jax.process_count()
    if processes > 1 and devices != len(there):
        raise UserError(
            f"tensor_parallel {devices}: {processes} processes have {len(there)} devices together, "
            f"and all have to take part; give {len(there)}"
        )
    if devices > len(there):
        raise UserError(
            f"tensor_parallel {devices}: this process has {len(there)} of kind "
            f"{there[0].device_kind}; give at most {len(there)}"
        )


def _check_devices(model: ModelConfig, devices: int, replicas: int) -> None:
    check_there(devices)
    heads = model.num_layers * model.num_kv_heads
    if devices > heads * replicas:
        raise UserError(
            f"tensor_parallel {devices}: {model.name} has {heads} KV heads in all layers; give at "
            f"most {heads * replicas}"
        )
    check_replicas(devices, replicas, model)


def check_replicas(devices: int, replicas: int, model: ModelConfig | None = None) -> None:
    """Raise `UserError` where KV heads, of any model or of this one, cannot have so many replicas
    on so many devices."""
    check_whole("kv_replicas", replicas, 1)
    if devices % replicas:
        raise UserError(
            f"kv_replicas {replicas} with tensor_parallel {devices}: every KV head has as many "
            f"devices; give a divisor of {devices}"
        )
    if model is not None and replicas > model.group_size:
        raise UserError(
            f"kv_replicas {replicas}: {model.name} has {model.group_size} query heads of each KV "
            f"head to share out; give at most {model.group_size}"
        )


def on_one_device(method: Method) -> bool:
    """Whether a method cannot run on several devices."""
    return method.across_heads or method.sparse is not None


def check_on_devices(method: Method, devices: int) -> None:
    """Raise `UserError` where a method cannot run on so many devices."""
    if devices > 1 and on_one_device(method):
        why = "its scores join heads that lie on several devices"
        if method.sparse is not None:
            why = "its sparse prefill runs on a single device"
        elif method.probed:
            why = "it embeds prompts on a single device"
        raise UserError(
            f"method {method.name} with tensor_parallel {devices}: {why}; give another method, or "
            "one device"
        )


def _of_fields(kind: type) -> Any:
    """A dataclass whose every field says that it is the same on all devices."""
    return kind(**{field.name: SAME for field in dataclasses.fields(kind)})


def _as_is(out: Any) -> Any:
    return out


def _summed(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, AXIS)


def _placed(out: Any) -> Any:
    cache, freed, shortfall, ok = out
    return cache, _summed(freed), shortfall, ok


def _started(report: InsertReport) -> InsertReport:
    return dataclasses.replace(report, free=report.free[None])


def _decoded(report: DecodeReport) -> DecodeReport:
    """Blocks by shard [G, P], KVs over all of them.

    Every device gets all of it, in one exchange: the host then reads a few arrays of one device,
    whatever their number, and not a part of each array from every device.
    """
    rows = jnp.stack([report.owned, report.growth, report.kvs, report.longest])
    told = jnp.append(rows.ravel(), report.free)
    told = jax.lax.all_gather(told, AXIS, axis=1)
    owned, growth, kvs, longest = told[:-1].reshape(*rows.shape, -1)
    return dataclasses.replace(
        report,
        owned=owned,
        growth=growth,
        free=told[-1],
        kvs=jnp.sum(kvs, axis=-1),
        longest=jnp.max(longest, axis=-1),
    )
