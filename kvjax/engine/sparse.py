"""The first stage where a method prefills sparsely: a prompt runs with what a draft says behind it.

A pure function; `config` and `scorer` are static. A prompt runs whole.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods.speckv import SparseLookahead
from kvjax.cache.policy import LayerView, Scores
from kvjax.engine.prefill import PromptKV, behind_prefix
from kvjax.kernels import Prefix, prefill_attention_with_log_sum, sparse_prefill_attention
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import activation_dtype, forward, logits


def prefill_sparse(
    config: ModelConfig,
    scorer: SparseLookahead,
    params: nnx.State,
    tokens: Int32[Array, " T"],
    length: Int32[Array, ""],
    looking: Int32[Array, " C"],
    looking_length: Int32[Array, ""],
    overlap: Int32[Array, ""] | int,
) -> tuple[PromptKV, Float[Array, " V"]]:
    """Run a whole prompt whose queries see some keys of each head and those next to them.

    In every layer the prompt's last queries and those of the draft see all keys first, and score
    them; by these scores the layer's verticals are chosen, and later what is kept. Then the layer's
    attention runs, sparsely for all queries alike.

    Args:
        config: the model (static).
        scorer: how KVs are scored, with what of the attention is left out (static).
        params: the model's parameters.
        tokens: token ids of the prompt; those from `length` on are padding.
        length: tokens of the prompt.
        looking: the queries that score: the prompt's last tokens with a draft behind them.
        looking_length: how many.
        overlap: how many of them the prompt ends with.

    Returns:
        What there is to cache, of the prompt alone and with its scores, and the logits of the token
        behind the prompt.
    """
    num_tokens, num_looking = tokens.shape[0], looking.shape[0]
    start = length - overlap
    everything = jnp.pad(tokens, (0, num_looking))
    everything = lax.dynamic_update_slice_in_dim(everything, looking, start, axis=0)
    token = jnp.arange(num_tokens + num_looking, dtype=jnp.int32)

    def attend(scratch, layer, q, k, v, hidden):
        q, k, v = q[0], k[0], v[0]
        metric = _scored(scorer, layer, q, k, v, start, looking_length, num_looking)
        verticals = scorer.sparse.chosen(metric, start)
        out = sparse_prefill_attention(q, k, v, verticals=verticals, local=scorer.sparse.local)
        found = k[:num_tokens], v[:num_tokens], metric[:, :num_tokens]
        scratch = jax.tree.map(lambda whole, part: whole.at[layer].set(part), scratch, found)
        return scratch, out[None], None

    heads, d = config.num_kv_heads, config.head_dim
    kv = jnp.zeros((config.num_layers, num_tokens, heads, d), activation_dtype(params))
    scratch = kv, kv, jnp.zeros((config.num_layers, heads, num_tokens), jnp.float32)
    hidden, (k, v, metric), _ = forward(
        config, params, everything[None], token[None], attend, scratch
    )
    last = lax.dynamic_index_in_dim(hidden[0], length - 1, keepdims=False)
    return PromptKV(k, v, Scores(metric), length), logits(config, params, last)


def _scored(
    scorer: SparseLookahead,
    layer: Int32[Array, ""],
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    start: Int32[Array, ""],
    count: Int32[Array, ""],
    most: int,
) -> Float[Array, "H T"]:
    """What `count` queries from token `start` on make of the keys before them; at most `most`."""

    def looking(x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, start, most, axis=0)

    own = looking(q), looking(k), looking(v)
    length = jnp.broadcast_to(start, k.shape[1])
    prefix = Prefix(jnp.swapaxes(k, 0, 1), jnp.swapaxes(v, 0, 1), length)
    _, log_sum = prefill_attention_with_log_sum(*own, prefix=prefix)
    token = jnp.arange(k.shape[0], dtype=jnp.int32)
    held = jnp.broadcast_to(jnp.where(token < start, token, -1), (k.shape[1], k.shape[0]))
    view = LayerView(layer, own[0], own[1], count, start, v=own[2], log_sum=log_sum)
    return scorer.score(behind_prefix(view, prefix, held), {}).metric[:, : k.shape[0]]
