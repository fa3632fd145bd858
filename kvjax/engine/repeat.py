"""What a model reads of a prompt that it repeats: a second pass behind the prompt, for KVzip.

Pure functions; `config` and `scorer` are static.
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods.kvzip import Repeated
from kvjax.cache.policy import Observer
from kvjax.engine.prefill import PromptKV, chunk_scores
from kvjax.models.config import ModelConfig
from kvjax.models.tokenizer import Tokenizer

REQUEST = "Repeat the previous context exactly."
CHUNK = 2048
"""Tokens that are repeated at a time (KVzip, section 3.3)."""


def request_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that ask for a repetition: what a chat template puts around a new turn."""
    mark = "\u2045context\u2046"
    text = tokenizer.render_chat(
        [{"role": "user", "content": mark}, {"role": "user", "content": REQUEST}]
    )
    _, found, behind = text.partition(mark)
    return tokenizer.encode(behind if found else f"\n\n{REQUEST}\n\n")


def repetitions(request: Sequence[int], prompt: np.ndarray, size: int = CHUNK) -> list[np.ndarray]:
    """What runs behind a prompt, one after the other: the request and a part of the prompt."""
    parts = max(1, -(-len(prompt) // size))
    return [np.asarray([*request, *part], np.int32) for part in np.array_split(prompt, parts)]


def repeat(
    config: ModelConfig,
    scorer: Repeated,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    prompt: PromptKV,
    tokens: Int32[Array, " C"],
    length: Int32[Array, ""],
) -> Float[Array, "L H T"]:
    """How much each KV of a prompt is read where it, or a part of it, is repeated.

    The prompt is not changed. Of several parts the largest counts.

    Args:
        config: the model (static).
        scorer: what counts (static).
        params: the model's parameters.
        artefacts: arrays by name that the scorer reads.
        prompt: the prompt in a contiguous scratch of T tokens.
        tokens: one of `repetitions`, padded at the end.
        length: its tokens.
    """
    scores = chunk_scores(config, Observer(scorer), params, artefacts, prompt, tokens, length)
    return jnp.where(jnp.isfinite(scores.metric), scores.metric, 0.0)[..., : prompt.k.shape[1]]
