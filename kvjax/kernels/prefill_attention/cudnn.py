"""Prefill attention on NVIDIA GPUs, by cuDNN's fused attention.

Without a prefix this is `jax.nn.dot_product_attention`. With one, both parts need their
log-sum-exp in float32 to be merged, and JAX rounds the one it returns publicly to the type of the
output: the function underneath does not.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.kernels.prefill_attention.reference import Partial

MAX_HEAD_DIM = 128
DTYPES = ("bfloat16", "float16")


def check(head_dim: int, dtype: Any) -> None:
    """What cuDNN asks of a call.

    Raises:
        NotImplementedError: it does not serve this one, with the reason.
    """
    if str(dtype) not in DTYPES:
        raise NotImplementedError(f"{dtype}, served are {' and '.join(DTYPES)}")
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"head dimension {head_dim}, served are multiples of 8 up to {MAX_HEAD_DIM}"
        )


def attention(
    q: Float[Array, "T Hr d"], k: Float[Array, "T H d"], v: Float[Array, "T H d"], scale: float
) -> Float[Array, "T Hr d"]:
    """Causal attention of one prompt."""
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, implementation="cudnn"
    )


def causal(
    q: Float[Array, "T Hr d"], k: Float[Array, "T H d"], v: Float[Array, "T H d"], scale: float
) -> Partial:
    """Causal attention of one prompt, ready to be merged."""
    out, lse = _with_lse(q[None], k[None], v[None], None, scale)
    grouped = (k.shape[1], -1)
    out = jnp.swapaxes(out[0], 0, 1)
    return _partial(out.reshape(*grouped, *out.shape[1:]), lse[0].reshape(*grouped, q.shape[0]))


def over_prefix(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "H P d"],
    v: Float[Array, "H P d"],
    length: Int32[Array, " H"],
    scale: float,
) -> Partial:
    """Attention of all queries over the first `length` KVs of each head: heads are a batch."""
    num_heads, num_held, d = k.shape
    q = jnp.moveaxis(q.reshape(q.shape[0], num_heads, -1, d), 0, 1)
    held = (jnp.arange(num_held) < length[:, None])[..., None]
    k, v = (jnp.where(held, x, 0)[:, :, None] for x in (k, v))
    out, lse = _with_lse(q, k, v, jnp.maximum(length, 1), scale)
    out = jnp.swapaxes(out, 1, 2)
    none = (length == 0)[:, None, None]
    return _partial(out, jnp.where(none, -jnp.inf, lse))


def _with_lse(q, k, v, kv_length, scale: float) -> Any:
    """cuDNN's output [B, T, n, d] and log-sum-exp [B, n, T]; causal if `kv_length` is None."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    if kv_length is None:
        mask, lengths = fused.MaskType.CAUSAL, {}
    else:
        mask = fused.MaskType.PADDING
        lengths = {"q_seqlen": jnp.full_like(kv_length, q.shape[1]), "kv_seqlen": kv_length}
    return fused.dot_product_attention(
        q, k, v, **lengths, scale=scale, mask_type=mask, return_residual=True
    )


def _partial(out, lse) -> Partial:
    """A normalised output and its log-sum-exp as a partial result."""
    lse = lse.astype(jnp.float32)
    present = jnp.isfinite(lse)
    out = jnp.where(present[..., None], out.astype(jnp.float32), 0)
    return out, lse, present.astype(jnp.float32)
