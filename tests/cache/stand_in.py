"""A stand-in for the model: queries, keys and values are drawn, one of each per token position.

The steps of the engine then are what is tested, and an oracle knows their input. What a step gives
as logits are the attention outputs of all layers side by side.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.engine import decode, prefill
from kvjax.models.config import ModelConfig
from tests.cache.pair import heads_of, host, of_host
from tests.oracle import KV

L, H, R, D, B = 2, 2, 2, 8, 4
P = 160
"""Token positions that there are."""
M = P // B
MODEL = ModelConfig(
    name="stand-in",
    vocab_size=L * H * R * D,
    # What enters attention is taken to be the queries themselves.
    hidden_size=H * R * D,
    intermediate_size=16,
    num_layers=L,
    num_heads=H * R,
    num_kv_heads=H,
    head_dim=D,
    max_position_embeddings=P,
)

# On arrays this small, compiling is all that takes time.
QUICKLY = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


def drawn(seed: int = 0) -> dict[str, np.ndarray]:
    """q [L, P, H·r, d], k and v [L, P, H, d]: the parameters of this model."""
    rng = np.random.default_rng(seed)
    return {
        "q": 1.5 * rng.standard_normal((L, P, H * R, D)).astype(np.float32),
        "k": rng.standard_normal((L, P, H, D)).astype(np.float32),
        "v": rng.standard_normal((L, P, H, D)).astype(np.float32),
    }


def forward(config, params, tokens, positions, attend, carry) -> tuple:
    """In place of `kvjax.models.decoder.forward`."""

    def run(carry, layer):
        q, k, v = (params[name][layer][positions] for name in "qkv")
        carry, out, _ = attend(carry, layer, q, k, v, q.reshape(*positions.shape, -1))
        return carry, out.reshape(*positions.shape, -1)

    params = jax.tree.map(jnp.asarray, params)
    carry, outs = jax.lax.scan(run, carry, jnp.arange(config.num_layers, dtype=jnp.int32))
    return jnp.concatenate(list(outs), axis=-1), carry, None


@pytest.fixture
def stand_in(monkeypatch, unchecked_signatures) -> None:
    """The engine's steps run this model; their types are not those of real parameters."""
    for module in (prefill, decode):
        monkeypatch.setattr(module, "forward", forward)
        monkeypatch.setattr(module, "logits", lambda config, params, hidden: hidden)
    monkeypatch.setattr(prefill, "activation_dtype", lambda params: params["k"].dtype)


def empty(num_slots: int = 2, planes: tuple[kv.Plane, ...] = ()) -> kv.PagedCache:
    return kv.init_cache(
        num_slots=num_slots,
        num_layers=L,
        num_kv_heads=H,
        head_dim=D,
        num_blocks=num_slots * L * H * M,
        max_blocks_per_head=M,
        block_size=B,
        planes=planes,
    )


@cache
def _write():
    return QUICKLY(kv.write_prompt)


def holding(
    params: dict[str, np.ndarray],
    lengths: list[int],
    seed: int,
    most: float = 0.9,
    planes: tuple[kv.Plane, ...] = (),
) -> kv.PagedCache:
    """Sequences of these lengths, whose heads hold some of their KVs each, in no order at all.

    The newest and the oldest are among them; metrics are drawn.
    """
    rng = np.random.default_rng(seed)
    cache = empty(len(lengths), planes)
    width = max(lengths)
    for slot, length in enumerate(lengths):
        kept = np.zeros((L, H, width), np.int32)
        count = np.zeros((L, H), np.int32)
        for at in np.ndindex(L, H):
            chosen = rng.permutation(np.arange(1, length - 1))[: int(most * rng.random() * length)]
            chosen = sorted({0, length - 1, *chosen.tolist()}) if length else []
            kept[at][: len(chosen)], count[at] = chosen, len(chosen)
        metric = rng.random((L, H, width)).astype(np.float32)
        k, v = params["k"][:, :width], params["v"][:, :width]
        cache, ok = _write()(
            cache, np.int32(slot), k, v, metric, np.int32(length), kept_index=kept, kept_len=count
        )
        assert ok
    c = host(cache)
    for at in np.ndindex(*c["context_len"].shape):
        index = np.arange(int(c["context_len"][at]))
        block, offset = c["block_table"][at][index // B], index % B
        order = rng.permutation(index)
        for name in ("k", "v", "metric", "position"):
            c[name][block, offset] = c[name][block[order], offset[order]]
    return of_host(c)


def metrics_of(cache: kv.PagedCache, slot: int) -> dict[tuple[int, int], dict[int, float]]:
    """The metric of each position that each (layer, head) of a slot holds."""
    return {
        at[1:]: {x.position: x.metric for x in kvs}
        for at, kvs in heads_of(cache).items()
        if at[0] == slot
    }


def assert_close(got: dict[int, float], want: dict[int, float], what: Any) -> None:
    """The same positions with the same metrics; NaN stands for any."""
    assert sorted(got) == sorted(want), what
    at = [j for j in sorted(want) if not np.isnan(want[j])]
    np.testing.assert_allclose(
        [got[j] for j in at], [want[j] for j in at], rtol=2e-4, atol=2e-6, err_msg=str(what)
    )


def assert_same_kvs(got: list[KV], want: list[KV], what: Any) -> None:
    """The same KVs in the same order, metrics but for rounding."""
    for x, y in zip(got, want, strict=True):
        plain = [dataclasses.replace(z, metric=0.0).bits() for z in (x, y)]
        assert plain[0] == plain[1], what
    assert_close({x.position: x.metric for x in got}, {x.position: x.metric for x in want}, what)
