"""How alike a layer's keys are with full attention and with blocks alone: measured once per model.

Source: EpiCache (Kim et al. 2025) and its authors' profile of a sample: queries see the first
tokens, their own block and a part of the one before; cosines are of windows of keys of each head.
Theirs has blocks of 4,096 tokens, 128 first ones, half a block before, windows of 100 keys; ours
the same with blocks of 256, on 1,024 tokens of a text that comes with this package.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.policy import Method
from kvjax.cache.policy.method import KEY_SIMILARITY
from kvjax.engine.calibrate.texts import default_texts
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import forward


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What queries see where attention sees blocks."""

    size: int = 256
    """Tokens of a block."""
    first: int = 8
    """Tokens of the text that all see."""
    before: int = 128
    """Tokens of the block before."""
    window: int = 100
    """Keys whose cosine is one."""

    def seen(self, length: int) -> Bool[np.ndarray, "T T"]:
        """Which keys each query sees."""
        query, key = np.arange(length)[:, None], np.arange(length)
        near = key >= query // self.size * self.size - self.before
        return (key <= query) & (near | (key < self.first))


TOKENS = 1024


def measured(
    model: LoadedModel, methods: Iterable[Method], known: Mapping[str, object]
) -> dict[str, Array]:
    """The arrays of a model that some methods read, and that no calibration brings, but those
    that are known."""
    wanted = {name for method in methods for name in method.artefacts}
    if KEY_SIMILARITY not in wanted - set(known):
        return {}
    tokens: list[int] = []
    most = min(TOKENS, model.config.max_position_embeddings)
    for text in default_texts():
        if len(tokens) < most:
            tokens += model.tokenizer.encode(text)
    run = jax.jit(functools.partial(key_similarity, model.config, Blocks()))
    return {KEY_SIMILARITY: run(model.params, jnp.asarray(tokens[:most], jnp.int32))}


def key_similarity(
    config: ModelConfig, blocks: Blocks, params: nnx.State, tokens: Int32[Array, " T"]
) -> Float[Array, " L"]:
    """The mean cosine of each layer's keys with full attention and with blocks alone.

    Args:
        config: the model (static).
        blocks: what attention sees of a text (static).
        params: the model's parameters.
        tokens: a text.
    """
    length = tokens.shape[0]
    position = jnp.arange(length, dtype=jnp.int32)

    def keys(seen: Bool[np.ndarray, "T T"]) -> Float[Array, "L T H d"]:
        def attend(carry, layer, q, k, v, hidden):
            queries = q[0].reshape(length, k.shape[2], -1, q.shape[3]).astype(jnp.float32)
            logits = jnp.einsum("qhrd,khd->hrqk", queries, k[0].astype(jnp.float32))
            weight = jax.nn.softmax(jnp.where(seen, logits * q.shape[3] ** -0.5, -jnp.inf))
            out = jnp.einsum("hrqk,khd->qhrd", weight, v[0].astype(jnp.float32))
            return carry, out.reshape(q[0].shape).astype(v.dtype)[None], k[0]

        return forward(config, params, tokens[None], position[None], attend, ())[2]

    whole, alone = (
        keys(seen).astype(jnp.float32)
        for seen in (np.tril(np.ones((length, length), bool)), blocks.seen(length))
    )
    cosines = []
    for start in range(0, length, blocks.window):
        a, b = (x[:, start : start + blocks.window] for x in (whole, alone))
        dot, *squares = (jnp.einsum("lthd,lthd->lh", x, y) for x, y in ((a, b), (a, a), (b, b)))
        cosines.append(dot / jnp.sqrt(jnp.maximum(squares[0] * squares[1], 1e-30)))
    return jnp.mean(jnp.stack(cosines), axis=(0, 2))
