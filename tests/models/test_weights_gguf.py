"""GGUF files: every quantisation, llama.cpp's row order, metadata, rotary scaling, bad files."""

import contextlib
import dataclasses
import struct
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.errors import UserError
from kvjax.models.config import RopeScaling, get_model_entry
from kvjax.models.decoder import abstract_params
from kvjax.models.rope import rope_frequencies
from kvjax.models.weights import config_from_gguf, fill, load_params
from kvjax.models.weights.gguf import SUPPORTED_TYPES, dequantize
from kvjax.models.weights.gguf_header import read_gguf_header
from tests.models.checkpoints import (
    CONFIG,
    QWEN3,
    assert_params,
    expected_params,
    random_tensors,
    write_gguf,
)
from tests.oracle import transformer as oracle

QUANTISED = [name for name in SUPPORTED_TYPES if name not in ("F32", "F16", "BF16")]


def random_blocks(type_name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random valid blocks [rows, bytes]: small finite scales, everything else at random."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    scales = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [size - 2]}
    for at in scales.get(type_name, [0]):
        values = rng.uniform(-0.1, 0.1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = values[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", CONFIG, random_tensors(CONFIG))


@pytest.mark.parametrize("stacked", [True, False])
def test_float32_file(tiny: Path, stacked: bool) -> None:
    config, params = load_params(tiny, stacked=stacked)
    assert dataclasses.replace(config, name="tiny") == CONFIG
    expected = expected_params(CONFIG, random_tensors(CONFIG))
    if not stacked:
        assert jax.tree.structure(params) == jax.tree.structure(
            abstract_params(config, jnp.float32, stacked=False)
        )
        expected = {
            path if i is None else (path[0], i, path[1]): value if i is None else value[i]
            for path, value in expected.items()
            for i in (range(CONFIG.num_layers) if path[0] == "layers" else [None])
        }
    else:
        assert jax.tree.structure(params) == jax.tree.structure(
            abstract_params(config, jnp.float32)
        )
    assert_params(params, expected)


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_every_type(tmp_path: Path, type_name: str) -> None:
    """Matrices of the type, norms in float32; the whole equals the gguf package's result."""
    type_ = gguf.GGMLQuantizationType[type_name]
    values = random_tensors(CONFIG)
    stored: dict[str, Any] = {}
    for seed, (name, value) in enumerate(values.items()):
        if value.ndim == 1:
            stored[name] = value
            continue
        if type_name.endswith("_K"):
            raw = random_blocks(type_name, *value.shape, seed=seed)
        else:
            raw = gguf.quantize(value, type_)
        stored[name] = (type_name, raw)
        values[name] = gguf.dequantize(raw, type_).reshape(value.shape)
        if not type_name.endswith("_K"):
            error = np.abs(values[name] - random_tensors(CONFIG)[name]).max()
            assert error < 0.5, "the reference is not the tensor that was stored"
    path = write_gguf(tmp_path / "typed.gguf", CONFIG, stored)
    assert type_name in {t.type_name for t in read_gguf_header(path).tensors.values()}
    _, params = load_params(path)
    assert_params(params, expected_params(CONFIG, values))


def test_in_pieces(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of real models are read some rows at a time; these are small enough for one piece."""
    monkeypatch.setattr(fill, "_PIECE", 1000)
    assert_params(load_params(tiny)[1], expected_params(CONFIG, random_tensors(CONFIG)))


@pytest.mark.parametrize("weight_dtype", [None, "int8"])
@pytest.mark.parametrize("heads", [1, 8])
def test_a_single_kv_head_in_pieces(
    tmp_path: Path, heads: int, weight_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are put back into order as a whole."""
    config = dataclasses.replace(CONFIG, num_heads=heads, num_kv_heads=1)
    values = random_tensors(config)
    path = write_gguf(tmp_path / "one.gguf", config, values)
    whole = load_params(path, weight_dtype=weight_dtype)[1]
    monkeypatch.setattr(fill, "_PIECE", 1000)
    found = load_params(path, weight_dtype=weight_dtype)[1]
    jax.tree.map(np.testing.assert_array_equal, found, whole)
    if weight_dtype is None:
        assert_params(found, expected_params(config, values))


@pytest.mark.parametrize("type_name", QUANTISED)
@pytest.mark.parametrize("rows", [1, 64, 67])
def test_dequantize_in_steps(type_name: str, rows: int) -> None:
    """Regrouped rows give the bits that the gguf package gives on the whole tensor."""
    raw = random_blocks(type_name, rows, 1024)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(dequantize(raw.reshape(-1), type_name), expected.reshape(-1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts(tiny: Path, dtype: str) -> None:
    _, params = load_params(tiny, dtype=dtype)
    exact = expected_params(CONFIG, random_tensors(CONFIG))
    for path, leaf in nnx.to_flat_state(params):
        expected = exact[path].astype(jnp.dtype(dtype))
        assert leaf[...].dtype == dtype
        np.testing.assert_array_equal(np.asarray(leaf[...]), expected)


def test_qwen2_biases_keep_their_order(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, attention_bias=True, tie_word_embeddings=True)
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "qwen.gguf", config, tensors, "qwen2")
    found, params = load_params(path)
    assert dataclasses.replace(found, name="tiny") == config
    assert_params(params, expected_params(config, tensors))


def test_qwen3_has_norms_of_heads(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN3)
    found, params = load_params(write_gguf(tmp_path / "q.gguf", QWEN3, tensors, "qwen3"))
    assert dataclasses.replace(found, name="tiny") == QWEN3
    assert_params(params, expected_params(QWEN3, tensors))


def test_llama_biases_are_permuted(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, attention_bias=True)
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "biased.gguf", config, tensors, "llama")
    _, params = load_params(path)
    assert_params(params, expected_params(config, tensors))


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(8.0),
        RopeScaling(32.0),
        RopeScaling(4.0, 1.0, 2.0, 512),
        RopeScaling(16.0, 1.0, 3.5, 300),
        None,
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rope_scaling_comes_back(
    tmp_path: Path, scaling: RopeScaling | None, head_dim: int
) -> None:
    """llama.cpp stores Llama 3.1's scaling as divisors; they give the same frequencies again."""
    config = dataclasses.replace(
        CONFIG,
        head_dim=head_dim,
        num_heads=2,
        num_kv_heads=1,
        hidden_size=256,
        rope_theta=500_000.0,
        rope_scaling=scaling,
    )
    hf: dict[str, Any] = {"head_dim": head_dim, "rope_theta": 500_000.0}
    plain = oracle.rope_frequencies(hf)
    if scaling is not None:
        hf["rope_scaling"] = dataclasses.asdict(scaling)
    factors = (plain / oracle.rope_frequencies(hf)).astype(np.float32)
    path = write_gguf(
        tmp_path / "scaled.gguf",
        config,
        random_tensors(config),
        extra={"rope_freqs.weight": factors},
    )
    found, _ = load_params(path)
    assert found.rope_theta == 500_000.0
    np.testing.assert_allclose(rope_frequencies(found), plain / factors, rtol=1e-4)
    if scaling in (None, RopeScaling(8.0), RopeScaling(32.0)):
        assert found.rope_scaling == scaling


def test_header_matches_the_gguf_package(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "test.text": "grüße 日本",
        "test.float": 1.5,
        "test.ints": [1, -2, 3],
        "test.floats": [0.5, 0.25],
        "test.strings": ["a", "", "ß" * 3000],
    }
    path = write_gguf(tmp_path / "h.gguf", CONFIG, random_tensors(CONFIG), metadata=metadata)
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        value = header.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = header.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.offset, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_real_model(smollm2_path: Path) -> None:
    """SmolLM2: its metadata give the named configuration, its weights the gguf package's."""
    config, params = load_params(smollm2_path)
    assert dataclasses.astuple(config) == (
        *("Smollm2 135M 8k Lc100K Mix1 Ep2", 49152, 576, 1536, 30, 9, 3, 64),
        *(100_000.0, None, 1e-5, 8192, True, False, "llama", None),
    )
    entry = get_model_entry("smollm2-135m")
    assert dataclasses.replace(config, name=entry.config.name) == entry.config
    tensors, raw = read_gguf_header(smollm2_path).tensors, smollm2_path.read_bytes()
    loaded = {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}

    def stored(name: str) -> np.ndarray:
        tensor = tensors[name]
        data = np.frombuffer(raw, np.uint8, tensor.num_bytes, tensor.offset)
        type_ = gguf.GGMLQuantizationType[tensor.type_name]
        return gguf.dequantize(data.reshape(tensor.shape[0], -1), type_)

    np.testing.assert_array_equal(loaded[("embed",)], stored("token_embd.weight"))
    np.testing.assert_array_equal(
        loaded["layers", "gate_up"][7, :, 1].T, stored("blk.7.ffn_up.weight")
    )


# --- bad files ------------------------------------------------------------------------------


def failure(path: Path, **arguments: Any) -> str:
    """The message of the UserError that loading gives: one line that names the file."""
    with pytest.raises(UserError) as caught:
        load_params(path, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_bytes(b"not a model at all" * 10)
    assert "not a GGUF file" in failure(path)
    path.write_bytes(b"")
    assert "not a GGUF file" in failure(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "version 1" in failure(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "big-endian" in failure(path)


def test_truncated_anywhere(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    end_of_header = read_gguf_header(tiny).metadata_end
    rng = np.random.default_rng(0)
    cuts = [4, 8, 23, 24, end_of_header, len(whole) - 1]
    cuts += rng.integers(24, end_of_header, 40).tolist()
    cuts += rng.integers(end_of_header, len(whole), 40).tolist()
    path = tmp_path / "cut.gguf"
    for cut in cuts:
        path.write_bytes(whole[:cut])
        assert "truncated" in failure(path) or cut < 4


def test_damaged_header(tiny: Path, tmp_path: Path) -> None:
    """Flipped bytes of the header give a UserError or a model, never another exception."""
    whole = bytearray(tiny.read_bytes())
    data_start = min(tensor.offset for tensor in read_gguf_header(tiny).tensors.values())
    rng = np.random.default_rng(1)
    path = tmp_path / "flipped.gguf"
    for _ in range(300):
        damaged = bytearray(whole)
        for position in rng.integers(4, data_start, rng.integers(1, 4)):
            damaged[position] = rng.integers(0, 256)
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            load_params(path)


def test_other_architectures(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "g.gguf", CONFIG, random_tensors(CONFIG), "gemma2")
    message = failure(path)
    assert "'gemma2'" in message
    assert "llama, qwen2, qwen3" in message
    for metadata, word in (
        ({"llama.expert_count": 8}, "mixture"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "'yarn'"),
        ({"llama.rope.scale_linear": 2.0}, "'linear' by 2.0"),
        ({"llama.rope.dimension_count": 16}, "dimension_count"),
        ({"llama.attention.key_length": "wide"}, "not a number"),
        ({"llama.expert_used_count": 2, "llama.expert_count": [0, 8]}, "differs between layers"),
    ):
        path = write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), metadata=metadata)
        assert word in failure(path)
    odd = np.linspace(1, 3, CONFIG.head_dim // 2, dtype=np.float32) ** 2
    path = write_gguf(
        tmp_path / "r.gguf", CONFIG, random_tensors(CONFIG), extra={"rope_freqs.weight": odd}
    )
    assert "rope_freqs.weight" in failure(path)


def test_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "missing.gguf", CONFIG, tensors)
    assert "blk.1.ffn_up.weight is missing" in failure(path)
    path = write_gguf(
        tmp_path / "extra.gguf",
        CONFIG,
        random_tensors(CONFIG),
        extra={"blk.0.attn_q_norm.weight": np.ones(4, np.float32)},
    )
    assert "blk.0.attn_q_norm.weight" in failure(path)


def test_shapes_that_disagree(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    tensors["model.layers.0.mlp.down_proj.weight"] = np.ones((256, 256), np.float32)
    path = write_gguf(tmp_path / "shape.gguf", CONFIG, tensors)
    message = failure(path)
    assert "blk.0.ffn_down.weight has shape [256, 256]" in message
    assert "[256, 512]" in message


def test_another_model_than_asked_for(tiny: Path) -> None:
    message = failure(tiny, config=dataclasses.replace(CONFIG, num_kv_heads=4, name="other"))
    assert "is not other" in message
    assert "num_kv_heads is 2" in message


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_weights_are_named(tmp_path: Path, value: float) -> None:
    tensors: dict[str, Any] = random_tensors(CONFIG)
    tensors["model.layers.1.self_attn.k_proj.weight"][7, 9] = value
    path = write_gguf(tmp_path / "nan.gguf", CONFIG, tensors)
    message = failure(path)
    assert "blk.1.attn_k.weight holds NaN or infinite values" in message
    # The same with a damaged scale of a quantised block.
    raw = random_blocks("Q8_0", CONFIG.vocab_size, CONFIG.hidden_size)
    raw[3, 34:36] = np.array([value], np.float16).view(np.uint8)
    tensors = {**random_tensors(CONFIG), "model.embed_tokens.weight": ("Q8_0", raw)}
    path = write_gguf(tmp_path / "nanq.gguf", CONFIG, tensors)
    assert "token_embd.weight holds NaN or infinite values" in failure(path)


def test_overflow_in_float16(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    tensors["model.norm.weight"][3] = 1e5
    path = write_gguf(tmp_path / "large.gguf", CONFIG, tensors)
    assert "output_norm.weight has values beyond float16" in failure(path, dtype="float16")
    load_params(path, dtype="bfloat16")


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    tensors: dict[str, Any] = random_tensors(CONFIG)
    rows = np.zeros((40, 18 * 8), np.uint8)
    tensors["model.embed_tokens.weight"] = ("IQ4_NL", rows)
    path = write_gguf(tmp_path / "iq.gguf", CONFIG, tensors)
    message = failure(path)
    assert "IQ4_NL" in message
    assert "Q4_K" in message


def test_config_from_gguf_takes_a_path(tiny: Path) -> None:
    assert dataclasses.replace(config_from_gguf(tiny), name="tiny") == CONFIG


def test_a_part_of_a_split_file_is_told(tmp_path: Path) -> None:
    parts = {"split.count": 3, "split.no": 0}
    path = write_gguf(tmp_path / "p.gguf", CONFIG, random_tensors(CONFIG), metadata=parts)
    assert "one of 3 parts" in failure(path)
    whole = {"split.count": 1, "split.no": 0}
    path = write_gguf(tmp_path / "w.gguf", CONFIG, random_tensors(CONFIG), metadata=whole)
    assert load_params(path)[0].num_layers == CONFIG.num_layers
