"""Which heads look things up: found once per model, for methods that keep these heads whole.

Source: RazorAttention (Tang et al. 2024), section 3.2. Random tokens run through the model, again
and again; nothing but their repetition tells what comes next. An echo head reads the earlier copies
of a query's token, an induction head what followed them.
"""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods.razor_attention import RETRIEVAL_HEAD
from kvjax.checks import check_whole
from kvjax.engine.parallel import SAME
from kvjax.engine.spread import Spread, by_heads
from kvjax.errors import UserError
from kvjax.kernels import prefill_attention_with_log_sum
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import forward
from kvjax.models.parallel import own_share

ECHO_SHARE, INDUCTION_SHARE = 0.01, 0.14
"""Shares of all heads that are retrieval heads by the one and by the other."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """The repeated tokens."""

    tokens: int = 2500
    """Tokens that are repeated; fewer where the model cannot run so many positions."""
    copies: int = 4
    """How often they stand there."""

    def __post_init__(self):
        check_whole("tokens", self.tokens, 8, 2**20)
        check_whole("copies", self.copies, 2, 64)

    def drawn(self, config: ModelConfig) -> Int32[np.ndarray, " T"]:
        """The token ids, of the whole vocabulary.

        Raises:
            UserError: the model has too few positions for a probe.
        """
        tokens = min(self.tokens, config.max_position_embeddings // self.copies)
        if tokens < 8:
            raise UserError(
                f"{config.name} has {config.max_position_embeddings} positions, too few for a "
                f"probe of {self.copies} times 8 tokens: its heads cannot be ranked"
            )
        ids = np.random.default_rng(13).integers(0, config.vocab_size, tokens)
        return np.tile(ids, self.copies).astype(np.int32)


def retrieval_heads(model: LoadedModel, probe: Probe = Probe()) -> dict[str, np.ndarray]:
    """The calibrated array `RETRIEVAL_HEAD` of a model.

    Args:
        model: the model.
        probe: what runs through it.

    Raises:
        UserError: the model has too few positions for a probe.
    """
    config = model.config
    ids = probe.drawn(config)
    spread = Spread(model)
    read = partial(reads_of_copies, spread.config, period=len(ids) // probe.copies)
    step = spread.jitted(read, (spread.specs(model.params), SAME), by_heads(1))
    echo, induction = spread.on_host(step(model.params, ids))
    return {RETRIEVAL_HEAD: order(echo, induction)}


def reads_of_copies(
    config: ModelConfig, params: nnx.State, tokens: Int32[Array, " T"], period: int
) -> tuple[Float[Array, "L H"], Float[Array, "L H"]]:
    """What the heads read of earlier copies of their token, and of what followed these.

    The mean over all queries behind the first copy, of the sum over all copies before; of a group
    the query head that reads most.

    Args:
        config: the model (static).
        params: its parameters.
        tokens: ids that repeat themselves.
        period: after so many (static).
    """

    def attend(carry, layer, q, k, v, hidden):
        out, log_sum = prefill_attention_with_log_sum(q[0], k[0], v[0])
        return carry, own_share(config, out)[None], _reads(q[0], k[0], log_sum, period)

    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    _, _, (echo, induction) = forward(config, params, tokens[None], position[None], attend, ())
    return echo, induction


def _reads(
    q: Float[Array, "T Hr d"], k: Float[Array, "T H d"], log_sum: Float[Array, "Hr T"], period: int
) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
    size, heads, d = k.shape
    q = q.astype(jnp.float32).reshape(size, heads, -1, d) * d**-0.5
    k = k.astype(jnp.float32)
    log_sum = jnp.moveaxis(log_sum.reshape(heads, -1, size), -1, 0)

    def read(ahead: int) -> Float[Array, " H"]:
        """What queries read of the keys so many tokens behind the copies of their own token."""
        total = jnp.zeros(q.shape[1:3])
        for first in range(period, size, period):
            copies = k[ahead : size - first + ahead]
            logits = jnp.einsum("thrd,thd->thr", q[first:], copies)
            total = total + jnp.sum(jnp.exp(logits - log_sum[first:]), axis=0)
        return jnp.max(total / (size - period), axis=-1)

    return read(0), read(1)


def order(
    echo: Float[np.ndarray, "L H"], induction: Float[np.ndarray, "L H"]
) -> Float[np.ndarray, "L H"]:
    """The order in which heads are kept whole, the highest first.

    By the smaller of a head's two ranks, each in parts of the heads that are retrieval heads by it:
    so the first 1 % and the first 14 % come before all others.
    """
    ranks = [
        np.argsort(np.argsort(-x, axis=None, kind="stable")).reshape(x.shape) / (share * x.size)
        for x, share in ((echo, ECHO_SHARE), (induction, INDUCTION_SHARE))
    ]
    return -np.minimum(*ranks).astype(np.float32)
