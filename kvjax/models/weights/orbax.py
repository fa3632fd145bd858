"""Orbax checkpoints: a folder with config.json, the tokenizer's files and the weights.

    config.json     as Hugging Face writes it
    tokenizer…      the files that the original had; of a GGUF file, its metadata alone
    params/         the Orbax checkpoint: {"embed": …, "layers": {"0": {"qkv": …}, …}, …}

The weights lie as the model takes them (``kvjax.models.llama``), one array per layer, so that
they load without a second copy whether the layers are to be stacked or not.
"""

import contextlib
import errno
import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.errors import UserError
from kvjax.models.config import LlamaConfig, config_from_hf
from kvjax.models.hub import Progress
from kvjax.models.weights import fill
from kvjax.models.weights.fill import ParamPath
from kvjax.models.weights.gguf_header import read_gguf_header
from kvjax.models.weights.safetensors import read_json
from kvjax.models.weights.source import all_finite

_PARAMS = "params"
_CONFIG = "config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
# What Orbax reads or writes at a time: it holds that much a second time meanwhile.
_GROUP_BYTES = 1 << 28


def is_orbax(folder: Path) -> bool:
    """Whether `folder` is a checkpoint that `save_orbax` wrote (whole or not)."""
    return (folder / _PARAMS).is_dir()


def save_orbax(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    params: nnx.State,
    tokenizer: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes an Orbax checkpoint that `load_params` reads; it appears whole or not at all.

    Args:
        path: the folder to make.
        config: the model.
        params: its parameters, stacked or not, in the dtype to store.
        tokenizer: the folder or GGUF file to take the tokenizer from.
        overwrite: replace what lies at `path`.

    Returns:
        `path`.

    Raises:
        UserError: `path` exists already, or cannot be written.
    """
    target = Path(path).absolute()
    if target.exists() and not overwrite:
        raise UserError(f"{target} exists already; choose another folder or overwrite it (--force)")
    # Beside the target, hence on its disk: to put it in place is to rename it.
    work = target.with_name(f".{target.name}.part-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(target)
        _require_space(target, params)
        work.mkdir()
        try:
            _write_arrays(work / _PARAMS, _tree(config, params))
            if tokenizer is not None:
                _copy_tokenizer(Path(tokenizer), work)
            # Last: a folder without it does not load.
            (work / _CONFIG).write_text(json.dumps(config_to_hf(config), indent=2) + "\n")
            _put_in_place(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise _write_error(target, error) from error
    except ValueError as error:
        # The array library reports what the file system says in errors of its own.
        if "NO_SPACE" not in str(error) and "No space left" not in str(error):
            raise
        raise _write_error(target, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) from error
    return target


def load_orbax(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    dtype: np.dtype,
    progress: Progress | None = None,
    *,
    stacked: bool = True,
    shardings: Mapping[ParamPath, jax.sharding.Sharding] | None = None,
) -> nnx.State:
    """The parameters in the Orbax checkpoint `path`, cast to `dtype` and sharded as asked.

    Raises UserError if arrays are missing, damaged, of other shapes than `config` says, or hold
    NaN or infinite values.
    """
    folder = Path(path)
    stored = _check_metadata(folder, config, dtype)
    shardings = shardings or {}
    place = _Placement(config, dtype, stacked, shardings)
    total = sum(math.prod(leaf.shape) for leaf in stored.values()) * dtype.itemsize
    done = 0
    for group in _groups(stored):
        for name, value in _read_arrays(folder, stored, group, place).items():
            if not _is_finite(value):
                raise UserError(
                    f"{folder}: the array {'.'.join(map(str, name))} holds NaN or infinite values "
                    f"as {dtype.name}; convert it again, or load it as float32 or bfloat16"
                )
            place.put(name, value)
            done += value.nbytes
            if progress:
                progress("load", done, total)
    return place.state()


def read_config(folder: Path) -> LlamaConfig:
    """The configuration of an Orbax checkpoint."""
    if not (folder / _CONFIG).is_file():
        raise UserError(f"{folder} has no {_CONFIG}: it is no whole checkpoint; convert it again")
    return config_from_hf(read_json(folder / _CONFIG))


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The contents of a Hugging Face config.json that `config_from_hf` reads back as `config`."""
    architecture = "Qwen2ForCausalLM" if config.attention_bias else "LlamaForCausalLM"
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen2" if config.attention_bias else "llama",
        "_name_or_path": config.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if (scaling := config.rope_scaling) is not None:
        values["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return values


# --- writing --------------------------------------------------------------------------------


def _tree(config: LlamaConfig, params: nnx.State) -> dict[str, Any]:
    """The nested dict that is stored: plain arrays, one per layer."""
    tree: dict[str, Any] = {"layers": {str(i): {} for i in range(config.num_layers)}}
    for path, leaf in cast(Iterable[tuple[ParamPath, Any]], nnx.to_flat_state(params)):
        value = leaf[...]
        if path[0] != "layers":
            tree[str(path[0])] = value
        elif len(path) == 3:
            tree["layers"][str(path[1])][path[2]] = value
        else:
            for i in range(config.num_layers):
                tree["layers"][str(i)][path[1]] = value[i]
    return tree


def _write_arrays(path: Path, tree: dict[str, Any]) -> None:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    if hasattr(context, "memory"):
        # Without limits everything is copied before anything is written.
        context.memory.transfer_concurrent_bytes = _GROUP_BYTES
        context.memory.write_concurrent_bytes = _GROUP_BYTES
    with context:
        ocp.save(str(path), tree)


def _require_space(target: Path, params: nnx.State) -> None:
    # Orbax reports a disk that fills up in hundreds of lines, from its own threads.
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) + (1 << 24)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise UserError(
            f"cannot write the checkpoint {target}: it takes {needed / 1e6:.0f} MB and "
            f"{free / 1e6:.0f} MB are free; choose another folder or a smaller dtype"
        )


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if source.is_dir():
        found = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
        for file in found:
            shutil.copyfile(file, folder / file.name)
        has_tokenizer = any(file.name in ("tokenizer.json", "tokenizer.model") for file in found)
        ggufs = sorted(source.glob("*.gguf"))
        if has_tokenizer or len(ggufs) != 1:
            return
        source = ggufs[0]
    header = read_gguf_header(source)
    with open(source, "rb") as stream:
        stream.seek(24)
        metadata = stream.read(header.metadata_end - 24)
    count = struct.pack("<IQQ", 3, 0, header.metadata_count)
    (folder / "tokenizer.gguf").write_bytes(b"GGUF" + count + metadata)


def _clear_leftovers(target: Path) -> None:
    """Removes what killed processes left of the same target; a live one keeps its folder."""
    for leftover in target.parent.glob(f".{target.name}.part-*"):
        process = leftover.name.rpartition("-")[2]
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _put_in_place(work: Path, target: Path) -> None:
    if not target.exists():
        os.replace(work, target)
        return
    old = work.with_name(work.name + ".old")
    os.replace(target, old)
    try:
        os.replace(work, target)
    except OSError:
        os.replace(old, target)
        raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink()


def _write_error(target: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write the checkpoint {target}: {error.strerror or error}; choose another folder"
    )


# --- reading --------------------------------------------------------------------------------


def _check_metadata(
    folder: Path, config: LlamaConfig, dtype: np.dtype
) -> dict[ParamPath, jax.ShapeDtypeStruct]:
    """What is to be stored, by path, after comparing it with what is."""
    from orbax.checkpoint import v1 as ocp

    if config.num_layers > 100_000:
        raise UserError(f"{folder}: its configuration has {config.num_layers} layers")
    wanted: dict[ParamPath, jax.ShapeDtypeStruct] = {
        path: jax.ShapeDtypeStruct(leaf.shape, dtype)
        for path, leaf in fill.abstract_leaves(config, dtype, stacked=False).items()
    }
    with _reading(folder):
        tree = ocp.metadata(str((folder / _PARAMS).absolute())).metadata
        found = {
            tuple(str(getattr(key, "key", key)) for key in path): tuple(leaf.shape)
            for path, leaf in jax.tree_util.tree_flatten_with_path(
                tree, is_leaf=lambda node: hasattr(node, "shape")
            )[0]
        }
    for path, leaf in wanted.items():
        name = ".".join(map(str, path))
        shape = found.pop(tuple(map(str, path)), None)
        if shape is None:
            raise UserError(f"{folder}: the array {name} is missing")
        if shape != leaf.shape:
            raise UserError(
                f"{folder}: the array {name} has shape {list(shape)}, but the configuration says "
                f"{list(leaf.shape)}"
            )
    if found:
        raise UserError(
            f"{folder}: the configuration has no place for the array {'.'.join(next(iter(found)))}"
        )
    return wanted


def _groups(stored: Mapping[ParamPath, jax.ShapeDtypeStruct]) -> Iterable[list[ParamPath]]:
    """Arrays to read together; the largest first, while there is little else in memory."""

    def size(path: ParamPath) -> int:
        return math.prod(stored[path].shape) * stored[path].dtype.itemsize

    group: list[ParamPath] = []
    total = 0
    for path in sorted(stored, key=size, reverse=True):
        if group and total + size(path) > _GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(path)
        total += size(path)
    if group:
        yield group


def _read_arrays(
    folder: Path,
    stored: Mapping[ParamPath, jax.ShapeDtypeStruct],
    group: list[ParamPath],
    place: "_Placement",
) -> dict[ParamPath, jax.Array]:
    from orbax.checkpoint import v1 as ocp

    chosen = set(group)
    tree: dict[str, Any] = {}
    for path, leaf in stored.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = ocp.PLACEHOLDER
        if path in chosen:
            sharding = place.sharding_of_single(path)
            node[str(path[-1])] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    with _reading(folder):
        loaded = cast(dict[str, Any], ocp.load(str((folder / _PARAMS).absolute()), tree))
    values: dict[ParamPath, jax.Array] = {}
    for path in group:
        node = loaded
        for key in path:
            node = node[str(key)]
        values[path] = cast(jax.Array, node)
    return values


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turns whatever Orbax raises for a damaged checkpoint into one line."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{folder} is no readable Orbax checkpoint, or is damaged: {lines[0][:200]}; "
            "convert it again"
        ) from error


def _is_finite(value: jax.Array) -> bool:
    if value.is_fully_addressable and next(iter(value.devices())).platform == "cpu":
        return all_finite(np.asarray(value))
    return bool(jnp.isfinite(value).all())


class _Placement:
    """Puts single arrays where the parameters want them: as they are, or into stacks."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: np.dtype,
        stacked: bool,
        shardings: Mapping[ParamPath, jax.sharding.Sharding],
    ):
        self.leaves = fill.abstract_leaves(config, dtype, stacked)
        self.stacked, self.shardings = stacked, shardings
        self.on_host = not shardings and fill.default_platform() == "cpu"
        self.device = jax.sharding.SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
        self.values: dict[ParamPath, Any] = {}
        self.writers: dict[ParamPath, Any] = {}

    def sharding_of_single(self, path: ParamPath) -> jax.sharding.Sharding:
        """Sharding of one array of the checkpoint: that of the stack less its first axis."""
        if not self.stacked or path[0] != "layers":
            return self.shardings.get(path, self.device)
        sharding = self.shardings.get((path[0], path[2]), self.device)
        if isinstance(sharding, jax.sharding.NamedSharding):
            spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
            return jax.sharding.NamedSharding(sharding.mesh, spec)
        return sharding

    def put(self, path: ParamPath, value: jax.Array) -> None:
        """Takes over one array of the checkpoint."""
        if not self.stacked or path[0] != "layers":
            self.values[path] = value
            return
        layer, stack = int(path[1]), (path[0], path[2])
        leaf = self.leaves[stack]
        if self.on_host:
            if stack not in self.values:
                self.values[stack] = fill.empty_on_host(leaf)
            self.values[stack][layer] = np.asarray(value)
            return
        if stack not in self.values:
            make, self.writers[stack] = fill.stack_functions(
                leaf.shape, leaf.dtype, self.shardings.get(stack)
            )
            self.values[stack] = make()
        self.values[stack] = self.writers[stack](self.values[stack], value, np.int32(layer))

    def state(self) -> nnx.State:
        """All parameters, once every array was put."""
        values = {
            path: jax.device_put(value, may_alias=True) if isinstance(value, np.ndarray) else value
            for path, value in self.values.items()
        }
        return fill.state_from_leaves(
            {path: leaf.replace(values[path]) for path, leaf in self.leaves.items()}
        )
