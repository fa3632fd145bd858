"""Models: configurations by name, families in Flax NNX, weights from wherever they are, tokenizers.

`load_model` gives all that an engine needs; `forward` and `logits` run a model of any family. What
is not here: a cache and kernels, for attention is the caller's (`family.Attend`).
"""

import dataclasses
import functools
import os
from collections.abc import Callable

import jax
from flax import nnx

from kvjax.errors import UserError
from kvjax.models.config import MODELS, ModelConfig, get_model_entry
from kvjax.models.decoder import forward, init_params, logits
from kvjax.models.fingerprint import model_hash
from kvjax.models.hub import resolve_weights
from kvjax.models.tokenizer import ByteTokenizer, Tokenizer
from kvjax.models.weights import load_params

DEFAULT_MODEL = "smollm2-135m"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    config: ModelConfig
    params: nnx.State
    tokenizer: Tokenizer
    source: str
    """Where the weights came from; "dummy weights" for random ones."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `model_hash`; computed once."""
        return model_hash(self.config, self.params)


def stacks_layers(platform: str) -> bool:
    """Whether a platform ("cpu", "gpu" or "tpu") takes the weights of all layers as one array.

    XLA for CPUs and GPUs copies each layer out of such an array before it multiplies by it: a
    decode step would move its weights three times.
    """
    return platform == "tpu"


def load_model(
    name: str | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    dummy_weights: bool = False,
    dtype: jax.typing.DTypeLike = "float32",
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> LoadedModel:
    """Load a model by name, from its weights, or both.

    Args:
        name: a name of `MODELS`. By default whatever `weights` holds; without weights,
            `DEFAULT_MODEL`.
        weights: a folder, hub id, GGUF file or Orbax checkpoint; by default the model's own place.
        dummy_weights: random weights of the true shapes; a tokenizer is used if `weights` has one,
            else every byte of a text is a token.
        dtype: of the weights and activations.
        seed: of the dummy weights.
        progress: called with what is being done, and how much of it is done in bytes.

    Raises:
        UserError: unknown name; weights that are missing, damaged or do not fit the model.
    """
    if name is None and (weights is None or dummy_weights):
        name = DEFAULT_MODEL
    config = None if name is None else get_model_entry(name).config
    stacked = stacks_layers(jax.default_backend())
    if dummy_weights:
        assert config is not None
        tokenizer = ByteTokenizer() if weights is None else Tokenizer.from_path(weights)
        params = init_params(config, dtype, seed, stacked=stacked)
        return LoadedModel(config, params, tokenizer, "dummy weights")
    path = resolve_weights(name or DEFAULT_MODEL, weights, progress)
    try:
        tokenizer = Tokenizer.from_path(path)
    except UserError:
        # What is no checkpoint has no tokenizer either: then that is what there is to say.
        load_params(path, config, dtype, stacked=stacked)
        raise
    config, params = load_params(path, config, dtype, progress, stacked=stacked)
    return LoadedModel(config, params, tokenizer, str(path))


__all__ = [
    "DEFAULT_MODEL",
    "MODELS",
    "ByteTokenizer",
    "LoadedModel",
    "ModelConfig",
    "Tokenizer",
    "forward",
    "get_model_entry",
    "load_model",
    "logits",
]
