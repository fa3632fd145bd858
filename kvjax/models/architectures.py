"""What checkpoints call the models that run here, and what their config.json says.

`ARCHITECTURES` is the one table of names: config.json's ``architectures`` and ``model_type``, and
GGUF's ``general.architecture``. Each row names the family that runs it (a key of
`kvjax.models.families.FAMILIES`), and how its files differ from those of others.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.models.config import ModelConfig, RopeScaling
from kvjax.models.files import Fields


@dataclass(frozen=True)
class Architecture:
    """One row of `ARCHITECTURES`.

    Attributes:
        name, model_type: of config.json.
        family: which family runs it.
        gguf: ``general.architecture`` of GGUF files; None where they say another row's.
        attention_bias: whether q, k and v have biases, which config.json does not say.
        head_dim: where config.json does not say it; None: hidden size over heads.
        always_windows: whether ``sliding_window`` counts without ``use_sliding_window``.
        gguf_interleaved: whether GGUF files hold the halves of each rotated head by turns.
    """

    name: str
    model_type: str
    family: str
    gguf: str | None
    attention_bias: bool = False
    head_dim: int | None = None
    always_windows: bool = False
    gguf_interleaved: bool = False


ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama", "llama", "llama", gguf_interleaved=True),
    Architecture("MistralForCausalLM", "mistral", "llama", None, always_windows=True),
    Architecture("Qwen2ForCausalLM", "qwen2", "llama", "qwen2", attention_bias=True),
    Architecture("Qwen3ForCausalLM", "qwen3", "qwen3", "qwen3", head_dim=128),
)
_BY_NAME = {row.name: row for row in ARCHITECTURES}
_BY_MODEL_TYPE = {row.model_type: row for row in ARCHITECTURES}
GGUF_ARCHITECTURES = {row.gguf: row for row in ARCHITECTURES if row.gguf is not None}


ORIGINAL = "original_max_position_embeddings"
MISTRAL_WINDOW, QWEN_WHOLE_LAYERS = 4096, 28
"""What transformers takes for Mistral's ``sliding_window`` and Qwen's ``max_window_layers`` where
the file does not say."""


def _whole(fields: Fields, key: str) -> int:
    fields.require(key)
    return fields.whole(key, 0)


def _number(fields: Fields, key: str) -> float:
    fields.require(key)
    return fields.number(key, 0.0)


def _architecture(hf: Fields) -> Architecture:
    names = hf.get("architectures")
    names = [] if names is None else names
    if not isinstance(names, list):
        raise UserError(f"{hf.label('architectures')} {shown(names)}: give a list of names")
    if not names:
        model_type = str(hf.get("model_type"))
        if model_type in _BY_MODEL_TYPE:
            return _BY_MODEL_TYPE[model_type]
        names = [model_type]
    for name in names:
        if isinstance(name, str) and name in _BY_NAME:
            return _BY_NAME[name]
    given = shown(", ".join(map(str, names))).strip("'")
    raise UserError(
        f"{hf.where}: architecture {given} is not supported; supported: {', '.join(_BY_NAME)}"
    )


def _rope(hf: Fields) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling, from ``rope_scaling`` or ``rope_parameters``, and else from fields of
    their own: what transformers takes where a file says a thing twice."""
    scaling = hf.object("rope_scaling")
    scaling = scaling if scaling.values else hf.object("rope_parameters")
    if nested := [key for key, value in scaling.values.items() if isinstance(value, dict)]:
        raise UserError(
            f"{hf.where}: rope_parameters by kind of layer ({shown(nested[0])}) are not supported"
        )
    theta = scaling.number("rope_theta", hf.number("rope_theta", 10_000.0))
    partial = scaling.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UserError(
            f"{hf.where}: partial_rotary_factor {partial} is not supported: only 1.0 is"
        )
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(
            f"{hf.where}: rope type {shown(kind)} is not supported; supported: default, llama3"
        )
    return theta, RopeScaling(
        factor=_number(scaling, "factor"),
        low_freq_factor=_number(scaling, "low_freq_factor"),
        high_freq_factor=_number(scaling, "high_freq_factor"),
        original_max_position_embeddings=_whole(
            scaling if scaling.get(ORIGINAL) is not None else hf, ORIGINAL
        ),
    )


def config_from_hf(
    hf: Mapping[str, Any], name: str = "", where: str = "config.json"
) -> ModelConfig:
    """Reads the contents of a Hugging Face ``config.json``.

    Args:
        hf: the parsed JSON object.
        name: what to call the model; ``_name_or_path`` of the file by default.
        where: what messages call the file.

    Raises:
        UserError: the architecture or one of its features is not supported (sliding windows,
            other activations, other RoPE scalings, output or MLP biases), or a field is missing
            or impossible.
    """
    fields = Fields(hf, where)
    try:
        return _config(fields, name)
    except UserError as error:
        if str(error).startswith(where):
            raise
        raise UserError(f"{where}: {error}") from None


def _check_window(hf: Fields, architecture: Architecture, num_layers: int, longest: int) -> None:
    """Refuse a sliding window that some layer would see the end of."""
    window = hf.whole("sliding_window", least=0)
    if architecture.always_windows:
        uses, way_out = True, "use a checkpoint with full attention (Mistral v0.2 or later)"
        if "sliding_window" not in hf.values:
            window = MISTRAL_WINDOW
    else:
        # The first layers of Qwen have full attention: so many, where no list says which.
        whole, kinds = (
            hf.whole("max_window_layers", QWEN_WHOLE_LAYERS, least=0),
            hf.get("layer_types"),
        )
        slides = "sliding_attention" in kinds if isinstance(kinds, list) else whole < num_layers
        uses = hf.flag("use_sliding_window") and slides
        way_out = "use a checkpoint whose use_sliding_window is false"
    if uses and window is not None and window < longest:
        raise UserError(
            f"{architecture.name} with a sliding window of {window} tokens is not supported; "
            + way_out
        )


def _config(hf: Fields, name: str) -> ModelConfig:
    architecture = _architecture(hf)
    quantized = hf.object("quantization_config")
    if quantized.values:
        raise UserError(
            f"weights quantized by {shown(quantized.text('quant_method') or 'some method')} "
            "(quantization_config) are not supported: give the checkpoint that they were made "
            "from, with --weight-dtype int8 for fewer bits, or a GGUF file"
        )
    num_layers = _whole(hf, "num_hidden_layers")
    longest = hf.whole("max_position_embeddings", 2048)
    _check_window(hf, architecture, num_layers, longest)
    activation = hf.text("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UserError(f"hidden_act {shown(activation)} is not supported; supported: silu")
    for key in ("attention_bias", "mlp_bias"):
        # In these architectures the flag would also put a bias on o_proj or the MLP.
        if hf.flag(key):
            raise UserError(f"{key} is not supported for {architecture.name}")
    theta, scaling = _rope(hf)
    hidden_size, num_heads = _whole(hf, "hidden_size"), _whole(hf, "num_attention_heads")
    head_dim = hf.whole("head_dim", architecture.head_dim)
    if head_dim is None:
        if hidden_size % num_heads:
            raise UserError(
                f"hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads})"
            )
        head_dim = hidden_size // num_heads
    return ModelConfig(
        name=name or hf.text("_name_or_path") or architecture.name,
        vocab_size=_whole(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_whole(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=hf.whole("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=hf.number("rms_norm_eps", 1e-6),
        max_position_embeddings=longest,
        # What the architectures assume when the file is silent.
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        attention_bias=architecture.attention_bias,
        family=architecture.family,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The contents of a Hugging Face config.json that `config_from_hf` reads back as `config`.

    Raises UserError if no architecture is of that family and has, or has not, such biases.
    """
    kind = (config.family, config.attention_bias)
    rows = [row for row in ARCHITECTURES if (row.family, row.attention_bias) == kind]
    if not rows:
        raise UserError(
            f"{config.name}: no architecture of config.json is a {config.family} model with "
            f"attention_bias {config.attention_bias}"
        )
    values: dict[str, Any] = {
        "architectures": [rows[0].name],
        "model_type": rows[0].model_type,
        "_name_or_path": config.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.rope_scaling is not None:
        values["rope_scaling"] = {"rope_type": "llama3", **asdict(config.rope_scaling)}
    return values
