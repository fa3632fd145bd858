"""PyramidInfer in NumPy: what each layer of a prompt has, and what its newest tokens look at.

Written from section 3 of the paper and the settings of the authors' code for Llama 3 8B: the newest
fifth of the tokens and one more stay and look back; their attention, averaged over the heads and
weighted from 1 for the oldest of them to 1.2, ranks the context.
"""

import math

import numpy as np

from tests.oracle.scores import Prompt
from tests.oracle.selection import Kept, best, webster

SINKS, LEAST = 4, 64


def recent(length: int) -> int:
    return min(length, int(0.2 * length) + 1)


def delta(layer: int, num_layers: int, last: float = 0.9) -> float:
    """Share of its context that a layer passes on: from 1 down to `last`, a half cosine."""
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * layer / num_layers))


def rows(length: int, num_layers: int, last: float = 0.9) -> list[int]:
    """Tokens that each layer has."""
    context = length - recent(length)
    found = []
    for layer in range(num_layers):
        found.append(context + recent(length))
        cut = int(context * delta(layer, num_layers, last))
        context = cut if cut > LEAST else context
    return found


def looked_at(attention: np.ndarray, newest: int) -> np.ndarray:
    """What `newest` queries at the end pay to each key; attention is [Q, n, n]."""
    weights = np.linspace(1, 1.2, newest)
    return weights @ attention.mean(axis=0)[-newest:].astype(np.float64)


class Narrowing:
    """`pass_on` of the reference transformer; remembers the positions that each layer had."""

    def __init__(self, length: int, num_layers: int, last: float = 0.9):
        self.length, self.num_layers, self.last = length, num_layers, last
        self.positions = [np.arange(length)]

    def __call__(self, layer: int, attention: np.ndarray) -> np.ndarray:
        held, newest = len(attention[0]), recent(self.length)
        context = held - newest
        after = rows(self.length, self.num_layers, self.last)[layer + 1] - newest
        value = looked_at(attention, newest)[:context]
        value[:SINKS] = np.inf
        chosen = sorted(sorted(range(context), key=lambda t: (-value[t], t))[:after])
        going = np.array([*chosen, *range(context, held)])
        self.positions.append(self.positions[-1][going])
        return going


def of_newest(p: Prompt) -> dict[tuple[int, int], np.ndarray]:
    """What a whole prompt's newest tokens look at, added up over the group of each head."""
    newest = recent(p.length)
    return {
        (layer, head): looked_at(p.attention[layer][list(p.of_group(head))], newest) * p.group
        for layer, head in p.names
    }


def keeps_narrowing(p: Prompt) -> Kept:
    """What a budget leaves of a prompt that was not pruned: layers as the schedule would."""
    if p.owned <= p.cap_blocks:
        return {name: list(range(p.length)) for name in p.names}
    newest = int(0.2 * p.cap_tokens)
    guarded = {t for t in range(p.length) if t < SINKS or t >= p.length - newest}
    context = [1.0]
    for layer in range(p.layers - 1):
        context.append(context[-1] * delta(layer, p.layers))
    weights = [0.2 + 0.8 * share for share in context]
    tokens = [p.cap_tokens * weight * p.layers / sum(weights) for weight in weights]
    low = max(1, -(-len(guarded) // p.block))
    blocks = webster(tokens, [low] * p.layers, [p.owned] * p.layers, p.cap_blocks * p.layers)
    values = of_newest(p)
    mean = [
        np.sum([values[layer, head] for head in range(p.heads)], axis=0)
        for layer in range(p.layers)
    ]
    return {(layer, head): best(p, mean[layer], guarded, blocks[layer]) for layer, head in p.names}
