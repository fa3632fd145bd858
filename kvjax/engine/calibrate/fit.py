"""The fit: ridge regression of the teacher's scores, layer by layer and head by head.

Sums over all tokens are kept in float64 on the host, so that memory does not grow with the texts.
"""

import dataclasses

import numpy as np
from jaxtyping import Float

FLOOR = 1e-9
"""The least score: its logarithm is what is fitted."""
FIRST = 4
"""First tokens of a text that are left out: heads rest on them whatever is read."""
EXTRAS = 4
"""Regressors of a head beside the hidden state: log ‖k‖, log ‖v‖, log(1 + position), 1."""


@dataclasses.dataclass
class Sums:
    """Products of regressors x and scores y, summed over tokens: of x and x, x and y, y and y.

    The hidden state is shared by a layer's heads; each has `EXTRAS` regressors of its own.
    """

    hidden: Float[np.ndarray, "L D D"]
    cross: Float[np.ndarray, "L H D E"]
    extra: Float[np.ndarray, "L H E E"]
    hidden_y: Float[np.ndarray, "L D H"]
    extra_y: Float[np.ndarray, "L H E"]
    squares: Float[np.ndarray, "L H"]
    total: Float[np.ndarray, "L H"]
    count: int = 0

    @classmethod
    def zeros(cls, num_layers: int, num_heads: int, size: int) -> "Sums":
        """Sums over no token of a model with hidden states of `size`."""
        heads = (num_layers, num_heads)
        return cls(
            np.zeros((num_layers, size, size)),
            np.zeros((*heads, size, EXTRAS)),
            np.zeros((*heads, EXTRAS, EXTRAS)),
            np.zeros((num_layers, size, num_heads)),
            np.zeros((*heads, EXTRAS)),
            np.zeros(heads),
            np.zeros(heads),
        )

    def add(
        self,
        hidden: Float[np.ndarray, "L T D"],
        k_norm: Float[np.ndarray, "L H T"],
        v_norm: Float[np.ndarray, "L H T"],
        score: Float[np.ndarray, "L H T"],
    ) -> None:
        """Add the tokens of a text, the first `FIRST` left out."""
        extra, y = extras_of(k_norm, v_norm)[..., FIRST:, :], target(score)[..., FIRST:]
        for layer, x in enumerate(hidden[:, FIRST:]):
            # The products of one text in float32, their sums over texts in float64.
            x, own = np.ascontiguousarray(x, np.float32), extra[layer]
            self.hidden[layer] += x.T @ x
            self.cross[layer] += x.T @ own.astype(np.float32)
            self.extra[layer] += np.swapaxes(own, 1, 2) @ own
            self.hidden_y[layer] += x.T @ y[layer].T.astype(np.float32)
            self.extra_y[layer] += np.einsum("hte,ht->he", own, y[layer])
        self.squares += np.sum(y * y, axis=-1)
        self.total += np.sum(y, axis=-1)
        self.count += y.shape[-1]

    def gram(self, layer: int, head: int) -> Float[np.ndarray, "F F"]:
        """x xᵀ of one head, hidden state first."""
        cross = self.cross[layer, head]
        return np.block([[self.hidden[layer], cross], [cross.T, self.extra[layer, head]]])

    def with_y(self, layer: int, head: int) -> Float[np.ndarray, " F"]:
        """x y of one head."""
        return np.concatenate([self.hidden_y[layer, :, head], self.extra_y[layer, head]])


def target(score: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """What is fitted."""
    return np.log(np.maximum(score.astype(np.float64), FLOOR))


def extras_of(
    k_norm: Float[np.ndarray, "L H T"], v_norm: Float[np.ndarray, "L H T"]
) -> Float[np.ndarray, "L H T E"]:
    """The regressors of each head beside the hidden state."""
    at = np.broadcast_to(np.log1p(np.arange(k_norm.shape[-1])), k_norm.shape)
    logs = (np.log(np.maximum(x.astype(np.float64), 1e-6)) for x in (k_norm, v_norm))
    return np.stack([*logs, at, np.ones(k_norm.shape)], axis=-1)


def solve(
    sums: Sums, ridge: float
) -> tuple[Float[np.ndarray, "L D H"], Float[np.ndarray, "L H E"]]:
    """Weights of hidden state and extras; `ridge` times the tokens is added to the diagonal."""
    num_layers, num_heads, size, _ = sums.cross.shape
    weight = np.zeros((num_layers, size, num_heads), np.float32)
    extra = np.zeros((num_layers, num_heads, EXTRAS), np.float32)
    penalty = np.full(size + EXTRAS, ridge * sums.count)
    # The constant is not drawn to 0.
    penalty[-1] = 1e-6 * sums.count
    for layer in range(num_layers):
        for head in range(num_heads):
            gram = sums.gram(layer, head)
            gram[np.diag_indices_from(gram)] += penalty
            found = np.linalg.solve(gram, sums.with_y(layer, head))
            weight[layer, :, head], extra[layer, head] = found[:size], found[size:]
    return weight, extra


def rank_correlation(
    found: Float[np.ndarray, "L H N"], true: Float[np.ndarray, "L H N"]
) -> Float[np.ndarray, "L H"]:
    """Spearman's: the correlation of ranks; ties as they come."""
    ranks = [np.argsort(np.argsort(x, axis=-1), axis=-1).astype(np.float64) for x in (found, true)]
    ranks = [r - r.mean(axis=-1, keepdims=True) for r in ranks]
    joint = np.sum(ranks[0] * ranks[1], axis=-1)
    return joint / np.maximum(np.sum(ranks[0] ** 2, axis=-1), 1)


def explained(
    sums: Sums, weight: Float[np.ndarray, "L D H"], extra: Float[np.ndarray, "L H E"]
) -> Float[np.ndarray, "L H"]:
    """R² of weights on the tokens of `sums`: 1 − what is left over what a constant leaves."""
    left = np.zeros(sums.squares.shape)
    for layer, head in np.ndindex(left.shape):
        w = np.concatenate([weight[layer, :, head], extra[layer, head]]).astype(np.float64)
        gram, y = sums.gram(layer, head), sums.with_y(layer, head)
        left[layer, head] = sums.squares[layer, head] - 2 * w @ y + w @ gram @ w
    constant = sums.squares - sums.total**2 / sums.count
    return 1 - left / np.maximum(constant, 1e-12)
