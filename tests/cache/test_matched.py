"""`matched:…`: what stays is read as all of it was; on a prompt's way in and in the pool."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.methods import get_method
from kvjax.cache.methods.matched import REFERENCE_QUERY, AttentionMatched
from kvjax.cache.policy import LayerView, Scores
from kvjax.cache.policy.merge import PROMPT_QUERY
from kvjax.cache.policy.method import PLAIN
from kvjax.cache.policy.rotary import ROPE_FREQUENCY
from kvjax.cache.policy.score import Stored
from kvjax.errors import UserError
from tests.cache.pair import heads_of, poison
from tests.oracle.matched import matched, turned
from tests.oracle.question_free import calibrated

L, H, D, B, T = 2, 2, 8, 4, 43
ARTEFACTS = calibrated(L, H, D)
METHOD = PLAIN._with(merger=AttentionMatched(ahead=50, turns=2), protected=2)


def queries(
    layer: int, head: int, seq_len: int, ahead: int, turns: int = 2,
    of: np.ndarray = ARTEFACTS[REFERENCE_QUERY],
) -> np.ndarray:  # fmt: skip
    """Reference queries of a KV head, each turned to some of the positions that come next."""
    of = np.concatenate([of[layer]] * turns)
    found = [
        turned(one, seq_len + i * ahead // len(of), ARTEFACTS[ROPE_FREQUENCY][layer])
        for i, heads in enumerate(of)
        for one in heads[2 * head : 2 * head + 2]
    ]
    return np.array(found)


def prompt(seed: int, num_tokens: int = T):
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((L, num_tokens, H, D)).astype(np.float32) for _ in range(2))
    return 2 * k, v, rng.random((L, H, num_tokens)).astype(np.float32)


def cache(slots: int = 1):
    return kv.init_cache(
        num_slots=slots, num_layers=L, num_kv_heads=H, head_dim=D, num_blocks=90,
        max_blocks_per_head=12, block_size=B,
    )  # fmt: skip


def compressed(
    way: str, k, v, metric, keep: int, method=METHOD, length: int = T, own: np.ndarray | None = None
):
    """A prompt as it is held; `own` are its queries."""
    slot, blocks = jnp.int32(0), jnp.int32(keep)
    if way == "in":
        scores = metric if own is None else Scores(jnp.asarray(metric), queries=jnp.asarray(own))
        found, _, ok = jax.jit(kv.write_survivors)(
            cache(), slot, k, v, scores, length, blocks, method, artefacts=ARTEFACTS
        )
    else:
        found, ok = jax.jit(kv.write_prompt)(cache(), slot, k, v, metric, length)
        # Blocks that others had before, with what they left there.
        found = poison(found, 7)
        artefacts = ARTEFACTS if own is None else {**ARTEFACTS, PROMPT_QUERY: own}
        found, _ = jax.jit(kv.compress)(
            found, slot[None], blocks[None], method, artefacts=artefacts
        )
    assert ok
    return found


def assert_fitted(found, k, v, asked) -> None:
    """Every head is as the oracle fits it to `asked(layer, head)`, and has given up KVs."""
    for (_, layer, h), kvs in heads_of(found).items():
        stays = np.isin(np.arange(T), [x.position for x in kvs])
        assert not stays.all()
        want = matched(asked(layer, h), k[layer, :, h], v[layer, :, h], stays)
        order = np.argsort([x.position for x in kvs])
        for got, wanted in zip(("k", "v"), want):
            got = np.stack([getattr(kvs[i], got) for i in order])
            np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("way", ["in", "in the pool"])
def test_what_stays_is_fitted_as_the_oracle_fits_it(way):
    k, v, metric = prompt(0)
    # Padding that would be read if it were looked at.
    more = 5 if way == "in" else 0
    wide = [np.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=np.nan) for x in (k, v)]
    scores = np.pad(metric, ((0, 0), (0, 0), (0, more)), constant_values=9)
    found = compressed(way, wide[0], wide[1], scores, 17)
    assert_fitted(found, k, v, lambda layer, h: queries(layer, h, T, 50))


@pytest.mark.parametrize("way", ["in", "in the pool"])
def test_queries_of_the_prompt_are_references_on_its_way_in(way):
    k, v, metric = prompt(5)
    own = np.random.default_rng(6).standard_normal((L, 2 * H, 7, D)).astype(np.float32)
    found = compressed(way, k, v, metric, 17, own=own)

    def asked(layer, h):
        of_prompt = queries(layer, h, T, 50, 1, np.swapaxes(own, 1, 2))
        return np.concatenate([queries(layer, h, T, 50, 1), of_prompt])

    assert_fitted(found, k, v, asked)


@pytest.mark.parametrize("length", [40, 5])
def test_the_newest_queries_and_some_of_all_are_those_of_the_prompt(length):
    """As they were before RoPE; a prompt that is too short gives some of them twice."""
    rng = np.random.default_rng(length)
    raw = rng.standard_normal((48, 2 * H, D))
    frequency = ARTEFACTS[ROPE_FREQUENCY][1]
    q = np.array([[turned(head, 100 + i, frequency) for head in x] for i, x in enumerate(raw)])
    k = jnp.zeros((48, H, D))
    view = LayerView(1, jnp.asarray(q, jnp.float32), k, jnp.int32(length), jnp.int32(100))
    observer = METHOD._with(merger=AttentionMatched(newest=8, spread=4)).observer
    got = observer.observe(view, jax.tree.map(jnp.asarray, ARTEFACTS)).queries
    assert got is not None
    picked = {40: [*range(39, 31, -1), 5, 15, 25, 35], 5: [4, 3, 2, 1, 0, 0, 0, 0, 0, 1, 3, 4]}
    want = np.swapaxes(raw[picked[length]], 0, 1)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert METHOD._with(merger=AttentionMatched(newest=0, spread=0)).observer.queries is None


def test_queries_are_there_once_layers_are_joined():
    class Joined(Stored):
        def join_layers(self, scores, position, seq_len, num_positions):
            return Scores(scores.metric + 1)

    own = jnp.ones((L, 2 * H, 7, D))
    before = Scores(jnp.zeros((L, H, T)), queries=own)
    found = METHOD._with(scorer=Joined()).observer.finish(before, None, T, T)
    assert found.queries is own
    assert (found.metric == 1).all()


def test_what_nothing_goes_of_stays_to_the_bit():
    k, v, metric = prompt(1)
    for way in ("in", "in the pool"):
        found = compressed(way, k, v, metric, 10**6)
        for (_, layer, h), kvs in heads_of(found).items():
            for x in kvs:
                assert np.array_equal(x.k, k[layer, x.position, h])
                assert np.array_equal(x.v, v[layer, x.position, h])


def test_queries_find_mass_and_output_as_they_were():
    """Of the reference queries, and of others like them at other positions."""
    rng = np.random.default_rng(2)
    k, v, metric = prompt(2, 400)
    # Keys of a head and queries have each a direction in common, as those of models do.
    centre = rng.standard_normal((L, 2, D))
    k = (0.5 * k + centre[:, :1, None]).astype(np.float32)
    refs = centre[:, 1, None, None] + 0.7 * rng.standard_normal((L, 40, 2 * H, D))
    one = {REFERENCE_QUERY: refs.astype(np.float32), ROPE_FREQUENCY: np.zeros((L, D // 2), "f4")}
    layer = {name: x[0] for name, x in one.items()}
    stays = rng.random((H, 400)) < 1 / 8
    rows = np.swapaxes(k[0], 0, 1), np.swapaxes(v[0], 0, 1)
    position = jnp.broadcast_to(jnp.arange(400, dtype=jnp.int32), (H, 400))
    new = AttentionMatched().fold(
        jnp.asarray(rows[0]), jnp.asarray(rows[1]), position, jnp.zeros((H, 400)),
        jnp.asarray(~stays), jnp.asarray(stays), jnp.int32(400), jax.tree.map(jnp.asarray, layer),
    )  # fmt: skip
    others = centre[0, 1] + 0.7 * rng.standard_normal((100, D))
    for h in range(H):

        def read(k, v, h=h):
            weight = np.exp(others @ np.asarray(k).T / np.sqrt(D))
            return np.log(weight.sum(1)), weight @ np.asarray(v) / weight.sum(1, keepdims=True)

        full = read(rows[0][h], rows[1][h])
        cut = read(rows[0][h][stays[h]], rows[1][h][stays[h]])
        fit = read(new[0][h][stays[h]], new[1][h][stays[h]])
        for want, without, got in zip(full, cut, fit):
            lost, left = np.mean((want - without) ** 2), np.mean((want - got) ** 2)
            assert left < 0.5 * lost


def test_a_sequence_that_is_compressed_again_is_fitted_from_what_it_holds():
    k, v, metric = prompt(3)
    once = compressed("in", k, v, metric, 26)
    before = heads_of(once)
    twice, _ = jax.jit(kv.compress)(
        once, jnp.zeros(1, jnp.int32), jnp.full(1, 13, jnp.int32), METHOD, artefacts=ARTEFACTS
    )
    for (slot, layer, h), kvs in heads_of(twice).items():
        held = sorted(before[slot, layer, h], key=lambda x: x.position)
        stays = np.isin([x.position for x in held], [x.position for x in kvs])
        if stays.all():
            continue
        old_k, old_v = (np.stack([getattr(x, name) for x in held]) for name in ("k", "v"))
        want = matched(queries(layer, h, T, 50), old_k, old_v, stays)
        got = np.stack([x.k for x in sorted(kvs, key=lambda x: x.position)])
        np.testing.assert_allclose(got, want[0], rtol=2e-3, atol=2e-3)


def test_a_query_that_looks_at_nothing_that_stays_counts_no_more_than_others():
    k, v, _ = prompt(4, 32)
    metric = np.broadcast_to(np.arange(32, dtype=np.float32), (L, H, 32))
    k[:, :20] *= 11
    found = compressed("in", k, v, metric, 8, length=32)
    for (_, layer, h), kvs in heads_of(found).items():
        stays = np.isin(np.arange(32), [x.position for x in kvs])
        assert not stays[:20].any()
        q = queries(layer, h, 32, 50)
        lost = np.log(np.exp(q @ k[layer, :, h].astype(np.float64).T / np.sqrt(D)).sum(1))
        assert 30 < lost.max() < 80
        want = matched(q, k[layer, :, h], v[layer, :, h], stays)
        for got, wanted in zip(("k", "v"), want):
            row = np.stack([getattr(x, got) for x in sorted(kvs, key=lambda x: x.position)])
            np.testing.assert_allclose(row, wanted, rtol=2e-3, atol=2e-3)


def test_names_wrap_what_evicts():
    base, over = get_method("kv-compress"), get_method("matched:kv-compress")
    assert dataclasses.replace(over, merger=None) == base
    assert over.merger == AttentionMatched()
    assert REFERENCE_QUERY in over.calibrated
    assert REFERENCE_QUERY not in base.artefacts
    assert get_method("matched:kvcrush:snapkv").selector == get_method("kvcrush:snapkv").selector
    for name, told in (("matched:full", "wanted one that evicts"),
                       ("matched:matched:kv-compress", "folds nothing by itself"),
                       ("matched-8:kv-compress", "did you mean")):  # fmt: skip
        with pytest.raises(UserError, match=f"^[^\n]*{told}[^\n]*$"):
            get_method(name)


@pytest.mark.parametrize(
    "wrong", [{"ahead": 0}, {"stiffness": 0}, {"drawn_back": float("nan")}, {"newest": -1}]
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}[^\n]*$"):
        AttentionMatched(**wrong)
