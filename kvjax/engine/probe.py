"""What runs behind a prompt and is thrown away, for methods that score its KVs by it.

Pure functions but for `Bench`; `config` and `scorer` are static.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods.kvzip import CHUNK, OUTPUT_GRAM, output_grams
from kvjax.cache.policy import Method, Observer, Scores
from kvjax.cache.policy.probe import AtHand, Probed
from kvjax.engine.prefill import PromptKV, chunk_scores, prefill_in_scratch
from kvjax.errors import UserError
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import embedded, is_stacked
from kvjax.models.family import scale_of
from kvjax.models.parallel import whole_groups
from kvjax.models.tokenizer import Tokenizer

EMBEDDED = 1024
"""Tokens that are embedded at a time."""
REQUEST = "Repeat the previous context exactly."


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
                return tokenizer.encode(behind, goes_on=True)
    return tokenizer.encode(f"\n\n{REQUEST}\n\n", goes_on=True)


class Bench(AtHand):
    """What a model's probes are made of."""

    def __init__(self, model: LoadedModel, size: int = CHUNK):
        self.model, self.size = model, size
        self._embed = jax.jit(embedded, static_argnums=0)
        self.idle = False
        """Whether nothing runs: where only the shapes of probes matter."""

    def embedded(self, tokens: np.ndarray) -> np.ndarray:
        rows = []
        for start in range(0, len(tokens), EMBEDDED):
            part = np.zeros(EMBEDDED, np.int32)
            size = len(tokens[start : start + EMBEDDED])
            part[:size] = tokens[start : start + EMBEDDED]
            if self.idle:
                rows.append(np.zeros((size, 1), np.float32))
            else:
                found = self._embed(self.model.config, self.model.params, part)
                rows.append(np.asarray(found, np.float32)[:size])
        return np.concatenate(rows)

    @functools.cached_property
    def request(self) -> Sequence[int]:  # type: ignore[override]
        return request_tokens(self.model.tokenizer)


@dataclasses.dataclass(frozen=True)
class Behind:
    """What there has to be room for where methods run tokens behind a prompt."""

    tokens: int = 0
    """Beside a chunk of a prompt, the request to repeat it; 0 where nothing runs behind prompts."""
    drafted: int = 0
    """Behind a copy of the prompt, where the model drafts for itself."""


NOTHING = Behind()


def behind(bench: Bench, methods: Sequence[Method]) -> Behind:
    """What some methods need, at most."""
    scorers = [m.scorer for m in methods if isinstance(m.scorer, Probed)]
    if not scorers:
        return NOTHING
    return Behind(len(bench.request), max(scorer.drafts for scorer in scorers))


def probe(
    config: ModelConfig,
    scorer: Probed,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    prompt: PromptKV,
    tokens: Int32[Array, " C"],
    length: Int32[Array, ""],
    overlap: Int32[Array, ""] | int = 0,
) -> Float[Array, "L H T"]:
    """How much each KV of a prompt is read by what runs behind it.

    The prompt is not changed.

    Args:
        config: the model (static).
        scorer: what counts (static).
        params: the model's parameters.
        artefacts: arrays by name that the scorer reads.
        prompt: the prompt in a contiguous scratch of T tokens.
        tokens: those of a `Probe`, padded at the end.
        length: how many.
        overlap: how many of them the prompt ends with.
    """
    prompt = dataclasses.replace(prompt, length=prompt.length - overlap)
    scores = chunk_scores(config, Observer(scorer), params, artefacts, prompt, tokens, length)
    return jnp.where(jnp.isfinite(scores.metric), scores.metric, 0.0)[..., : prompt.k.shape[1]]


def probe_again(
    config: ModelConfig,
    scorer: Probed,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    prompt: PromptKV,
    tokens: Int32[Array, " C"],
    length: Int32[Array, ""],
    overlap: Int32[Array, ""] | int = 0,
) -> Float[Array, "L H T"]:
    """The prompt's metrics once one more probe has run; arguments as of `probe`."""
    found = probe(config, scorer, params, artefacts, prompt, tokens, length, overlap)
    return jnp.maximum(prompt.scores.metric, found)


def draft(
    config: ModelConfig,
    most: int,
    params: nnx.State,
    prompt: PromptKV,
    tokens: Int32[Array, " C"],
    length: Int32[Array, ""],
    eos_ids: Int32[Array, " E"],
) -> tuple[Int32[Array, " C"], Int32[Array, ""]]:
    """What the model says behind a prompt, greedily: so many decode steps over the whole prompt.

    Args:
        config: the model (static).
        most: tokens at most (static).
        params: the model's parameters.
        prompt: the prompt in a contiguous scratch; it is not changed.
        tokens: those of a `Probe`, the last of which is the prompt's last one, with room for
            `most` more.
        length: how many.
        eos_ids: tokens that end what is said; they are part of it.

    Returns:
        The tokens with what was said, and how many there are now.
    """
    room = ((0, 0), (0, most), (0, 0), (0, 0))
    start = prompt.length - 1
    none = Scores(jnp.zeros((*prompt.scores.metric.shape[:2], prompt.k.shape[1] + most)))
    held = PromptKV(jnp.pad(prompt.k, room), jnp.pad(prompt.v, room), none, start)

    def goes_on(state):
        _, tokens, said = state
        last = tokens[length + said - 1]
        return (said < most) & ((said == 0) | ~jnp.isin(last, eos_ids))

    def step(state):
        held, tokens, said = state
        last = lax.dynamic_slice_in_dim(tokens, length + said - 1, 1)
        held, logits = prefill_in_scratch(
            config, Observer(None), params, {}, held, last, jnp.int32(1)
        )
        said = said + 1
        return held, tokens.at[length + said - 1].set(jnp.argmax(logits).astype(jnp.int32)), said

    _, tokens, said = lax.while_loop(goes_on, step, (held, tokens, jnp.int32(0)))
    return tokens, length + said


def probe_artefacts(config: ModelConfig, params: nnx.State) -> dict[str, Array]:
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
