"""Methods that look at no question: what they need beside a prompt, and parts of one."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache import CompressionConfig
from kvjax.cache.calibration import Calibration
from kvjax.cache.methods import get_method
from kvjax.cache.methods.compactor import Compactor
from kvjax.cache.methods.expected_attention import ExpectedAttention
from kvjax.cache.methods.fastgen import ByPolicy
from kvjax.cache.methods.key_norm import KeyNorm
from kvjax.cache.methods.keydiff import KeyDiff
from kvjax.cache.methods.kvzip import OUTPUT_GRAM, Repeated
from kvjax.cache.methods.triattention import ExpectedOfCentre
from kvjax.cache.policy import LayerView, Scores
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned_back
from kvjax.errors import UserError
from kvjax.models.config import RopeScaling
from kvjax.models.fingerprint import model_hash
from kvjax.models.rope import rope_angles, rope_artefacts, rotate
from tests.cache.stand_in import QUICKLY
from tests.cache.test_own_method import engine
from tests.engine.conftest import TINY, tiny_params  # noqa: F401
from tests.engine.serving import assert_empty, greedy, prompts_of, tokens_of
from tests.oracle.question_free import calibrated, compactor_part, expected_row, rotation

H, R, D, T, LENGTH = 2, 2, 8, 80, 71
SCALED = dataclasses.replace(TINY, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64))


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((T, h, D)).astype(np.float32) for h in (H * R, H, H))
    for x in (q, k, v):
        x[LENGTH:] = 1e4  # padding
    return q, k, v


@partial(QUICKLY, static_argnums=0)
def score(scorer, view, frequency):
    return scorer.score(view, {ROPE_FREQUENCY: frequency}).metric


def scored(scorer, drawn, start: int = 0) -> np.ndarray:
    """The metrics [H, T] of a prompt, or of its tokens from `start` on behind nothing."""
    q, k, v = map(jnp.asarray, drawn)
    frequency = jnp.asarray(calibrated(1, H, D)[ROPE_FREQUENCY][0])
    length, first = jnp.int32(LENGTH), jnp.int32(start)
    at = jnp.where(jnp.arange(T) < LENGTH, start + jnp.arange(T, dtype=jnp.int32), -1)
    view = LayerView(0, q, k, length, first, jnp.broadcast_to(at, (H, T)), v=v)
    return np.asarray(score(scorer, view, frequency))


@pytest.mark.parametrize("start", [0, 5, 100])
@pytest.mark.parametrize(
    "settings", [{"chunk": 16, "sketch": 4}, {"chunk": 1}, {"blend": 0.0}, {"chunk": 63}]
)
def test_compactor_scores_chunks_and_sketches(drawn, settings, start):
    got = scored(Compactor(**settings), drawn, start)
    q, k, v = (x[:LENGTH].astype(np.float64) for x in drawn)
    want = compactor_part(q, k, v, start + np.arange(LENGTH), start + LENGTH, **settings)
    np.testing.assert_allclose(got[:, :LENGTH], want, rtol=1e-3, atol=1e-4)


def repeated(length: int, distinct: int, d: int) -> tuple[jax.Array, ...]:
    """Queries, keys and values of a prompt; few distinct keys, of standard deviation 3."""
    rng = np.random.default_rng(8)
    few = 3 * rng.standard_normal((distinct, H, d)).astype(np.float32)
    k = jnp.asarray(few[rng.integers(0, distinct, length)])
    q, v = (jnp.asarray(rng.standard_normal((length, h, d)), jnp.float32) for h in (H * R, H))
    return q, k, v


def test_compactor_measures_keys_that_repeat():
    """1,000 tokens of 10 distinct keys, which leave most of 48 dimensions empty."""
    q, k, v = repeated(1000, 10, 64)
    # Values of norm 0 leave the keys alone.
    view = LayerView(0, q, k, jnp.int32(1000), jnp.int32(0), v=jnp.zeros_like(v))
    metric = np.asarray(score(Compactor(), view, jnp.zeros(32)))
    assert np.isfinite(metric).all()
    # Equal keys stand out alike, and the rarer ones more.
    for row, keys in zip(metric[:, 8:-4], np.moveaxis(np.asarray(k)[8:-4], 1, 0), strict=True):
        _, kind, often = np.unique(keys[:, 0], return_inverse=True, return_counts=True)
        of_kind = [row[kind == n] for n in range(10)]
        assert max(np.ptp(x) for x in of_kind) < 0.1
        assert np.corrcoef([x.mean() for x in of_kind], often)[0, 1] < -0.9


@partial(QUICKLY, static_argnums=0)
def survivors(method, k, v, scores, length, keep):
    cache = kv.init_cache(
        num_slots=1,
        num_layers=1,
        num_kv_heads=H,
        head_dim=k.shape[-1],
        num_blocks=H * 63,
        max_blocks_per_head=63,
        block_size=16,
    )
    return kv.write_survivors(cache, jnp.int32(0), k, v, scores, length, keep, method)


def test_compactor_holds_its_budget_where_keys_repeat():
    q, k, v = repeated(1000, 10, 64)
    view = LayerView(0, q, k, jnp.int32(1000), jnp.int32(0), v=v)
    keep = jnp.int32(kv.budget_blocks(128, 1, H, 16))
    metric = score(Compactor(), view, jnp.zeros(32))[None]
    method, scores = get_method("compactor").eviction, Scores(metric)
    cache, report, ok = survivors(method, k[None], v[None], scores, view.length, keep)
    assert ok
    assert int(report.shortfall[0]) == 0
    assert np.asarray(cache.context_len[0]).tolist() == [[128] * H]


def test_a_head_without_numbers_costs_compactor_no_other(drawn):
    q, k, _ = drawn
    broken = k.copy()
    broken[20, 1] = np.nan
    metric = scored(Compactor(), (q, broken, np.zeros_like(k)))[:, :LENGTH]
    assert np.isfinite(metric).all()
    assert np.std(metric[0]) > 0.5
    assert not metric[1].any()


def test_queries_that_nothing_enters_repeat_nothing():
    """The first does not count anyway, nor do the last two, which are padding."""
    rng = np.random.default_rng(2)
    held, size, length = 20, 8, 6
    q, k, v = (
        rng.standard_normal((n, h, D)).astype(np.float32)
        for n, h in ((size, H * R), (held + size, H), (held + size, H))
    )
    hidden = rng.standard_normal((size, 5)).astype(np.float32)
    hidden[[0, 3, 6, 7]] = 0
    half = rng.standard_normal((H * R, D, 7)).astype(np.float32)
    given = {OUTPUT_GRAM: jnp.einsum("hdi,hei->hde", half, half)}

    def metric(q, k, v, hidden, length):
        q, k, v, hidden = map(jnp.asarray, (q, k, v, hidden))
        log_sum = jnp.full((H * R, len(q)), 4.0)
        view = LayerView(
            0, q, k, jnp.int32(length), jnp.int32(held), v=v, hidden=hidden, log_sum=log_sum
        )
        return np.asarray(Repeated(plus=True, first=1).score(view, given).metric)[:, :held]

    found = metric(q, k, v, hidden, length)
    assert np.isfinite(found).all()
    assert (found > 0).all()
    others = np.arange(size) != 3
    want = metric(q[others], k[:-1], v[:-1], hidden[others], length - 1)
    np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.parametrize(("start", "ahead"), [(0, 1), (2000, 512)])
def test_expected_attention_looks_ahead_from_where_it_is(drawn, start, ahead):
    got = scored(ExpectedAttention(ahead=ahead), drawn, start)
    q, k, v = (x[:LENGTH] for x in drawn)
    at = start + np.arange(LENGTH)
    for h in range(H):
        queries = np.swapaxes(q[:, h * R : (h + 1) * R], 0, 1)
        want = expected_row(queries, at, k[:, h], v[:, h], at, start + LENGTH, ahead)
        there = ~np.isnan(want)
        np.testing.assert_allclose(got[h, :LENGTH][there], want[there], rtol=2e-3)


def test_fastgen_keeps_everything_where_no_policy_keeps_enough():
    """Attention that is even over what a query sees: all but everything keeps some 93 % of it."""
    k = jnp.asarray(np.random.default_rng(3).standard_normal((LENGTH, H, D)), jnp.float32)
    view = LayerView(0, jnp.zeros((LENGTH, H * R, D)), k, jnp.int32(LENGTH), jnp.int32(0))
    some, every = (ByPolicy(recovered=n).score(view, {}).metric for n in (0.9, 0.99))
    given = np.tril(np.ones((LENGTH, LENGTH))) / np.arange(1, LENGTH + 1)[:, None]
    np.testing.assert_allclose(every, [given.mean(axis=0)] * H, rtol=1e-5)
    assert ((some < 0).sum(axis=1) > LENGTH / 4).all()


def test_norms_and_directions_of_short_keys_are_measured_in_float32(drawn):
    short = jnp.asarray(drawn[1][:LENGTH], jnp.bfloat16)
    long = np.asarray(short, np.float64)
    norm = np.linalg.norm(long, axis=-1)
    np.testing.assert_allclose(
        -KeyNorm().of(0, short, jnp.zeros((LENGTH, H), jnp.int32)), norm, rtol=1e-5
    )
    view = LayerView(0, short[:, :0], short, jnp.int32(LENGTH), jnp.int32(0))
    unit = long / norm[..., None]
    mean = unit.mean(axis=0) / np.linalg.norm(unit.mean(axis=0), axis=-1, keepdims=True)
    want = -np.sum(unit * mean, axis=-1).T
    np.testing.assert_allclose(KeyDiff().score(view, {}).metric, want, atol=1e-5)


@pytest.mark.parametrize("config", [TINY, SCALED])
def test_rotations_are_undone_with_the_models_own_frequencies(config):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((4, 3, config.head_dim)), jnp.float32)
    position = jnp.array([0, 1, 77, 3000], jnp.int32)
    turned = rotate(x, *rope_angles(config, position))
    artefacts = rope_artefacts(config)
    assert len(artefacts[ROPE_FREQUENCY]) == config.num_layers
    for frequency in artefacts[ROPE_FREQUENCY]:
        np.testing.assert_allclose(turned_back(turned, position, frequency), x, atol=1e-5)
    assert float(jnp.abs(turned - x).max()) > 1


@pytest.mark.parametrize(
    "name", [pytest.param("expected-attention", marks=pytest.mark.slow), "compactor"]
)
@pytest.mark.slow
def test_the_engine_knows_its_models_rotations(tiny_params, name):  # noqa: F811
    """Without any calibration: whole prompts, in a scratch, in the pool."""
    llm = engine(tiny_params, compression=CompressionConfig(name, max_cache_tokens=24))
    outputs = llm.generate(prompts_of(30, 100, 150), greedy(4))
    assert [len(tokens) for tokens in tokens_of(outputs)] == [4] * 3
    assert all(output.stats.blocks_after < output.stats.blocks_before for output in outputs)
    assert_empty(llm)


@pytest.mark.slow
def test_centres_are_needed_and_metrics_are_of_the_time(tiny_params):  # noqa: F811
    """Whole prompts, in a scratch, in the pool, and while decoding, where nothing is set aside."""
    asked = CompressionConfig("triattention", max_cache_tokens=24, compress_every=4)
    (prompt,) = prompts_of(60)
    with pytest.raises(UserError, match=r"^method triattention reads .* query_centre: [^\n]*$"):
        engine(tiny_params).add_request(prompt, greedy(), asked)
    arrays = calibrated(TINY.num_layers, TINY.num_kv_heads, TINY.head_dim)
    centres = {name: x for name, x in arrays.items() if name.startswith("query")}
    calibration = Calibration(centres, model_hash(TINY, tiny_params))
    llm = engine(tiny_params, compression=asked, calibration=calibration)
    before = llm.worker.cache.spec
    outputs = llm.generate(prompts_of(30, 100, 150), greedy(40))
    assert [len(tokens) for tokens in tokens_of(outputs)] == [40] * 3
    assert all(output.stats.blocks_after < output.stats.blocks_before for output in outputs)
    assert_empty(llm)
    # Nothing lies beside metric and position, and what was generated competes.
    assert before.planes == ()
    name = llm.add_request(prompt, greedy(40), asked)
    while not llm.scheduler.running or len(llm.scheduler.running[0].tokens) < 9:
        llm.step()
    (request,) = llm.scheduler.running
    assert (request.id, request.unmeasured) == (name, 0)


@pytest.mark.parametrize("ahead", [1, 3, 4096])
def test_centres_look_ahead_by_powers_of_two(drawn, ahead):
    """Of one query head, from its definition: time, distance, phase, and sizes."""
    of = {name: x[1] for name, x in calibrated(2, H, D).items()}
    _, k, _ = drawn
    view = LayerView(1, jnp.zeros((0, 0, D)), jnp.asarray(k), jnp.int32(0), jnp.int32(LENGTH))
    one = {**of, "query_centre": of["query_centre"][::2], "query_size": of["query_size"][::2]}
    given = {name: jnp.asarray(x) for name, x in one.items()}
    got = ExpectedOfCentre(ahead).score(view, given).metric
    later = [2**n for n in range(20) if 2**n <= ahead]
    for h in range(H):
        rows = []
        for now in later:
            turn = rotation(LENGTH + now, D)
            rows.append(k[:LENGTH, h] @ (turn @ one["query_centre"][h]))
        centre = one["query_centre"][h]
        size, of_centre = (np.hypot(*np.split(x, 2, axis=-1)) for x in (k[:LENGTH, h], centre))
        want = np.mean(rows, axis=0) + size @ (one["query_size"][h] - of_centre)
        want = (want - want.mean()) / want.std()
        np.testing.assert_allclose(got[h, :LENGTH], want, atol=2e-3)


@pytest.mark.slow
def test_whole_heads_need_a_calibration(tiny_params):  # noqa: F811
    asked = CompressionConfig("duo-heads", max_cache_tokens=64)
    (prompt,) = prompts_of(120)
    with pytest.raises(UserError, match=r"^method duo-heads reads .* head_budget: [^\n]*$"):
        engine(tiny_params).add_request(prompt, greedy(), asked)
    heads = (TINY.num_layers, TINY.num_kv_heads)
    budget = np.arange(np.prod(heads), dtype=np.float32).reshape(heads)
    calibration = Calibration({"head_budget": budget}, model_hash(TINY, tiny_params))
    llm = engine(tiny_params, compression=asked, calibration=calibration)
    (output,) = llm.generate([prompt], greedy(4))
    assert output.stats.blocks_after == 64 // 4 * budget.size < output.stats.blocks_before
