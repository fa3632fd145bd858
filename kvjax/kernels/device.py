"""The device that a call will run on, known while it is traced; what kernels for devices share."""

import dataclasses
import importlib.util
import math

import jax
import jax.core

HOPPER_CORES = 132
"""Multiprocessors of an H100 or H200, should the driver not say."""
HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")
HEAD_DIMS = (64, 80, 96, 128)
"""Head dimensions that kernels for devices serve."""
IN_PARTS = (
    *(None, "default", "fastest", "high", "bfloat16", "bfloat16_3x", "tensorfloat32"),
    *("BF16_BF16_F32", "BF16_BF16_F32_X3", "TF32_TF32_F32"),
)
"""What `jax.default_matmul_precision` says where float32 numbers may be multiplied in parts."""
LOG2E = math.log2(math.e)
"""Of logits in powers of two, which devices are quicker at."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What the choice of a kernel depends on."""

    platform: str
    """"cpu", "gpu" or "tpu"."""
    kind: str
    hopper: bool
    """Whether it is a GPU of compute capability 9.0, the one that has `wgmma`."""
    cores: int


def of(array: object = None) -> Device:
    """The device of a call with this argument.

    In order: the abstract device of the current mesh (set to compile without the hardware), where
    the array lies, JAX's default device.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        hopper = any(name in abstract.device_kind for name in HOPPER_NAMES)
        return Device(abstract.platform, abstract.device_kind, hopper, abstract.num_cores or 1)
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        device = min(array.devices(), key=lambda d: d.id)
    else:
        default = jax.config.jax_default_device
        device = default if isinstance(default, jax.Device) else jax.devices(default)[0]
    hopper = getattr(device, "compute_capability", None) == "9.0"
    cores = getattr(device, "core_count", None) or (HOPPER_CORES if hopper else 1)
    return Device(device.platform, device.device_kind, hopper, cores)


def check_numba(where: Device) -> None:
    """
    Raises:
        NotImplementedError: kernels that Numba compiles do not run on the device, or jaxlib does
            not call them.
    """
    if where.platform != "cpu":
        raise NotImplementedError(f"device {where.kind}")
    if importlib.util.find_spec("numba") is None:
        raise NotImplementedError("Python without Numba (pip install '.[cpu]')")
    from kvjax.kernels import numba_calls

    numba_calls.check()


def check_in_parts(*operands: jax.Array) -> None:
    """
    Raises:
        NotImplementedError: some are float32, and JAX is told to multiply these as they are, or in
            more parts than three.
    """
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision not in IN_PARTS and any(x.dtype == "float32" for x in operands):
        raise NotImplementedError(f"float32 at precision {precision}")


def check_hopper(where: Device) -> None:
    """
    Raises:
        NotImplementedError: kernels for Hopper do not run on the device.
    """
    if not where.hopper:
        raise NotImplementedError(f"device {where.kind} (wanted: compute capability 9.0)")
