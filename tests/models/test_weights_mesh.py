"""Loading onto a mesh of two devices: every format gives the same shards."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from kvjax.models.weights import load_params, save_orbax
from tests.models.checkpoints import CONFIG, random_tensors, write_folder, write_gguf

SCRIPT = textwrap.dedent(
    """
    import sys
    import jax, numpy as np
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from kvjax.models.decoder import logical_axes
    from kvjax.models.weights import load_params

    assert jax.device_count() == 2
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    for stacked, dtype in ((True, "bfloat16"), (False, "float32")):
        plain = None
        for path in sys.argv[1:]:
            config, params = load_params(path, dtype=dtype, stacked=stacked)
            axes = logical_axes(config, stacked)
            shardings = {
                key: NamedSharding(mesh, PartitionSpec(
                    *("model" if name in ("kv_heads", "mlp") else None for name in names)
                ))
                for key, names in axes.items()
            }
            plain = plain or params
            _, split = load_params(path, dtype=dtype, stacked=stacked, shardings=shardings)
            jax.tree.map(np.testing.assert_array_equal, plain, split)
            for key, leaf in nnx.to_flat_state(split):
                value = leaf[...]
                assert value.sharding.is_equivalent_to(shardings[key], value.ndim), key
                divided = any(name in ("kv_heads", "mlp") for name in axes[key])
                parts = value.size // value.addressable_shards[0].data.size
                assert parts == (2 if divided else 1), key
    """
)


def test_two_devices(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    folder = write_folder(tmp_path / "folder", CONFIG, tensors, shards=2)
    file = write_gguf(tmp_path / "model.gguf", CONFIG, tensors)
    orbax = save_orbax(tmp_path / "orbax", *load_params(folder))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "-c", SCRIPT, str(folder), str(file), str(orbax)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
