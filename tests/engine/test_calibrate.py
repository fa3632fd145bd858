"""Calibration: the teacher against NumPy, files and failures."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams
from kvjax.cache.calibration import HEAD_LOAD, Calibration
from kvjax.cache.config import CALIBRATED, UNCALIBRATED
from kvjax.cache.methods.duo_heads import HEAD_BUDGET
from kvjax.cache.methods.kvzip import Repeated, repetitions
from kvjax.cache.methods.matched import REFERENCE_QUERY
from kvjax.cache.methods.predicted_reads import (
    CLAIM,
    CLAIM_LEVELS,
    EXTRA,
    LEAST,
    WEIGHT,
)
from kvjax.cache.methods.triattention import QUERY_CENTRE, QUERY_SIZE
from kvjax.engine.calibrate import CalibrationSettings, calibrate, loads, run, shelf
from kvjax.engine.calibrate.fit import (
    FIRST,
)
from kvjax.engine.calibrate.generated import KINDS, generated_text, planted
from kvjax.engine.calibrate.state import forget
from kvjax.engine.calibrate.teacher import Lesson, lesson
from kvjax.engine.calibrate.texts import GENERATED, default_texts
from kvjax.engine.probe import probe_artefacts, request_tokens
from kvjax.errors import UserError
from kvjax.eval.tasks.wordings import FACTS, KEYS, NEEDLES, PASSKEYS
from kvjax.models import load_model
from tests.oracle.repetition import repetition_scores
from tests.tiny import TINY

SETTINGS = CalibrationSettings(tokens=96, least_tokens=32, exercises=0)


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(weights=str(tiny_folder), dtype="float32")


TEXTS = [generated_text(i, lines=8) for i in range(12)]


@pytest.fixture(scope="module")
def fit(model):
    return calibrate(model, TEXTS, SETTINGS, recipe={"source": "made up"})


@pytest.mark.parametrize("plus", [False, True], ids=["kvzip", "kvzip-plus"])
def test_the_teacher_scores_as_published(model, tiny_folder, plus):
    hf = json.loads((tiny_folder / "config.json").read_text())
    config = model.config
    hf |= {"rope_theta": config.rope_theta, "rms_norm_eps": config.rms_norm_eps}
    hf["tie_word_embeddings"] = config.tie_word_embeddings
    rng = np.random.default_rng(2)
    text, request = rng.integers(0, 256, 37), rng.integers(0, 256, 5)
    expected = repetition_scores(hf, load_file(tiny_folder / "model.safetensors"), text, request)
    again = np.concatenate([request, text])
    found = jax.jit(lesson, static_argnums=(0, 1))(
        model.config,
        Repeated(first=len(request) if plus else 0, plus=plus),
        model.params,
        probe_artefacts(model.config, model.params),
        np.pad(text, (0, 11)).astype(np.int32),
        np.int32(len(text)),
        # More than is scored at once, most of it padding.
        np.pad(again, (0, 300 - len(again))).astype(np.int32),
        np.int32(len(again)),
        np.zeros(1, np.int32),
    )
    score = np.asarray(found.score)[..., : len(text)]
    np.testing.assert_allclose(score, expected[int(plus)], rtol=2e-4, atol=1e-7)
    assert not np.asarray(found.score)[..., len(text) :].any()


def test_what_asks_for_a_repetition_opens_a_turn(model):
    request = request_tokens(model.tokenizer)
    assert "Repeat the previous context exactly." in model.tokenizer.decode(request)
    parts = repetitions(request, np.arange(50, 91, dtype=np.int32), size=20)
    assert [len(part) - len(request) for part in parts] == [14, 14, 13]
    assert np.concatenate([part[len(request) :] for part in parts]).tolist() == [*range(50, 91)]
    assert all(part[: len(request)].tolist() == request for part in parts)


def test_a_calibration_says_what_it_is_and_how_good(fit, model):
    arrays = fit.calibration.arrays
    config = model.config
    assert arrays[WEIGHT].shape == (config.num_layers, config.hidden_size, config.num_kv_heads)
    assert arrays[EXTRA].shape == (config.num_layers, config.num_kv_heads, 5)
    assert (arrays[EXTRA][..., 4] == 95).all()
    assert arrays[CLAIM].shape == (config.num_layers, CLAIM_LEVELS)
    assert (np.diff(arrays[CLAIM][0]) <= 0).all()
    shape = (config.num_layers, config.num_kv_heads)
    assert arrays[HEAD_BUDGET].shape == shape
    assert arrays[HEAD_LOAD].shape == (*shape, len(loads.LOAD_RATES))
    np.testing.assert_allclose(arrays[HEAD_LOAD].mean((0, 1)), 1, rtol=1e-5)
    assert arrays[QUERY_CENTRE].shape == (config.num_layers, config.num_heads, config.head_dim)
    # A mean of sizes is no less than the size of a mean, and not much more here.
    centre = np.hypot(*np.split(arrays[QUERY_CENTRE], 2, axis=-1))
    assert (arrays[QUERY_SIZE] >= centre).all()
    assert arrays[QUERY_SIZE].max() < 10 * centre.max()
    assert fit.texts == 12
    # None of them both fitted and held out.
    assert fit.tokens == 12 * (96 - FIRST)
    assert fit.explained.shape == fit.rank_correlation.shape == (2, 2)
    assert 0 < fit.explained.mean() < 1
    assert fit.rank_correlation.mean() > 0.2
    shape = (config.num_layers, SETTINGS.references, config.num_heads, config.head_dim)
    assert arrays[REFERENCE_QUERY].shape == shape
    assert len(np.unique(arrays[REFERENCE_QUERY], axis=1)[0]) == SETTINGS.references
    recipe = fit.calibration.recipe
    assert (recipe["source"], recipe["texts"], recipe["tokens"]) == ("made up", "12", "96")


def test_heads_are_ranked_by_the_mean_of_their_scores(model):
    """Of all texts, fitted and held out, the first tokens left out."""
    rng = np.random.default_rng(8)
    learned = run._Learned.empty(model)
    config, sums, count = model.config, 0.0, 0
    for number, length in enumerate((40, 25, 60)):
        heads = (config.num_layers, config.num_kv_heads)
        score = rng.uniform(0.1, 1, (*heads, 64)).astype(np.float32)
        hidden = rng.standard_normal((config.num_layers, 64, config.hidden_size))
        arrays = (hidden.astype(np.float32), score + 1, score + 2, score, score, *no_queries(model))
        of = Lesson(*(jnp.asarray(array) for array in arrays))
        learned.add(number, of, length)
        sums, count = sums + score[..., FIRST:length].sum(axis=-1), count + length - FIRST
    np.testing.assert_allclose(learned.scores, sums, rtol=1e-5)
    assert learned.fitted.count + learned.held_out.count == count


def no_queries(model) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray]:
    config = model.config
    centre = jnp.zeros((config.num_layers, config.num_heads, config.head_dim))
    return centre, centre[..., ::2], centre[:, None]


def test_queries_are_those_before_rope(model, tiny_folder):
    """Of a layer's projection, which no rotation has met: their means, the first tokens left out,
    and those of the tokens that are written down."""
    config, rng = model.config, np.random.default_rng(7)
    lengths, learned = (40, 25), run._Learned.empty(model)
    teach = run._teacher(model, SETTINGS.tokens, 3)
    weights = load_file(tiny_folder / "model.safetensors")
    centre = size = 0.0
    written = set()
    for number, length in enumerate(lengths):
        of = jax.device_get(teach(rng.integers(0, 256, length), number))
        learned.add(number, of, length)
        for layer in range(config.num_layers):
            w = weights[f"model.layers.{layer}.self_attn.q_proj.weight"].astype(np.float64)
            q = (of.hidden[layer, FIRST:length] @ w.T).reshape(length - FIRST, config.num_heads, -1)
            half = q.shape[-1] // 2
            at = np.eye(config.num_layers)[layer][:, None, None]
            centre = centre + at * q.sum(axis=0)
            size = size + at * np.hypot(q[..., :half], q[..., half:]).sum(axis=0)
            for one in of.reference[layer]:
                far = np.abs(q - one).max(axis=(1, 2))
                assert far.min() < 1e-3
                assert (number, layer, int(far.argmin())) not in written
                written.add((number, layer, int(far.argmin())))
    # The same tokens in all layers, others of each text.
    of_text = [{at for n, _, at in written if n == number} for number in (0, 1)]
    assert [len(at) for at in of_text] == [3, 3]
    assert of_text[0] != of_text[1]
    np.testing.assert_allclose(learned.query, centre, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(learned.query_size, size, rtol=1e-3)


def test_a_run_that_was_stopped_goes_on(model, fit, tmp_path):
    state = tmp_path / "state"
    seen = []

    def stop(what, done, total):
        seen.append((what, done))
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, TEXTS, SETTINGS, state=state, progress=stop)
    assert state.is_file()
    again = []
    found = calibrate(
        model, TEXTS, SETTINGS, state=state, recipe={"source": "made up"},
        progress=lambda what, done, total: again.append((what, done, total)),
    )  # fmt: skip
    assert again[0] == ("calibrating", 8, 12)
    assert ("fitting", 12, 12) in again
    assert again[-1] == ("counting what heads keep", 11, 12)
    assert found.calibration.recipe == fit.calibration.recipe
    for name, array in fit.calibration.arrays.items():
        np.testing.assert_array_equal(found.calibration.arrays[name], array)
    np.testing.assert_array_equal(found.rank_correlation, fit.rank_correlation)
    # Its result may still get lost: only who has saved it forgets the state.
    again.clear()
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, TEXTS, SETTINGS, state=state, progress=_stop_at(12, again))
    assert again == [12]
    state.with_name("state.choice").touch()
    forget(state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["noise", "other texts"])
def test_a_state_that_does_not_fit_is_passed_over(model, tmp_path, how):
    state = tmp_path / "state"
    if how == "noise":
        state.write_bytes(b"PK\x03\x04 no state at all")
    else:
        with pytest.raises(KeyboardInterrupt):
            calibrate(model, TEXTS, SETTINGS, state=state, progress=_stop_at(8))
    seen = []
    texts = TEXTS[::-1] if how == "other texts" else TEXTS
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, texts, SETTINGS, state=state, progress=_stop_at(1, seen))
    assert seen[0] == 0


def _stop_at(number, seen=None):
    def stop(what, done, total):
        if seen is not None:
            seen.append(done)
        if done == number:
            raise KeyboardInterrupt

    return stop


def test_texts_that_are_too_few_or_short_are_refused(model):
    with pytest.raises(UserError, match=r"^1 of 3 texts have 32 tokens or more: give at least 2"):
        calibrate(model, ["", "short", TEXTS[0]], SETTINGS)


def test_texts_are_padded_to_the_longest_alone(model, monkeypatch):
    """However many tokens they may have."""
    seen = []

    def stop(model, tokens, references):
        seen.append(tokens)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_teacher", stop)
    longest = max(len(text.encode()) for text in TEXTS)
    for tokens in (96, 900):
        with pytest.raises(KeyboardInterrupt):
            calibrate(model, TEXTS, dataclasses.replace(SETTINGS, tokens=tokens))
    assert seen[0] == 96
    assert longest <= seen[1] < 900


def test_a_context_holds_a_text_and_its_repetition(model):
    request = len(request_tokens(model.tokenizer))
    most = (TINY.max_position_embeddings - request) // 2
    run._check_repeats(model, dataclasses.replace(SETTINGS, tokens=most))
    context = f"the context of {model.config.name} is 2048"
    says = f"tokens 100000: {context}, which .* repetition: give at most {most}$"
    with pytest.raises(UserError, match=says):
        calibrate(model, TEXTS, dataclasses.replace(SETTINGS, tokens=100_000))
    with pytest.raises(UserError, match=rf"tokens {most + 1}: "):
        calibrate(model, TEXTS, dataclasses.replace(SETTINGS, tokens=most + 1))
    # What has no repetition is as long as the context at most.
    run.chosen_prompts(model, TEXTS, dataclasses.replace(SETTINGS, tokens=2048))
    with pytest.raises(UserError, match=f"tokens 2049: {context}: give at most 2048"):
        run.chosen_prompts(model, TEXTS, dataclasses.replace(SETTINGS, tokens=2049))


def test_a_fit_that_is_no_better_than_a_constant_is_none(model, monkeypatch):
    def noise(model, tokens, references):
        rng = np.random.default_rng(1)

        def teach(ids, number):
            shape = (2, 2, 96)
            hidden = rng.standard_normal((2, 96, 32)).astype(np.float32)
            one = jnp.ones(shape)
            score = jnp.exp(jnp.asarray(rng.standard_normal(shape)))
            return Lesson(jnp.asarray(hidden), one, one, score, one / 2, *no_queries(model))

        return teach

    monkeypatch.setattr(run, "_teacher", noise)
    with pytest.raises(UserError, match="no more than a constant does; nothing is written"):
        calibrate(model, TEXTS, SETTINGS)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"ridge": float("nan")},
                                   {"least_tokens": 800}, {"claim_share": 1},
                                   {"exercises": -1}, {"exercise_tokens": 12},
                                   {"references": 0}])  # fmt: skip
def test_settings_out_of_range_are_refused_in_one_line(wrong):
    with pytest.raises(UserError) as caught:
        CalibrationSettings(**wrong)
    assert next(iter(wrong)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_made_up_texts_share_nothing_with_the_evaluation():
    texts = default_texts()
    assert len(texts) == 96
    assert len(set(texts)) == len(texts)
    assert default_texts(10) == texts[:10]
    assert generated_text(3) == generated_text(3) != generated_text(3 + len(KINDS))
    everything = "\n".join(texts)
    for split in ("dev", "test"):
        for wording in (*NEEDLES[split], *PASSKEYS[split], *FACTS[split]):
            for part in wording[0].split("{v}"):
                assert len(part) < 12 or part not in everything
    # Books may well speak of willows.
    made = [generated_text(i) for i in range(GENERATED)]
    assert not [key for key in KEYS if f" {key} " in "\n".join(made)]
    plain = "One. Two. Three. Four. Five."
    assert planted(plain, 1) != planted(plain, 2)
    assert len(planted(plain, 1).split(". ")) >= 9


def test_calibrations_are_found_made_and_kept(model, fit, monkeypatch, tmp_path):
    monkeypatch.setattr(shelf, "user_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(shelf, "QUICK", 4)
    assert shelf.find(model) is None
    assert shelf.load("none", model) is None
    made = shelf.make(model)
    kept = shelf.shelved(made.model_hash)
    assert kept.is_file()
    monkeypatch.setattr(shelf, "calibrate", lambda *args, **kwargs: pytest.fail("made twice"))
    found = shelf.load("auto", model)
    assert found is not None
    np.testing.assert_array_equal(found.arrays[WEIGHT], made.arrays[WEIGHT])
    kept.write_bytes(kept.read_bytes()[:100])
    assert shelf.find(model) is None
    other = dataclasses.replace(fit.calibration, model_hash="0" * 16)
    with pytest.raises(UserError, match="the calibration is of model"):
        shelf.load(other, model)
    assert shelf.load(fit.calibration, model) is fit.calibration


def test_weights_are_looked_at_where_a_calibration_may_be_theirs(model, fit, monkeypatch, tmp_path):
    monkeypatch.setattr(shelf, "user_cache_dir", lambda: tmp_path)
    fresh = dataclasses.replace(model)
    assert shelf.find(fresh) is None
    assert "fingerprint" not in vars(fresh)
    # One that ships with as many layers.
    fit.calibration.save(tmp_path / "ships.safetensors")
    monkeypatch.setattr(shelf, "shipped", lambda: [tmp_path / "ships.safetensors"])
    found = shelf.find(fresh)
    assert found is not None
    assert found.model_hash == fit.calibration.model_hash
    dataclasses.replace(fit.calibration, model_hash="0" * 16).save(tmp_path / "ships.safetensors")
    assert shelf.find(fresh) is None


def test_what_ships_is_a_calibration_of_its_model():
    assert [path.stem for path in shelf.shipped()] == ["qwen2.5-coder-0.5b", "smollm2-135m"]
    for path in shelf.shipped():
        found = Calibration.load(path)
        assert {WEIGHT, EXTRA, CLAIM, REFERENCE_QUERY, HEAD_LOAD} <= set(found.arrays)
        assert found.recipe["source"] == "this package's"
        assert path.stat().st_size < 1_000_000
        assert all(jnp.isfinite(jnp.asarray(x)).all() for x in found.arrays.values())


def test_a_method_that_is_calibrated_runs_in_an_engine(model, fit):
    compression = CompressionConfig(method="predicted-reads", max_cache_tokens=48)
    config = EngineConfig(max_batch=2, max_len=512, pool_tokens=1024, prefill_chunk=256)
    llm = LLM(model, compression, config, calibration=fit.calibration)
    llm.add_request(np.arange(150), SamplingParams(max_tokens=30, ignore_eos=True))
    while not (llm.scheduler.running and len(llm.scheduler.running[0].tokens) >= 3):
        llm.step()
    slot = llm.scheduler.running[0].slot
    cache = llm.worker.cache
    held = np.asarray(cache.context_len[slot])
    grown = len(llm.scheduler.running[0].tokens)
    assert 48 * 2 < held.sum() <= (48 + grown) * 4
    table, at = np.asarray(cache.block_table[slot]), np.asarray(cache.position)
    metric, claim = np.asarray(cache.metric), np.asarray(cache.state["claim"])[..., 0]
    generated = at[table[0, 0][table[0, 0] < len(at)]] >= 150
    own = metric[table[0, 0][table[0, 0] < len(at)]][generated]
    assert len(own)
    assert (own != 0).all()
    assert (claim[table[0, 0][table[0, 0] < len(at)]][generated] == LEAST).all()
    while llm.has_unfinished():
        llm.step()


def test_without_its_calibration_a_method_is_refused(model, fit):
    config = EngineConfig(max_batch=1, max_len=512, pool_tokens=1024, methods=("predicted-reads",))
    llm = LLM(model, None, config, calibration="none")
    for method, made_by in (
        ("predicted-reads", "calibrate`"),
        ("razor-attention", "calibrate --heads`"),
        ("kvzap-linear", "calibrate --import`"),
    ):
        compression = CompressionConfig(method=method, max_cache_tokens=48)
        said = f"^method {method} reads the calibrated array [^\n]* as `kvjax {made_by} makes it$"
        with pytest.raises(UserError, match=said):
            llm.add_request(np.arange(150), compression=compression)
    other = dataclasses.replace(fit.calibration, model_hash="0" * 16)
    with pytest.raises(UserError, match="the calibration is of model"):
        LLM(model, None, config, calibration=other)


def test_an_engine_chooses_what_its_calibration_allows(model, fit, monkeypatch, tmp_path):
    monkeypatch.setattr(shelf, "user_cache_dir", lambda: tmp_path)
    config = EngineConfig(max_batch=1, max_len=512, pool_tokens=1024)
    asked = CompressionConfig(max_cache_tokens=48)
    assert LLM(model, asked, config).compression.method == UNCALIBRATED
    shelved = shelf.shelved(model.fingerprint)
    shelved.parent.mkdir()
    fit.calibration.save(shelved)
    llm = LLM(model, asked, config)
    assert llm.compression == dataclasses.replace(asked, method=CALIBRATED)
    assert LLM(model, asked, config, calibration="none").compression.method == UNCALIBRATED
    # A request that leaves it open gets the engine's own.
    llm.add_request(np.arange(150), compression=CompressionConfig(max_cache_tokens=64))
    llm.step()
    (request,) = llm.scheduler.running
    assert request.compression == CompressionConfig(method=CALIBRATED, max_cache_tokens=64)
