"""What holds of every split of a budget and of every choice, on arbitrary metrics."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import cache as kv
from kvjax.cache import CompressionConfig
from kvjax.cache.methods import METHODS, get_method
from kvjax.cache.methods.adakv import Ada
from kvjax.cache.methods.kvcrush import SpreadOverBits
from kvjax.cache.methods.pyramidkv import Pyramid
from kvjax.cache.methods.snapkv import SnapKV
from kvjax.cache.policy import ByLayer, Global
from kvjax.cache.policy.allocate import CheapestBlocks, apportion
from kvjax.cache.policy.method import PLAIN
from kvjax.errors import UserError
from tests.conftest import REPOSITORY

L, H, T, B = 3, 2, 32, 4
SHAPES = {
    "global": Global(safe=0.5),
    "uniform": ByLayer(),
    "pyramid": ByLayer(Pyramid(beta=4)),
    "ada": ByLayer(heads=Ada(floor=0.2)),
    "cheapest": ByLayer(heads=CheapestBlocks()),
}


@settings(max_examples=60)
@given(st.data())
def test_apportion_meets_its_bounds_and_its_total(data):
    n = 4
    low = np.array([data.draw(st.integers(0, 3)) for _ in range(n)], np.int32)
    high = low + np.array([data.draw(st.integers(0, 4)) for _ in range(n)], np.int32)
    share = np.array([data.draw(st.floats(0, 1000, width=32)) for _ in range(n)], np.float32)
    total = data.draw(st.integers(0, 40))
    given_ = np.asarray(apportioned(share, low, high, np.int32(total)))
    assert (given_ >= low).all()
    assert (given_ <= high).all()
    assert given_.sum() == np.clip(total, low.sum(), high.sum())
    for i, j in np.ndindex(n, n):  # whoever asks for more gets no less, bounds aside
        if share[i] > share[j] and given_[i] < high[i] and given_[j] > low[j]:
            assert given_[i] >= given_[j]


@jax.jit
def apportioned(share, low, high, total):
    return apportion(share, low, high, total, 8)


@cache
def compressor(name: str):
    @jax.jit
    def run(metric, length, keep, protected, sinks):
        cache = kv.init_cache(
            num_slots=1,
            num_layers=L,
            num_kv_heads=H,
            head_dim=1,
            num_blocks=L * H * T // B,
            max_blocks_per_head=T // B,
            block_size=B,
        )
        k = jnp.zeros((L, T, H, 1))
        method = PLAIN._with(allocator=SHAPES[name], protected=protected, sinks=sinks)
        return kv.write_survivors(cache, jnp.int32(0), k, k, metric, length, keep, method)

    return run


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=25)
@given(data=st.data())
def test_budget_protection_and_last_blocks(name, data):
    length = data.draw(st.integers(1, T))
    keep = data.draw(st.integers(0, L * H * T // B))
    protected, sinks = data.draw(st.integers(0, 10)), data.draw(st.integers(0, 5))
    seed = data.draw(st.integers(0, 99))
    metric = np.random.default_rng(seed).integers(0, 4, (L, H, T)).astype(np.float32)
    numbers = (np.int32(x) for x in (length, keep, protected, sinks))
    cache, report, ok = compressor(name)(metric, *numbers)
    assert ok
    kv.check_invariants(cache)
    count = np.asarray(cache.context_len[0])
    blocks = -(-count // B)
    owned = L * H * -(-length // B)
    guarded = {t for t in range(length) if t < sinks or t >= length - protected}
    least = max(1, -(-len(guarded) // B))
    assert blocks.sum() == max(min(keep, owned), blocks.sum() if report.shortfall[0] else 0)
    assert int(report.freed[0]) == owned - blocks.sum()
    assert int(report.shortfall[0]) == blocks.sum() - min(keep, owned)
    if report.shortfall[0]:  # then nothing more can go
        even = keep * B / (L * H) if name == "global" else 0
        assert (blocks <= max(least, even * 0.5 / B)).all()
    position = np.asarray(cache.position)
    for at in np.ndindex(L, H):
        assert blocks[at] >= least or count[at] == length
        assert count[at] == length or count[at] % B == 0
        rows = np.asarray(cache.block_table)[0][at][: blocks[at]]
        assert guarded <= set(position[rows].reshape(-1).tolist())


def test_methods_are_data():
    for name, method in METHODS.items():
        assert method.name == name
        assert hash(method) == hash(dataclasses.replace(method))
        assert method.summary
        assert name == name.lower()


def test_names_of_wrappers():
    method = get_method("kvcrush-mean-chunk8-50:snapkv-w32")
    assert method.selector == SpreadOverBits(anchor="mean", compared=8, share=0.5)
    assert method.scorer == METHODS["snapkv-w32"].scorer
    assert CompressionConfig(method="kvcrush:tova", rate=4).resolved.selector.scope == "layer"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("snapk", "did you mean snapkv"),
        ("kvcrush-best:snapkv", "did you mean kvcrush"),
        ("kvcrush:nothing", "did you mean"),
        ("kvcrush:full", "wanted one that evicts"),
        ("kvcrush:kmeans:snapkv", "wanted one that evicts by itself"),
        ("kmeans:r-kv", "wanted one that evicts by itself"),
        (
            "kvcrush-openvino:kv-compress",
            "mode 'openvino': wanted an allocator by layer, which Global",
        ),
        (
            "kvcrush-openvino:duo-heads",
            "mode 'openvino': wanted an allocator by layer, which Whole",
        ),
        ("kvcrush-openvino:razor-attention", "which WholeHeads is not$"),
        ("kvcrush-openvino:fastgen", "which ByNeed is not$"),
    ],
)
def test_names_that_are_none(name, says):
    with pytest.raises(UserError, match=says):
        get_method(name)


def test_overrides_reach_every_part():
    config = CompressionConfig(method="predicted-reads-blind", protected=5, sinks=2, rate=2)
    assert config.resolved.shares == (0, 0)
    assert (config.resolved.protected, config.resolved.sinks) == (5, 2)
    config = CompressionConfig(method="ada-snapkv", window=16, rate=2)
    assert (config.resolved.scorer, config.resolved.protected) == (SnapKV(window=16), 16)


def test_the_page_on_methods_lists_every_one():
    page = (REPOSITORY / "docs" / "methods.md").read_text(encoding="utf-8")
    missing = [name for name in METHODS if f"\n| `{name}` |" not in page]
    assert not missing, f"docs/methods.md has no row for {missing}"
    tova = REPOSITORY / "kvjax" / "cache" / "methods" / "tova.py"
    assert tova.read_text(encoding="utf-8") in page, "the example is not the file any more"
