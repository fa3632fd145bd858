"""A pass with full attention that leaves all that is looked at afterwards.

The evaluation compares every method on one of them, the teacher of a calibration starts from it.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from kvjax.kernels import prefill_attention_with_log_sum
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import forward, logits
from kvjax.models.parallel import own_share


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DensePass:
    """What a pass with full attention leaves of every layer, and the logits asked for."""

    q: Float[Array, "L T Hr d"]
    k: Float[Array, "L T H d"]
    v: Float[Array, "L T H d"]
    log_sum: Float[Array, "L Hr T"]
    """Log-sum-exp of each query's logits."""
    hidden: Float[Array, "L T D"]
    """What enters each layer's attention block."""
    logits: Float[Array, "N V"]
    peak: Float[Array, "L T"] | None = None
    """Largest absolute entry of what enters each layer, before its norm, where it was asked for."""


def dense_pass(
    config: ModelConfig,
    params: nnx.State,
    tokens: Int32[Array, " T"],
    at: Int32[Array, " N"],
    peaks: bool = False,
) -> DensePass:
    """Run tokens with full attention.

    Args:
        config: the model (static).
        params: its parameters.
        tokens: token ids, padded at the end.
        at: positions whose next-token logits are wanted.
        peaks: whether `DensePass.peak` is (static).
    """

    def attend(carry, layer, q, k, v, hidden):
        out, log_sum = prefill_attention_with_log_sum(q[0], k[0], v[0])
        return carry, own_share(config, out)[None], (q[0], k[0], v[0], log_sum, hidden[0])

    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    last, _, seen = forward(config, params, tokens[None], positions[None], attend, (), peaks)
    (q, k, v, log_sum, hidden), peak = seen if peaks else (seen, None)
    said = logits(config, params, last[0, at])
    return DensePass(q, k, v, log_sum, hidden, said, None if peak is None else peak[:, 0])
