"""The first stage where a method prunes: layers pass on fewer and fewer tokens of a prompt.

A pure function; `config`, `observer` and `pruner` are static, and with them the number of rows that
each layer is compiled for (`Pruner.plan`). A prompt runs whole.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy import LayerView, Observer, Pruner, Scores
from kvjax.engine.prefill import PromptKV
from kvjax.kernels import prefill_attention_with_received
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import activation_dtype, forward_narrowing, logits


def prefill_narrowing(
    config: ModelConfig,
    observer: Observer,
    pruner: Pruner,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    tokens: Int32[Array, " T"],
    length: Int32[Array, ""],
) -> tuple[PromptKV, Float[Array, " V"]]:
    """Run a whole prompt of which layers drop tokens.

    Rows of a layer are its tokens in order, padding behind them: attention is causal by row, and
    keys and queries are rotated at the positions that the tokens had from the beginning.

    Args:
        config: the model (static).
        observer: how KVs are scored (static).
        pruner: which tokens go on from layer to layer (static).
        params: the model's parameters.
        artefacts: calibrated arrays by name.
        tokens: token ids; those from `length` on are padding.
        length: tokens of the prompt.

    Returns:
        What there is to cache, with `PromptKV.token` and `PromptKV.rows`, and the logits of the
        next token.
    """
    width, num_layers = tokens.shape[0], config.num_layers
    plan = pruner.plan(num_layers, width)
    rows = jnp.asarray(plan.rows)[:, length]
    recent = jnp.asarray(plan.recent)[length]

    def attend(scratch, layer, positions, q, k, v, hidden):
        q, k, v = q[0], k[0], v[0]
        count = rows[layer]
        there = jnp.arange(len(positions), dtype=jnp.int32) < count
        token = jnp.where(there, positions, -1)
        weight = pruner.query_weight(count, recent, len(positions))
        out, log_sum, received = prefill_attention_with_received(q, k, v, query_weight=weight)
        received = jnp.sum(received, axis=0)
        view = LayerView(
            layer, q, k, count, length - count, v=v, hidden=hidden[0], log_sum=log_sum,
            position=jnp.broadcast_to(token, (k.shape[1], len(token))),
            token=positions, from_newest=received,
        )  # fmt: skip
        found = k, v, _padded(observer.observe(view, artefacts), width), token
        scratch = jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice(
                whole, part[None].astype(whole.dtype), (layer, *[0] * part.ndim)
            ),
            scratch,
            found,
        )
        return scratch, out[None], pruner.stay(received, count, recent, rows[layer + 1])

    stages = [(stage.first, stage.width) for stage in plan.stages]
    scratch = _scratch(config, observer, params, artefacts, width)
    hidden, (k, v, scores, token) = forward_narrowing(
        config, params, tokens[None], stages, attend, scratch
    )
    scores = observer.finish(scores, None, length, width)
    # The last layer drops tokens, too, from what no layer reads.
    last = lax.dynamic_index_in_dim(hidden[0], rows[num_layers] - 1, keepdims=False)
    return PromptKV(k, v, scores, length, token, rows[:num_layers]), logits(config, params, last)


def _padded(scores: Scores, width: int) -> Scores:
    """The scores of a layer with room for so many rows."""

    def wide(x: Array | None, axis: int) -> Any:
        if x is None:
            return None
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, width - x.shape[axis])
        return jnp.pad(x, pad)

    return dataclasses.replace(
        scores,
        metric=wide(scores.metric, -1),
        query_heads=wide(scores.query_heads, -1),
        state={name: wide(x, -2) for name, x in scores.state.items()},
    )


def _scratch(
    config: ModelConfig,
    observer: Observer,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    width: int,
) -> tuple[Array, Array, Scores, Array]:
    """Room for keys, values, scores and token positions of all layers."""
    dtype = activation_dtype(params)
    shape = config.num_layers, width, config.num_kv_heads, config.head_dim

    def abstract(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    q, k = (abstract(width, n, config.head_dim, dtype=dtype) for n in (config.num_heads, shape[2]))
    view = LayerView(
        abstract(), q, k, abstract(), abstract(), v=k,
        position=abstract(shape[2], width), token=abstract(width),
        hidden=abstract(width, config.hidden_size, dtype=dtype),
        from_newest=abstract(width, dtype=jnp.float32),
        log_sum=abstract(config.num_heads, width, dtype=jnp.float32),
    )  # fmt: skip
    kv = jnp.zeros(shape, dtype)
    scores = observer.room(view, artefacts, config.num_layers)
    return kv, kv, scores, jnp.full(shape[:2], -1, jnp.int32)
