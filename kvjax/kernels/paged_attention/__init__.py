"""Attention of one query per sequence over a paged cache with its own length for every KV head."""

import math
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.kernels.checks import wanted
from kvjax.kernels.choice import Choice, choose
from kvjax.kernels.device import Device, check_hopper, check_numba
from kvjax.kernels.encoded import Encoded, Half, form_of, half_of
from kvjax.kernels.paged_attention import reference, spec
from kvjax.kernels.paged_attention.exact import ExactKVs
from kvjax.kernels.paged_attention.worklist import WorkList


def paged_attention(
    q: Float[Array, "S Hr d"],
    k: Float[Array, "N b d"] | Encoded | Half,
    v: Float[Array, "N b d"] | Encoded | Half,
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    *,
    scale: float | None = None,
    metric: Float[Array, "N b"] | None = None,
    return_metric: bool = False,
    power: int = 2,
    observed: Bool[Array, " S"] | None = None,
    exact: ExactKVs | None = None,
    implementation: str | None = None,
    work: WorkList | None = None,
    debug: bool | None = None,
) -> Float[Array, "S Hr d"] | tuple[Float[Array, "S Hr d"], Float[Array, "N b"]]:
    """Attention over the KVs that each (sequence, KV head) holds in the pool.

    Args:
        q: one query per sequence and query head; query head i reads KV head i // r.
        k: pool of keys: bfloat16, float16 or float32, or `Encoded` as such.
        v: pool of values, of the same type. Both may be the `Half` of one array.
        block_table: blocks of each head; entries from ⌈context_len / b⌉ on are not followed.
        context_len: KVs of each head; 0 gives an output of zeros.
        scale: factor of the logits, 1/√d by default.
        metric: pool of eviction metrics, float32; needed with `return_metric`.
        return_metric: also return the metrics with Σ p^power over the query group added to each KV
            (KV-Compress, equation 20). A block may then belong to one head only, of sequences that
            are observed and of the others.
        power: 1 or 2 (static).
        observed: sequences whose metrics are added to; all by default.
        exact: rows that are read in place of what the pool has of the same KVs.
        implementation: "mosaic_gpu" (Hopper), "tpu", "numba" (CPUs) or "xla"; None picks by
            device and shape (`kvjax.kernels.explain` says which and why).
        work: what `plan_paged_attention` gave for these lengths; made here if None.
        debug: check lengths and table entries on the host where their values are known; None
            asks the environment variable KVJAX_DEBUG.

    Raises:
        ValueError: an argument does not fit; names it, what it got and what is wanted. Raised
            before any device code runs.
    """
    statistic = {
        "metric": metric, "return_metric": return_metric, "power": power, "observed": observed
    }  # fmt: skip
    chosen = choice(
        q, k, v, block_table, context_len,
        scale=scale, implementation=implementation, exact=exact, **statistic,
    )  # fmt: skip
    return _attend(
        chosen, q, k, v, block_table, context_len,
        exact=exact, work=work, debug=debug, **statistic,
    )[1]  # fmt: skip


def append_and_attend(
    q: Float[Array, "S Hr d"],
    new_k: Float[Array, "S H d"],
    new_v: Float[Array, "S H d"],
    k: Float[Array, "N b d"],
    v: Float[Array, "N b d"],
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    **options: Any,
) -> tuple[tuple[Float[Array, "N b d"], Float[Array, "N b d"]], Any]:
    """Write the newest key and value of every head to the pool, then attend to all of them.

    Args:
        q, k, v, block_table: as of `paged_attention`; the pools are arrays.
        new_k: keys, in the pool's dtype.
        new_v: values, the same.
        context_len: KVs of each head, the newest included; heads with 0 are passed over.
        options: those of `paged_attention`.

    Returns:
        The pools, and what `paged_attention` returns.

    Raises:
        ValueError: as `paged_attention`.
    """
    chosen = choice(q, k, v, block_table, context_len, **options)
    for name, rows, pool in (("new_k", new_k, k), ("new_v", new_v, v)):
        if rows.shape != (*context_len.shape, k.shape[2]):
            raise wanted(f"{name} shape", list(rows.shape), [*context_len.shape, k.shape[2]])
        if rows.dtype != pool.dtype:
            raise wanted(f"{name} dtype", rows.dtype, f"that of the pool, {pool.dtype}")
    return _attend(chosen, q, k, v, block_table, context_len, newest=(new_k, new_v), **options)


def _attend(
    chosen: Choice,
    q: Array,
    k: Array | Encoded | Half,
    v: Array | Encoded | Half,
    block_table: Array,
    context_len: Array,
    *,
    newest: tuple[Array, Array] | None = None,
    metric: Array | None = None,
    return_metric: bool = False,
    power: int = 2,
    observed: Array | None = None,
    exact: ExactKVs | None = None,
    work: WorkList | None = None,
    debug: bool | None = None,
    **_: Any,
) -> tuple[tuple[Any, Any], Any]:
    """The pools, with `newest` keys and values where there are any, and what `paged_attention`
    returns, by the implementation that is chosen."""
    if spec.debugging() if debug is None else debug:
        spec.check_table(block_table, context_len, k.shape[0], k.shape[1])
    pools: tuple[Any, Any] = (k, v)
    if newest is not None and chosen.name != "mosaic_gpu":
        k, v = (
            reference.write_newest(pool, block_table, context_len, rows)
            for pool, rows in zip(pools, newest, strict=True)
        )
        pools = (k, v)
    metric = metric if return_metric else None
    arguments: tuple[Any, ...] = (q, k, v, block_table, context_len)
    statistic = {"metric": metric, "power": power, "observed": observed, "exact": exact}
    if chosen.name == "mosaic_gpu":
        from kvjax.kernels.paged_attention import mosaic_gpu

        options = {"c": chosen.config, "work": work, **statistic}
        if newest is None:
            out, metric = mosaic_gpu.paged_attention(*arguments, **options)
        else:
            pools, out, metric = mosaic_gpu.append_and_attend(q, *newest, *arguments[1:], **options)
    elif chosen.name == "tpu":
        from kvjax.kernels.paged_attention import tpu

        out, metric = tpu.paged_attention(*arguments, c=chosen.config, **statistic)
    elif chosen.name == "numba":
        from kvjax.kernels.paged_attention import numba_cpu

        out, metric = numba_cpu.paged_attention(*arguments, c=chosen.config, **statistic)
    else:
        out, metric = reference.paged_attention(*arguments, **chosen.config, **statistic)
    out = out.astype(q.dtype)
    return pools, out if metric is None else (out, metric)


def choice(
    q,
    k,
    v,
    block_table,
    context_len,
    *,
    scale: float | None = None,
    metric=None,
    return_metric: bool = False,
    power: int = 2,
    observed=None,
    exact=None,
    implementation: str | None = None,
    **_,
) -> Choice:
    """The implementation of a call of `paged_attention`, from shapes alone."""
    if return_metric and metric is None:
        raise ValueError("metric: got None, wanted the pool of metrics for return_metric=True")
    shape = spec.checked(q, k, v, block_table, context_len, metric if return_metric else None)
    spec.check_statistic(power, observed, shape)
    spec.check_exact(exact, shape)
    return _choose(shape, q, scale, return_metric, implementation, exact is not None)


paged_attention.choice = choice  # type: ignore[attr-defined]


def _choose(
    shape: spec.Shape,
    argument: object,
    scale: float | None,
    return_metric: bool,
    implementation: str | None,
    exact: bool = False,
) -> Choice:
    scale = 1 / math.sqrt(shape.head_dim) if scale is None else scale
    queries = str(getattr(argument, "dtype", shape.dtype))

    def mosaic_gpu(where: Device):
        check_hopper(where)
        from kvjax.kernels.paged_attention import mosaic_gpu

        options = {"keep_logits": return_metric, "exact": exact, "cores": where.cores}
        return mosaic_gpu.config(shape, scale=scale, **options)

    def tpu(where: Device):
        if where.platform != "tpu":
            raise NotImplementedError(f"device {where.kind}")
        from kvjax.kernels.paged_attention import tpu

        options = {"keep_logits": return_metric, "exact": exact, "queries": queries}
        return tpu.config(shape, scale=scale, **options)

    def numba(where: Device):
        check_numba(where)
        from kvjax.kernels.paged_attention import numba_cpu

        return numba_cpu.config(shape, scale=scale, keep_weights=return_metric, exact=exact)

    def xla(where: Device):
        # Elsewhere every round of a loop is a launch, and unused lanes are cheap.
        pieces = reference.PIECES_ON_CPU if where.platform == "cpu" else None
        return {"scale": scale, "pieces_at_once": pieces}

    candidates = {"mosaic_gpu": mosaic_gpu, "tpu": tpu, "numba": numba, "xla": xla}
    return choose(implementation, candidates, argument)


def plan_paged_attention(
    context_len: Int32[Array, "*layers S H"],
    k: Float[Array, "N b d"] | Encoded | Half,
    *,
    num_query_heads: int,
    max_blocks: int,
    return_metric: bool = False,
    implementation: str | None = None,
) -> WorkList | None:
    """The work list of decode steps with these lengths, for `paged_attention(work=…)`.

    It depends on the lengths alone. Made once per step for all layers (leading axes are kept, for
    `lax.scan` to slice) it costs about what it costs for one.

    Args:
        context_len: KVs of each head.
        k: the pool of keys that the calls will read.
        num_query_heads, max_blocks, return_metric, implementation: as in those calls.

    Returns:
        None where the implementation needs no list.

    Raises:
        ValueError: the query heads are no multiple of the KV heads.
    """
    num_seqs, num_heads = context_len.shape[-2:]
    num_blocks, block_size, head_dim = k.shape
    if num_query_heads < num_heads or num_query_heads % num_heads:
        raise wanted("num_query_heads", num_query_heads, f"a multiple of {num_heads} KV heads")
    group = num_query_heads // num_heads
    shape = spec.Shape(
        num_seqs,
        num_heads,
        group,
        head_dim,
        num_blocks,
        block_size,
        max_blocks,
        str(k.dtype),
        (form_of(k), form_of(k)),
        half_of(k) is not None,
    )
    chosen = _choose(shape, k, None, return_metric, implementation)
    if chosen.name != "mosaic_gpu":
        return None
    from kvjax.kernels.paged_attention import mosaic_gpu

    def build(lengths):
        return mosaic_gpu.build_work(lengths, chosen.config)

    for _ in context_len.shape[:-2]:
        build = jax.vmap(build)
    return build(context_len)
