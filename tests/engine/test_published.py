"""Published calibrations: files made in KVzap's format, and what is no such file."""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams
from kvjax.cache.calibration import Calibration
from kvjax.cache.methods.kvzap import LINEAR, MLP, linear_scores, mlp_scores
from kvjax.cli import main_of
from kvjax.cli.main import run_command
from kvjax.engine.calibrate import shelf
from kvjax.engine.calibrate.published import load_published
from kvjax.errors import UserError
from kvjax.models import load_model
from tests.oracle.question_free import surrogate_one
from tests.tiny import TINY

D, M, H, L = TINY.hidden_size, 12, TINY.num_kv_heads, TINY.num_layers
SHAPES = {
    "linear": {"weight": (H, D), "bias": (H,)},
    "mlp": {"0.weight": (M, D), "0.bias": (M,), "2.weight": (H, M), "2.bias": (H,)},
}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(weights=str(tiny_folder), dtype="float32")


def tensors_of(kind, layers=L) -> dict[str, np.ndarray]:
    """Weights as torch keeps them: [out, in]."""
    rng = np.random.default_rng(2)
    return {
        f"layers.{layer}.{name}": rng.standard_normal(shape).astype(np.float32)
        for layer in range(layers)
        for name, shape in SHAPES[kind].items()
    }


def write(folder, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "kvzap"}')
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_surrogate_says_what_its_file_says(model, tmp_path, kind):
    tensors = tensors_of(kind)
    folder = write(tmp_path / "zap", tensors)
    found = load_published(folder, model)
    assert found.model_hash == model.fingerprint
    assert set(found.arrays) == set(LINEAR if kind == "linear" else MLP)
    hidden = np.random.default_rng(3).standard_normal((5, D)).astype(np.float32)
    names = dict(zip(SHAPES[kind], LINEAR if kind == "linear" else MLP))
    # The oracle takes them the other way round, [in, out].
    of = {
        array: np.stack([tensors[f"layers.{n}.{name}"].T for n in range(L)])
        for name, array in names.items()
    }
    says = linear_scores if kind == "linear" else mlp_scores
    for layer in range(L):
        own = {name: jnp.asarray(array[layer]) for name, array in found.arrays.items()}
        ours = says(own, jnp.asarray(hidden))
        true = [[surrogate_one(of, kind, layer, head, x) for head in range(H)] for x in hidden]
        np.testing.assert_allclose(ours, true, rtol=1e-4, atol=1e-4)
    # The file by itself, half as precise, and under the option of every command.
    short = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    save_file(short, tmp_path / "short.safetensors")
    other = shelf.load(tmp_path / "short.safetensors", model)
    assert other is not None
    for name, array in found.arrays.items():
        assert other.arrays[name].dtype == np.float32
        np.testing.assert_allclose(other.arrays[name], array, rtol=1e-2)


def test_an_engine_runs_with_it(model, tmp_path):
    folder = write(tmp_path / "zap", tensors_of("mlp"))
    compression = CompressionConfig(method="kvzap-mlp", max_cache_tokens=48)
    config = EngineConfig(max_batch=1, max_len=512, pool_tokens=1024, prefill_chunk=256)
    llm = LLM(model, compression, config, calibration=folder)
    (output,) = llm.generate([np.arange(150)], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.token_ids) == 4
    assert output.stats.blocks_after < output.stats.blocks_before


def test_the_command_writes_a_calibration(tiny_folder, tmp_path, capsys, model):
    folder, out = write(tmp_path / "zap", tensors_of("linear")), tmp_path / "own.safetensors"
    arguments = ["--weights", tiny_folder, "--import", folder, "--out", out]

    def run(*more):
        given = [str(argument) for argument in (*arguments, *more)]
        return main_of(functools.partial(run_command, "calibrate"), given)

    assert run() == 0
    assert "for the method kvzap-linear" in capsys.readouterr().err
    found = Calibration.load(out)
    found.check(model.fingerprint, L)
    assert set(found.arrays) == set(LINEAR)
    found.with_arrays({"mine": np.ones((L, 3))}, {"source": "mine"}).save(out)
    assert run() == 0
    again = Calibration.load(out)
    assert set(again.arrays) == {"mine", *LINEAR}
    assert again.recipe == {**found.recipe, "source": "mine"}
    capsys.readouterr()
    assert run("--data", folder) == 2
    assert "give no --data" in capsys.readouterr().err


def _without(name):
    return {key: value for key, value in tensors_of("mlp").items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (tensors_of("mlp", L + 1), f"has {L + 1} layers, the model {L}"),
        (_without("layers.0.0.bias"), f"kvzap_in_bias has {L - 1} layers, the model {L}"),
        ({k: v for k, v in tensors_of("mlp").items() if "2." not in k}, "not a surrogate"),
        ({k: v[..., :3] for k, v in tensors_of("linear").items()}, "the model needs"),
        ({**tensors_of("linear"), "layers.0.9.weight": np.ones(3, np.float32)}, "is no tensor of"),
        (
            {**tensors_of("linear"), "layers.0.weight": np.full((H, D), np.nan, np.float32)},
            "wanted finite numbers",
        ),
    ],
)
def test_files_of_another_model_or_damaged_ones_are_refused(model, tmp_path, tensors, says):
    folder = write(tmp_path / "zap", tensors)
    with pytest.raises(UserError, match=says) as caught:
        shelf.load(folder, model)
    assert "\n" not in str(caught.value)


def test_pickles_are_never_read(model, tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"not even one")
    for choice in (path, tmp_path):
        with pytest.raises(UserError, match="is a pickle, which may run code and is never loaded"):
            shelf.load(choice, model)
    path.unlink()
    with pytest.raises(UserError, match="give a file that was saved whole"):
        shelf.load(tmp_path, model)
