"""How many KVs each head keeps, by which heads are dealt to several devices.

What `predicted-reads` foretells of texts says which of their KVs are the highest quarter, eighth, …
of a text. How many of these a head has differs twentyfold, and changes with the rate.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods.predicted_reads import EXTRA, WEIGHT
from kvjax.engine.calibrate.choice import predictions
from kvjax.engine.calibrate.texts import padded_room
from kvjax.engine.dense import dense_pass
from kvjax.engine.parallel import SAME
from kvjax.engine.spread import Spread, by_heads
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig

LOAD_RATES = (4, 8, 16, 32)
"""Rates of compression that what heads keep is foretold for."""


def head_load(
    model: LoadedModel,
    arrays: Mapping[str, np.ndarray],
    prompts: Sequence[np.ndarray],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Float[np.ndarray, "L H R"]:
    """How many KVs each head keeps where those of the highest predictions of a text stay.

    Of the mean head, over all texts, at each of `LOAD_RATES`.

    Args:
        model: the model.
        arrays: its calibrated arrays `WEIGHT` and `EXTRA`.
        prompts: the tokens of some texts [T], int32.
        progress: called before each text.
    """
    spread = Spread(model)
    fitted = spread.artefacts({name: jnp.asarray(arrays[name]) for name in (WEIGHT, EXTRA)})
    specs = *spread.specs((model.params, fitted)), SAME
    step = spread.jitted(functools.partial(_foretold, spread.config), specs, by_heads(1))
    room = padded_room(max(map(len, prompts)))
    stay: np.ndarray | int = 0
    for number, ids in enumerate(prompts):
        progress("counting what heads keep", number, len(prompts))
        found = spread.on_host(step(model.params, fitted, np.pad(ids, (0, room - len(ids)))))
        stay = stay + kept_of(found[..., : len(ids)])
    return (stay / np.mean(stay, axis=(0, 1))).astype(np.float32)


def kept_of(predictions: Float[np.ndarray, "L H T"]) -> Float[np.ndarray, "L H R"]:
    """How many KVs of each head are among the highest of a text, at each of `LOAD_RATES`."""
    ordered = np.sort(predictions, axis=None)
    least = [ordered[-max(1, predictions.size // rate)] for rate in LOAD_RATES]
    return np.stack([np.sum(predictions >= x, axis=-1) for x in least], axis=-1).astype(np.float64)


def _foretold(
    config: ModelConfig,
    params: nnx.State,
    arrays: Mapping[str, Array],
    tokens: Int32[Array, " T"],
) -> Float[Array, "L H T"]:
    # No logits: nothing is said.
    dense = dense_pass(config, params, tokens, jnp.zeros(0, jnp.int32))
    return predictions(arrays, dense.hidden, dense.k, dense.v)
