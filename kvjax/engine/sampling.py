"""Sampling on the device, with its own settings for every sequence of a batch."""

import dataclasses
from collections.abc import Iterable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from kvjax.checks import check_flag, check_number, check_text, check_whole, shown
from kvjax.errors import UserError

FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_STOPS, MAX_STOP_LENGTH = 64, 4096
"""Every new token's text is searched for each of them."""
SAMPLING_CHUNK = 256
"""Tokens whose probabilities are summed together when one is drawn."""
MAX_LOGPROBS = 20
"""Most of the likeliest tokens whose log-probabilities can be asked for."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that reach this share of probability together."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest."""
    seed: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] | list[str] | str = ()
    """The text ends before the first of these; one text may stand alone. Kept as a tuple."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report the log-probability of each token, and of so many of the likeliest (at most 20)."""
    detokenize: bool = True
    """Turn tokens into text; without it there are no stop texts either."""
    goes_on: bool | None = None
    """The text goes on from the prompt's, and keeps the space before its first word; else, with
    SentencePiece vocabularies, it has none there. None: where the prompt is a text, it does."""

    def __post_init__(self):
        # Sampled on the device in float32: what underflows there is refused here.
        check_number("temperature", self.temperature, 0, FLOAT32_MAX)
        check_whole("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, 0, 1, above=True)
        check_number("min_p", self.min_p, 0, 1)
        check_whole("max_tokens", self.max_tokens, 1)
        check_whole("seed", self.seed, 0, 2**32 - 1)
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("detokenize", self.detokenize)
        if self.goes_on is not None:
            check_flag("goes_on", self.goes_on)
        object.__setattr__(self, "stop", self._checked_stop())

    def _checked_stop(self) -> tuple[str, ...]:
        if isinstance(self.stop, str):
            stop = (self.stop,)
        elif isinstance(self.stop, list | tuple):
            stop = tuple(self.stop)
        else:
            raise UserError(f"stop {shown(self.stop)}: give a text, or several in a tuple")
        if len(stop) > MAX_STOPS:
            raise UserError(f"stop with {len(stop)} texts: give at most {MAX_STOPS}")
        for text in stop:
            check_text("stop", text)
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise UserError(f"stop {shown(text)}: give texts of 1 to {MAX_STOP_LENGTH} letters")
        return stop


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """`SamplingParams` of every slot, on the device."""

    temperature: Float[Array, " S"]
    top_k: Int32[Array, " S"]
    top_p: Float[Array, " S"]
    min_p: Float[Array, " S"]
    seed: UInt32[Array, " S"]


def init_sampling(num_slots: int) -> SamplingState:
    """Greedy in every slot."""
    return SamplingState(
        temperature=jnp.zeros(num_slots, jnp.float32),
        top_k=jnp.zeros(num_slots, jnp.int32),
        top_p=jnp.ones(num_slots, jnp.float32),
        min_p=jnp.zeros(num_slots, jnp.float32),
        seed=jnp.zeros(num_slots, jnp.uint32),
    )


def sampling_row(params: SamplingParams) -> SamplingState:
    """The settings of one request as a state of one slot, still on the host."""
    dtypes = {"top_k": np.int32, "seed": np.uint32}
    fields = dataclasses.fields(SamplingState)
    return SamplingState(
        **{
            f.name: np.full(1, getattr(params, f.name), dtypes.get(f.name, np.float32))
            for f in fields
        }  # type: ignore[arg-type]
    )


GREEDY, DRAWN, FILTERED = range(3)
"""What choosing a token takes: nothing but the likeliest, a draw, a draw from some of them."""


def effort_of(rows: Iterable[SamplingParams]) -> int:
    """The most that any of some rows takes."""
    return max(_effort(row.temperature, row.top_k, row.top_p, row.min_p) for row in rows)


def _effort(temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Of numbers, or of arrays of them."""
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    return (temperature > 0) * (DRAWN + filtered)


def sample(
    logits: Float[Array, "S V"],
    state: SamplingState,
    position: Int32[Array, " S"],
    effort: int | None = None,
) -> Int32[Array, " S"]:
    """The next token of every slot.

    The random number of a token depends on its slot's seed and on `position`, the number of tokens
    before it, and on nothing else of the batch. Ties of a greedy choice go to the lowest id.
    `effort` (static) says what the rows take, if the host knows it.
    """
    logits = logits.astype(jnp.float32)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    drawn = state.temperature > 0

    def draw(filters: bool):
        scaled = logits / jnp.maximum(state.temperature, 1e-6)[:, None]
        if filters:
            scaled = _filter(scaled, state)

        def uniform(seed, at):
            return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), at))

        token = _draw(jax.nn.softmax(scaled, axis=-1), jax.vmap(uniform)(state.seed, position))
        return jnp.where(drawn, token, greedy).astype(jnp.int32)

    choices = [lambda: greedy, lambda: draw(False), lambda: draw(True)]
    if effort is not None:
        return choices[effort]()
    # One choice of three: on GPUs the host waits for the device at each.
    rows = _effort(state.temperature, state.top_k, state.top_p, state.min_p)
    return lax.switch(jnp.max(rows).astype(jnp.int32), choices)


def _draw(p: Float[Array, "S V"], uniform: Float[Array, " S"]) -> Int32[Array, " S"]:
    """The token at which the sum of probabilities passes `uniform` of the whole.

    Takes one random number per sequence, and sums over chunks first: Gumbel noise for a whole
    vocabulary would cost more than a decode step of a small model.
    """
    num_seqs, vocab = p.shape
    p = jnp.pad(p, ((0, 0), (0, -vocab % SAMPLING_CHUNK))).reshape(num_seqs, -1, SAMPLING_CHUNK)
    sums = jnp.sum(p, axis=-1)
    upto = jnp.cumsum(sums, axis=-1)
    target = uniform * upto[:, -1]

    def passed(values, upto, target):
        # Rounding may leave the target at the very end: the last that is possible then.
        last = values.shape[-1] - 1 - jnp.argmax(values[:, ::-1] > 0, axis=-1)
        return jnp.minimum(jnp.sum(upto <= target[:, None], axis=-1), last)

    chunk = passed(sums, upto, target)
    row = jnp.arange(num_seqs)
    within = p[row, chunk]
    target = target - (upto[row, chunk] - sums[row, chunk])
    token = chunk * SAMPLING_CHUNK + passed(within, jnp.cumsum(within, axis=-1), target)
    return token.astype(jnp.int32)


def _filter(logits: Float[Array, "S V"], state: SamplingState) -> Float[Array, "S V"]:
    """−inf for every token that top-k, top-p or min-p leave out; the likeliest always stays."""
    descending = -jnp.sort(-logits, axis=-1)
    probability = jax.nn.softmax(descending, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    before = jnp.cumsum(probability, axis=-1) - probability
    # Sums of many probabilities may be rounded to 1 before the last of them.
    keep = (before < state.top_p[:, None]) | (state.top_p[:, None] == 1)
    keep &= (state.top_k[:, None] == 0) | (rank < state.top_k[:, None])
    keep &= probability >= state.min_p[:, None] * probability[:, :1]
    least = jnp.min(jnp.where(keep | (rank == 0), descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)
