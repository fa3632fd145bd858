"""What a method sees of one layer of a prompt, as one eviction metric per KV.

Source: KV-Compress, section 4.3 (attention of an observation window).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods import Method
from kvjax.cache.metrics import pool_metric, pool_metric_at, reduce_group
from kvjax.kernels import window_metrics


def _window(
    method: Method, q: Float[Array, "T Hr d"], start: Int32[Array, ""], length: Int32[Array, ""]
) -> tuple[Float[Array, "w Hr d"], Int32[Array, " w"]]:
    """The queries that a method looks at and their positions (−1 for padding)."""
    assert method.observation is not None
    window = min(method.observation.window or q.shape[0], q.shape[0])
    first = jnp.maximum(length - window, 0)
    index = first + jnp.arange(window, dtype=jnp.int32)
    queries = lax.dynamic_slice_in_dim(q, first, window, axis=0)
    return queries, jnp.where(index < length, start + index, -1)


def observe_prompt(
    method: Method,
    layer: Int32[Array, ""] | int,
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    length: Int32[Array, ""] | int,
) -> Float[Array, "H T"]:
    """Eviction metric of every KV of one layer of a whole prompt.

    Args:
        method: the method (static).
        layer: index of the layer.
        q: queries of the prompt, rotated.
        k: keys, rotated.
        v: values.
        length: tokens of the prompt; those from `length` on are padding.
    """
    del layer, v
    num_tokens, num_heads, _ = k.shape
    observation = method.observation
    if observation is None:
        return jnp.zeros((num_heads, num_tokens), jnp.float32)
    queries, position = _window(method, q, jnp.int32(0), jnp.asarray(length, jnp.int32))
    received = window_metrics(
        queries,
        k,
        query_position=position,
        power=observation.power,
        excluded_distance=observation.excluded_distance,
    )
    received = pool_metric(received, observation.pool)
    return reduce_group(received.reshape(num_heads, -1, num_tokens), observation.group)


def observe_chunk(
    method: Method,
    layer: Int32[Array, ""] | int,
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    length: Int32[Array, ""],
    start: Int32[Array, ""],
    held_k: Float[Array, "H P d"],
    held_position: Int32[Array, "H P"],
) -> Float[Array, "H P+T"]:
    """Eviction metric of what the heads of one layer hold already, and of a chunk after it.

    Args:
        method: the method (static).
        layer: index of the layer.
        q: queries of the chunk, rotated.
        k: keys of the chunk, rotated.
        v: values of the chunk.
        length: tokens of the chunk; those from `length` on are padding.
        start: position of the chunk's first token.
        held_k: keys that the heads hold.
        held_position: their token positions; −1 where nothing is held.
    """
    del layer, v
    num_tokens, num_heads, _ = k.shape
    num_held = held_k.shape[1]
    observation = method.observation
    if observation is None:
        return jnp.zeros((num_heads, num_held + num_tokens), jnp.float32)
    held_k = jnp.swapaxes(jnp.where((held_position >= 0)[..., None], held_k, 0), 0, 1)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    new_position = jnp.where(token < length, start + token, -1)
    new_position = jnp.broadcast_to(new_position, (num_heads, num_tokens))
    key_position = jnp.concatenate([held_position, new_position], axis=1)
    queries, query_position = _window(method, q, start, length)
    received = window_metrics(
        queries,
        jnp.concatenate([held_k, k.astype(held_k.dtype)]),
        query_position=query_position,
        key_position=key_position.T,
        power=observation.power,
        excluded_distance=observation.excluded_distance,
    )
    received = received.reshape(num_heads, -1, num_held + num_tokens)
    received = pool_metric_at(received, key_position, observation.pool)
    return reduce_group(received, observation.group)
