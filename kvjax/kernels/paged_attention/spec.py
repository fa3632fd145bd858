"""Shapes of paged attention: what arguments must look like, and families for tests and timings."""

import dataclasses
import os
from collections.abc import Collection

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.checks import wanted
from kvjax.kernels.device import HEAD_DIMS
from kvjax.kernels.encoded import FINER, form_of, half_of

BLOCK_SIZES = (8, 16, 32, 64)
MAX_GROUP = 16
DTYPES = ("bfloat16", "float16", "float32")
"""What the device kernels serve; the XLA path serves any head dimension, group and block size."""

DEBUG_VARIABLE = "KVJAX_DEBUG"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static shape of one call. The letters are those of the cache: S, H, r, d, N, b, M."""

    seqs: int
    heads: int
    group: int
    head_dim: int
    blocks: int
    block_size: int
    max_blocks: int
    dtype: str = "bfloat16"
    """Of the rows of keys and values."""
    forms: tuple[str | None, str | None] = (None, None)
    """What is stored of keys and of values, None for rows as they are (`kvjax.kernels.encoded`)."""
    halves: bool = False
    """Whether a row of both, or of codes of both, is one row of an array."""

    @property
    def fine(self) -> bool:
        """Whether blocks may have finer codes in others."""
        return any(form is not None and form.endswith(FINER) for form in self.forms)

    @property
    def codes(self) -> tuple[str | None, str | None]:
        """The forms, whether there are finer codes or not."""
        keys, values = (form and form.removesuffix(FINER) for form in self.forms)
        return keys, values

    @property
    def rows(self) -> int:
        """(sequence, KV head) pairs."""
        return self.seqs * self.heads

    def arguments(self, metric: bool = True) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k, v, block_table, context_len and, if asked for, metric, without data."""
        pool = (self.blocks, self.block_size, self.head_dim)
        shapes = [
            ((self.seqs, self.heads * self.group, self.head_dim), self.dtype),
            (pool, self.dtype),
            (pool, self.dtype),
            ((self.seqs, self.heads, self.max_blocks), "int32"),
            ((self.seqs, self.heads), "int32"),
            (pool[:2], "float32"),
        ]
        return tuple(jax.ShapeDtypeStruct(s, jnp.dtype(t)) for s, t in shapes[: 5 + metric])


def _families() -> dict[str, Shape]:
    base = Shape(4, 2, 4, 128, 97, 16, 12)
    families = {"llama-3.1-8b": base, "llama-3.1-70b": dataclasses.replace(base, group=8)}
    for dtype in DTYPES:
        for d in HEAD_DIMS:
            families[f"{dtype} d={d}"] = dataclasses.replace(base, head_dim=d, dtype=dtype)
    for b in BLOCK_SIZES:
        families[f"b={b}"] = dataclasses.replace(base, block_size=b)
    for r in (1, 2, 3, 5, 6, 7, 16):
        families[f"r={r}"] = dataclasses.replace(base, group=r)
    unlike = {shape: name for name, shape in reversed(families.items())}
    families = {name: shape for shape, name in reversed(unlike.items())}
    families["pool of more than 2^31 elements"] = dataclasses.replace(base, blocks=12_000_000)
    return families


FAMILIES = _families()
"""One small call per family of shapes that the device kernels serve, by name."""


def checked(q, k, v, block_table, context_len, metric) -> Shape:
    """The static shape of a call.

    Raises:
        ValueError: an argument does not fit; names it, what it got and what is wanted.
    """
    for name, array, axes in (
        ("q", q, "[S, H·r, d]"),
        ("k", k, "[N, b, d]"),
        ("v", v, "[N, b, d]"),
        ("block_table", block_table, "[S, H, M]"),
    ):
        if array.ndim != 3:
            raise wanted(f"{name} shape", list(array.shape), axes)
    seqs, heads, max_blocks = block_table.shape
    blocks, block_size, head_dim = k.shape
    if not all(k.shape):
        raise wanted("k shape", list(k.shape), "[N, b, d], each at least 1")
    if max_blocks == 0:
        raise wanted("block_table shape", list(block_table.shape), "[S, H, M], M at least 1")
    if v.shape != k.shape:
        raise wanted("v shape", list(v.shape), f"that of k, {list(k.shape)}")
    if q.shape[0] != seqs or q.shape[2] != head_dim:
        raise wanted("q shape", list(q.shape), f"[{seqs}, H·r, {head_dim}]")
    if heads == 0 or q.shape[1] == 0 or q.shape[1] % heads:
        raise wanted("q shape", f"{q.shape[1]} query heads", f"a multiple of {heads} KV heads")
    if context_len.shape != (seqs, heads):
        raise wanted("context_len shape", list(context_len.shape), [seqs, heads])
    for name, array in (("block_table", block_table), ("context_len", context_len)):
        if array.dtype != jnp.int32:
            raise wanted(f"{name} dtype", array.dtype, "int32")
    for name, array in (("q", q), ("k", k)):
        if str(array.dtype) not in DTYPES:
            raise wanted(f"{name} dtype", array.dtype, f"one of {', '.join(DTYPES)}")
    if v.dtype != k.dtype:
        raise wanted("v dtype", v.dtype, f"that of k, {k.dtype}")
    if metric is not None:
        if metric.shape != (blocks, block_size):
            raise wanted("metric shape", list(metric.shape), [blocks, block_size])
        if metric.dtype != jnp.float32:
            raise wanted("metric dtype", metric.dtype, "float32")
    halves = (half_of(k), half_of(v))
    if halves not in ((None, None), (False, True)):
        raise wanted("halves of rows that k and v are", halves, "(None, None) or (False, True)")
    forms = (form_of(k), form_of(v))
    fine = [form is not None and form.endswith(FINER) for form in forms]
    if fine[0] != fine[1]:
        raise wanted("finer codes of k and v", fine, "those of both, in the same blocks, or none")
    group = q.shape[1] // heads
    kind = (str(k.dtype), forms, halves[0] is not None)
    return Shape(seqs, heads, group, head_dim, blocks, block_size, max_blocks, *kind)


def check_statistic(power: int, observed, shape: Shape) -> None:
    """Check what the statistic adds up, and for which sequences.

    Raises:
        ValueError: it names the argument, what it got and what is wanted.
    """
    if power not in (1, 2):
        raise wanted("power", power, "1 or 2")
    if observed is not None:
        if observed.shape != (shape.seqs,):
            raise wanted("observed shape", list(observed.shape), [shape.seqs])
        if observed.dtype != jnp.bool_:
            raise wanted("observed dtype", observed.dtype, "bool")


def check_exact(exact, shape: Shape) -> None:
    """Check the rows that are read in place of the pool's.

    Raises:
        ValueError: it names the argument, what it got and what is wanted.
    """
    if exact is None:
        return
    heads, rows = (shape.seqs, shape.heads), exact.index.shape[-1]
    wants = {"k": (*heads, rows, shape.head_dim), "index": (*heads, rows)}
    for name, want in {**wants, "v": wants["k"]}.items():
        if getattr(exact, name).shape != want:
            raise wanted(f"exact.{name} shape", list(getattr(exact, name).shape), list(want))
    if exact.index.dtype != jnp.int32:
        raise wanted("exact.index dtype", exact.index.dtype, "int32")


def check_table(block_table, context_len, num_blocks: int, block_size: int) -> None:
    """Check lengths and followed table entries on the host, where their values are known.

    Raises:
        ValueError: a length or an entry is out of range, with its place.
    """
    if isinstance(block_table, jax.core.Tracer) or isinstance(context_len, jax.core.Tracer):
        return
    lengths, table = np.asarray(context_len), np.asarray(block_table)
    max_blocks = table.shape[-1]
    most = max_blocks * block_size
    for bad in np.argwhere((lengths < 0) | (lengths > most))[:1]:
        place = tuple(int(i) for i in bad)
        raise wanted(f"context_len{list(place)}", lengths[place], f"0 to {most}")
    used = np.arange(max_blocks) < -(-lengths[..., None] // block_size)
    for bad in np.argwhere(used & ((table < 0) | (table >= num_blocks)))[:1]:
        place = tuple(int(i) for i in bad)
        raise wanted(f"block_table{list(place)}", table[place], f"0 to {num_blocks - 1}")


def debugging() -> bool:
    """Whether the environment asks for host-side checks of tables."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def served_shape(shape: Shape, forms: Collection[str]) -> None:
    """What both device kernels ask of a shape; `forms` are those of codes that they read.

    Raises:
        NotImplementedError: the kernels do not serve it, with the reason.
    """
    for name, got, served in (
        ("head dimension", shape.head_dim, HEAD_DIMS),
        ("block size", shape.block_size, BLOCK_SIZES),
    ):
        if got not in served:
            raise NotImplementedError(f"{name} {got}, served are {', '.join(map(str, served))}")
    if shape.group > MAX_GROUP:
        raise NotImplementedError(
            f"{shape.group} query heads per KV head, served are 1 to {MAX_GROUP}"
        )
    for form in shape.codes:
        if form is not None and form not in forms:
            raise NotImplementedError(f"{form} pools, served are {', '.join(forms)}")
    if shape.rows == 0 or shape.blocks == 0 or shape.max_blocks == 0:
        raise NotImplementedError("an empty batch, pool or table")
