"""Writes Orbax checkpoints; ``kvjax.models.weights.orbax`` tells what they consist of."""

import contextlib
import errno
import json
import logging
import os
import shutil
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from kvjax.errors import UserError, in_one_line
from kvjax.models.architectures import config_to_hf
from kvjax.models.config import ModelConfig
from kvjax.models.parallel import Dealing
from kvjax.models.weights.gguf_header import read_gguf_header
from kvjax.models.weights.orbax import (
    CONFIG,
    DEALING,
    FILES,
    FINGERPRINT,
    GROUP_BYTES,
    PARAMS,
    library,
    list_files,
)
from kvjax.models.weights.placement import ParamPath

GENERATION = "generation_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    GENERATION,
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
_MOST_TOLD = 2048
"""Bytes of what the first process says of an error."""


def save_orbax(
    path: str | os.PathLike[str],
    config: ModelConfig,
    params: nnx.State,
    tokenizer: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
    dealing: Dealing | None = None,
    fingerprint: str | None = None,
) -> Path:
    """Writes an Orbax checkpoint that `load_params` reads; it appears whole or not at all.

    Where several processes have a part of the parameters each, all of them call it, with the same
    arguments and a folder that all of them see.

    Args:
        path: the folder to make.
        config: the model.
        params: its parameters, stacked or not, in the dtype to store.
        tokenizer: the folder or GGUF file to take the tokenizer from.
        overwrite: replace the checkpoint that lies at `path`.
        dealing: how `params` are dealt to several devices, if they are. They are stored as they
            lie, each device's part by itself, and load onto any other number of devices.
        fingerprint: of the checkpoint that they are of, by which its calibrations know them.

    Returns:
        `path`.

    Raises:
        UserError: `path` exists already, is not to be replaced (`check_target`), or cannot be
            written; the weights are of few bits.
    """
    if config.weight_dtype is not None:
        raise UserError(
            f"weight_dtype {config.weight_dtype}: checkpoints hold all bits, and lose them when "
            "they are loaded; save the model without it"
        )
    target = Path(path).absolute()
    # Beside the target, hence on its disk: to put it in place is to rename it.
    number = multihost_utils.broadcast_one_to_all(np.int32(os.getpid())) if _several() else None
    work = target.with_name(f".{target.name}.part-{os.getpid() if number is None else number}")

    def prepare() -> None:
        check_target(target, overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(target)
        _require_space(target, params)
        work.mkdir()

    def finish() -> None:
        (work / FILES).write_text(json.dumps(list_files(work / PARAMS)) + "\n")
        if dealing is not None:
            told = {"number": dealing.number.tolist(), "devices": dealing.devices}
            told["replicas"] = dealing.replicas
            (work / DEALING).write_text(json.dumps(told) + "\n")
        if tokenizer is not None:
            _copy_tokenizer(Path(tokenizer), work)
        # Last: a folder without it does not load.
        told = {} if fingerprint is None else {FINGERPRINT: fingerprint}
        (work / CONFIG).write_text(json.dumps(config_to_hf(config) | told, indent=2) + "\n")
        # Somebody else may have put another one there meanwhile.
        check_target(target, overwrite)
        _put_in_place(work, target)

    with _told_in_one_line(target):
        _by_the_first(prepare, target)
        try:
            _write_arrays(work / PARAMS, _tree(config, params))
            _by_the_first(finish, target)
        finally:
            if jax.process_index() == 0:
                shutil.rmtree(work, ignore_errors=True)
    return target


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a place where no checkpoint is written: what was not written here stays.

    Raises:
        UserError: something lies there and `overwrite` is not asked for, or it is neither an empty
            folder nor a checkpoint that `save_orbax` wrote.
    """
    if not target.exists() and not target.is_symlink():
        return
    if not overwrite:
        raise UserError(f"{target} exists already: choose another folder or give --force")
    ours = all((target / name).exists() for name in (CONFIG, FILES, PARAMS))
    if not ours and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(
            f"{target} is no checkpoint that kvjax wrote, and is not replaced: choose another "
            "folder, or remove it yourself"
        )


def _several() -> bool:
    """Whether other processes write their parts of the same checkpoint."""
    return jax.process_count() > 1


def _by_the_first(act: Callable[[], None], target: Path) -> None:
    """Have the first process do something while the others wait; what it raises there ends all.

    Args:
        act: what it does.
        target: of the checkpoint.

    Raises:
        UserError: in the others, in the words that the first one's error has.
    """
    if not _several():
        act()
        return
    error, told = None, np.zeros(_MOST_TOLD, np.uint8)
    if jax.process_index() == 0:
        try:
            with _told_in_one_line(target):
                act()
        except Exception as caught:
            error, words = caught, in_one_line(caught).encode()[:_MOST_TOLD]
            told[: len(words)] = np.frombuffer(words, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(told), np.uint8)
    if error is not None:
        raise error
    if told.any():
        raise UserError(told.tobytes().rstrip(b"\0").decode(errors="replace"))


@contextlib.contextmanager
def _told_in_one_line(target: Path) -> Iterator[None]:
    """Turns what the file system says into a line about the checkpoint."""
    try:
        yield
    except OSError as error:
        raise _write_error(target, error) from error
    except ValueError as error:
        # The array library reports what the file system says in errors of its own.
        if "NO_SPACE" not in str(error) and "No space left" not in str(error):
            raise
        raise _write_error(target, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) from error


def _tree(config: ModelConfig, params: nnx.State) -> dict[str, Any]:
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
    ocp = library()

    context = ocp.Context()
    if hasattr(context, "memory"):
        # Without limits everything is copied before anything is written.
        context.memory.transfer_concurrent_bytes = GROUP_BYTES
        context.memory.write_concurrent_bytes = GROUP_BYTES
    # What goes wrong is raised. Orbax's threads report it besides, at length, and go on for a
    # moment where a write is interrupted: then they stay quiet.
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    hook = sys.excepthook

    def of_main_thread(*raised: Any) -> None:
        # Callbacks of theirs that find no event loop any more are printed by this hook.
        if threading.current_thread() is threading.main_thread():
            hook(*raised)

    sys.excepthook = of_main_thread
    with context:
        try:
            ocp.save(str(path), tree)
        except Exception:
            log.disabled, sys.excepthook = before, hook
            raise
        log.disabled, sys.excepthook = before, hook


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
    # It reads headers by a module of this package.
    from kvjax.models.tokenizer_files import read_tokenizer

    if source.is_dir():
        found = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
        for file in found:
            (folder / file.relative_to(source)).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / file.relative_to(source))
        has_tokenizer = any(file.name in ("tokenizer.json", "tokenizer.model") for file in found)
        ggufs = sorted(source.glob("*.gguf"))
        if has_tokenizer:
            # The config.json that is written is the model's alone.
            ends = sorted(read_tokenizer(source).eos_ids)
            generation = folder / GENERATION
            said = json.loads(generation.read_bytes()) if generation.is_file() else {}
            generation.write_text(json.dumps({**said, "eos_token_id": ends}, indent=2) + "\n")
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
