"""A method in a file of its own does all that one of ours does; see `own_method`."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache import CompressionConfig
from kvjax.cache.calibration import Calibration
from kvjax.cache.evict import LOWEST, eviction_scores
from kvjax.cache.methods import METHODS
from kvjax.cache.policy import Allocator, DecodeRule, LayerView, Selector
from kvjax.cache.policy.method import PLAIN, AttentionScorer, Method
from kvjax.cache.store import Plane
from kvjax.engine import LLM, EngineConfig
from kvjax.errors import UserError
from kvjax.models import LoadedModel
from kvjax.models.fingerprint import model_hash
from tests.cache.own_method import MINE
from tests.cache.pair import heads_of
from tests.cache.test_methods import B, H, L, T, both, empty, inputs
from tests.engine.conftest import TINY, tiny_params  # noqa: F401
from tests.engine.serving import assert_empty, greedy, prompts_of, tokens_of
from tests.models.tokenizer_builders import tiny_tokenizer
from tests.oracle.selection import webster

WEIGHT = np.array([[1.0, 3.0], [0.5, 1.0], [2.0, 2.0]], np.float32)
WEIGHTS_OF_TINY = np.linspace(1, 2, TINY.num_layers * TINY.num_kv_heads, dtype=np.float32)


def kept_by_hand(v: np.ndarray, length: int, keep: int) -> dict[tuple[int, int], list[int]]:
    """Positions that each head keeps, from the docstring of the method alone."""
    worth = np.linalg.norm(v[:, :length], axis=-1).swapaxes(1, 2) * WEIGHT[..., None]
    owned = -(-length // B)
    free = np.arange(length) < length - MINE.protected
    share = np.where(free, worth, 0).sum(axis=-1, dtype=np.float32).reshape(-1)
    heads = L * H
    # The protected ones end the last blocks: as many stay as these fill, and one at least.
    evictable = int(free.sum())
    gives = sum(length - (owned - e) * B <= evictable for e in range(1, owned))
    low = [owned - gives] * heads
    blocks = webster(share.tolist(), low, [owned] * heads, keep)
    result = {}
    for i, at in enumerate(np.ndindex(L, H)):
        count = length if blocks[i] == owned else blocks[i] * B
        rank = np.where(free, worth[at], np.inf)
        order = np.argsort(rank, kind="stable")
        result[at] = sorted(order[length - count :].tolist())
    return result


@pytest.mark.parametrize(("length", "cap"), [(70, 16), (61, 24), (33, 8)])
def test_it_keeps_what_its_docstring_says(length, cap):
    _, k, v, _ = inputs("random", length, cap, length)
    q = np.zeros((T, 2 * H, k.shape[-1]), np.float32)
    view = LayerView(0, *map(jnp.asarray, (q, k[0], np.int32(length), np.int32(0))), v=v[0])
    scores = MINE.scorer.score(view, {"head_weight": WEIGHT[0]})  # type: ignore[union-attr]
    np.testing.assert_allclose(
        scores.metric, np.linalg.norm(v[0], axis=-1).T * WEIGHT[0][:, None], rtol=1e-5
    )
    worth = np.linalg.norm(v, axis=-1).swapaxes(1, 2) * WEIGHT[..., None]
    keep = kv.budget_blocks(cap, L, H, B)
    given = kv.Scores(jnp.asarray(worth), state={"reads": jnp.zeros((L, H, T, 1))})
    direct, whole, *_, ok = both(
        k, v, given, np.int32(length), np.int32(keep), MINE.eviction, MINE.planes
    )
    assert ok
    want = kept_by_hand(v, length, keep)
    for cache in (direct, whole):
        held = heads_of(cache)
        got = {at: sorted(x.position for x in held[1, *at]) for at in want}
        assert got == want
    assert len({len(x) for x in want.values()}) > 1


def engine(params, **arguments) -> LLM:
    sizes = EngineConfig(
        max_batch=4, max_len=256, block_size=4, prefill_chunk=32, prefill_scratch=128,
        pool_tokens=600, decode_steps_per_sync=1, **arguments.pop("sizes", {}),
    )  # fmt: skip
    model = LoadedModel(TINY, params, tiny_tokenizer(), "random weights")
    return LLM(model, config=sizes, **arguments)


def calibration(params) -> Calibration:
    weight = WEIGHTS_OF_TINY.reshape(TINY.num_layers, TINY.num_kv_heads)
    return Calibration({"head_weight": weight}, model_hash(TINY, params), {"by": "a test"})


@pytest.mark.slow
def test_it_runs_in_the_engine(tiny_params, tmp_path):  # noqa: F811
    """Whole prompts, prompts in chunks, compression while decoding; reads are counted."""
    path = tmp_path / "mine.safetensors"
    calibration(tiny_params).save(path)
    asked = CompressionConfig(MINE, max_cache_tokens=16, compress_every=4)
    llm = engine(tiny_params, compression=asked, calibration=path)
    outputs = llm.generate(prompts_of(20, 60, 150), greedy(12))
    assert [len(tokens) for tokens in tokens_of(outputs)] == [12] * 3
    assert all(output.stats.blocks_after < output.stats.blocks_before for output in outputs)
    assert llm.worker.cache.block_bytes == 4 * (2 * TINY.head_dim * 4 + 8 + 8)
    assert_empty(llm)
    other = CompressionConfig("h2o-decode", max_cache_tokens=16, compress_every=4)
    alone = tokens_of(engine(tiny_params, compression=other).generate(prompts_of(60), greedy(12)))
    mixed = [llm.add_request(p, greedy(12), c) for p, c in zip(prompts_of(60, 60), (asked, other))]
    last = {}
    while llm.has_unfinished():
        last |= {output.request_id: output for output in llm.step()}
    assert [last[name].token_ids for name in mixed] == [outputs[1].token_ids, alone[0]]


def test_the_pool_has_room_for_what_the_settings_make_of_a_method(tiny_params):  # noqa: F811
    """Planes that follow from a window that a request overrides."""
    asked = CompressionConfig(Method("own", "", Windowed(window=3)), window=7)
    llm = engine(tiny_params, compression=asked)
    assert [plane.name for plane in llm.plan.spec.planes] == ["seen of 7"]
    asked = dataclasses.replace(asked, max_cache_tokens=16)
    llm.add_request(prompts_of(20)[0], greedy(), asked)


@dataclasses.dataclass(frozen=True)
class Windowed(AttentionScorer):
    window: int = 3

    @property
    def decode(self):
        rule = DecodeRule()
        rule.planes = (Plane(f"seen of {self.window}"),)  # type: ignore[misc]
        return rule


def test_what_it_needs_is_asked_for(tiny_params):  # noqa: F811
    asked = CompressionConfig(MINE, max_cache_tokens=16)
    (prompt,) = prompts_of(20)
    with pytest.raises(UserError, match=r"^method mine keeps reads, given .*methods=\('mine',\)"):
        engine(tiny_params).add_request(prompt, greedy(), asked)
    room = engine(tiny_params, sizes={"methods": (MINE,)})
    with pytest.raises(UserError, match=r"^method mine reads the calibrated array head_weight"):
        room.add_request(prompt, greedy(), asked)
    with pytest.raises(UserError, match=r"^no method 'yours'"):
        EngineConfig(methods=("yours",))


@dataclasses.dataclass(frozen=True)
class Says(AttentionScorer):
    window: int = 3
    what: str = ""

    def score(self, view, artefacts):
        size = (view.num_heads, view.k.shape[0])
        return {
            "lower": kv.Scores(jnp.where(jnp.arange(size[1]) % 2 == 0, -jnp.inf, jnp.ones(size))),
            "turned": kv.Scores(jnp.ones(size[::-1])),
            "whole": kv.Scores(jnp.ones(size, jnp.int32)),
            "nothing": kv.Scores(None),  # type: ignore[arg-type]
            "metric": jnp.ones(size),
        }[self.what]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("turned", r"score gave a metric float32 \[\d+, 2\]"),
        ("whole", r"score gave a metric int32 \[2, \d+\]"),
        ("nothing", "score gave Scores"),
        ("metric", r"score gave "),
    ],
)
def test_scores_that_are_none_are_named(tiny_params, what, says):  # noqa: F811
    asked = CompressionConfig(Method("own", "", Says(what=what)), max_cache_tokens=16)
    output = engine(tiny_params, compression=asked).generate(prompts_of(60), greedy(4))[0]
    assert output.finish_reason == "error"
    assert re.search(
        rf"scorer Says: {says}.*: give Scores with a metric of floats \[H, P\], here \[2, \d+\]",
        output.error or "",
    )


def test_minus_infinity_goes_first(tiny_params):  # noqa: F811
    asked = CompressionConfig(Method("own", "", Says(what="lower")), max_cache_tokens=32)
    llm = engine(tiny_params, compression=asked)
    name = llm.add_request(prompts_of(64)[0], greedy(4), report_kept=True)
    last = {}
    while llm.has_unfinished():
        last |= {output.request_id: output for output in llm.step()}
    stats = last[name].stats
    assert stats.shortfall == 0
    odd = np.arange(64) % 2 == 1
    for kept in stats.kept_tokens.reshape(-1, *stats.kept_tokens.shape[-1:]):
        np.testing.assert_array_equal(np.asarray(kept)[:64].astype(bool), odd)


@dataclasses.dataclass(frozen=True)
class RanksNothing(AttentionScorer):
    window: int = 3

    def rank(self, metric, state, position, seq_len):
        return jnp.where(metric == 3, jnp.nan, metric)


def test_what_tells_no_order_stays():
    metric, one = jnp.array([[3.0, jnp.nan, -jnp.inf, jnp.inf, 1.0]]), jnp.array([5])

    def scores(method):
        return eviction_scores(method, metric, {}, jnp.arange(5)[None], one, one, 0)[0]

    lowest, never = np.float32(LOWEST), np.inf
    np.testing.assert_array_equal(scores(PLAIN), [[3, never, lowest, never, 1]])
    own = Method("own", "", RanksNothing())
    np.testing.assert_array_equal(scores(own), [[never, never, lowest, never, 1]])


@dataclasses.dataclass
class NotFrozen(AttentionScorer):
    window: int = 3


@pytest.mark.parametrize("scorer", [NotFrozen(), Says(what=jnp.ones(3))])  # type: ignore[arg-type]
def test_parts_that_no_step_is_compiled_from_are_refused(scorer):
    with pytest.raises(UserError, match=rf"^scorer {type(scorer).__name__}: .*give a frozen data"):
        Method("own", "", scorer)


def test_each_layer_gets_its_part_of_what_is_calibrated():
    _, k, v, _ = inputs("random", 20, 8, 0)
    q, one = np.zeros((T, 2 * H, k.shape[-1]), np.float32), jnp.int32(20)
    for layer in range(L):
        view = LayerView(layer, jnp.asarray(q), jnp.asarray(k[layer]), one, one, v=v[layer])
        got = MINE.observer.observe(view, {"head_weight": jnp.asarray(WEIGHT)}).metric
        want = np.linalg.norm(v[layer], axis=-1).T * WEIGHT[layer][:, None]
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_evictions_share_steps_where_the_metric_alone_decides():
    assert MINE.eviction is MINE
    h2o, snapkv = METHODS["h2o"], METHODS["snapkv"]
    assert h2o.eviction.parts == snapkv.eviction.parts != snapkv.parts
    assert METHODS["paged-h2o-openvino"].eviction.parts == METHODS["paged-h2o-openvino"].parts


@dataclasses.dataclass(frozen=True)
class Absurd(Allocator):
    """Asks for what cannot be."""

    blocks: int

    def split(self, costs, budget, artefacts):
        return jnp.full_like(costs.owned, self.blocks)


@pytest.mark.parametrize(("blocks", "held"), [(0, 2), (-5, 2), (10**6, 9)])
def test_an_allocator_that_asks_for_the_impossible_gets_what_is_possible(blocks, held):
    """Five protected tokens fill two blocks; nobody has more than it has."""
    _, k, v, _ = inputs("random", 35, 8, 0)
    method = dataclasses.replace(PLAIN, allocator=Absurd(blocks), protected=5)
    metric = np.random.default_rng(0).random((L, H, T)).astype(np.float32)
    keep = np.int32(12)
    direct, whole, report, _, ok = both(
        k, v, kv.Scores(jnp.asarray(metric)), np.int32(35), keep, method, ()
    )
    assert ok
    for cache in (direct, whole):
        assert (-(-np.asarray(cache.context_len[1]) // B) == held).all()
        kv.check_invariants(cache)
    assert int(report.shortfall[0]) == max(0, held * L * H - 12)


@dataclasses.dataclass(frozen=True)
class Splits(Allocator):
    """Gives what is none of each head."""

    what: str

    def shares(self, scores, layer, budget, artefacts):
        one = jnp.ones(len(scores))
        return {"share": one[:1], "count": one.astype(jnp.int32)}.get(self.what, one)

    def split(self, costs, budget, artefacts):
        good = costs.owned
        return {"layer": good[:, :1], "float": good * 0.5, "list": [1]}.get(self.what, good)


@dataclasses.dataclass(frozen=True)
class Chooses(Selector):
    """Likewise."""

    what: str = ""

    def eviction_scores(self, rank, evictable, position):
        good = jnp.where(evictable, rank, jnp.inf)
        one = {"head": good[..., :1, :], "marks": evictable}.get(self.what, good)
        return (good, one) if self.what == "head" else (one, good)

    def choose(self, of):
        good = super().choose(of)
        return {"number": good.astype(jnp.int32), "row": good[0]}.get(self.what, good)


@dataclasses.dataclass(frozen=True)
class Ranks(AttentionScorer):
    window: int = 3

    def rank(self, metric, state, position, seq_len):
        return metric[..., :1, :]


PARTS = [
    ({"allocator": Splits("share")}, r"Splits: shares gave float32 \[1\]: give floats \[H\], "),
    ({"allocator": Splits("count")}, r"Splits: shares gave int32 \[2\]: give floats \[H\], "),
    ({"allocator": Splits("layer")}, r"Splits: split gave int32 \[3, 1\]: give whole .*\[3, 2\]"),
    ({"allocator": Splits("float")}, r"Splits: split gave float32 \[3, 2\]: give whole numbers "),
    ({"allocator": Splits("list")}, r"Splits: split gave \[1\]: give whole numbers \[L, H\], "),
    ({"selector": Chooses(what="head")}, r"Chooses: eviction_scores gave float32 \[.*1, \d+\]: "),
    ({"selector": Chooses(what="marks")}, r"Chooses: eviction_scores gave bool \[.*give floats "),
    ({"selector": Chooses(what="number")}, r"Chooses: choose gave int32 .*give booleans \[H, T\]"),
    ({"selector": Chooses(what="row")}, r"Chooses: choose gave bool \[\d+\]: give booleans "),
    ({"scorer": Ranks()}, r"Ranks: rank gave float32 \[.*1, \d+\]: give floats \[…, H, T\], "),
]


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(("parts", "says"), PARTS)
def test_what_a_part_gives_is_checked(parts, says):
    """By its type: in a step, when that is traced; what would broadcast is wrong, too."""
    _, k, v, _ = inputs("random", 35, 8, 0)
    k, v = jnp.asarray(k), jnp.asarray(v)
    scores = kv.Scores(jnp.ones((L, H, T), jnp.float32))
    for method, wrong in ((dataclasses.replace(PLAIN, **parts), True), (GOOD, False)):

        def step(cache, method=method):
            return kv.write_survivors(cache, 1, k, v, scores, 35, 12, method)

        with pytest.raises(UserError, match=f"^{says}") if wrong else contextlib.nullcontext():
            jax.eval_shape(step, empty())


GOOD = dataclasses.replace(PLAIN, allocator=Splits(""), selector=Chooses())


def test_a_cache_of_its_own_has_its_planes():
    cache = empty(MINE.planes)
    assert {name: x.shape for name, x in cache.state.items()} == {
        "reads": (*cache.metric.shape, 1),
        "given": (*cache.metric.shape, 1),
    }
