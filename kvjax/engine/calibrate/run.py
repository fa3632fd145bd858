"""A calibration from texts to arrays: teach, add up, fit, check on texts that were held out."""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.cache.calibration import HEAD_LOAD, Calibration
from kvjax.cache.methods.duo_heads import HEAD_BUDGET
from kvjax.cache.methods.kvzip import Repeated
from kvjax.cache.methods.matched import REFERENCE_QUERY
from kvjax.cache.methods.predicted_reads import CLAIM, CLAIM_LEVELS, EXTRA, LEAST, WEIGHT
from kvjax.cache.methods.triattention import QUERY_CENTRE, QUERY_SIZE
from kvjax.checks import check_flag, check_number, check_whole
from kvjax.engine.calibrate.choice import Fitted
from kvjax.engine.calibrate.exercises import SAID, turn_of
from kvjax.engine.calibrate.fit import (
    FIRST,
    Sums,
    explained,
    extras_of,
    rank_correlation,
    solve,
    target,
)
from kvjax.engine.calibrate.loads import head_load
from kvjax.engine.calibrate.practice import Practice, Practised, practise
from kvjax.engine.calibrate.state import OF_CHOICE, load, save
from kvjax.engine.calibrate.teacher import LESSON, Lesson, lesson
from kvjax.engine.calibrate.texts import padded_room
from kvjax.engine.parallel import SAME
from kvjax.engine.probe import request_tokens
from kvjax.engine.spread import Spread
from kvjax.errors import UserError
from kvjax.models import LoadedModel

HOLD_OUT = 8
"""Every so manyth text is not fitted but predicted."""
SAMPLE = 128
"""Tokens of each of these whose regressors are kept until the fit is there."""
MOST_SAMPLED = 24
"""Texts of which tokens are kept."""
NEWEST = 8
"""Last tokens of a text whose claims are not counted: they are protected."""
SUMMED = ("reads", "scores", "query", "query_size")
"""What a state has beside the sums of the fit and its samples."""
SAVE_EVERY = 8
"""Texts between two states on disk."""

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, how much there is."""


@dataclasses.dataclass(frozen=True)
class CalibrationSettings:
    """How a model is calibrated."""

    tokens: int = 700
    """Tokens of a text that are used; shorter ones count as they are."""
    fitted: int = 48
    """Texts that are fitted at most, some of each kind; exercises are made of all of them."""
    least_tokens: int = 64
    """Texts of fewer tokens are passed over."""
    ridge: float = 1e-3
    """Of the fit, times the number of tokens."""
    claim_share: float = 0.3
    """Share of a budget that what is read now may claim."""
    exercises: int = 160
    """Contexts that the choice is trained on (`kvjax.engine.calibrate.choice`); 0 for none."""
    trainings: int = 1
    """Trainings on so many contexts each, whose mean is taken."""
    exercise_tokens: int = 1024
    """Tokens of each of these at most."""
    own_words: bool = False
    """Whether the model asks and answers half of them itself
    (`kvjax.engine.calibrate.own_words`)."""
    sheets: bool = False
    """Whether a quarter of them are tables, records, logs, code and the like
    (`kvjax.engine.calibrate.sheets`)."""
    references: int = 16
    """Tokens whose queries are written down, for `kvjax.cache.methods.matched`."""

    def __post_init__(self):
        check_whole("tokens", self.tokens, 16, 2**20)
        check_whole("fitted", self.fitted, 2)
        check_whole("least_tokens", self.least_tokens, 16, self.tokens)
        check_number("ridge", self.ridge, 0, 1)
        check_number("claim_share", self.claim_share, 0.01, 0.99)
        check_whole("exercises", self.exercises, 0)
        check_whole("trainings", self.trainings, 1)
        check_whole("exercise_tokens", self.exercise_tokens, 256, 2**20)
        check_flag("own_words", self.own_words)
        check_flag("sheets", self.sheets)
        check_whole("references", self.references, 1, 4096)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A calibration and how well it predicts texts that it was not made from."""

    calibration: Calibration
    explained: Float[np.ndarray, "L H"]
    """R² on the texts held out."""
    rank_correlation: Float[np.ndarray, "L H"]
    """Spearman's, between predictions and scores of sampled tokens of these."""
    divergence: dict[int, tuple[float, float]]
    """KL(full cache ‖ compressed) of what is said behind held-out contexts, by rate: with the fit
    of scores, and with what was trained. Empty without exercises."""
    texts: int
    tokens: int


def calibrate(
    model: LoadedModel,
    texts: Sequence[str],
    settings: CalibrationSettings = CalibrationSettings(),
    *,
    state: str | os.PathLike[str] | None = None,
    recipe: dict[str, str] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Fit:
    """Make the arrays that `predicted-reads` reads, those of `duo-heads` and `triattention`, the
    queries of `matched:…`, and the load of heads.

    Args:
        model: the model.
        texts: what it is calibrated on; each is used up to `settings.tokens` tokens.
        settings: how.
        state: a file that keeps what is done; a run that was stopped goes on from it. Once the
            result is saved, `kvjax.engine.calibrate.state.forget` removes it.
        recipe: what to write into the calibration beside its settings.
        progress: called before each text.

    Raises:
        UserError: fewer than two texts are long enough; the model's context does not hold a text
            and its repetition; the fit predicts no better than a constant; the state cannot be
            written.
    """
    _check_repeats(model, settings)
    prompts = chosen_prompts(model, texts, settings)
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(ids.tobytes() + b"/")
    for text in texts:
        digest.update(text.encode() + b"/")
    own_hash = model.fingerprint
    made_of = {
        **{name: str(value) for name, value in dataclasses.asdict(settings).items()},
        "data": digest.hexdigest()[:16],
        "texts": str(len(prompts)),
    }
    key = json.dumps([own_hash, made_of])
    kept = None if state is None else Path(state)
    learned = _Learned.load(kept, key) or _Learned.empty(model)
    longest = max(map(len, prompts))
    teach = _teacher(model, longest, -(-settings.references // len(prompts)))
    for number in range(learned.done, len(prompts)):
        progress("calibrating", number, len(prompts))
        learned.add(number, teach(prompts[number], number), len(prompts[number]))
        if kept is not None and (learned.done % SAVE_EVERY == 0 or learned.done == len(prompts)):
            learned.save(kept, key)
    progress("fitting", len(prompts), len(prompts))

    def train(fitted: Fitted) -> Practised:
        room = model.config.max_position_embeddings - SAID
        tokens = min(settings.exercise_tokens, room)
        practice = Practice(
            settings.exercises, settings.trainings, tokens,
            own_words=settings.own_words, sheets=settings.sheets,
        )  # fmt: skip
        of_choice = kept and kept.with_name(kept.name + OF_CHOICE)
        return practise(
            model, texts, fitted, practice, state=of_choice, key=key, progress=progress
        )  # fmt: skip

    fit = _fitted(model, learned, settings, own_hash, {**(recipe or {}), **made_of}, train)
    loads = {HEAD_LOAD: head_load(model, fit.calibration.arrays, prompts, progress)}
    return dataclasses.replace(fit, calibration=fit.calibration.with_arrays(loads))


def chosen_prompts(
    model: LoadedModel, texts: Sequence[str], settings: CalibrationSettings
) -> list[np.ndarray]:
    """The tokens [T] of some texts, as many as are fitted at most, as a user's turn opens.

    Raises:
        UserError: fewer than two are long enough; the model's context does not hold as many tokens
            as are asked for.
    """
    _check_tokens(model, settings, model.config.max_position_embeddings)
    # Neighbours are alike, and every second one may be, too.
    order: list[int] = np.random.default_rng(5).permutation(len(texts)).tolist()
    chosen = [texts[i] for i in sorted(order[: settings.fitted])]
    prompts = list(_prompts(model, chosen, settings))
    if len(prompts) < 2:
        raise UserError(
            f"{len(prompts)} of {len(texts)} texts have {settings.least_tokens} tokens or more: "
            "give at least 2, better 30"
        )
    return prompts


def _check_repeats(model: LoadedModel, settings: CalibrationSettings) -> None:
    """Refuse texts that the model's context does not hold twice, with the request in between."""
    request = len(request_tokens(model.tokenizer))
    room = (model.config.max_position_embeddings - request) // 2
    _check_tokens(model, settings, room, ", which holds a text and its repetition")


def _check_tokens(
    model: LoadedModel, settings: CalibrationSettings, room: int, what: str = ""
) -> None:
    if settings.tokens > room:
        raise UserError(
            f"tokens {settings.tokens}: the context of {model.config.name} is "
            f"{model.config.max_position_embeddings}{what}: give at most {max(room, 0)}"
        )


def _prompts(
    model: LoadedModel, texts: Sequence[str], settings: CalibrationSettings
) -> Iterator[np.ndarray]:
    """The tokens of each text that is long enough."""
    head, _ = turn_of(model.tokenizer)
    for text in texts:
        # No token is longer than this on average.
        ids = model.tokenizer.encode(head + text[: 16 * settings.tokens])[: settings.tokens]
        if len(ids) >= settings.least_tokens:
            yield np.asarray(ids, np.int32)


def _teacher(
    model: LoadedModel, tokens: int, references: int
) -> Callable[[np.ndarray, int], Lesson]:
    """What makes the lesson of a text of at most `tokens` and its number, on the host, with the
    queries of so many tokens."""
    request = request_tokens(model.tokenizer)
    scorer = Repeated(first=len(request), plus=True)
    spread = Spread(model)
    artefacts = spread.probe_artefacts()
    specs = *spread.specs((model.params, artefacts)), *(SAME,) * 5
    step = spread.jitted(functools.partial(lesson, spread.config, scorer), specs, LESSON)
    room = padded_room(tokens)
    room_again = padded_room(tokens + len(request))

    def padded(ids: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
        return np.pad(np.asarray(ids, np.int32), (0, size - len(ids)))

    def teach(ids: np.ndarray, number: int) -> Lesson:
        order = np.random.default_rng((7, number)).permutation(np.arange(FIRST, len(ids)))
        again = np.concatenate([np.asarray(request, np.int32), ids])
        return spread.on_host(step(
            model.params, artefacts,
            padded(ids, room), np.int32(len(ids)), padded(again, room_again), np.int32(len(again)),
            np.resize(order, references).astype(np.int32),
        ))  # fmt: skip

    return teach


@dataclasses.dataclass
class _Learned:
    """What is known after some texts."""

    fitted: Sums
    held_out: Sums
    reads: np.ndarray
    """How many KVs have a claim of at least each level, and how many there were."""
    scores: Float[np.ndarray, "L H"]
    """The teacher's, summed over all tokens of all texts."""
    query: Float[np.ndarray, "L Hr d"]
    """Queries before RoPE, summed likewise."""
    query_size: Float[np.ndarray, "L Hr half"]
    """Norms of their pairs, summed likewise."""
    samples: list[dict[str, np.ndarray]]
    references: list[Float[np.ndarray, "L n Hr d"]]
    """Queries before RoPE of some tokens of each text."""
    done: int = 0

    @classmethod
    def empty(cls, model: LoadedModel) -> "_Learned":
        config = model.config
        sizes = (config.num_layers, config.num_kv_heads, config.hidden_size)
        reads, scores = np.zeros(CLAIM_LEVELS + 1), np.zeros(sizes[:2])
        query = np.zeros((config.num_layers, config.num_heads, config.head_dim))
        half = np.zeros((*query.shape[:2], config.head_dim // 2))
        return cls(Sums.zeros(*sizes), Sums.zeros(*sizes), reads, scores, query, half, [], [])

    def add(self, number: int, of: Lesson, length: int) -> None:
        hidden = np.asarray(of.hidden)[:, :length]
        k, v, score, claim = (np.asarray(x)[..., :length] for x in (
            of.k_norm, of.v_norm, of.score, of.claim,
        ))  # fmt: skip
        # The second one too where there are few.
        held = number % HOLD_OUT == 1
        (self.held_out if held else self.fitted).add(hidden, k, v, score)
        claim = claim[..., FIRST : max(FIRST, length - NEWEST)]
        self.reads[:-1] += [np.sum(claim >= level) for level in claim_levels()]
        self.reads[-1] += claim.size
        self.scores += np.sum(score[..., FIRST:], axis=-1, dtype=np.float64)
        self.query += np.asarray(of.query)
        self.query_size += np.asarray(of.query_size)
        self.references.append(np.asarray(of.reference))
        if held and len(self.samples) < MOST_SAMPLED:
            at = np.linspace(FIRST, length - 1, min(SAMPLE, length - FIRST)).astype(int)
            self.samples.append({
                "hidden": hidden[:, at].astype(np.float32),
                "extra": extras_of(k, v)[:, :, at].astype(np.float32),
                "target": target(score)[..., at].astype(np.float32),
            })  # fmt: skip
        self.done = number + 1

    def save(self, path: Path, key: str) -> None:
        """Write all of it, whole or not at all."""
        arrays: dict[str, Any] = {"done": self.done}
        arrays |= {name: getattr(self, name) for name in SUMMED}
        for name in ("fitted", "held_out"):
            for part, value in vars(getattr(self, name)).items():
                arrays[f"{name}/{part}"] = value
        if self.references:
            arrays["references"] = np.stack(self.references)
        for number, sample in enumerate(self.samples):
            arrays |= {f"sample/{number}/{part}": value for part, value in sample.items()}
        save(path, key, arrays)

    @classmethod
    def load(cls, path: Path | None, key: str) -> "_Learned | None":
        """What stands in a file of the same model, texts and settings; None without one."""
        arrays = load(path, key)
        if arrays is None:
            return None
        try:
            sums = []
            for name in ("fitted", "held_out"):
                parts = {p.name: arrays[f"{name}/{p.name}"] for p in dataclasses.fields(Sums)}
                sums.append(Sums(**{**parts, "count": int(parts["count"])}))
            summed = {name: arrays[name] for name in SUMMED}
            samples: dict[int, dict[str, np.ndarray]] = {}
            references = list(arrays["references"])
            for name, value in arrays.items():
                if name.startswith("sample/"):
                    _, number, part = name.split("/")
                    samples.setdefault(int(number), {})[part] = value
        except (ValueError, KeyError):
            return None
        fitted, held_out = sums
        every = list(samples.values())
        done = int(arrays["done"])
        return cls(fitted, held_out, **summed, samples=every, references=references, done=done)


def claim_levels() -> Float[np.ndarray, " Q"]:
    """The attentions that claims are tabled for, descending from 1."""
    return np.exp(-np.arange(CLAIM_LEVELS) / 4)


def claim_table(
    share: Float[np.ndarray, " Q"], predictions: Float[np.ndarray, " N"], of_budget: float
) -> Float[np.ndarray, " Q"]:
    """The prediction that each of `claim_levels` counts as.

    Two lists on one budget: a KV stays if its rank by prediction is within 1 − s of the budget, or
    its rank by what is read now within s of it. So the n-th of the second list stands where the
    n (1 − s) / s-th of the first does.

    Args:
        share: of all KVs, those with at least this claim.
        predictions: of KVs of the same texts.
        of_budget: s.
    """
    at = share * (1 - of_budget) / of_budget
    ordered = np.sort(predictions)[::-1]
    found = ordered[np.minimum(at * len(ordered), len(ordered) - 1).astype(int)]
    return np.where(at >= 1, LEAST, found).astype(np.float32)


def _fitted(
    model: LoadedModel,
    learned: _Learned,
    settings: CalibrationSettings,
    own_hash: str,
    recipe: dict[str, str],
    train: Callable[[Fitted], Practised],
) -> Fit:
    weight, extra = solve(learned.fitted, settings.ridge)
    good = explained(learned.held_out, weight, extra)
    if not np.isfinite(good).all() or good.mean() <= 0:
        raise UserError(
            f"on texts that were held out the fit explains {good.mean():.2f} of the variance, no "
            "more than a constant does; nothing is written: give more and longer texts"
        )
    divergence = {}
    if settings.exercises:
        trained = train(Fitted.of(learned.fitted, weight, extra, settings.tokens - 1))
        weight, extra = trained.weight, trained.extra
        divergence = {rate: (was, trained.after[rate]) for rate, was in trained.before.items()}
    found = [
        np.einsum("ltd,ldh->lht", s["hidden"], weight)
        + np.einsum("lhte,lhe->lht", s["extra"], extra)
        for s in learned.samples
    ]
    predictions = np.concatenate(found, axis=-1)
    ranks = rank_correlation(
        predictions,
        np.concatenate([s["target"] for s in learned.samples], axis=-1),
    )
    share = learned.reads[:-1] / max(learned.reads[-1], 1)
    table = claim_table(share, predictions.ravel(), settings.claim_share)
    tokens = learned.fitted.count + learned.held_out.count
    references = np.concatenate(learned.references, axis=1)
    some = np.linspace(0, references.shape[1] - 1, settings.references).astype(int)
    arrays = {
        WEIGHT: weight,
        EXTRA: np.concatenate([extra, np.full_like(extra[..., :1], settings.tokens - 1)], axis=-1),
        CLAIM: np.tile(table, (model.config.num_layers, 1)),
        HEAD_BUDGET: (learned.scores / tokens).astype(np.float32),
        QUERY_CENTRE: (learned.query / tokens).astype(np.float32),
        QUERY_SIZE: (learned.query_size / tokens).astype(np.float32),
        REFERENCE_QUERY: references[:, some].astype(np.float16),
    }
    fit = Calibration(arrays, own_hash, recipe)
    return Fit(fit, good, ranks, divergence, learned.done, tokens)
