"""PyramidKV (Cai et al. 2024): SnapKV's scores, and less cache from layer to layer.

With B = C − window tokens on average, the first layer keeps 2·B − ⌊B/β⌋, the last ⌊B/β⌋, the ones
between a linear schedule, each with its window on top; β = 20. Prompts below 2·B tokens get a
uniform split (with `short` a pyramid, too). The authors' code floors the step between layers, which
keeps more than the cap: up to 27 % more at C = 128 and 80 layers. `pyramidkv-faithful` does so too,
and holds more memory than the others at the same cap; `pyramidkv-exact` keeps the schedule on its
real line and the cap.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.methods.snapkv import METHODS as SNAPKV
from kvjax.cache.policy.allocate import Budget, ByLayer, EvenLayers
from kvjax.cache.policy.checks import check_wholes
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.score import Artefacts
from kvjax.checks import INT32_MAX, check_flag


@dataclasses.dataclass(frozen=True)
class Pyramid(EvenLayers):
    """Linearly less from layer to layer (section 3.2)."""

    beta: int = 20
    """The last layer keeps about 1/beta of the mean."""
    exact: bool = True
    """False for the authors' floored step, which keeps more than the cap says."""
    short: bool = False
    """Whether prompts below 2·B tokens have a pyramid, too, no layer of it wider than they are."""

    def __post_init__(self):
        check_wholes(self, 1, INT32_MAX, "beta")
        check_flag("exact", self.exact)
        check_flag("short", self.short)

    @property
    def overruns(self) -> bool:
        return not self.exact

    def tokens(self, budget: Budget, artefacts: Artefacts) -> Float[Array, " L"]:
        low, high, pyramid = ends(budget, self.beta, self.short)
        layer = jnp.arange(budget.num_layers, dtype=jnp.int32)
        steps = max(1, budget.num_layers - 1)
        if self.exact:
            slope = (high - low).astype(jnp.float32) / steps
            tokens = high.astype(jnp.float32) - layer.astype(jnp.float32) * slope
        else:
            tokens = (high - layer * ((high - low) // steps)).astype(jnp.float32)
        return jnp.where(pyramid, tokens + budget.protected, super().tokens(budget, artefacts))


def ends(
    budget: Budget, beta: int, short: bool = False
) -> tuple[Int32[Array, ""], Int32[Array, ""], Bool[Array, ""]]:
    """Tokens beside its window that a head of the last and of the first layer keeps, and whether
    there is a pyramid at all: not for a single layer, and for `short` prompts if that says so."""
    window, seq_len = budget.protected, budget.seq_len
    base = jnp.maximum(budget.cap.astype(jnp.int32) - window, 0)
    low = base // beta
    high = 2 * base - low
    room = jnp.maximum(seq_len - window, 0)
    low = jnp.where(high >= room, 2 * base - room, low)
    pyramid = (short | (seq_len >= 2 * base)) & (budget.num_layers > 1)
    return low, jnp.minimum(high, room), pyramid


METHODS: tuple[Method, ...] = tuple(
    dataclasses.replace(
        SNAPKV[0],
        name=f"pyramidkv-{name}",
        summary=f"SnapKV's scores, linearly fewer blocks from layer to layer, {name} budgets",
        allocator=ByLayer(Pyramid(exact=name == "exact")),
    )
    for name in ("exact", "faithful")
)
