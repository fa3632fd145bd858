"""Which heads look at a fact while it is copied, and what layers lose: found once per model, for
`compresskv`.

Source: CompressKV (Lin et al. 2025) and the authors' code. A fact is planted in a text and asked
for; where the model copies a token of what answers the question, a head reads that with as much
attention as it pays to all of it, once for each time that the token is there. Runs count whose
answer is mostly right. Then each layer attends with few KVs, and what it adds to the residual
stream is off by so much.

Theirs decode freely, up to 50 tokens, and a run counts where a reply has half of the answer's
words; here the answer is given, token by token, and half of its tokens have to be the likeliest.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.methods.compresskv import LAYER_ERROR, SEMANTIC_HEAD, SemanticHeads
from kvjax.cache.policy import LayerView
from kvjax.cache.store import HeadShard, summed
from kvjax.checks import check_number, check_whole
from kvjax.engine.calibrate.exercises import drawn_fact, turn_of
from kvjax.engine.calibrate.generated import Draw
from kvjax.engine.parallel import SAME
from kvjax.engine.spread import Spread, by_heads
from kvjax.errors import UserError
from kvjax.kernels import prefill_attention
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import added, forward, logits
from kvjax.models.parallel import deal, own_share
from kvjax.models.tokenizer import Tokenizer

ANSWER = 32
"""Tokens of an answer that are looked at."""
FEW = 32
"""KVs of a prompt with which a layer's error is measured."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that are asked for."""

    number: int = 24
    tokens: int = 512
    """Of each prompt with its answer; fewer where the model cannot run so many positions."""
    recall: float = 0.5
    """Share of the answer that the model says itself in runs that count, more than this."""

    def __post_init__(self):
        check_whole("number", self.number, 1, 2**16)
        check_whole("tokens", self.tokens, 64, 2**20)
        check_number("recall", self.recall, 0, 1)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt with a fact in it, and the answer."""

    tokens: Int32[np.ndarray, " T"]
    """Padded at the end."""
    fact: Int32[np.ndarray, " 2"]
    """Where that of the fact begins which answers the question, and where it has ended."""
    first: int
    """Tokens of the prompt; the answer follows."""
    answer: Int32[np.ndarray, " A"]


def asked(tokenizer: Tokenizer, text: str, number: int, tokens: int) -> Asked:
    """Prompt `number` (0, 1, …), which follows from it and the text alone.

    Raises:
        UserError: the fact and its question do not fit into so many tokens, or the chat template
            does not show what the user says.
    """
    draw = Draw(90_000 + number)
    fact, (head, suffix) = drawn_fact(draw), turn_of(tokenizer)
    parts = [head, *fact.parts, f"\n\n{fact.question}{suffix}", fact.answer]
    head, *inside, answer = parts
    before, told, after, question = (tokenizer.encode(part, goes_on=True) for part in inside)
    head, answer = tokenizer.encode(head), tokenizer.encode(answer)
    said, answer = [*before, *told, *after], answer[:ANSWER]
    room = tokens - sum(map(len, (head, said, question, answer)))
    if room < 1:
        raise UserError(f"{tokens} tokens have no room for a fact and its question: its heads "
                        "cannot be ranked")  # fmt: skip
    around = tokenizer.encode(text[: 16 * room])[:room]
    begins = len(head) + draw.number(0, len(around) + 1)
    context = [*head, *around]
    ids = [*context[:begins], *said, *context[begins:], *question, *answer]
    first = begins + len(before)
    return Asked(
        np.pad(ids, (0, tokens - len(ids))).astype(np.int32),
        np.array([first, first + len(told)], np.int32),
        len(ids) - len(answer),
        np.array(answer, np.int32),
    )


def semantic_heads(
    model: LoadedModel, texts: Sequence[str], facts: Facts = Facts()
) -> dict[str, np.ndarray]:
    """The calibrated arrays `SEMANTIC_HEAD` and `LAYER_ERROR` of a model.

    Args:
        model: the model.
        texts: what facts are planted in, in turn.
        facts: how many, in prompts of how many tokens.

    Raises:
        UserError: the model answers none of them, or has no room for one.
    """
    config = model.config
    tokens = min(facts.tokens, config.max_position_embeddings)
    spread = Spread(model)
    weights = spread.specs(model.params)
    said = (weights, SAME, SAME, SAME), (SAME, by_heads(1))
    off = (weights, SAME, SAME, SAME, SAME, spread.specs(spread.shard)), SAME
    read, lost = (
        spread.jitted(partial(step, spread.config), *lies)
        for step, lies in ((reads_of_fact, said), (errors_with_few, off))
    )
    masses, runs = [], []
    for number in range(facts.number):
        run = asked(model.tokenizer, texts[number % len(texts)], number, tokens)
        likeliest, mass = spread.on_host(read(model.params, run.tokens, run.fact, run.first))
        size = len(run.answer)
        right = likeliest[:size] == run.answer
        times = np.sum(run.answer[:, None] == run.tokens[slice(*run.fact)], axis=1) * right
        if np.mean(right) > facts.recall and times.any():
            masses.append(mass[..., :size] @ times)
            runs.append(run)
    if not runs:
        raise UserError(
            f"{config.name} answers none of {facts.number} facts of a text: its semantic heads "
            "cannot be found, and compresskv is not for it"
        )
    found = np.mean(masses, axis=0).astype(np.float32)
    errors = [
        lost(model.params, r.tokens, r.first, len(r.answer), found, spread.shard) for r in runs
    ]
    return {SEMANTIC_HEAD: found, LAYER_ERROR: np.mean(errors, axis=0).astype(np.float32)}


def reads_of_fact(
    config: ModelConfig,
    params: nnx.State,
    tokens: Int32[Array, " T"],
    fact: Int32[Array, " 2"],
    first: Int32[Array, ""],
) -> tuple[Int32[Array, " A"], Float[Array, "L Hr A"]]:
    """What the model would say at each token of an answer, and the attention to the fact there.

    Args:
        config: the model (static).
        params: its parameters.
        tokens: a prompt, and its answer from token `first` on.
        fact: where it begins, and where it has ended.
        first: tokens of the prompt.
    """
    at = first - 1 + jnp.arange(ANSWER, dtype=jnp.int32)

    def attend(carry, layer, q, k, v, hidden):
        weights = attention(q[0].at[at].get(mode="clip"), k[0], at)
        place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        inside = (place >= fact[0]) & (place < fact[1])
        mass = jnp.sum(jnp.where(inside, weights, 0), axis=-1)
        out = prefill_attention(own_share(config, q[0]), k[0], v[0])
        return carry, out[None], mass

    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    last, _, mass = forward(config, params, tokens[None], position[None], attend, ())
    said = logits(config, params, last[0].at[at].get(mode="clip"))
    return jnp.argmax(said, axis=-1).astype(jnp.int32), mass


def errors_with_few(
    config: ModelConfig,
    params: nnx.State,
    tokens: Int32[Array, " T"],
    first: Int32[Array, ""],
    count: Int32[Array, ""],
    semantic: Float[Array, "L Hr"],
    shard: HeadShard | None = None,
) -> Float[Array, " L"]:
    """By how much what attention adds is off in each layer whose heads hold `FEW` KVs of a prompt.

    The sum of ‖out − out with few‖ / (‖out‖ + 1e-5) over the answer's tokens, of what the output
    projection makes of all heads, each layer by itself. The KVs are those that `SemanticHeads`
    chooses. Arguments as of `reads_of_fact`; `count` tokens of the answer, the array
    `SEMANTIC_HEAD`, and which heads this is of where several devices have some each.
    """
    at = first + jnp.arange(ANSWER, dtype=jnp.int32)
    scorer, size = SemanticHeads(), tokens.shape[0]
    heads = config.num_kv_heads if shard is None else shard.total
    counts = jax.vmap(lambda how: scorer.counts(how, heads))(semantic)
    if shard is not None:
        groups = counts.reshape(len(counts), heads, -1)
        counts = deal(groups, 1, shard.number).reshape(len(counts), -1)

    def attend(carry, layer, q, k, v, hidden):
        view = LayerView(layer, q[0], k[0], first, jnp.int32(0), v=v[0])
        metric = summed(shard, jnp.sum(scorer.weighed(view, counts[layer]), axis=0))
        few = kept(metric / heads, first, scorer.window or size)
        queries = q[0].at[at].get(mode="clip")
        whole, part = (
            outputs(attention(queries, k[0], at, seen), v[0])
            for seen in (jnp.ones(size, bool), few)
        )
        out = prefill_attention(own_share(config, q[0]), k[0], v[0])
        return carry, out[None], own_share(config, jnp.stack([whole - part, whole]))

    position = jnp.arange(size, dtype=jnp.int32)
    _, _, given = forward(config, params, tokens[None], position[None], attend, ())
    norms = jnp.linalg.norm(added(config, params, given).astype(jnp.float32), axis=-1)
    relative = norms[:, 0] / (norms[:, 1] + 1e-5)
    return jnp.sum(jnp.where(jnp.arange(ANSWER) < count, relative, 0), axis=-1)


def kept(metric: Float[Array, " T"], first: Int32[Array, ""], window: int) -> Bool[Array, " T"]:
    """The prompt's `FEW` KVs of highest metric, its last `window` among them, and all behind it."""
    place = jnp.arange(metric.shape[0], dtype=jnp.int32)
    metric = jnp.where(place >= first - window, jnp.inf, metric)
    order = jnp.argsort(jnp.argsort(-jnp.where(place < first, metric, -jnp.inf)))
    return (order < FEW) | (place >= first)


def attention(
    q: Float[Array, "A Hr d"],
    k: Float[Array, "T H d"],
    at: Int32[Array, " A"],
    seen: Bool[Array, " T"] | None = None,
) -> Float[Array, "Hr A T"]:
    """Attention of queries at some positions to the keys up to these; of those that are `seen`."""
    heads = k.shape[1]
    q = q.astype(jnp.float32).reshape(q.shape[0], heads, -1, q.shape[-1]) * q.shape[-1] ** -0.5
    s = jnp.einsum("ahrd,thd->hrat", q, k.astype(jnp.float32)).reshape(-1, len(at), len(k))
    mask = at[:, None] >= jnp.arange(len(k), dtype=jnp.int32)
    if seen is not None:
        mask &= seen
    return jax.nn.softmax(jnp.where(mask, s, -jnp.inf), axis=-1)


def outputs(weights: Float[Array, "Hr A T"], v: Float[Array, "T H d"]) -> Float[Array, "A Hr d"]:
    """What queries get by some weights."""
    heads = v.shape[1]
    parts = weights.reshape(heads, -1, *weights.shape[1:])
    found = jnp.einsum("hrat,thd->ahrd", parts, v.astype(jnp.float32))
    return found.reshape(found.shape[0], -1, found.shape[-1])
