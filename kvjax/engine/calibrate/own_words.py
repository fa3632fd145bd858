"""Exercises in a model's own words: it is asked for questions about a context, and answers them.

What is asked of a text in earnest is mostly about what it says as a matter of course, and planted
facts stand out of it. So the model itself writes questions about passages, with all of the context
before it, and its answers are what a compressed cache is held against (as of the self-study of
Cartridges, Eyuboglu et al. 2025, section 4: questions about parts of a context, answered by the
model itself). No text and no judge beside the model is needed.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.engine.calibrate.exercises import ASKED, SAID, SAID_INSIDE, Exercise, Setting
from kvjax.engine.calibrate.generated import Draw
from kvjax.engine.calibrate.texts import padded_room
from kvjax.engine.dense import dense_pass
from kvjax.engine.parallel import SAME
from kvjax.engine.spread import Spread, by_heads
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import forward, logits
from kvjax.models.parallel import own_share

EVERY = 2
"""Every so manyth exercise is in the model's own words."""
ASKING = (
    'Write one question about the passage around "{}".',
    'Ask a short question whose answer stands near "{}".',
)
TELLING = (
    'What does the text say where it mentions "{}"?',
    'What is said about "{}"?',
    'Tell me what happens around "{}".',
    'Summarize the part about "{}".',
)
"""What is asked where the model writes no question."""
SHORTEST = 12
"""Characters that a question has at least."""
ASKED_MOST = 44
"""Tokens of a question that is answered, the end of the turn among them; a longer one loses its
beginning."""
WARMTH = 0.5
"""Temperature of questions; answers are greedy."""


class OwnWords:
    """Exercises of one model."""

    def __init__(self, model: LoadedModel):
        self._model, spread = model, Spread(model)
        weights, by_head = spread.specs(model.params), by_heads(2)
        self._heard = spread.jitted(
            functools.partial(heard, spread.config), (weights, SAME), (by_head, by_head)
        )
        specs = weights, by_head, by_head, *(SAME,) * 5
        self._spoken = spread.jitted(functools.partial(spoken, spread.config), specs, SAME)

    def exercise(
        self, texts: Sequence[str], number: int, tokens: int, sheets: bool = False
    ) -> Exercise:
        """Exercise `number`: the context of `kvjax.engine.calibrate.exercises.exercise`.

        Args:
            texts: what contexts are made of, in turn.
            number: which.
            tokens: of a context at most, template and question included.
            sheets: whether some contexts are sheets.

        Raises:
            UserError: the chat template does not show what the user says.
        """
        tokenizer = self._model.tokenizer
        setting = Setting.of(tokenizer, texts, number, tokens, sheets)
        draw, context = Draw(90_000 + number), setting.context
        padded = np.pad(context, (0, padded_room(tokens) - len(context))).astype(np.int32)
        memory = *self._heard(self._model.params, padded), len(context)
        anchors = []
        for _ in range(ASKED):
            size = draw.number(4, 13)
            at = draw.number(setting.begins, max(setting.begins + 1, len(context) - size))
            anchors.append(" ".join(tokenizer.decode(context[at : at + size]).split()))
        questions = [draw.of(TELLING).format(anchor) for anchor in anchors]
        requests = [setting.asked(tokenizer, draw.of(ASKING).format(a)) for a in anchors]
        for row, ids in enumerate(self._behind(memory, requests, number, WARMTH)):
            line = tokenizer.decode(ids).strip().split("\n")[0]
            question, mark, _ = line.partition("?")
            if mark and len(question) >= SHORTEST:
                questions[row] = question + mark
        asked = [setting.asked(tokenizer, question)[-ASKED_MOST:] for question in questions]
        answers = self._behind(memory, asked, number, 0.0)
        if setting.inside:
            answers = [answer[:SAID_INSIDE] for answer in answers]
        return setting.answered(tokenizer, tokens, asked, answers)

    def _behind(
        self,
        memory: tuple[jax.Array, jax.Array, int],
        rows: list[list[int]],
        seed: int,
        warmth: float,
    ) -> list[list[int]]:
        """What the model says behind each of some rows, to the end of its turn or of `SAID`."""
        k, v, length = memory
        given = np.array([min(len(row), SAID - 1) for row in rows], np.int32)
        said = np.zeros((len(rows), SAID), np.int32)
        for ids, row, count in zip(said, rows, given):
            ids[:count] = row[-count:]
        ends = np.array(sorted(self._model.tokenizer.eos_ids), np.int32)
        found = np.asarray(self._spoken(
            self._model.params, k, v, np.int32(length), said, given, ends,
            (np.uint32(seed), np.float32(warmth)),
        ))  # fmt: skip
        told = []
        for ids, count in zip(found, given):
            (end,) = np.nonzero(np.isin(ids[count:], ends))
            told.append(ids[count:][: end[0] if len(end) else None].tolist())
        return told


def heard(
    config: ModelConfig, params: nnx.State, context: Int32[Array, " T"]
) -> tuple[Float[Array, "L T H d"], Float[Array, "L T H d"]]:
    """Keys and values of a context with full attention."""
    dense = dense_pass(config, params, context, jnp.zeros(1, jnp.int32))
    return dense.k, dense.v


def spoken(
    config: ModelConfig,
    params: nnx.State,
    k: Float[Array, "L T H d"],
    v: Float[Array, "L T H d"],
    length: Int32[Array, ""],
    said: Int32[Array, "N C"],
    given: Int32[Array, " N"],
    ends: Int32[Array, " E"],
    drawn: tuple[Array, Float[Array, ""]],
) -> Int32[Array, "N C"]:
    """Go on behind a context, N times by itself, until every row has ended or is full.

    Args:
        config: the model (static).
        params: its parameters.
        k: keys of the context, rotated.
        v: its values.
        length: tokens of it that count.
        said: token ids behind it; the first of each row are given, the rest is written.
        given: how many, 1 … C − 1.
        ends: tokens that end a row; what is behind one means nothing.
        drawn: a seed, and the temperature of what is drawn; greedy at 0.
    """
    rows, room = said.shape
    held = jnp.arange(k.shape[1]) < length
    seed, warmth = drawn

    def behind(tokens, first, own):
        """Hidden states [N, t, D] of tokens at columns `first` …, and all keys and values."""
        column = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        seen = jnp.arange(room) <= column[:, None]

        def attend(carry, layer, q, new_k, new_v, _):
            at = layer, 0, first, 0, 0
            own_k, own_v = (
                lax.dynamic_update_slice(x, new[None], at) for x, new in zip(carry, (new_k, new_v))
            )
            q = q.reshape(*tokens.shape, new_k.shape[2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
            old = jnp.einsum("nqhrd,phd->nqhrp", q, k[layer]).astype(jnp.float32)
            new = jnp.einsum("nqhrd,nphd->nqhrp", q, own_k[layer]).astype(jnp.float32)
            old = jnp.where(held, old, -1e30)
            new = jnp.where(seen[:, None, None], new, -1e30)
            share = jax.nn.softmax(jnp.concatenate([old, new], axis=-1), axis=-1).astype(v.dtype)
            old, new = jnp.split(share, [k.shape[1]], axis=-1)
            out = jnp.einsum("nqhrp,phd->nqhrd", old, v[layer])
            out = out + jnp.einsum("nqhrp,nphd->nqhrd", new, own_v[layer])
            out = out.reshape(*tokens.shape, -1, q.shape[-1])
            return (own_k, own_v), own_share(config, out), ()

        position = jnp.broadcast_to(length + column, tokens.shape)
        return forward(config, params, tokens, position, attend, own)[:2]

    def step(state):
        said, own, column, done = state
        token = lax.dynamic_slice_in_dim(said, column, 1, axis=1)
        hidden, own = behind(token, column, own)
        found = logits(config, params, hidden[:, 0]).astype(jnp.float32)
        noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), column), found.shape)
        token = jnp.argmax(found + warmth * noise, axis=-1).astype(said.dtype)
        column = column + 1
        token = jnp.where(column < given, said[:, column], token)
        done = done | (column >= given) & jnp.isin(token, ends)
        return said.at[:, column].set(token), own, column, done

    def further(_, state):
        # As the condition of a while loop XLA fails to compile it for several CPU devices.
        _, _, column, done = state
        ended = (column == room - 1) | jnp.all(done)
        return lax.cond(ended, lambda state: state, step, state)

    shape = k.shape[0], rows, room, *k.shape[2:]
    _, own = behind(said, 0, (jnp.zeros(shape, k.dtype), jnp.zeros(shape, v.dtype)))
    # The last that all rows are given runs once more, for what comes behind it.
    state = said, own, jnp.min(given) - 1, jnp.zeros(rows, bool)
    return lax.fori_loop(0, room - 1, further, state)[0]
