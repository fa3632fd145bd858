"""One file per family of models: its parameters and its equations, as `kvjax.models.family` asks.

What is not here: the names that checkpoints use for a family (`kvjax.models.architectures`), shapes
by name (`kvjax.models.config`), and whatever is the same for all (`kvjax.models.decoder`).
"""

from kvjax.models.config import ModelConfig
from kvjax.models.families.llama import Llama
from kvjax.models.families.qwen3 import Qwen3
from kvjax.models.family import Model

FAMILIES: dict[str, type[Model]] = {"llama": Llama, "qwen3": Qwen3}


def family_of(config: ModelConfig) -> type[Model]:
    """The family that runs a configuration."""
    return FAMILIES[config.family]
