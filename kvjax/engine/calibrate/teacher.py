"""What the teacher says of a text: KVzip's scores of every KV, and what a fit may look at."""

import dataclasses
from collections.abc import Mapping
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods.kvzip import Repeated
from kvjax.cache.methods.predicted_reads import CLAIM_WINDOW, largest_read
from kvjax.cache.policy import LayerView, Scores
from kvjax.cache.policy.rotary import sizes, turned_back
from kvjax.engine.calibrate.fit import FIRST
from kvjax.engine.dense import dense_pass
from kvjax.engine.parallel import SAME
from kvjax.engine.prefill import PromptKV
from kvjax.engine.probe import probe
from kvjax.engine.spread import by_heads
from kvjax.models.config import ModelConfig
from kvjax.models.rope import rope_frequencies


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lesson:
    """A text of T tokens as the model saw it, and the teacher's scores."""

    hidden: Float[Array, "L T D"]
    """What enters each layer's attention block."""
    k_norm: Float[Array, "L H T"]
    v_norm: Float[Array, "L H T"]
    score: Float[Array, "L H T"]
    """KVzip's with the weight of what is changed ("+"), not its logarithm."""
    claim: Float[Array, "L H T"]
    """The largest attention of the text's last queries."""
    query: Float[Array, "L Hr d"]
    """Queries before RoPE, summed over the text but its first tokens."""
    query_size: Float[Array, "L Hr half"]
    """Norms of their pairs, summed likewise."""
    reference: Float[Array, "L n Hr d"]
    """Those of n tokens."""


LESSON = Lesson(SAME, *(by_heads(1),) * 6, by_heads(2))  # type: ignore[arg-type]
"""How it lies on several devices."""


def lesson(
    config: ModelConfig,
    scorer: Repeated,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    tokens: Int32[Array, " T"],
    length: Int32[Array, ""],
    again: Int32[Array, " C"],
    again_length: Int32[Array, ""],
    chosen: Int32[Array, " n"],
) -> Lesson:
    """One text of a calibration.

    Args:
        config: the model (static).
        scorer: the teacher (static).
        params: the model's parameters.
        artefacts: `kvjax.engine.probe.probe_artefacts`.
        tokens: the text, padded at the end.
        length: its tokens.
        again: the request to repeat it and the text, padded at the end.
        again_length: its tokens.
        chosen: positions of the text whose queries are wanted.
    """

    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    counts = ((position >= FIRST) & (position < length))[:, None, None]

    def queries_of(q):
        q = jnp.where(counts, turned_back(q, position, frequency), 0)
        return jnp.sum(q, axis=0), jnp.sum(sizes(q), axis=0), q[chosen]

    def claim_of(part):
        layer, q, k = part
        return largest_read(LayerView(layer, q, k, length, jnp.int32(0)), CLAIM_WINDOW)

    # No logits: nothing is predicted.
    dense = dense_pass(config, params, tokens, jnp.zeros(0, jnp.int32))
    k, v = dense.k, dense.v
    claim = lax.map(claim_of, (jnp.arange(len(k), dtype=jnp.int32), dense.q, k))
    prompt = PromptKV(k, v, Scores(jnp.zeros((k.shape[0], k.shape[2], k.shape[1]))), length)
    score = probe(config, scorer, params, artefacts, prompt, again, again_length)

    def norm(x: Array) -> Array:
        return jnp.swapaxes(jnp.linalg.norm(x.astype(jnp.float32), axis=-1), 1, 2)

    frequency = jnp.asarray(rope_frequencies(config))
    queries = lax.map(queries_of, dense.q)
    return Lesson(dense.hidden, norm(k), norm(v), score, claim, *queries)
