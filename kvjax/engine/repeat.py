"""What a model reads of a prompt that it repeats: a second pass behind the prompt, for KVzip.

Pure functions; `config` and `scorer` are static.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods.kvzip import OUTPUT_GRAM, Repeated, output_grams
from kvjax.cache.policy import Method, Observer
from kvjax.engine.prefill import PromptKV, chunk_scores
from kvjax.errors import UserError
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import is_stacked
from kvjax.models.family import scale_of
from kvjax.models.parallel import whole_groups
from kvjax.models.tokenizer import Tokenizer

REQUEST = "Repeat the previous context exactly."
CHUNK = 2048
"""Tokens that are repeated at a time (KVzip, section 3.3)."""


def request_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that ask for a repetition: what a chat template puts around a new turn."""
    mark = "\u2045context\u2046"
    turns = [{"role": "user", "content": mark}, {"role": "user", "content": REQUEST}]
    answered = [turns[0], {"role": "assistant", "content": ""}, turns[1]]
    # Some templates refuse two turns of one role.
    for messages in (turns, answered):
        with contextlib.suppress(UserError):
            _, found, behind = tokenizer.render_chat(messages).partition(mark)
            if found:
                return tokenizer.encode(behind)
    return tokenizer.encode(f"\n\n{REQUEST}\n\n")


def check_fits(method: Method, length: int, scratch: int) -> None:
    """Raise `UserError` where a scratch does not hold a sequence whose prompt is to be repeated,
    with what it generates, since it may be prefilled again."""
    if length > scratch:
        raise UserError(
            f"method {method.name} repeats what the scratch holds: {length} tokens with those to "
            f"generate, prefill_scratch is {scratch}; give a larger one, or another method"
        )


def check_whole_fits(method: Method, length: int, scratch: int) -> None:
    """`check_fits` where a prompt has to run whole, since layers drop tokens of it."""
    if length > scratch:
        raise UserError(
            f"method {method.name} prunes prompts that run whole: {length} tokens with those to "
            f"generate, prefill_scratch is {scratch}; give a larger one, or another method"
        )


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


def repeat_again(
    config: ModelConfig,
    scorer: Repeated,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    prompt: PromptKV,
    tokens: Int32[Array, " C"],
    length: Int32[Array, ""],
) -> Float[Array, "L H T"]:
    """The prompt's metrics once one more of its `repetitions` has run; arguments as of `repeat`."""
    found = repeat(config, scorer, params, artefacts, prompt, tokens, length)
    return jnp.maximum(prompt.scores.metric, found)


def scorer_behind(scorer: Any, request: Sequence[int]) -> Repeated:
    """A method's scorer for repetitions that begin with a request."""
    assert isinstance(scorer, Repeated)
    return dataclasses.replace(scorer, first=len(request))


def repeat_artefacts(config: ModelConfig, params: nnx.State) -> dict[str, Array]:
    """The arrays that `Repeated` reads beside the parameters, where it weighs attention.

    On several devices a pass of its own: each has those of all query heads of its KV heads.
    """
    layers: Any = params["layers"]

    def whole(layer: Any) -> Array:
        out, scale = layer["out"][...], layer.get(scale_of("out"))
        return out if scale is None else out * scale[...][..., None, None, None, :]

    if is_stacked(params):
        out = whole(layers)
    else:
        out = jnp.stack([whole(layers[i]) for i in range(config.num_layers)])
    grams = output_grams(out)
    shares = grams.reshape(*out.shape[:3], -1)
    return {OUTPUT_GRAM: whole_groups(config, shares).reshape(len(out), -1, *grams.shape[2:])}
