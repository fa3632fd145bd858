"""Moving KVs inside the pool: what MoveCache does to keys and values."""

from typing import Any

from jaxtyping import Array, Int32, Num

from kvjax.kernels.checks import wanted
from kvjax.kernels.choice import Choice, choose
from kvjax.kernels.device import Device, check_hopper
from kvjax.kernels.move_kvs import reference


def move_kvs(
    k: Num[Array, "N b d"],
    v: Num[Array, "N b d"],
    source: Int32[Array, "rows U"],
    target: Int32[Array, "rows U"],
    count: Int32[Array, " rows"],
    *,
    implementation: str | None = None,
) -> tuple[Num[Array, "N b d"], Num[Array, "N b d"]]:
    """Copy KVs from slots of the pool to others, in place where the pools are donated.

    Source: KV-Compress, algorithm 1, lines 8–10.

    Args:
        k: pool of keys.
        v: pool of values.
        source: slots to read, block · b + offset.
        target: slots to write. No slot may be a target twice, or both target and source.
        count: moves of each row; entries from there on may be anything.
        implementation: "mosaic_gpu" (Hopper, work follows the counts) or "xla" (work follows U);
            None picks by device and shape (`kvjax.kernels.explain` says which and why).

    Raises:
        ValueError: an argument does not fit; names it, what it got and what is wanted.
    """
    name = choice(k, v, source, target, count, implementation=implementation).name
    if name == "mosaic_gpu":
        from kvjax.kernels.move_kvs import mosaic_gpu

        return mosaic_gpu.move_kvs(k, v, source, target, count)
    return reference.move_kvs(k, v, source, target, count)


def choice(k, v, source, target, count, *, implementation: str | None = None, **_: Any) -> Choice:
    """The implementation of a call of `move_kvs`."""
    if k.ndim != 3:
        raise wanted("k shape", list(k.shape), "[N, b, d]")
    if source.ndim != 2:
        raise wanted("source shape", list(source.shape), "[rows, U]")
    if v.shape != k.shape or v.dtype != k.dtype:
        raise wanted("v", f"{v.dtype}{list(v.shape)}", f"{k.dtype}{list(k.shape)} as k")
    if target.shape != source.shape:
        raise wanted("target shape", list(target.shape), list(source.shape))
    if count.shape != source.shape[:1]:
        raise wanted("count shape", list(count.shape), list(source.shape[:1]))
    for name, array in (("source", source), ("target", target), ("count", count)):
        if array.dtype != "int32":
            raise wanted(f"{name} dtype", array.dtype, "int32")

    def mosaic_gpu(where: Device) -> None:
        check_hopper(where)
        row_bytes = k.shape[2] * k.dtype.itemsize
        if row_bytes % 16 or k.shape[2] > 256:
            raise NotImplementedError(f"rows of {row_bytes} bytes, served are multiples of 16")
        if 0 in (*k.shape, *source.shape):
            raise NotImplementedError("an empty pool or no moves")

    return choose(implementation, {"mosaic_gpu": mosaic_gpu, "xla": lambda _: None}, k)


move_kvs.choice = choice  # type: ignore[attr-defined]
