"""What PyramidKV (Cai et al. 2024, appendix I.1, table 4) compares its linear schedule with.

Scores, window and the split inside a layer are PyramidKV's; only the layers' budgets differ, and
all hold the cap. The paper names the strategies and gives no formula, so these are assumptions:

- `pyramidkv-geometric`: a constant ratio from layer to layer, so that the last layer is to the
  first as in the linear schedule, the sum kept. "Exponential decay" is a row of its own there; a
  constant ratio is both, and the two rows are .13 points apart.
- `pyramidkv-entropy`, `pyramidkv-gini`: a layer's tokens beside the window in proportion to the
  entropy −Σ p ln p, or to the Gini coefficient, of what the last queries give to the KVs before the
  window (SnapKV's scores, divided by their sum), the mean over its heads. More of either means
  more cache, as the paper says of both, although the one is high where attention is spread and the
  other where it is not.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods.pyramidkv import ends
from kvjax.cache.methods.snapkv import METHODS as SNAPKV
from kvjax.cache.policy.allocate import Allocator, BlockCosts, Budget, ByLayer, EvenLayers
from kvjax.cache.policy.checks import check_one_of, check_wholes
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.score import Artefacts
from kvjax.checks import INT32_MAX

Measure = Literal["entropy", "gini"]
STEPS = 1024
"""Parts of 1 that measures are rounded to, so that equal layers get equal blocks."""


@dataclasses.dataclass(frozen=True)
class Geometric(EvenLayers):
    """From layer to layer less by a constant ratio."""

    beta: int = 20
    """That of the linear schedule with the same first and last layer."""

    def __post_init__(self):
        check_wholes(self, 1, INT32_MAX, "beta")

    def tokens(self, budget: Budget, artefacts: Artefacts) -> Float[Array, " L"]:
        low, high, pyramid = ends(budget, self.beta)
        ratio = jnp.maximum(low, 1).astype(jnp.float32) / jnp.maximum(high, 1)
        depth = jnp.arange(budget.num_layers, dtype=jnp.float32) / max(1, budget.num_layers - 1)
        weight = ratio**depth
        base = jnp.maximum(budget.cap - budget.protected, 0) * budget.num_layers
        tokens = base * weight / jnp.sum(weight) + budget.protected
        return jnp.where(pyramid, tokens, super().tokens(budget, artefacts))


@dataclasses.dataclass(frozen=True)
class ByMeasure(Allocator):
    """Layers by a measure of their scores, the heads of each evenly."""

    measure: Measure = "entropy"

    even_in_layer: ClassVar[bool] = True

    def __post_init__(self):
        check_one_of("measure", self.measure, Measure)

    def shares(
        self,
        scores: Float[Array, "H T"],
        layer: Int32[Array, ""],
        budget: Budget,
        artefacts: Artefacts,
    ) -> Float[Array, " H"]:
        found = {"entropy": entropy, "gini": gini}[self.measure](scores)
        return jnp.round(found * STEPS) / STEPS

    def split(self, costs: BlockCosts, budget: Budget, artefacts: Artefacts) -> Int32[Array, "L H"]:
        weight = jnp.mean(costs.shares, axis=-1)
        total = jnp.sum(weight)
        weight = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), 1 / weight.shape[0])
        base = jnp.maximum(budget.cap - budget.protected, 0) * budget.num_layers
        layers = _Told(base * weight + budget.protected)
        costs = dataclasses.replace(costs, shares=jnp.ones_like(costs.shares))
        return ByLayer(layers).split(costs, budget, artefacts)


@dataclasses.dataclass(frozen=True, eq=False)
class _Told(EvenLayers):
    """Tokens of each layer as they were found; for use inside a step."""

    found: Float[Array, " L"]

    def tokens(self, budget: Budget, artefacts: Artefacts) -> Float[Array, " L"]:
        return self.found


def entropy(scores: Float[Array, "H T"]) -> Float[Array, " H"]:
    """In nats, of each row (≥ 0) divided by its sum; what is not finite does not count."""
    x = jnp.where(jnp.isfinite(scores), scores, 0)
    p = x / jnp.maximum(jnp.sum(x, axis=-1, keepdims=True), 1e-30)
    return -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), axis=-1)


def gini(scores: Float[Array, "H T"]) -> Float[Array, " H"]:
    """Of each row (≥ 0): Σ (2i − n − 1) xᵢ / (n Σ x), x ascending; what is not finite does not
    count."""
    counts = jnp.isfinite(scores)
    number = jnp.sum(counts, axis=-1, keepdims=True, dtype=jnp.float32)
    x = jnp.sort(jnp.where(counts, scores, jnp.inf), axis=-1)
    place = jnp.arange(1, scores.shape[-1] + 1, dtype=jnp.float32)
    x = jnp.where(place <= number, x, 0)
    spread = jnp.sum((2 * place - number - 1) * x, axis=-1)
    return spread / jnp.maximum(number[..., 0] * jnp.sum(x, axis=-1), 1e-30)


def _ablation(name: str, summary: str, allocator: Allocator) -> Method:
    return dataclasses.replace(
        SNAPKV[0],
        name=f"pyramidkv-{name}",
        summary=f"SnapKV's scores, {summary}",
        allocator=allocator,
        evidence="U",
    )


METHODS = (
    _ablation("geometric", "from layer to layer less by a constant ratio", ByLayer(Geometric())),
    _ablation("entropy", "layers by the entropy of what the last queries read", ByMeasure()),
    _ablation("gini", "layers by the Gini coefficient of what is read", ByMeasure("gini")),
)
