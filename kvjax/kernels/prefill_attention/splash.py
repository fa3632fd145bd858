"""Prefill attention on TPUs, by the splash attention kernel that JAX ships."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jaxtyping import Array, Float

from kvjax.kernels.prefill_attention.reference import Partial

LANES = 128
BLOCK = 512
"""Queries, and keys, of one tile of logits."""


def causal(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    scale: float,
    *,
    interpret: bool = False,
) -> Partial:
    """Causal attention of one prompt, padded to whole tiles, ready to be merged."""
    num_tokens, num_query_heads, d = q.shape
    num_heads = k.shape[1]
    group = num_query_heads // num_heads
    block = min(BLOCK, -(-num_tokens // LANES) * LANES)
    padded = -(-num_tokens // block) * block

    def by_head(x):
        """[T, n, d] as [n, padded T, d]."""
        return jnp.pad(jnp.swapaxes(x, 0, 1), ((0, 0), (0, padded - num_tokens), (0, 0)))

    mask = splash_attention.CausalMask((padded, padded))
    kernel = splash_attention.make_splash_mqa_single_device(
        splash_attention.MultiHeadMask([mask] * group),
        block_sizes=splash_attention.BlockSizes(block_q=block, block_kv=block),
        save_residuals=True,
        interpret=interpret,
    )
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    queries = by_head(scaled).reshape(num_heads, group, padded, d)
    out, (lse,) = jax.vmap(kernel)(queries, by_head(k), by_head(v))
    out = out[:, :, :num_tokens].astype(jnp.float32)
    lse = lse[:, :, :num_tokens].astype(jnp.float32)
    return out, lse, jnp.ones_like(lse)
