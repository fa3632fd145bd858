"""PyramidInfer (Yang et al. 2024, arXiv 2405.12532): later layers never see what earlier ones drop.

While a prompt is prefilled, each layer passes on fewer hidden states (`Pruner`, with the schedule
and the numbers of the authors' code for Llama 3 8B): what the newest fifth of the tokens attends to
least is not computed any more. So the share that is kept follows from the schedule, not from a
rate: of 32 layers about three quarters of the KVs. `pyramidinfer:BASE` prunes so and has BASE
compress what is left, `pyramidinfer:full` nothing; a number is the last δ in percent, as in
`pyramidinfer-80:snapkv`.

What the paper does not say, since it has no budget: a rate that asks for less gets it from what is
left by the same attention, the same tokens in all heads of a layer, layers in the proportions of
the schedule; the first 4 tokens stay and the newest for a fifth of the budget. The paper also
thins out generated tokens, 16 at a time, once they are older than the newest fifth: this is not
there, generated KVs go when a sequence is compressed again.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache.policy.allocate import Budget, ByLayer, EvenLayers
from kvjax.cache.policy.checks import check_a
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.prune import Pruner
from kvjax.cache.policy.score import Artefacts, LayerView, Scorer, Scores
from kvjax.cache.policy.select import Selector
from kvjax.errors import UserError
from kvjax.kernels import window_metrics

AUTHORS = Pruner()
"""With the numbers of the authors' code."""


@dataclasses.dataclass(frozen=True)
class FromNewest(Scorer):
    """Attention from the newest tokens: what a pruner goes by."""

    pruner: Pruner = AUTHORS

    over_gaps: ClassVar[bool] = True

    def __post_init__(self):
        check_a("pruner", self.pruner, Pruner)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        shape = view.num_heads, view.k.shape[0]
        if view.from_newest is not None:
            return Scores(jnp.broadcast_to(view.from_newest / view.num_heads, shape))
        recent = jnp.floor(self.pruner.recent * view.end.astype(jnp.float32)) + 1
        recent = jnp.minimum(recent.astype(jnp.int32), view.end)
        at = view.query_position
        given = window_metrics(
            view.q,
            view.k,
            query_position=jnp.where((at >= view.end - recent) & (at < view.end), at, -1),
            key_position=None if view.position is None else view.position.T,
            power=1,
            # Of a chunk, those of them that are in it.
            query_weight=self.pruner.query_weight(view.length, recent, view.q.shape[0]),
        )
        # The mean over heads is the selector's, which tells apart what tokens they hold.
        return Scores(jnp.sum(given.reshape(view.num_heads, -1, shape[1]), axis=1))


@dataclasses.dataclass(frozen=True)
class AsPruned(EvenLayers):
    """Layers keep in the proportions that a pruner leaves of a long prompt."""

    pruner: Pruner = AUTHORS

    def tokens(self, budget: Budget, artefacts: Artefacts) -> Float[Array, " L"]:
        shares = self.pruner.shares(budget.num_layers)
        left = np.cumprod([1.0, *shares[:-1]])
        weight = self.pruner.recent + (1 - self.pruner.recent) * left
        return budget.cap * jnp.asarray(weight / weight.mean(), jnp.float32)


def pruned(base: Method, name: str, share: float | None = None) -> Method:
    """`base` behind a prefill that prunes.

    Args:
        base: compresses what is left.
        name: what it is called.
        share: the δ of the last layers, if not the authors'.

    Raises:
        UserError: the base prunes by itself, or needs all tokens in every layer.
    """
    if base.pruner is not None:
        raise UserError(f"base {base.name}: wanted one that does not prune by itself")
    return dataclasses.replace(
        base,
        name=name,
        summary=f"{base.summary}; tokens leave the prefill from layer to layer",
        pruner=AUTHORS if share is None else Pruner(decay=share),
        query_aware=True,
        evidence="own",
    )


METHODS = (
    Method(
        "pyramidinfer",
        "tokens leave the prefill from layer to layer, by the newest fifth's attention",
        FromNewest(),
        allocator=ByLayer(AsPruned()),
        selector=Selector(scope="layer"),
        pruner=AUTHORS,
        protected_share=0.2,
        sinks=4,
        evidence="C",
    ),
)
