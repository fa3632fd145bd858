"""Models: configurations by name, families in Flax NNX, weights from wherever they are, tokenizers.

`load_model` gives all that an engine needs; `forward` and `logits` run a model of any family. What
is not here: a cache and kernels, for attention is the caller's (`family.Attend`).
"""

import dataclasses
import functools
import os
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from kvjax.errors import UserError
from kvjax.models.config import MODELS, ModelConfig, get_model_entry
from kvjax.models.decoder import forward, init_params, is_stacked, logical_axes, logits
from kvjax.models.fingerprint import model_hash
from kvjax.models.hub import resolve_weights
from kvjax.models.parallel import Split, join_params
from kvjax.models.tokenizer import ByteTokenizer, Tokenizer
from kvjax.models.weights import checkpoint_config, checkpoint_hash, load_params
from kvjax.models.weights.orbax import told_hash
from kvjax.models.weights.placement import dummies

DEFAULT_MODEL = "smollm2-135m"
DUMMY = "dummy weights"
"""Source of random weights."""


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    config: ModelConfig
    params: nnx.State
    tokenizer: Tokenizer
    source: str
    """Where the weights came from; "dummy weights" for random ones."""
    hashed: Callable[[], str] | None = None
    """What tells the fingerprint where it is not that of `params`: they have fewer bits than the
    checkpoint, or lie on several devices."""
    split: Split | None = None
    """How `params` lie on several devices, if they do."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `model_hash`; computed once."""
        return self.hashed() if self.hashed else model_hash(self.config, self.whole().params)

    def whole(self) -> "LoadedModel":
        """The same with its weights on one device."""
        if self.split is None:
            return self
        axes = logical_axes(self.config, is_stacked(self.params))
        params = join_params(self.params, axes, self.config, self.split.dealing)
        return dataclasses.replace(self, params=jax.tree.map(jax.device_put, params), split=None)


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
    weight_dtype: str | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
    split: Callable[[LoadedModel], Split | None] | None = None,
    check: Callable[[Tokenizer], None] | None = None,
) -> LoadedModel:
    """Load a model by name, from its weights, or both.

    Args:
        name: a name of `MODELS`. By default whatever `weights` holds; without weights,
            `DEFAULT_MODEL`.
        weights: a folder, hub id, GGUF file or Orbax checkpoint; by default the model's own place.
        dummy_weights: random weights of the true shapes; a tokenizer is used if `weights` has one,
            else every byte of a text is a token.
        dtype: of the weights and activations.
        weight_dtype: of matrices and embeddings alone, int8 or float8_e4m3fn: what
            `kvjax.models.narrow` says.
        seed: of the dummy weights.
        progress: called with what is being done, and how much of it is done in bytes.
        split: says how the weights are to lie on several devices, of the model without them.
        check: called with the tokenizer before the weights are read, to refuse it.

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
        if check is not None:
            check(tokenizer)
        config = dataclasses.replace(config, weight_dtype=weight_dtype)
        model = LoadedModel(config, nnx.State({}), tokenizer, DUMMY)
        lies = None if split is None else split(model)
        if lies is None:
            params = init_params(config, dtype, seed, stacked=stacked)
        else:
            params = dummies(config, np.dtype(dtype), seed, stacked, lies)
        return dataclasses.replace(model, params=params, split=lies)
    path = resolve_weights(name or DEFAULT_MODEL, weights, progress)
    try:
        tokenizer = Tokenizer.from_path(path)
    except UserError:
        # What is no checkpoint has no tokenizer either: then that is what there is to say.
        load_params(path, config, dtype, stacked=stacked)
        raise
    if check is not None:
        check(tokenizer)
    hashed, lies = functools.partial(checkpoint_hash, path, dtype=dtype), None
    if split is not None:
        found = checkpoint_config(path, config, weight_dtype)
        told = functools.partial(hashed, found)
        lies = split(LoadedModel(found, nnx.State({}), tokenizer, str(path), told))
    config, params = load_params(
        path, config, dtype, progress, weight_dtype=weight_dtype, stacked=stacked, shardings=lies
    )
    # bfloat16 is not that of the checkpoint any more once small weights were rounded to float16.
    same = weight_dtype is None and lies is None and np.dtype(dtype) != np.float16
    same = same and told_hash(path) is None
    own = None if same else functools.partial(hashed, config)
    return LoadedModel(config, params, tokenizer, str(path), own, lies)


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
