"""Devices that are not there: enough of them to choose kernels and to lower for them."""

from jax.sharding import AbstractDevice, AbstractMesh


def _mesh(kind: str, cores: int, platform: str) -> AbstractMesh:
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    return AbstractMesh((), (), abstract_device=device)


H200 = _mesh("NVIDIA H200", 132, "gpu")
A100 = _mesh("NVIDIA A100-SXM4-80GB", 108, "gpu")
B200 = _mesh("NVIDIA B200", 148, "gpu")
TPU_V5E = _mesh("TPU v5 lite", 1, "tpu")
TPU_V6E = _mesh("TPU v6 lite", 1, "tpu")
