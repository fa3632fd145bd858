"""EpiCache (Kim et al. 2025): what is read of a prompt by the most typical part of its last topic.

The prompt is cut into segments, which are embedded and sorted into 4 episodes by k-means. Of one
episode the segment next to its centroid, its medoid, runs once more behind the prompt; a KV counts
the largest attention that one of its queries pays to it, over the query heads of its group; the
softmax is over the prompt's keys alone, as in the authors' code. Layers
keep in proportion to (1 − s)^1.1, where s is how alike the layer's keys are with full attention and
when attention sees blocks of the text alone, 0 for the layer least alike and 1 for the one most so;
a quarter of the mean at least. In a layer the best KVs of all heads stay.

Theirs prepares a cache for every episode and has an embedding of the question choose one:
`LLM.episodes` does (`kvjax.engine.episodes`), each with a `Medoid` of its own. A request of the
method `epicache` makes one cache: that of the episode in which the prompt ends, by its last
segment. What differs besides: prompts have no utterances, so a segment is 64 tokens, counted from
the end, and what is left over at the beginning belongs to none. A segment's embedding is the mean
of its tokens' rows of the model's own table, at unit length (their code has this beside its three
embedding models). One medoid stands for an episode, where their scripts run the eight
segments that are nearest to it.
K-means begins with the last segment and then the one farthest from all chosen, where theirs draws
ten times. The medoid stands behind the prompt without their instruction to extract what matters.
Theirs prefills block by block and evicts after each; here the whole prompt is scored at once, and
budgets keep their sum where a quarter of the mean is more than a share, while theirs grow. The
first 4 tokens and the newest one stay; KVs of decode steps have metric 0. α is 1.3 for Qwen.

How alike keys are is measured once per engine (`kvjax.engine.key_similarity`).
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from kvjax.cache.policy.allocate import Budget, ByLayer, CheapestBlocks, EvenHeads, EvenLayers
from kvjax.cache.policy.checks import check_numbers, check_wholes
from kvjax.cache.policy.method import KEY_SIMILARITY, Method
from kvjax.cache.policy.probe import AtHand, Probe, Probed
from kvjax.cache.policy.score import Artefacts

TURNS = 50
"""Iterations of k-means at most."""


@dataclasses.dataclass(frozen=True)
class Episode(Probed):
    """The largest attention of the medoid of the episode that the prompt ends in."""

    segment: int = 64
    """Tokens that are embedded together."""
    episodes: int = 4

    def __post_init__(self):
        super().__post_init__()
        check_wholes(self, 1, 2**12, "segment", "episodes")

    sees_itself: ClassVar[bool] = False
    across_heads: ClassVar[bool] = True

    def probes(self, prompt: np.ndarray, at_hand: AtHand) -> list[Probe]:
        segments = self.segments(prompt)
        points = self.points(segments, at_hand)
        return [Probe(segments[medoid_of_last(points, self.episodes)])]

    def segments(self, prompt: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, "S t"]:
        """A prompt's segments, the last of which ends where it does."""
        size = max(1, min(self.segment, len(prompt)))
        number = len(prompt) // size
        return np.asarray(prompt[len(prompt) - number * size :], np.int32).reshape(number, size)

    def points(
        self, segments: Int32[np.ndarray, "S t"], at_hand: AtHand
    ) -> Float[np.ndarray, "S D"]:
        """Their embeddings, float64 of unit length."""
        rows = at_hand.embedded(segments.reshape(-1))
        return unit(rows.reshape(*segments.shape, -1).astype(np.float64).mean(axis=1))

    def found(
        self, prompt: Int32[np.ndarray, " T"], at_hand: AtHand
    ) -> list[tuple["Medoid", Float[np.ndarray, " D"]]]:
        """Of each episode of a prompt what scores its cache, and its centroid, float64 of unit
        length.

        They are fewer than `episodes` where segments have equal embeddings.
        """
        segments = self.segments(prompt)
        points = self.points(segments, at_hand)
        labels = clustered(points, self.episodes)
        same = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        chosen = [segments[medoid_of(points, one)] for one in same]
        scorers = [Medoid(tokens=tuple(one.tolist()), prompt=len(prompt)) for one in chosen]
        return list(zip(scorers, unit(np.stack([points[one].mean(axis=0) for one in same]))))


@dataclasses.dataclass(frozen=True)
class Medoid(Probed):
    """The largest attention of one episode's medoid, where that is known beforehand.

    What is left of the prompt by it is the same whatever follows, so prompts may go on from there.
    """

    tokens: tuple[int, ...] = ()
    prompt: int = 0
    """Tokens of the prompt whose episode it is."""

    sees_itself: ClassVar[bool] = False
    across_heads: ClassVar[bool] = True

    @property
    def measured(self) -> int | None:
        return self.prompt

    def probes(self, prompt: np.ndarray, at_hand: AtHand) -> list[Probe]:
        return [Probe(np.asarray(self.tokens, np.int32))]

    def behind(self, probe: Probe) -> "Medoid":
        # All episodes share one compiled step.
        return Medoid(probe.first)


def unit(points: Float[np.ndarray, "*S D"]) -> Float[np.ndarray, "*S D"]:
    """Points at unit length; those of length 0 stay where they are."""
    return points / np.maximum(np.linalg.norm(points, axis=-1, keepdims=True), 1e-12)


def nearest_episode(centroids: Float[np.ndarray, "E D"], rows: Float[np.ndarray, "T D"]) -> int:
    """The episode that a question belongs to: the cosine of its embedding and the centroid is the
    largest, the first of equal ones.

    The authors' code compares with means that are not brought to unit length, which favours the
    episodes whose segments are alike.

    Args:
        centroids: of unit length.
        rows: the question's tokens in the model's table.
    """
    return int(np.argmax(centroids @ rows.astype(np.float64).mean(axis=0)))


def medoid_of_last(points: Float[np.ndarray, "S D"], clusters: int) -> int:
    """Of the cluster that the last point is in, the point most in the direction of the mean."""
    labels = clustered(points, clusters)
    same = np.flatnonzero(labels == labels[-1])
    return medoid_of(points, same)


def medoid_of(points: Float[np.ndarray, "S D"], same: Int[np.ndarray, " N"]) -> int:
    """Of the points with these indices, the one most in the direction of their mean."""
    centre = points[same].mean(axis=0)
    return int(same[np.argmax(points[same] @ centre)])


def clustered(points: Float[np.ndarray, "S D"], clusters: int) -> np.ndarray:
    """The cluster of each point by Lloyd's iteration, the same whenever it is asked.

    The first centre is the last point, each further one the point farthest from all so far. Equal
    distances go to the lowest index; a centre that no point is near stays where it is.
    """
    centres = [points[-1]]
    nearest = _distances(points, points[-1:])[:, 0]
    while len(centres) < clusters and nearest.max() > 0:
        centres.append(points[int(nearest.argmax())])
        nearest = np.minimum(nearest, _distances(points, centres[-1][None])[:, 0])
    centre = np.stack(centres)
    labels = _distances(points, centre).argmin(axis=1)
    for _ in range(TURNS):
        for cluster in range(len(centre)):
            if (labels == cluster).any():
                centre[cluster] = points[labels == cluster].mean(axis=0)
        before, labels = labels, _distances(points, centre).argmin(axis=1)
        if np.array_equal(before, labels):
            break
    return labels


def _distances(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return np.square(points[:, None] - centres).sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class UnlikeLayers(EvenLayers):
    """Layers keep the more the less alike their keys are."""

    power: float = 1.1
    """How much more."""
    least: float = 0.25
    """Of the mean, what every layer keeps at least."""

    def __post_init__(self):
        check_numbers(self, 0, 64, "power")
        check_numbers(self, 0, 1, "least")

    def tokens(self, budget: Budget, artefacts: Artefacts) -> Float[Array, " L"]:
        alike = artefacts[KEY_SIMILARITY].astype(jnp.float32)
        low, high = jnp.min(alike), jnp.max(alike)
        weight = jnp.where(high > low, (high - alike) / (high - low), 1.0) ** self.power
        share = budget.num_layers * weight / jnp.sum(weight)
        return budget.cap * jnp.maximum(share, self.least)


@dataclasses.dataclass(frozen=True)
class BySimilarity(ByLayer):
    """Over the layers by how alike their keys are, then whatever is cheapest in each."""

    artefacts: ClassVar[tuple[str, ...]] = (KEY_SIMILARITY,)

    layers: EvenLayers = UnlikeLayers()
    heads: EvenHeads = dataclasses.field(default=CheapestBlocks())


METHODS = (
    Method(
        "epicache",
        "what the most typical segment of the prompt's last topic attends to, layers by their keys",
        Episode(),
        allocator=BySimilarity(),
        protected=1,
        sinks=4,
        evidence="C",
    ),
)
