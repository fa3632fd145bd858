"""Prompts of which layers drop tokens: prefill, engine and evaluation, beside NumPy."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from kvjax.cache import CompressionConfig, get_method
from kvjax.cache.policy import Observer, Pruner
from kvjax.engine import LLM, EngineConfig
from kvjax.engine.narrowing import prefill_narrowing
from kvjax.engine.prefill import prefill
from kvjax.errors import UserError
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.rows import Row
from kvjax.eval.sizes import EvaluatorConfig, Variant
from kvjax.models import load_model
from kvjax.models.config import ModelConfig
from tests.engine.serving import assert_empty, greedy
from tests.models.decoder_helpers import params_from, unstacked
from tests.oracle import transformer
from tests.oracle.narrowing import Narrowing, recent, rows
from tests.tiny import TINY, write_tiny

LENGTH, LAST, B = 200, 0.6, 4
DEEP: ModelConfig = dataclasses.replace(TINY, num_layers=5)
PROMPT = np.random.default_rng(9).integers(0, 256, LENGTH).astype(np.int32)
NAME = "pyramidinfer-60"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep")
    write_tiny(folder, DEEP)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(weights=folder)


@pytest.fixture(scope="module")
def reference(folder):
    """Logits, keys and values of the prompt with some tokens behind it, and each layer's tokens."""
    hf = json.loads((folder / "config.json").read_text())
    hf |= {"rope_theta": DEEP.rope_theta, "rms_norm_eps": DEEP.rms_norm_eps}
    hf["tie_word_embeddings"] = DEEP.tie_word_embeddings
    weights = load_file(folder / "model.safetensors")

    @functools.cache
    def run(*behind: int, length: int = LENGTH, last: float = LAST):
        chosen = Narrowing(length, DEEP.num_layers, last)

        def pass_on(layer, attention):
            # Those behind the prompt come after all its layers: they choose nothing, and all stay.
            held = attention.shape[1] - len(behind)
            stay = chosen(layer, attention[:, :held, :held])
            return np.concatenate([stay, held + np.arange(len(behind))])

        tokens = np.concatenate([PROMPT[:length], np.asarray(behind, np.int32)])
        at = np.arange(len(tokens))
        logits, projected = transformer.forward(hf, weights, tokens, at, pass_on=pass_on)
        return logits, projected, chosen.positions

    return run


@functools.cache
def compiled(config, observer, pruner):
    return jax.jit(functools.partial(prefill_narrowing, config, observer, pruner))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("width", [LENGTH, 256])
def test_each_layer_has_what_is_left_and_computes_nothing_else(
    folder, model, reference, stacked, width
):
    params = model.params
    if stacked:
        tensors = load_file(folder / "model.safetensors")
        params = params_from(DEEP, tensors.__getitem__)
        assert jax.tree.structure(unstacked(params)) == jax.tree.structure(model.params)
    tokens = np.zeros(width, np.int32)
    tokens[:LENGTH] = PROMPT
    tokens[LENGTH:] = 7
    run = compiled(DEEP, Observer(None), Pruner(decay=LAST))
    prompt, logits = run(params, {}, tokens, np.int32(LENGTH))
    want, projected, positions = reference()
    held = rows(LENGTH, DEEP.num_layers, LAST)
    assert held[0] == LENGTH > held[2] > held[3] > held[4]
    assert np.asarray(prompt.rows).tolist() == held
    for layer, count in enumerate(held):
        assert np.asarray(prompt.token)[layer, :count].tolist() == positions[layer].tolist()
        assert (np.asarray(prompt.token)[layer, count:] == -1).all()
        for found, true in zip((prompt.k, prompt.v), projected[layer][1:], strict=True):
            np.testing.assert_allclose(found[layer, :count], true, atol=2e-4)
    np.testing.assert_allclose(logits, want[-1], atol=2e-4)


def test_a_short_prompt_loses_nothing(model):
    tokens, length = np.zeros(96, np.int32), np.int32(70)
    tokens[:70] = PROMPT[:70]
    prompt, logits = compiled(DEEP, Observer(None), Pruner(decay=LAST))(
        model.params, {}, tokens, length
    )
    whole, plain = jax.jit(functools.partial(prefill, DEEP, Observer(None)))(
        model.params, {}, tokens, length
    )
    assert np.asarray(prompt.rows).tolist() == [70] * DEEP.num_layers
    np.testing.assert_allclose(prompt.k[:, :70], whole.k[:, :70], atol=1e-5)
    np.testing.assert_allclose(logits, plain, atol=1e-5)


def test_later_layers_are_compiled_for_fewer_rows(model):
    """Of a whole prompt's products, those of the MLP shrink as the plan says."""
    args = model.params, {}, np.zeros(256, np.int32), np.int32(LENGTH)
    pruner = Pruner(decay=LAST)
    plan = pruner.plan(DEEP.num_layers, 256)
    assert [stage.width for stage in plan.stages] == sorted(
        {stage.width for stage in plan.stages}, reverse=True
    )
    assert len(plan.stages) > 1
    text = compiled(DEEP, Observer(None), pruner).lower(*args).as_text()
    for stage in plan.stages:
        assert f"tensor<{stage.width}x{DEEP.intermediate_size}xf32>" in text.replace("1x", "")


@given(
    length=st.integers(0, 600),
    room=st.integers(0, 200),
    num_layers=st.integers(1, 40),
    last=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_layers_have_fewer_and_fewer_tokens(length, room, num_layers, last):
    pruner, width = Pruner(decay=last), length + room
    found = pruner.rows(num_layers, length)
    assert found[:-1].tolist() == rows(length, num_layers, last)
    assert (np.diff(found) <= 0).all()
    assert found[-1] >= min(length, recent(length) + 65)
    plan = pruner.plan(num_layers, width)
    assert plan.rows[:, length].tolist() == found.tolist()
    assert plan.recent[length] == recent(length)
    assert plan.stages[0] == dataclasses.replace(plan.stages[0], first=0, width=width)
    for layer in range(num_layers):
        stage = [stage for stage in plan.stages if stage.first <= layer][-1]
        # However long a prompt of this width is, its tokens have room.
        assert stage.width >= plan.rows[layer].max()


@given(
    seed=st.integers(0, 2**31),
    count=st.integers(100, 160),
    newest=st.integers(1, 30),
    goes=st.integers(0, 30),
)
def test_sinks_and_the_newest_stay_in_order(seed, count, newest, goes):
    received = np.random.default_rng(seed).integers(0, 5, 160).astype(np.float32)
    sizes = (jnp.int32(x) for x in (count, newest, count - goes))
    stay = np.asarray(Pruner().stay(jnp.asarray(received), *sizes))
    assert ((stay >= 0) & (stay < 160)).all()
    stay = stay[: count - goes].tolist()
    context = range(4, count - newest)
    best = sorted(sorted(context, key=lambda t: (-received[t], t))[: len(context) - goes])
    assert stay == [*range(4), *best, *range(count - newest, count)]


def test_newer_queries_count_more():
    weight = Pruner().query_weight(jnp.int32(8), jnp.int32(3), 10)
    np.testing.assert_allclose(weight, [0] * 5 + [1, 1.1, 1.2, 0, 0], rtol=1e-6)
    alone = Pruner().query_weight(jnp.int32(1), jnp.int32(1), 2)
    np.testing.assert_allclose(alone, [1, 0])


def engine(model, compression, **sizes) -> LLM:
    given = {"prefill_scratch": 256, "prefill_chunk": 64, "decode_steps_per_sync": 1, **sizes}
    config = EngineConfig(max_batch=2, max_len=512, block_size=B, pool_tokens=700, **given)
    return LLM(model, compression, config)


def test_the_engine_holds_what_each_layer_has_and_goes_on_from_it(model, reference):
    llm = engine(model, CompressionConfig(f"{NAME}:full"))
    out = llm.generate(PROMPT, greedy(5))[0]
    logits, _, positions = reference(*out.token_ids)
    assert out.token_ids == tuple(logits[-6:-1].argmax(axis=-1))
    held = rows(LENGTH, DEEP.num_layers, LAST)
    assert out.stats.kept is not None
    assert out.stats.kept.tolist() == [[count] * DEEP.num_kv_heads for count in held]
    assert out.stats.blocks_after == DEEP.num_kv_heads * sum(-(-count // B) for count in held)
    assert out.stats.blocks_after < out.stats.blocks_before
    assert [len(p) for p in positions] == held
    assert_empty(llm)


@pytest.mark.parametrize(
    "base",
    [
        "pyramidinfer",
        pytest.param(f"{NAME}:snapkv", marks=pytest.mark.slow),
        pytest.param(f"{NAME}:h2o", marks=pytest.mark.slow),
    ],
)
def test_a_budget_is_kept_of_what_is_left(model, reference, base):
    llm = engine(model, CompressionConfig(base, max_cache_tokens=64))
    request = llm.add_request(PROMPT, greedy(3), report_kept=True)
    outputs = {}
    while not outputs or not outputs[request].finished:
        outputs |= {out.request_id: out for out in llm.step()}
    kept = outputs[request].stats.kept_tokens
    assert kept is not None
    *_, positions = reference(last=0.9 if base == "pyramidinfer" else LAST)
    for layer, there in enumerate(positions):
        assert not kept[layer][:, np.setdiff1d(np.arange(LENGTH), there)].any()
    blocks = (-(-kept.sum(-1) // B)).sum()
    assert blocks <= 64 // B * DEEP.num_layers * DEEP.num_kv_heads
    assert kept[..., -8:].all()
    assert_empty(llm)


def test_scores_of_layers_that_lack_tokens(model, reference):
    """SnapKV's and H2O's scores are of the tokens that a layer has, by where these were."""
    _, projected, positions = reference()
    for name, window in (("snapkv", 8), ("h2o", LENGTH)):
        observer = get_method(name).observer
        tokens = np.zeros(224, np.int32)
        tokens[:LENGTH] = PROMPT
        run = compiled(DEEP, observer, Pruner(decay=LAST))
        prompt, _ = run(model.params, {}, tokens, np.int32(LENGTH))
        for layer, at in enumerate(positions):
            q, k, _ = projected[layer]
            n, group = len(at), DEEP.group_size
            for head in range(DEEP.num_kv_heads):
                logits = np.stack(
                    [q[:, head * group + r] @ k[:, head].T for r in range(group)]
                ) / np.sqrt(DEEP.head_dim)
                logits[:, ~np.tri(n, dtype=bool)] = -np.inf
                p = np.exp(logits - logits.max(-1, keepdims=True))
                given = (p / p.sum(-1, keepdims=True))[:, -window:].sum(1)
                want = given.sum(0) if name == "h2o" else given.mean(0)
                if name == "snapkv":
                    before = at < at[-8]
                    near = np.abs(at[:, None] - at) <= 3
                    pooled = np.where(near & before, want, -np.inf).max(1)
                    want = np.where(before, pooled, want)
                found = prompt.scores.metric[layer, head, :n]
                np.testing.assert_allclose(found, want, atol=1e-4)


@pytest.mark.slow
def test_evaluation_runs_the_prefill_that_prunes(model):
    run = compiled(DEEP, Observer(None), Pruner(decay=LAST))
    plain = jax.jit(functools.partial(prefill, DEEP, Observer(None)))
    for seed in range(40):
        text = np.random.default_rng(seed).integers(97, 123, LENGTH).astype(np.int32)
        padded = np.pad(text, (0, 56))
        said, full = (
            int(np.argmax(step(model.params, {}, padded, np.int32(LENGTH))[1]))
            for step in (run, plain)
        )
        if said != full and 33 <= said < 127:
            break
    else:
        pytest.fail("both caches say the same of every text")
    row = Row("one", "task", LENGTH, "", bytes(text.tolist()).decode(), "", "", "", chr(said))
    evaluator = Evaluator(model, EvaluatorConfig(block_size=B, num_slots=4, free_tokens=0))
    variants = [Variant("full", 1.0), Variant(f"{NAME}:full", 1.0), Variant("pyramidinfer", 4.0)]
    found = {
        result["method"]: result
        for batch in evaluator.evaluate(row, evaluator.tokenise(row), {"prompt": variants})
        for result in batch
    }
    # The first word is the prompt's own as it was pruned, not the full cache's.
    assert found["full"]["em"] == 0
    assert found[f"{NAME}:full"]["em"] == 1
    heads = DEEP.num_kv_heads
    assert found["full"]["kvs"] == heads * DEEP.num_layers * LENGTH
    assert found[f"{NAME}:full"]["kvs"] == heads * sum(rows(LENGTH, DEEP.num_layers, LAST))
    assert found["pyramidinfer"]["kvs"] <= heads * DEEP.num_layers * LENGTH / 4
    assert found["pyramidinfer"]["seconds"]["prefill"] != found["full"]["seconds"]["prefill"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pyramidinfer:pyramidinfer", "does not prune by itself"),
        ("pyramidinfer-80:kvzip", "layers that lack tokens"),
        ("pyramidinfer:kvcrush:snapkv", "plain selector"),
        ("pyramidinfer:matched:kv-compress", "no merger"),
        ("matched:pyramidinfer", "no merger"),
        ("pyramidinfer-x:snapkv", "no method"),
        ("pyramidinfer:nothing", "no method"),
    ],
)
def test_what_does_not_go_with_it_is_refused(name, says):
    with pytest.raises(UserError, match=says):
        get_method(name)


def test_a_pruner_that_cannot_be_is_refused():
    bad: dict[str, Any] = {"decay": 1.5, "recent": -1, "sinks": 65, "least": -1}
    for name, value in bad.items():
        with pytest.raises(UserError, match=name):
            Pruner(**{name: value})


def test_prompts_that_do_not_run_whole_are_refused(model):
    llm = engine(model, CompressionConfig("pyramidinfer"), prefill_scratch=128)
    with pytest.raises(UserError, match="prefill_scratch is 128"):
        llm.add_request(PROMPT, greedy(3))
    with pytest.raises(UserError, match="tensor_parallel 2"):
        engine(model, CompressionConfig("pyramidinfer"), tensor_parallel=2)


@pytest.mark.slow
def test_warming_up_compiles_it(model):
    llm = engine(model, CompressionConfig("pyramidinfer", max_cache_tokens=64))
    llm.warm_up([LENGTH])
    steps = set(llm.worker.compiled.seconds)
    assert any(key.step == "prefill narrowing" for key in steps)
    llm.generate(PROMPT, greedy(2))
    assert set(llm.worker.compiled.seconds) == steps


def test_it_shares_no_prefix(model):
    llm = engine(model, CompressionConfig(f"{NAME}:full"), share_prefix="always")
    outs = [llm.generate(PROMPT, greedy(2))[0] for _ in range(2)]
    assert outs[0].token_ids == outs[1].token_ids
    assert outs[1].stats.cached_tokens == 0
