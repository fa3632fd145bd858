"""Attention of a prompt's queries: causal among themselves, whole over what a cache holds."""

import dataclasses
import functools
import math
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.kernels.checks import check_dtype, check_prompt, wanted
from kvjax.kernels.choice import Choice, choose
from kvjax.kernels.device import Device, check_in_parts, check_numba
from kvjax.kernels.prefill_attention import reference
from kvjax.kernels.window_metrics import window_metrics

LEAST_ROWS = 64
"""Tokens from which on it pays to put keys and values into the order in which AMX reads them."""


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """KVs of one layer of one sequence that come before every query.

    Gathered from the pool by the caller: a loop that reads the pool itself would make XLA copy it
    before a later step can write to it in place.
    """

    k: Float[Array, "H P d"]
    v: Float[Array, "H P d"]
    length: Int32[Array, " H"]
    """How many of them each head holds; the rest may be anything."""


def prefill_attention(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    *,
    prefix: Prefix | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "T Hr d"]:
    """Causal attention of a prompt in memory linear in its length.

    Args:
        q: queries of T consecutive tokens; query head i reads KV head i // r.
        k: keys of the same tokens.
        v: values of the same tokens.
        prefix: what the cache holds of the tokens before; each head has its own length.
        scale: factor of the logits, 1/√d by default.
        implementation: "cudnn" (NVIDIA GPUs), "splash" (TPUs), "amx" (CPUs that have it), "numba"
            (CPUs) or "xla"; None picks by device and shape (`kvjax.kernels.explain` says which and
            why). "amx" multiplies float32 numbers in parts, as `kvjax.kernels.matmul` does.

    Raises:
        ValueError: an argument does not fit, or the implementation asked for is unknown or does not
            serve the call; names the argument, what it got and what is wanted.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    name = choice(q, k, v, prefix=prefix, implementation=implementation).name
    if name == "cudnn" and prefix is None:
        from kvjax.kernels.prefill_attention import cudnn

        return cudnn.attention(q, k, v, scale)
    return reference.normalised(_partial(name, q, k, v, prefix, scale), v.dtype)


def prefill_attention_with_log_sum(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    *,
    prefix: Prefix | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T Hr d"], Float[Array, "Hr T"]]:
    """`prefill_attention`, and the log-sum-exp of each query's logits in float32."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    name = choice(q, k, v, prefix=prefix, implementation=implementation).name
    part = _partial(name, q, k, v, prefix, scale)
    return reference.normalised(part, v.dtype), reference.log_sum(part)


def prefill_attention_with_received(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    *,
    query_weight: Float[Array, " T"],
    power: int = 1,
    excluded_distance: int = 0,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T Hr d"], Float[Array, "Hr T"], Float[Array, "Hr T"]]:
    """`prefill_attention_with_log_sum` of a whole prompt, and what each key receives of it.

    The third is `window_metrics` of all queries: Σ weight · p^power. On CPUs it is summed where the
    softmax is; elsewhere `window_metrics` takes another pass over the logits.

    Args:
        q, k, v, scale, implementation: as of `prefill_attention`.
        query_weight: what each query counts; 0 for padding.
        power: 1 (sum) or 2 (sum of squares).
        excluded_distance: a pair counts only if query − key ≥ this.

    Raises:
        ValueError: an argument does not fit; names it, what it got and what is wanted.
    """
    if power not in (1, 2):
        raise wanted("power", power, "1 or 2")
    if excluded_distance < 0:
        raise wanted("excluded_distance", excluded_distance, "at least 0")
    if query_weight.shape != q.shape[:1]:
        raise wanted("query_weight shape", list(query_weight.shape), list(q.shape[:1]))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    name = choice(q, k, v, implementation=implementation).name
    if name in ("amx", "numba", "xla"):
        observed = reference.Observed(query_weight, power, excluded_distance)
        causal_with_received = reference.causal_with_received
        if name != "xla":
            from kvjax.kernels.prefill_attention import numba_cpu

            causal_with_received = functools.partial(
                numba_cpu.causal_with_received, tiles=name == "amx"
            )
        part, received = causal_with_received(q, k, v, scale, observed)
        return reference.normalised(part, v.dtype), reference.log_sum(part), received
    out, log_sum = prefill_attention_with_log_sum(q, k, v, scale=scale, implementation=name)
    received = window_metrics(
        q,
        k,
        query_position=jnp.arange(q.shape[0], dtype=jnp.int32),
        power=power,
        excluded_distance=excluded_distance,
        query_weight=query_weight,
        log_sum=log_sum,
        scale=scale,
    )
    return out, log_sum, received


def _partial(name: str, q, k, v, prefix: Prefix | None, scale: float) -> reference.Partial:
    """Output and log-sum-exp in parts, by the implementation of a name."""
    over_prefix = reference.over_prefix
    if name == "cudnn":
        from kvjax.kernels.prefill_attention import cudnn

        part = cudnn.causal(q, k, v, scale)
        over_prefix = cudnn.over_prefix
    elif name == "splash":
        from kvjax.kernels.prefill_attention import splash

        part = splash.causal(q, k, v, scale)
    elif name in ("amx", "numba"):
        from kvjax.kernels.prefill_attention import numba_cpu

        part = numba_cpu.causal(q, k, v, scale, tiles=name == "amx")
        over_prefix = functools.partial(numba_cpu.over_prefix, tiles=name == "amx")
    else:
        part = reference.causal(q, k, v, scale)
    if prefix is not None:
        before = over_prefix(q, prefix.k, prefix.v, prefix.length, scale)
        part = reference.merged(part, before)
    return part


def choice(
    q, k, v, *, prefix: Prefix | None = None, implementation: str | None = None, **_
) -> Choice:
    """The implementation of a call of `prefill_attention`."""
    _check(q, k, v, prefix)

    def cudnn(where: Device) -> None:
        if where.platform != "gpu" or not where.kind.startswith("NVIDIA"):
            raise NotImplementedError(f"device {where.kind}")
        if not q.dtype == k.dtype == v.dtype:
            raise NotImplementedError(f"q, k and v of {q.dtype}, {k.dtype} and {v.dtype}")
        from kvjax.kernels.prefill_attention import cudnn

        cudnn.check(q.shape[-1], q.dtype)

    def splash(where: Device) -> None:
        if where.platform != "tpu":
            raise NotImplementedError(f"device {where.kind}")
        if q.dtype == "float16":
            raise NotImplementedError("float16, which TPUs have no vector type for")

    def amx(where: Device) -> None:
        check_numba(where)
        from kvjax.kernels.prefill_attention import tiled

        tiled.check(q.shape[-1])
        if implementation is None and q.shape[0] < LEAST_ROWS:
            raise NotImplementedError(f"{q.shape[0]} tokens")
        check_in_parts(q, k, v)

    own = {"cudnn": cudnn, "splash": splash, "amx": amx, "numba": check_numba}
    return choose(implementation, {**own, "xla": lambda _: None}, q)


def _check(q, k, v, prefix: Prefix | None) -> None:
    """Refuse arguments that do not fit."""
    num_tokens, num_heads, d = check_prompt(q, k, "T")
    if q.shape[0] != num_tokens:
        raise wanted("q shape", list(q.shape), [num_tokens, *q.shape[1:]])
    if v.shape != k.shape:
        raise wanted("v shape", list(v.shape), f"that of k, {list(k.shape)}")
    check_dtype("v", v, jnp.floating, "a floating-point type")
    if prefix is None:
        return
    if prefix.k.ndim != 3 or prefix.k.shape[::2] != (num_heads, d):
        raise wanted("prefix.k shape", list(prefix.k.shape), f"[{num_heads}, P, {d}]")
    if prefix.k.shape[1] == 0:
        raise wanted("prefix.k shape", list(prefix.k.shape), "P of at least 1, or no prefix")
    if prefix.v.shape != prefix.k.shape:
        raise wanted("prefix.v shape", list(prefix.v.shape), f"that of k, {list(prefix.k.shape)}")
    if prefix.length.shape != (num_heads,):
        raise wanted("prefix.length shape", list(prefix.length.shape), [num_heads])
    if prefix.length.dtype != jnp.int32:
        raise wanted("prefix.length dtype", prefix.length.dtype, "int32")


prefill_attention.choice = choice  # type: ignore[attr-defined]
