"""What our side computes for the comparison alone: kept positions, and logits beside the peer's."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.kvpress.process import PeerProcess
from kvjax.cache import get_method, init_cache, rate_blocks, write_survivors
from kvjax.engine.dense import dense_pass
from kvjax.errors import UserError
from kvjax.eval import passes
from kvjax.eval.sizes import padded_size

MOST_DIFFERENCE = 0.05
"""Largest difference of two logits up to which both models are the same in float32."""


def kept_positions(evaluator: Any, row: Any, tokens: Any, cut: int, wanted: list[Any]) -> list[Any]:
    """Positions that each (layer, head) keeps under each variant, in the layout's order."""
    config, b = evaluator.model.config, evaluator.config.block_size
    size = padded_size(cut, 128)
    padded = np.zeros(size, np.int32)
    padded[:cut] = tokens.prompt[:cut]
    dense = jax.jit(functools.partial(dense_pass, config))(
        evaluator.model.params, padded, np.zeros(8, np.int32)
    )
    found = []
    for variant in wanted:
        method = get_method(variant.method)
        observe = jax.jit(functools.partial(passes.observe, method.observer))
        scores = observe(dense, np.int32(cut), evaluator.artefacts)
        width = -(-size // b) + 1
        cache = init_cache(
            num_slots=1,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_blocks=evaluator.heads * width,
            max_blocks_per_head=width,
            block_size=b,
        )
        keep = rate_blocks(cut, variant.rate, evaluator.heads, b)
        given = (dense.k, dense.v, scores, np.int32(cut), np.int32(keep), method)
        write = functools.partial(write_survivors, artefacts=evaluator.artefacts)
        cache, _, _ = jax.jit(write)(cache, np.int32(0), *given)
        position, table = np.asarray(cache.position), np.asarray(cache.block_table[0])
        held = np.asarray(cache.context_len[0])
        found.append(
            [
                np.concatenate([position[i] for i in table[l, h] if i < len(position)])[:n].tolist()
                for (l, h), n in np.ndenumerate(held)
            ]
        )
    return found


def check_same(evaluator: Any, peer: PeerProcess, row: Any, tokens: Any, folder: Path) -> float:
    """Largest difference of the logits after a prompt, as both sides compute them.

    Raises:
        UserError: they differ by more than rounding, or the peer splits texts otherwise.
    """
    text = f"{row.head}{row.context[:500]}\n{row.suffix}"
    if peer.ask({"encode": text})["ids"] != evaluator.model.tokenizer.encode(text):
        raise UserError("the peer's tokens of a text are others than ours: give another --export")
    prompt = tokens.prompt
    dense = jax.jit(functools.partial(dense_pass, evaluator.model.config))
    last = np.full(1, len(prompt) - 1, np.int32)
    ours = np.asarray(dense(evaluator.model.params, prompt, last).logits[0])
    file = folder / "logits.bin"
    job = {
        "prompt": prompt.tolist(),
        "cut": len(prompt),
        "opened": tokens.opened,
        "free_tokens": 0,
        "head": 0,
        "target": tokens.target[:1].tolist(),
        "presses": [],
        "logits_to": str(file),
    }
    peer.ask(job)
    theirs = np.fromfile(file, np.float32)
    difference = float(np.abs(theirs - ours).max())
    if not difference <= MOST_DIFFERENCE:
        raise UserError(
            f"the logits of both models differ by up to {difference:.3g}: not the same model"
        )
    return difference
