"""Codecs of whole prompts against NumPy, their bytes by hand, and what each of them promises."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import as_codec
from kvjax.cache.policy.rotary import ROPE_FREQUENCY
from kvjax.cache.store.named import OF_PROMPTS
from kvjax.engine.calibrate.levels import KEY_RANGE, LEVELS, NORM, Weighed, fitted, levels_of
from kvjax.engine.dense import DensePass, dense_pass
from kvjax.errors import UserError
from kvjax.eval import evaluator as evaluator_module
from kvjax.eval import passes
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.prompt_codecs import PROMPT_CODECS, PromptCodec
from kvjax.eval.prompt_codecs.gear import Gear, start
from kvjax.eval.prompt_codecs.kivi import KeysByChannel
from kvjax.eval.prompt_codecs.kvquant import KVQuant
from kvjax.eval.prompt_codecs.kvquant_calibrated import CalibratedKVQuant
from kvjax.eval.prompt_codecs.mikv import MiKV
from kvjax.eval.prompt_codecs.minicache import MiniCache
from kvjax.eval.prompt_codecs.rotatekv import RotateKV
from kvjax.eval.prompt_codecs.xkv import XKV
from kvjax.eval.prompt_codecs.xquant import (
    KEY_INPUT,
    KEY_OUTPUT,
    VALUE_INPUT,
    VALUE_OUTPUT,
    XQuant,
)
from kvjax.eval.prompt_codecs.xquant_cl import INPUT, OUTPUT, XQuantCL
from kvjax.eval.prompt_codecs.zipcache import ZipCache, drawn
from kvjax.eval.prompt_rows import PromptRows
from kvjax.eval.sizes import EvaluatorConfig, Variant
from kvjax.models import LoadedModel
from kvjax.models.decoder import init_params
from kvjax.models.rope import rope_artefacts
from kvjax.models.tokenizer import ByteTokenizer
from tests.eval.conftest import TINY, make_row
from tests.eval.test_evaluator import run_row
from tests.oracle import prompt_codecs as oracle

LAYERS, TOKENS, LENGTH, HIDDEN = 5, 48, 37, 24
THREE = (3, 1, 8)
"""KV heads, query heads of each, channels; (2, 2, 16) where nothing else is said."""
WIDE = (8, 1, 32)
"""A row of two groups of 128 numbers."""


@functools.cache
def prompt(heads: int = 2, group: int = 2, d: int = 16) -> tuple[DensePass, dict[str, Any]]:
    """A pass whose keys have outlying channels, whose values are not around nought, whose layers
    are alike and some of whose tokens are sinks, which only the stream before the norm shows, and
    RoPE's frequencies. What follows the prompt is wild."""
    rng = np.random.default_rng(heads)
    base = rng.standard_normal((1, TOKENS, heads, d))
    k, v = (base + 0.7 * rng.standard_normal((LAYERS, TOKENS, heads, d)) for _ in range(2))
    k[..., 3] *= 6
    k[..., 5] += 8
    v += 3
    q = rng.standard_normal((LAYERS, TOKENS, heads * group, d))
    hidden = rng.standard_normal((LAYERS, TOKENS, HIDDEN))
    peak = rng.uniform(2, 40, (LAYERS, TOKENS))
    for x in (k, v, q, hidden, peak):
        x[:, LENGTH:] *= 100
    k, v, q, hidden, peak = (jnp.asarray(x, jnp.float32) for x in (k, v, q, hidden, peak))
    logits = jnp.einsum("lqhd,lkhd->lhqk", q, jnp.repeat(k, group, 2)) / np.sqrt(d)
    seen = np.tril(np.ones((TOKENS, TOKENS), bool))
    log_sum = jax.nn.logsumexp(jnp.where(seen, logits, -jnp.inf), axis=-1)
    frequency = jnp.asarray(100.0 ** -np.linspace(0, 1, d // 2), jnp.float32)
    artefacts = {ROPE_FREQUENCY: jnp.broadcast_to(frequency, (LAYERS, d // 2))}
    return DensePass(q, k, v, log_sum, hidden, jnp.zeros((1, 1)), peak), artefacts


def through(codec: PromptCodec, *shape: int, **arrays: Any) -> tuple[np.ndarray, np.ndarray]:
    """What comes back of the prompt, with further arrays by layer."""
    dense, artefacts = prompt(*shape)
    run = jax.jit(functools.partial(passes.through_codec, codec))
    k, v = run(dense, jnp.int32(LENGTH), {**artefacts, **arrays})
    return np.asarray(k)[:, :LENGTH], np.asarray(v)[:, :LENGTH]


def exact(*shape: int) -> tuple[np.ndarray, ...]:
    """Queries, keys, values and what enters attention of the prompt alone, in float64, and RoPE's
    frequencies."""
    dense, artefacts = prompt(*shape)
    arrays = (dense.q, dense.k, dense.v, dense.hidden)
    frequency = np.asarray(artefacts[ROPE_FREQUENCY][0])
    return *(np.asarray(x, np.float64)[:, :LENGTH] for x in arrays), frequency


def assert_same(found, wanted, of) -> None:
    """Equal but for numbers between two codes, of which float32 may take the other one."""
    for got, want, x in zip(found, wanted, of, strict=True):
        size = np.abs(x).max()
        assert np.isclose(got, want, atol=2e-3 * size, rtol=0).mean() > 0.985
        errors = (np.sum((y - x) ** 2) for y in (got, want))
        np.testing.assert_allclose(*errors, rtol=0.02)


@pytest.mark.parametrize("group", [None, 16])
def test_keys_by_channel_and_values_by_token(group):
    _, k, v, *_ = exact()
    found = through(KeysByChannel(bits=3, group=group))
    assert_same(found, oracle.kivi(k, v, 3, group), (k, v))


@pytest.mark.parametrize(("bits", "group"), [(4, None), (2, 16)])
def test_gear_gives_back_outliers_and_a_low_rank(bits, group):
    _, k, v, *_ = exact()
    codec = Gear(codes=KeysByChannel(bits=bits, group=group), outliers=60)
    want = oracle.gear(k, v, bits, group, 60, 4, np.asarray(start(16, 4), np.float64))
    assert_same(through(codec), want, (k, v))


@pytest.mark.parametrize(("high", "shape"), [(8, ()), (4, THREE)])
def test_mikv_has_more_bits_for_what_is_new_or_read(high, shape):
    q, k, v, *_ = exact(*shape)
    assert_same(through(MiKV(high=high), *shape), oracle.mikv(q, k, v, high, 2, 200), (k, v))


@pytest.mark.parametrize(("codec", "probes"), [(ZipCache(probes=150), 150), (ZipCache(), 50)])
def test_zipcache_has_more_bits_for_what_is_salient(codec, probes):
    q, k, v, *_ = exact()
    want = oracle.zipcache(q, k, v, 4, 2, 600, probes, np.asarray(drawn(TOKENS)))
    assert_same(through(codec), want, (k, v))


def test_probes_are_the_same_whatever_follows():
    assert np.array_equal(drawn(60)[:40], drawn(40))


def test_kvquant_has_levels_of_its_own():
    _, k, v, _, frequency = exact()
    assert_same(through(KVQuant()), oracle.kvquant(k, v, frequency, 3, 5), (k, v))


@functools.cache
def calibrated() -> dict[str, np.ndarray]:
    """Levels of numbers like the prompt's, whose middle tokens count most."""
    _, k, v, _, frequency = exact()
    k = oracle.turned(k, frequency, back=True)
    k, v = (x[:, 1:].reshape(LAYERS, LENGTH - 1, -1) for x in (k, v))
    k = 0.8 * (k - k.mean(axis=1, keepdims=True)) + k.mean(axis=1, keepdims=True)
    weight = np.exp(-np.abs(np.arange(LENGTH - 1) - 20) / 5)[:, None] * np.ones(k.shape)
    return fitted(Weighed(k, v, weight, weight))


@pytest.mark.parametrize("bits", [4, 2])
def test_kvquant_of_calibrated_levels(bits):
    _, k, v, _, frequency = exact()
    arrays = calibrated()
    found = through(CalibratedKVQuant(bits=bits, outliers=40), **arrays)
    norm = arrays[NORM] if bits == 2 else None
    want = oracle.kvquant_calibrated(
        k, v, frequency, arrays[KEY_RANGE], arrays[LEVELS[bits]], norm, 40
    )
    assert_same(found, want, (k, v))


def test_q_norm_restores_the_deviation():
    """Of values between their ends, which levels by k-means draw together."""
    _, _, v, *_ = exact()
    arrays = calibrated()
    plain = {**arrays, NORM: np.broadcast_to([1.0, 0], arrays[NORM].shape).astype(np.float32)}
    spread = [through(CalibratedKVQuant(bits=2), **each)[1].std() for each in (arrays, plain)]
    assert spread[1] < spread[0]
    assert abs(spread[0] - v.std()) < abs(spread[1] - v.std())


def test_calibrated_arrays_have_to_be_there(tiny_model):
    evaluator = Evaluator(tiny_model, EvaluatorConfig(block_size=4, num_slots=1, free_tokens=0))
    said = r"^kvquant4c reads [^\n]* kvquant_key_range: [^\n]*calibrate --levels` makes it$"
    variant = Variant("full", 1.0, "kvquant4c")
    with pytest.raises(UserError, match=said):
        run_row(evaluator, make_row(), ["chat"], [variant])
    prompts = [np.arange(start, start + 60) % 256 for start in (3, 90)]
    arrays = levels_of(tiny_model, prompts)
    evaluator = Evaluator(
        tiny_model,
        EvaluatorConfig(block_size=4, num_slots=1, free_tokens=0),
        {name: jnp.asarray(x) for name, x in arrays.items()},
    )
    results = run_row(evaluator, make_row(), ["chat"], [variant])
    assert 0 < results["chat", variant.label, 1.0]["kl"] < 0.1


@pytest.mark.parametrize(("bits", "shape"), [(2, ()), (4, THREE), (2, WIDE)])
def test_rotatekv_turns_sorts_and_keeps_sinks(bits, shape):
    _, k, v, _, frequency = exact(*shape)
    peak = np.asarray(prompt(*shape)[0].peak)[:, :LENGTH]
    codec = RotateKV(bits=bits, sinks=5)
    if shape != WIDE:
        codec = dataclasses.replace(codec, group=16)
    want = oracle.rotatekv(k, v, peak, frequency, bits, 128 if shape == WIDE else 16, 5)
    assert_same(through(codec, *shape), want, (k, v))


def test_minicache_joins_layers():
    _, k, v, *_ = exact()
    want = [oracle.minicache(x, 0.6, 100) for x in (k, v)]
    found = through(MiniCache(apart=100))
    assert_same(found, want, (k, v))
    # Lengths are kept, and what is not joined.
    for got, x in zip(found, (k, v)):
        norms = (np.linalg.norm(y, axis=-1) for y in (got, x))
        np.testing.assert_allclose(*norms, rtol=2**-7)
        np.testing.assert_allclose(got[[0, 1, 4]], x[[0, 1, 4]], rtol=2**-8)


def test_xkv_keeps_a_low_rank_and_all_of_a_full_one():
    _, k, v, _, frequency = exact()
    assert_same(through(XKV()), oracle.xkv(k, v, frequency), (k, v))
    for got, x in zip(through(XKV(keys=16, values=16)), (k, v)):
        np.testing.assert_allclose(got, x, atol=2**-6 * np.abs(x).max())


def test_xquant_rebuilds_keys_and_values(tiny_model):
    """Of a pass of the model itself; its first layers have four bits."""
    codec = XQuant(bits=2, group=16, first=1)
    tokens = np.random.default_rng(0).integers(0, 256, TOKENS).astype(np.int32)
    run = jax.jit(functools.partial(dense_pass, TINY))
    dense = run(tiny_model.params, tokens, np.zeros(1, np.int32))
    made = codec.from_weights(tiny_model)
    arrays = {name: np.asarray(x, np.float64) for name, x in made.items()}
    eye = np.eye(arrays[KEY_INPUT].shape[-1])
    pairs = ((KEY_INPUT, KEY_OUTPUT, -2), (VALUE_INPUT, VALUE_OUTPUT, -1))
    for inner, outer, at in pairs:
        np.testing.assert_allclose(
            arrays[inner].swapaxes(1, 2) @ arrays[inner], [eye] * 3, atol=1e-5
        )
        layers: Any = tiny_model.params["layers"]
        weight = np.asarray(layers["qkv"][...])[..., at, :]
        product = arrays[inner] @ arrays[outer]
        np.testing.assert_allclose(product.reshape(weight.shape), weight, atol=1e-5)
    call = jax.jit(functools.partial(passes.through_codec, codec))
    found = call(dense, jnp.int32(LENGTH), {**rope_artefacts(TINY), **made})
    frequency = np.asarray(rope_artefacts(TINY)[ROPE_FREQUENCY][0])
    k, v, hidden = (np.asarray(x, np.float64)[:, :LENGTH] for x in (dense.k, dense.v, dense.hidden))
    weights = [(arrays[inner], arrays[outer]) for inner, outer, _ in pairs]
    want = oracle.xquant(hidden, weights, frequency, 2, 16, 1, k.shape[1:])
    assert_same([np.asarray(x)[:, :LENGTH] for x in found], want, (k, v))


def tiny_of(**changes) -> LoadedModel:
    config = dataclasses.replace(TINY, **changes)
    return LoadedModel(config, init_params(config, "float32", seed=3), ByteTokenizer(), "dummy")


@functools.cache
def pass_of(heads: int) -> tuple[LoadedModel, DensePass]:
    """A model with so many KV heads, wide ones of four, and its pass over a prompt."""
    wide = {"hidden_size": 160, "head_dim": 32} if heads == 4 else {}
    model = tiny_of(num_kv_heads=heads, **wide)
    tokens = np.random.default_rng(0).integers(0, 256, TOKENS).astype(np.int32)
    run = jax.jit(functools.partial(dense_pass, model.config))
    return model, run(model.params, tokens, np.zeros(1, np.int32))


def weights_of(model: LoadedModel) -> np.ndarray:
    """[L, D, 2 · H · d], of keys and then of values, in float64."""
    layers: Any = model.params["layers"]
    weight = np.asarray(layers["qkv"][...], np.float64)
    parts = [weight[..., at, :].reshape(*weight.shape[:2], -1) for at in (-2, -1)]
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize(("heads", "rank"), [(1, 16), (2, 24), (4, 160)])
def test_xquant_cl_adds_up_differences_of_layers(heads, rank):
    """Those of a subspace where it is narrower than what enters attention, else all of them."""
    model, dense = pass_of(heads)
    codec, size, group = XQuantCL(bits=2, first=1), 160, 128
    if rank < 128:
        codec, size, group = dataclasses.replace(codec, group=12), 24, 12
    made = codec.from_weights(model)
    inner, outer = (np.asarray(made[name], np.float64) for name in (INPUT, OUTPUT))
    weight = weights_of(model)
    assert inner.shape == (3, size, rank)
    np.testing.assert_allclose(inner.swapaxes(1, 2) @ inner, [np.eye(rank)] * 3, atol=1e-5)
    np.testing.assert_allclose(inner @ outer, weight, atol=1e-5)
    assert (rank < size) or (inner == np.eye(size)).all()
    call = jax.jit(functools.partial(passes.through_codec, codec))
    found = call(dense, jnp.int32(LENGTH), {**rope_artefacts(model.config), **made})
    frequency = np.asarray(rope_artefacts(model.config)[ROPE_FREQUENCY][0])
    k, v, hidden = (np.asarray(x, np.float64)[:, :LENGTH] for x in (dense.k, dense.v, dense.hidden))
    want = oracle.xquant_cl(hidden, inner, weight, frequency, 2, group, 1, k.shape[1:])
    assert_same([np.asarray(x)[:, :LENGTH] for x in found], want, (k, v))


def test_xquant_cl_does_not_add_up_what_codes_lose():
    """Each layer's loss is that of its own codes: with many bits in it next to none, whatever
    those before it have lost."""
    model, dense = pass_of(1)
    coarse, fine = XQuantCL(bits=2, first=0), XQuantCL(bits=12, first=0)
    made = {**rope_artefacts(model.config), **coarse.from_weights(model)}
    entering = jnp.concatenate([dense.hidden[:1], dense.hidden[:1], dense.hidden[2:]])
    errors = []
    for codec in (coarse, fine):
        call = jax.jit(functools.partial(passes.through_codec, codec))
        k, v = call(dataclasses.replace(dense, hidden=entering), jnp.int32(LENGTH), made)
        errors.append([
            np.abs(np.asarray(x - y)).max(axis=(1, 2, 3)) for x, y in ((k, dense.k), (v, dense.v))
        ])  # fmt: skip
    assert (np.max(errors[1], axis=0) < 0.01 * np.min(errors[0])).all()


@pytest.mark.parametrize("codec", [XQuant(), XQuantCL()])
def test_xquant_refuses_keys_that_are_normalised(codec):
    said = rf"^{codec.name} rebuilds keys .* tiny normalises them: give kvquant4$"
    with pytest.raises(UserError, match=said):
        codec.from_weights(tiny_of(family="qwen3"))


def assert_bytes(name: str, length: int, want: int) -> None:
    shape = dataclasses.replace(TINY, num_layers=4, head_dim=16, hidden_size=80)
    assert PROMPT_CODECS[name].stored_bytes(shape, length) == want, name


def test_bytes_counted_by_hand():
    """Of 100 tokens, four layers, two heads of 16 channels; ends are two numbers of two bytes."""
    codes = 2 * 100 * 32 // 2  # of four bits
    assert_bytes("kcvt4", 100, 4 * (codes + 4 * 32 + 4 * 100))
    assert_bytes("kcvt3", 100, 4 * (2400 + 4 * 32 + 4 * 100))
    assert_bytes("kivi2", 100, 4 * (codes // 2 + 4 * 2 * 32 + 4 * 100))
    # Two outliers of a key's channel, with an index of a byte; a row of 32 has none.
    gear = 2 * 32 * 3 + 2 * 2 * (100 + 16) * 4 * 2
    assert_bytes("gear4", 100, 4 * (codes + 4 * 32 + 4 * 100 + gear))
    assert_bytes("gear2", 100, 4 * (codes // 2 + 4 * 2 * 32 + 4 * 100 + gear))
    # 20 rows in 8 bits (or 4), 80 in 2; two groups each; a bit per token; the balance of keys.
    assert_bytes("mikv8", 100, 8 * (2 * (20 * (16 + 8) + 80 * (4 + 8)) + 13 + 32))
    assert_bytes("mikv4", 100, 8 * (2 * (20 * (8 + 8) + 80 * (4 + 8)) + 13 + 32))
    assert_bytes("zipcache", 100, 8 * (2 * (480 + 160) + 4 * 2 * 16 + 4 * 100 + 32 + 13))
    # 99 tokens: per channel, and per token, two outliers of three bytes and a range.
    of_three = 2 * 99 * 32 * 3 // 8 + (32 + 99) * (2 * 3 + 4) + 2 * 8 * 2 + 2 * 32 * 2
    assert_bytes("kvquant3", 100, 4 * of_three)
    # 99 tokens: two outliers of a key and of a value, and a value's range.
    of_three = 2 * 99 * 32 * 3 // 8 + 99 * (2 * 2 * 3 + 4) + 2 * 32 * 2
    assert_bytes("kvquant3c", 100, 4 * of_three)
    # 20 sinks with an index, and the order of 32 channels.
    assert_bytes("rotatekv2", 100, 4 * (80 * 2 * (8 + 4) + 20 * (2 * 64 + 1) + 32))
    assert_bytes("rotatekv4", 300, 4 * (280 * 2 * (16 + 4) + 20 * (2 * 64 + 2) + 32))
    # Two layers as they are, and a pair: 95 directions with two norms, 5 pairs with an index.
    assert_bytes("minicache", 100, 2 * 2 * (2 * 100 * 32 + 95 * (32 + 4) + 5 * (64 + 1)))
    assert_bytes("xkv", 100, 2 * (100 + 128) * (16 + 24))
    assert_bytes("xkv", 10, 2 * (10 + 128) * (10 + 10))
    # Three layers in four bits; 100 tokens are one group.
    assert_bytes("xquant2", 100, 3 * codes + codes // 2 + 4 * 4 * (32 + 100))
    assert_bytes("xquant4", 300, 4 * (3 * codes + 4 * (3 * 32 + 300)))
    # As many codes, and the ends of 64 differences of a token.
    assert_bytes("xquantcl2", 100, 3 * codes + codes // 2 + 4 * 4 * 100)
    assert_bytes("xquantcl3", 100, 3 * codes + codes * 3 // 4 + 4 * 4 * 100)
    # What enters attention is narrower than a key and a value of all heads.
    assert TINY.hidden_size == 24
    assert PROMPT_CODECS["xquantcl4"].stored_bytes(TINY, 100) == 3 * 100 * (12 + 4)


@dataclasses.dataclass(frozen=True)
class Coded(PromptCodec):
    """A codec of the pool, of a whole prompt."""

    dtype: str = "int2"

    def layer(self, view, artefacts):
        assert view.v is not None
        codec = as_codec(self.dtype, "float32")
        k, v = (codec.decode(codec.encode(x)) for x in (view.k, view.v))
        return k, v

    def stored_bytes(self, shape, length):
        return 1000 + length


def test_peaks_are_there_for_what_reads_them(tiny_model, monkeypatch):
    asked = []

    def noted(*args, peaks):
        asked.append(peaks)
        return dense_pass(*args, peaks=peaks)

    monkeypatch.setattr(evaluator_module, "dense_pass", noted)
    evaluator = Evaluator(tiny_model, EvaluatorConfig(block_size=4, num_slots=1, free_tokens=0))
    for kind in ("kcvt4", "rotatekv4"):
        variants = [Variant("full", 1.0, kind)]
        results = run_row(evaluator, make_row(), ["chat"], variants)
        assert 0 < results["chat", variants[0].label, 1.0]["kl"] < 0.1
    assert asked == [False, True]


@pytest.mark.slow
def test_answers_are_read_from_what_comes_back(tiny_model, monkeypatch):
    """What reads a prompt in int2 reads it so, whoever stored it."""
    monkeypatch.setitem(PROMPT_CODECS, "mine", Coded())  # type: ignore[arg-type]
    evaluator = Evaluator(tiny_model, EvaluatorConfig(block_size=4, num_slots=1, free_tokens=4))
    kinds = (None, "int2", "mine", "xquant4")
    variants = [Variant("full", 1.0, kind) for kind in kinds]
    results = run_row(evaluator, make_row(), ["chat", "agnostic"], variants)
    for protocol in ("chat", "agnostic"):
        full, coded, mine, rebuilt = (results[protocol, v.label, 1.0] for v in variants)
        assert mine["nll"] == pytest.approx(coded["nll"], rel=1e-4)
        assert mine["kl"] == pytest.approx(coded["kl"], rel=1e-3)
        assert 0 < rebuilt["kl"] < coded["kl"]
        assert mine["kvs"] == full["kvs"] == 6 * mine["compressed_tokens"]
        # Eight bytes of numbers beside each KV, as with any type.
        assert mine["bytes"] == 1000 + mine["compressed_tokens"] + 8 * mine["kvs"]
        assert mine["bytes_full"] == full["bytes"]
        assert isinstance(mine["free_answer"], str)
    # The cut decides what is stored together.
    assert len({results[p, "full in xquant4", 1.0]["bytes"] for p in ("chat", "agnostic")}) == 2


def test_the_last_codec_is_kept_for_its_cut():
    dense, artefacts = prompt()
    asked = []

    def timed(key, fn, *args):
        asked.append(key)
        return jax.jit(fn)(*args), 1.5

    rows = PromptRows(timed, lambda codec: {}, dense, artefacts)
    assert rows.of(Variant("full", 1.0), 9) == (dense.k, dense.v, 0.0)
    variant = Variant("full", 1.0, "kcvt4")
    first = rows.of(variant, 9)
    assert rows.of(variant, 9) == first
    assert len(asked) == 1
    assert first[2] == 1.5
    # Fewer tokens, and their ends are closer together.
    assert np.abs(rows.of(variant, 30)[0][:, :9] - first[0][:, :9]).max() > 1e-3
    assert len(asked) == 2


def test_where_no_prompt_is_stored_whole_the_nearest_codec_is_named(tiny_model):
    assert set(OF_PROMPTS) == set(PROMPT_CODECS)
    assert {codec.name for codec in PROMPT_CODECS.values()} == set(PROMPT_CODECS)
    for name, nearest in OF_PROMPTS.items():
        as_codec(nearest, "float32")
        with pytest.raises(
            UserError, match=rf"^cache_dtype {name} stores .* give {nearest}, [^\n]*$"
        ):
            as_codec(name, "float32")
    evaluator = Evaluator(tiny_model, EvaluatorConfig(block_size=4, num_slots=2))
    with pytest.raises(
        UserError, match=r"^gear4 stores all KVs .* snapkv leaves some out: [^\n]*$"
    ):
        run_row(evaluator, make_row(), ["chat"], [Variant("snapkv", 4.0, "gear4")])
    with pytest.raises(
        UserError, match=r"^xkv looks at all heads .* which 2 devices share: [^\n]*$"
    ):
        Variant("full", 1.0, "xkv").check(2)
