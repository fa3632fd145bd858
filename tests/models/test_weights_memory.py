"""Loading streams: peak host memory stays near the weights in the dtype that was asked for."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.config import ModelConfig
from kvjax.models.layout import tensor_slots
from tests.models.checkpoints import (
    CONFIG,
    num_params,
    random_tensors,
    write_folder,
    write_gguf,
)

# 78 million parameters: 310 MB in float32.
LARGE = dataclasses.replace(
    CONFIG,
    name="large",
    vocab_size=16_384,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
)
MEGABYTE = 1e6

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)


def large_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """Tensors of the right shapes; all rows of a matrix share one piece of random numbers."""
    rng = np.random.default_rng(0)
    row = rng.standard_normal(8192).astype(np.float32)
    return {
        slot.hf_name: np.ascontiguousarray(
            np.broadcast_to(row[: slot.file_shape[-1]], slot.file_shape)
        )
        for slot in tensor_slots(config)
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The large model as `safetensors`, `sharded`, `model.gguf`; the tiny one likewise."""
    root = tmp_path_factory.mktemp("checkpoints")
    for config, tensors, folder in (
        (CONFIG, random_tensors(CONFIG), root / "tiny"),
        (LARGE, large_tensors(LARGE), root / "large"),
    ):
        write_folder(folder / "safetensors", config, tensors)
        halves = {name: value.astype(jnp.bfloat16) for name, value in tensors.items()}
        write_folder(folder / "sharded", config, halves, shards=2)
        type_ = gguf.GGMLQuantizationType.Q8_0
        quantised = {
            name: ("Q8_0", gguf.quantize(value, type_)) if value.ndim == 2 else value
            for name, value in tensors.items()
        }
        write_gguf(folder / "model.gguf", config, quantised)
    yield root
    # Hundreds of megabytes, which pytest would keep for the next runs.
    shutil.rmtree(root)


def peak_of_loading(root: Path, name: str, dtype: str, stacked: bool) -> float:
    """MB that loading adds at its peak, in a process that has loaded the tiny model before."""
    script = textwrap.dedent(
        """
        import json, sys
        import jax
        from kvjax.models.weights import load_params, save_orbax

        def status(field):
            with open("/proc/self/status") as file:
                line = next(line for line in file if line.startswith(field))
            return int(line.split()[1]) * 1024

        root, name, dtype, stacked = sys.argv[1:]
        arguments = dict(dtype=dtype, stacked=stacked == "True")
        jax.block_until_ready(load_params(f"{root}/tiny/{name}", **arguments))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = status("VmRSS")
        params = jax.block_until_ready(load_params(f"{root}/large/{name}", **arguments))
        print(json.dumps(status("VmHWM") - before))
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", script, str(root), name, dtype, str(stacked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) / MEGABYTE


@pytest.mark.parametrize(
    ("name", "dtype", "stacked"),
    [
        pytest.param("safetensors", "bfloat16", True, marks=pytest.mark.slow),
        pytest.param("sharded", "float32", False, marks=pytest.mark.slow),
        ("model.gguf", "float32", True),
    ],
)
def test_peak_memory(checkpoints: Path, name: str, dtype: str, stacked: bool) -> None:
    weights = num_params(LARGE) * np.dtype(dtype if dtype == "float32" else "int16").itemsize
    peak = peak_of_loading(checkpoints, name, dtype, stacked)
    # A gigabyte is allowed, but at this size even a second copy would be within it.
    assert peak <= weights / MEGABYTE + 100


@pytest.mark.parametrize(("dtype", "stacked"), [("float32", False), ("bfloat16", True)])
@pytest.mark.slow
def test_peak_memory_of_orbax(checkpoints: Path, dtype: str, stacked: bool) -> None:
    for size in ("tiny", "large"):
        if not (checkpoints / size / "orbax").exists():
            script = (
                "import sys; from kvjax.models.weights import load_params, save_orbax;"
                "save_orbax(sys.argv[2], *load_params(sys.argv[1], stacked=False))"
            )
            folder = checkpoints / size
            subprocess.run(
                [sys.executable, "-c", script, str(folder / "safetensors"), str(folder / "orbax")],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                check=True,
            )
    weights = num_params(LARGE) * np.dtype(dtype if dtype == "float32" else "int16").itemsize
    peak = peak_of_loading(checkpoints, "orbax", dtype, stacked)
    # Orbax holds a group of arrays (268 MB) more than once while it reads.
    assert peak <= weights / MEGABYTE + 400
