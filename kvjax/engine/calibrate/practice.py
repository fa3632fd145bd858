"""The training of the choice: exercise after exercise, and what it gained on held-out ones."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from kvjax.engine.calibrate.choice import BLOCK_SIZE, STUDIED, Change, Fitted, Studied, loss, study
from kvjax.engine.calibrate.exercises import exercise
from kvjax.engine.calibrate.own_words import EVERY, OwnWords
from kvjax.engine.calibrate.state import load, save
from kvjax.engine.calibrate.texts import padded_room
from kvjax.engine.parallel import SAME
from kvjax.engine.spread import Spread
from kvjax.models import LoadedModel

RATES = (3, 40)
"""Compression rates that are trained for."""
CHECKED: tuple[int, ...] = (4, 8, 16, 32)
"""Rates that the held-out exercises are looked at with."""
HELD_OUT = 8
"""Exercises that are not trained on; they are made of other facts."""
FIRST_HELD_OUT = 1_000_000
AVERAGED = 0.02
"""Share of the newest step in the running mean of what is trained, which is returned: single
steps, of one context each, wander (Polyak & Juditsky 1992)."""
SAVE_EVERY = 8
"""Exercises between two states on disk."""
CHANGES = ("change", "mean", "taught")
"""What a state has beside moments and losses."""

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Practice:
    """How the choice is trained."""

    exercises: int = 160
    """Contexts that it is trained on, each once."""
    trainings: int = 1
    """Trainings, each from the fit and on so many contexts of its own, whose mean is returned, for
    what each gains on its contexts alone to count less (Wortsman et al. 2022, model soups)."""
    tokens: int = 1024
    """Of a context at most."""
    rates_each: int = 2
    """Rates drawn for each of them, a step each."""
    step: float = 1.5e-3
    """Of Adam (Kingma & Ba 2015) at first; it falls to a twentieth along a cosine."""
    own_words: bool = False
    """Whether every second exercise is in the model's own (`kvjax.engine.calibrate.own_words`)."""
    sheets: bool = False
    """Whether some contexts are sheets (`kvjax.engine.calibrate.sheets`)."""


@dataclasses.dataclass(frozen=True)
class Practised:
    """What training gave."""

    weight: Float[np.ndarray, "L D H"]
    extra: Float[np.ndarray, "L H E"]
    before: dict[int, float]
    """Mean KL(full ‖ compressed) on the held-out exercises with the fit, by rate."""
    after: dict[int, float]
    """The same with what is returned."""


@dataclasses.dataclass
class _At:
    """How far a training is."""

    change: Change
    mean: Change
    """Running mean of the change over the steps."""
    moments: Any
    taught: Change
    """Means of the trainings that are done, added up."""
    before: dict[int, float]
    done: int = 0
    """Exercises, of all trainings."""

    def save(self, path: Path, key: str) -> None:
        arrays = {f"moment/{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(self.moments))}
        for part in CHANGES:
            arrays |= {f"{part}/{name}": x for name, x in getattr(self, part)._asdict().items()}
        before = np.array([self.before[rate] for rate in CHECKED])
        save(path, key, {**arrays, "before": before, "done": self.done})

    @classmethod
    def load(cls, path: Path | None, key: str, init: Callable[[Change], Any]) -> "_At | None":
        arrays = load(path, key)
        if arrays is None:
            return None
        changes = {
            part: Change(*(jnp.asarray(arrays[f"{part}/{name}"]) for name in Change._fields))
            for part in CHANGES
        }
        leaves, structure = jax.tree.flatten(jax.eval_shape(init, changes["change"]))
        moments = [jnp.asarray(arrays[f"moment/{i}"], x.dtype) for i, x in enumerate(leaves)]
        before = dict(zip(CHECKED, arrays["before"].tolist()))
        moments = jax.tree.unflatten(structure, moments)
        return cls(**changes, moments=moments, before=before, done=int(arrays["done"]))


def passes_of(model: LoadedModel) -> tuple[Callable[..., Studied], Callable[..., Any]]:
    """`study`, jitted, and `loss`, to be jitted, on the model's devices; without configuration and
    shard."""
    spread = Spread(model)
    weights, shard = spread.specs(model.params), spread.shard
    specs = (SAME, SAME, weights, STUDIED, SAME)
    look = spread.jitted(functools.partial(study, spread.config), (weights, *(SAME,) * 5), STUDIED)
    if shard is None:
        return look, functools.partial(loss, spread.config)
    of_shard = spread.mapped(
        functools.partial(loss, spread.config), (*specs, spread.specs(shard)), SAME
    )
    return look, lambda *args: of_shard(*args, shard)


def practise(
    model: LoadedModel,
    texts: Sequence[str],
    fitted: Fitted,
    practice: Practice = Practice(),
    *,
    state: Path | None = None,
    key: str = "",
    progress: Progress = lambda what, done, total: None,
) -> Practised:
    """Train a fit to leave together what is needed together.

    Where the held-out exercises are none the better for it, the fit is returned as it was.

    Args:
        model: the model.
        texts: what contexts are made of.
        fitted: the fit.
        practice: how.
        state: a file that keeps what is done.
        key: what else the training depends on; a state of another key is passed over.
        progress: called before each exercise.

    Raises:
        UserError: the state cannot be written; the chat template does not show what the user says.
    """
    config, total = model.config, practice.trainings * practice.exercises
    steps = practice.exercises * practice.rates_each
    adam = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(optax.cosine_decay_schedule(practice.step, steps, 0.05), b2=0.98),
    )
    look, lost = passes_of(model)
    weigh = jax.jit(lost)

    @jax.jit
    def nearer(mean, change):
        return optax.incremental_update(change, mean, AVERAGED)

    @jax.jit
    def learn(change, moments, *rest):
        value, slope = jax.value_and_grad(lost)(change, *rest)
        found, after = adam.update(slope, moments)
        # A step that is no number teaches nothing.
        good = jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(slope))
        moved = optax.apply_updates(change, found)
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), (moved, after), (change, moments))

    room = padded_room(practice.tokens)

    own_words = OwnWords(model) if practice.own_words else None

    def studied(number: int) -> Any:
        given = texts, number, practice.tokens, practice.sheets
        if own_words is not None and number < FIRST_HELD_OUT and number % EVERY:
            of = own_words.exercise(*given)
        else:
            of = exercise(model.tokenizer, *given)
        return look(model.params, *of.padded(room)), len(of.context)

    def blocks(length: int, rate: float) -> np.int32:
        heads = config.num_layers * config.num_kv_heads
        return np.int32(max(heads, int(length * heads / (rate * BLOCK_SIZE))))

    def checked(change: Change, done: int) -> dict[int, float]:
        found: dict[int, list[float]] = {rate: [] for rate in CHECKED}
        for number in range(HELD_OUT):
            progress("checking", done + number, total + 2 * HELD_OUT)
            of, length = studied(FIRST_HELD_OUT + number)
            for rate in CHECKED:
                value = weigh(change, fitted, model.params, of, blocks(length, rate))
                found[rate].append(float(value))
        return {rate: float(np.mean(values)) for rate, values in found.items()}

    # What another release was in the middle of is begun anew.
    key = f"{key} {RATES} {CHECKED} {AVERAGED} {EVERY}"
    at = _At.load(state, key, adam.init)
    none = Change.none(config)
    if at is None:
        at = _At(none, none, adam.init(none), none, checked(none, 0))
    while at.done < total:
        progress("training the choice", HELD_OUT + at.done, total + 2 * HELD_OUT)
        of, length = studied(at.done)
        for rate in drawn_rates(at.done, practice.rates_each):
            keep = blocks(length, rate)
            at.change, at.moments = learn(at.change, at.moments, fitted, model.params, of, keep)
            at.mean = nearer(at.mean, at.change)
        at.done += 1
        if at.done % practice.exercises == 0:
            at.taught = optax.tree.add(at.taught, at.mean)
            at.change, at.mean, at.moments = none, none, adam.init(none)
        if state is not None and (at.done % SAVE_EVERY == 0 or at.done == total):
            at.save(state, key)
    taught = optax.tree.scale(1 / practice.trainings, at.taught)
    after = checked(taught, HELD_OUT + total)
    if np.mean([*after.values()]) < np.mean([*at.before.values()]):
        changed = fitted.changed(taught)
        weight, extra = (np.asarray(x, np.float32) for x in changed)
    else:
        weight, extra, after = np.asarray(fitted.weight), np.asarray(fitted.extra), at.before
    return Practised(weight, extra, at.before, after)


def drawn_rates(number: int, count: int) -> list[float]:
    """The rates of exercise `number`: one of each part of `RATES`, parts alike by logarithm."""
    at = (np.arange(count) + np.random.default_rng((17, number)).uniform(size=count)) / count
    low, high = np.log(RATES)
    return np.exp(low + (high - low) * at).tolist()
