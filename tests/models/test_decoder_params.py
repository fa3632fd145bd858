"""Parameters of models: shapes, initial values, checkpoint layout, memory."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import decoder
from kvjax.models.architectures import ARCHITECTURES
from kvjax.models.config import MODELS, ModelConfig
from kvjax.models.families import FAMILIES, family_of
from kvjax.models.layout import tensor_slots, undo_gguf_permutation
from tests.models.checkpoints import num_params
from tests.models.decoder_helpers import empty_cache, params_from, run, unstacked
from tests.models.test_config import PUBLISHED_MILLIONS

TINY = ModelConfig(
    name="tiny",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=False,
    attention_bias=True,
)
TINY_QWEN3 = dataclasses.replace(TINY, attention_bias=False, family="qwen3")
TINIES = (TINY, TINY_QWEN3)


def keys(path) -> tuple:
    """Names and layer numbers on a path through the parameters."""
    return tuple(entry.key for entry in path if hasattr(entry, "key"))


def named(params) -> dict[str, jax.Array]:
    """The arrays of stacked parameters by name."""
    return {keys(path)[-1]: leaf for path, leaf in jax.tree.leaves_with_path(params)}


def memory_of(lowered):
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    return memory


@pytest.mark.parametrize("name", MODELS)
def test_abstract_params_have_the_size_of_the_configuration(name):
    config = MODELS[name].config
    leaves = jax.tree.leaves(decoder.abstract_params(config, jnp.bfloat16))
    bias = config.num_layers * config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    total = sum(leaf.size for leaf in leaves)
    assert total == num_params(config)
    assert round(total / 1e6) == PUBLISHED_MILLIONS[name]
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert any(leaf.size == bias for leaf in leaves) == config.attention_bias


def test_every_architecture_has_a_family():
    assert {row.family for row in ARCHITECTURES} == FAMILIES.keys()


@pytest.mark.parametrize("config", TINIES, ids=lambda config: config.family)
@pytest.mark.parametrize("stacked", [True, False])
def test_init_matches_the_abstract_description(stacked, config):
    params = decoder.init_params(config, jnp.bfloat16, seed=3, stacked=stacked)
    abstract = decoder.abstract_params(config, jnp.bfloat16, stacked=stacked)
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, params, abstract)
    )
    axes = decoder.logical_axes(config, stacked)
    for path, leaf in jax.tree.leaves_with_path(abstract):
        assert len(axes.pop(keys(path))) == leaf.ndim
    assert not axes


def test_initial_values():
    config = dataclasses.replace(TINY, hidden_size=256, intermediate_size=512)
    params = decoder.init_params(config, jnp.float32, seed=1)
    again = decoder.init_params(config, jnp.float32, seed=1)
    other = decoder.init_params(config, jnp.float32, seed=2)
    family = family_of(config)
    tables = {**family.table(config), **family.layer_class.table(config)}
    drawn = []
    for name, leaf in named(params).items():
        values, std = np.asarray(leaf), tables[name].std
        if std is None:
            assert (values == 1).all()
            continue
        spread = 5 / np.sqrt(values.size)
        assert abs(values.mean()) < spread * std, name
        assert abs(values.std() / std - 1) < spread, name
        drawn.append(values.ravel()[:1000] / std)
        if values.shape[0] == config.num_layers:
            assert not np.array_equal(values[0], values[1]), name
    # No two parameters, nor two seeds, get the same stream.
    correlation = np.corrcoef([values[: min(map(len, drawn))] for values in drawn])
    assert (np.abs(correlation - np.eye(len(drawn))) < 0.3).all()
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, again)
    assert jax.tree.all(same)
    assert not np.array_equal(named(params)["embed"], named(other)["embed"])


def test_stacked_or_not_the_numbers_are_the_same():
    stacked = decoder.init_params(TINY, jnp.float32, seed=5)
    single = decoder.init_params(TINY, jnp.float32, seed=5, stacked=False)
    assert decoder.is_stacked(stacked)
    assert not decoder.is_stacked(single)
    split = unstacked(stacked)
    assert jax.tree.structure(split) == jax.tree.structure(single)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), split, single))


@pytest.mark.parametrize("config", TINIES, ids=lambda config: config.family)
@pytest.mark.parametrize("tied", [True, False])
def test_checkpoint_slots_fill_every_parameter_once(tied, config):
    config = dataclasses.replace(config, tie_word_embeddings=tied)
    counter = iter(range(1, 10**6))

    def read(name: str) -> np.ndarray:
        shape = next(s.file_shape for s in tensor_slots(config) if s.hf_name == name)
        return np.full(shape, next(counter), np.float32)

    params = params_from(config, read)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    assert not any(np.isnan(leaf).any() for leaf in leaves)
    filled = sum(np.prod(s.file_shape) for s in tensor_slots(config))
    assert filled == sum(leaf.size for leaf in leaves)
    slots = list(tensor_slots(config))
    assert len({s.hf_name for s in slots}) == len({s.gguf_name for s in slots}) == len(slots)


def test_gguf_rows_are_put_back_into_halves():
    halves = np.arange(2 * 6 * 3).reshape(12, 3)  # 2 heads, d = 6
    paired = halves.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)
    assert paired[:2, 0].tolist() == [0, 9]
    np.testing.assert_array_equal(undo_gguf_permutation(paired, 2), halves)


@pytest.mark.usefixtures("unchecked_signatures")
def test_positions_must_match_tokens():
    params = decoder.init_params(TINY, jnp.float32)
    with pytest.raises(ValueError, match=r"one shape \[B, T\], got \(1, 4\) and \(4,\)"):
        decoder.forward(
            TINY,
            params,
            jnp.zeros((1, 4), jnp.int32),
            jnp.zeros(4, jnp.int32),
            lambda *_: None,  # pyright: ignore[reportArgumentType]
            None,
        )


def test_loops_over_layers_are_for_cpus_alone():
    """On GPUs the host would wait at every branch."""
    assert [p for p in ("cpu", "gpu", "tpu") if decoder.chooses_layers(p)] == ["cpu"]


@pytest.mark.parametrize("layers", ["scan", "chosen", "unrolled"])
def test_aux_is_stacked_over_layers(layers, monkeypatch):
    params = decoder.init_params(TINY, jnp.float32)
    tokens = jnp.zeros((2, 4), jnp.int32)

    def attend(carry, layer, q, k, v, _):
        return carry + 1, jnp.zeros_like(q), {"k": k, "layer": layer}

    monkeypatch.setattr(decoder, "chooses_layers", lambda _: layers == "chosen")
    state = params if layers == "scan" else unstacked(params)
    _, count, aux = decoder.forward(TINY, state, tokens, tokens, attend, 0)
    assert int(count) == TINY.num_layers
    assert aux["k"].shape == (3, 2, 4, 2, 8)
    assert aux["layer"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("layers", "times"), [("scan", 1), ("chosen", 1), ("unrolled", 3)])
def test_attention_is_compiled_once_where_layers_run_in_a_loop(layers, times, monkeypatch):
    monkeypatch.setattr(decoder, "chooses_layers", lambda _: layers == "chosen")
    params = decoder.abstract_params(TINY, jnp.float32, stacked=layers == "scan")
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def attend(carry, layer, q, k, v, _):
        return carry, jnp.tan(q), None

    def run(params, tokens):
        return decoder.forward(TINY, params, tokens, tokens, attend, ())[0]

    program = jax.jit(run).lower(params, token).compile().as_text()
    assert program is not None
    assert len(re.findall(r"= \S+ tan\(", program)) == times
    assert ("conditional(" in program) == (layers == "chosen")


@pytest.mark.parametrize("layers", ["scan", "chosen", "unrolled"])
def test_a_decode_step_copies_neither_the_carry_nor_unstacked_weights(layers, monkeypatch):
    monkeypatch.setattr(decoder, "chooses_layers", lambda _: layers == "chosen")
    stacked = layers == "scan"
    config = dataclasses.replace(
        TINY, hidden_size=256, intermediate_size=1024, num_layers=4, tie_word_embeddings=True
    )
    params = decoder.abstract_params(config, jnp.float32, stacked)
    cache = jax.eval_shape(functools.partial(empty_cache, config, 1, 65_536))
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    step = jax.jit(run, static_argnums=(0, 3), donate_argnums=4)
    memory = memory_of(step.lower(config, params, token, 60_000, cache))
    largest = max(leaf.size // (4 if stacked else 1) for leaf in jax.tree.leaves(params)) * 4
    # The dense callback of this test reads one layer of the cache and makes one layer of scores.
    read = cache[0].size * 4 // config.num_layers * 2 + 65_536 * config.num_heads * 4 * 4
    assert memory.alias_size_in_bytes == 2 * cache[0].size * 4
    assert memory.temp_size_in_bytes < read + (2 * largest if stacked else largest // 4)


def test_init_makes_no_second_copy():
    config = dataclasses.replace(TINY, hidden_size=256, vocab_size=8192)
    build = jax.jit(lambda seed: decoder._build(config, jnp.float32, seed, True))
    memory = memory_of(build.lower(np.uint32(0)))
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes // 20
