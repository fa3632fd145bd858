"""What heads are expected to keep of a prompt: their loads, for devices to share."""

import jax.numpy as jnp
import numpy as np

from kvjax.cache.methods.predicted_reads import EXTRA, WEIGHT, predicted
from kvjax.engine.calibrate import loads
from kvjax.engine.dense import dense_pass
from kvjax.models import load_model


def test_heads_have_the_load_of_what_stays_of_them():
    """The highest quarter, eighth, … of a text's predictions, wherever they are."""
    predictions = np.random.default_rng(9).standard_normal((2, 3, 32)) * [[[1], [2], [3]]]
    ranked = sorted(np.ndindex(2, 3, 32), key=lambda at: -predictions[at])
    found = loads.kept_of(predictions)
    for at, stay in enumerate((48, 24, 12, 6)):
        expected = np.zeros((2, 3))
        for layer, head, _ in ranked[:stay]:
            expected[layer, head] += 1
        np.testing.assert_array_equal(found[..., at], expected)
    assert found.shape == (2, 3, 4)


def test_the_load_of_heads_is_that_of_all_texts(tiny_folder):
    """Each is ranked by itself, what pads it left out; by the predictions of the method."""
    model, rng = load_model(weights=str(tiny_folder), dtype="float32"), np.random.default_rng(4)
    config = model.config
    weight = rng.standard_normal((config.num_layers, config.hidden_size, config.num_kv_heads))
    extra = rng.standard_normal((config.num_layers, config.num_kv_heads, 5))
    extra[..., 4] = 95
    given = {WEIGHT: weight.astype(np.float32), EXTRA: extra.astype(np.float32)}
    arrays = {name: jnp.asarray(array) for name, array in given.items()}
    prompts = [rng.integers(0, 256, size).astype(np.int32) for size in (70, 130)]
    stay: np.ndarray | int = 0
    for ids in prompts:
        dense = dense_pass(model.config, model.params, jnp.asarray(ids), jnp.zeros(0, jnp.int32))
        parts = [
            predicted(
                {name: array[layer] for name, array in arrays.items()},
                dense.hidden[layer], dense.k[layer], dense.v[layer], jnp.arange(len(ids)),
            ).T
            for layer in range(model.config.num_layers)
        ]  # fmt: skip
        stay = stay + loads.kept_of(np.stack(parts))
    found = loads.head_load(model, given, prompts)
    np.testing.assert_allclose(found, stay / np.mean(stay, axis=(0, 1)), rtol=0.02)
    assert found.std(axis=(0, 1)).min() > 0
