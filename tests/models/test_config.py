"""Configurations: the table of models, and what config.json files are read or refused."""

import dataclasses

import pytest

from kvjax.errors import UserError
from kvjax.models.architectures import config_from_hf, config_to_hf
from kvjax.models.config import MODELS, ModelConfig, RopeScaling, get_model_entry
from tests.conftest import REPOSITORY

LLAMA31 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
MISTRAL = {
    **{key: value for key, value in LLAMA31.items() if key != "rope_scaling"},
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rope_theta": 1000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "attention_bias": False,
}

# Weights in millions, as the model cards print them.
PUBLISHED_MILLIONS = {
    "llama2-7b": 6738,
    "llama2-13b": 13016,
    "llama3-8b": 8030,
    "llama3-70b": 70554,
    "llama3.1-8b": 8030,
    "llama3.1-70b": 70554,
    "llama3.1-405b": 405853,
    "llama3.2-1b": 1236,
    "llama3.2-3b": 3213,
    "mistral-7b-v0.2": 7242,
    "mistral-7b-v0.3": 7248,
    "smollm2-135m": 135,
    "smollm2-360m": 362,
    "smollm2-1.7b": 1711,
    "qwen2.5-0.5b": 494,
    "qwen2.5-1.5b": 1544,
    "qwen2.5-7b": 7616,
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1721,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
    "qwen3-14b": 14768,
    "qwen3-32b": 32762,
}


# Of the published config.json files: layers, hidden, intermediate, heads, KV heads, head
# dimension, vocabulary; RoPE base and scaling factor, epsilon, context, tied, biased. Those of
# Qwen3 have heads with norms.
PUBLISHED = {
    "llama2-7b": (32, 4096, 11008, 32, 32, 128, 32000, 1e4, None, 1e-5, 4096, False, False),
    "llama2-13b": (40, 5120, 13824, 40, 40, 128, 32000, 1e4, None, 1e-5, 4096, False, False),
    "llama3-8b": (32, 4096, 14336, 32, 8, 128, 128256, 5e5, None, 1e-5, 8192, False, False),
    "llama3-70b": (80, 8192, 28672, 64, 8, 128, 128256, 5e5, None, 1e-5, 8192, False, False),
    "llama3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256, 5e5, 8.0, 1e-5, 131072, False, False),
    "llama3.1-70b": (80, 8192, 28672, 64, 8, 128, 128256, 5e5, 8.0, 1e-5, 131072, False, False),
    "llama3.1-405b": (
        126,
        16384,
        53248,
        128,
        8,
        128,
        128256,
        5e5,
        8.0,
        1e-5,
        131072,
        False,
        False,
    ),
    "llama3.2-1b": (16, 2048, 8192, 32, 8, 64, 128256, 5e5, 32.0, 1e-5, 131072, True, False),
    "llama3.2-3b": (28, 3072, 8192, 24, 8, 128, 128256, 5e5, 32.0, 1e-5, 131072, True, False),
    "mistral-7b-v0.2": (32, 4096, 14336, 32, 8, 128, 32000, 1e6, None, 1e-5, 32768, False, False),
    "mistral-7b-v0.3": (32, 4096, 14336, 32, 8, 128, 32768, 1e6, None, 1e-5, 32768, False, False),
    "smollm2-135m": (30, 576, 1536, 9, 3, 64, 49152, 1e5, None, 1e-5, 8192, True, False),
    "smollm2-360m": (32, 960, 2560, 15, 5, 64, 49152, 1e5, None, 1e-5, 8192, True, False),
    "smollm2-1.7b": (24, 2048, 8192, 32, 32, 64, 49152, 1.3e5, None, 1e-5, 8192, True, False),
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 64, 151936, 1e6, None, 1e-6, 32768, True, True),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128, 151936, 1e6, None, 1e-6, 32768, True, True),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 128, 152064, 1e6, None, 1e-6, 32768, False, True),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936, 1e6, None, 1e-6, 40960, True, False),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, 151936, 1e6, None, 1e-6, 40960, True, False),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936, 1e6, None, 1e-6, 40960, True, False),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, 151936, 1e6, None, 1e-6, 40960, False, False),
    "qwen3-14b": (40, 5120, 17408, 40, 8, 128, 151936, 1e6, None, 1e-6, 40960, False, False),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936, 1e6, None, 1e-6, 40960, False, False),
}


def test_table_has_the_published_configurations():
    assert MODELS.keys() == PUBLISHED.keys()
    for name, published in PUBLISHED.items():
        config = MODELS[name].config
        scaling = config.rope_scaling
        assert (
            config.num_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            config.rope_theta,
            None if scaling is None else scaling.factor,
            config.rms_norm_eps,
            config.max_position_embeddings,
            config.tie_word_embeddings,
            config.attention_bias,
        ) == published, name
        assert config.family == ("qwen3" if name.startswith("qwen3") else "llama")
        if scaling is not None:
            assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)
            assert scaling.original_max_position_embeddings == 8192


def test_architectures_are_named_in_one_table():
    package = REPOSITORY / "kvjax"
    named = [path for path in package.rglob("*.py") if "ForCausalLM" in path.read_text()]
    # What measures transformers beside kvjax runs in another process, without kvjax.
    assert {path.relative_to(package).as_posix() for path in named} <= {
        "models/architectures.py",
        "cli/throughput/peer.py",
    }


def test_table_is_keyed_by_name():
    assert all(name == entry.config.name for name, entry in MODELS.items())
    assert len({entry.hub_id for entry in MODELS.values()}) == len(MODELS)
    assert MODELS["qwen3-0.6b"].hub_id == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("name", "hf"),
    [
        ("llama3.1-8b", LLAMA31),
        ("qwen2.5-0.5b", QWEN25),
        ("mistral-7b-v0.2", MISTRAL),
        ("qwen3-4b", QWEN3),
    ],
)
def test_config_json_equals_the_table(name, hf):
    assert config_from_hf(hf, name) == get_model_entry(name).config


def test_config_json_of_newer_transformers():
    hf = {key: value for key, value in LLAMA31.items() if key not in ("rope_theta", "rope_scaling")}
    hf["rope_parameters"] = {**LLAMA31["rope_scaling"], "rope_theta": 500000.0}
    assert config_from_hf(hf, "llama3.1-8b") == get_model_entry("llama3.1-8b").config


@pytest.mark.parametrize("hf", [LLAMA31, QWEN25, QWEN3])
def test_config_json_written_is_read_alike(hf):
    config = config_from_hf(hf, "any")
    written = config_to_hf(config)
    assert written["architectures"] == hf["architectures"]
    assert config_from_hf(written) == config
    by_type = {**written, "architectures": None}
    assert config_from_hf(by_type) == config


def test_what_no_config_json_can_say_is_not_written():
    config = dataclasses.replace(MODELS["qwen3-4b"].config, attention_bias=True)
    with pytest.raises(UserError, match="qwen3 model with attention_bias True"):
        config_to_hf(config)


def test_heads_of_qwen3_where_the_file_is_silent():
    hf = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert config_from_hf(hf, "qwen3-4b") == get_model_entry("qwen3-4b").config


def test_defaults_of_sparse_config_json():
    hf = {k: v for k, v in LLAMA31.items() if k not in ("num_key_value_heads", "rope_scaling")}
    config = config_from_hf(hf)
    assert (config.num_kv_heads, config.head_dim, config.rope_scaling) == (32, 128, None)
    assert config.name == "LlamaForCausalLM"
    assert config_from_hf({**hf, "quantization_config": None}) == config
    unsaid = ("rope_theta", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    config = config_from_hf({key: value for key, value in hf.items() if key not in unsaid})
    assert (config.rope_theta, config.rms_norm_eps) == (10_000.0, 1e-6)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (2048, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: Ll"),
        ({"architectures": None, "model_type": "gemma3"}, "gemma3 is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "no 'factor'"),
        (
            {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            "by kind of layer .'full_attention'",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized by 'awq'"),
        ({"quantization_config": {"bits": 4}}, "quantized by 'some method'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"num_key_value_heads": 5}, "must be a multiple of num_kv_heads"),
        ({"num_attention_heads": 31}, "no multiple of num_attention_heads"),
        ({"hidden_size": "many"}, "many"),
    ],
)
def test_refusals_are_one_line(change, message):
    with pytest.raises(UserError, match=message) as error:
        config_from_hf({**LLAMA31, **change})
    assert "\n" not in str(error.value)


def test_sliding_windows_are_refused():
    with pytest.raises(UserError, match="sliding window of 4096"):
        config_from_hf({**MISTRAL, "sliding_window": 4096})
    with pytest.raises(UserError, match="sliding window"):
        config_from_hf(
            {**QWEN25, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 23}
        )
    with pytest.raises(UserError, match="Qwen3ForCausalLM with a sliding window of 9"):
        config_from_hf(
            {**QWEN3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
        )
    # What Mistral's first version meant by saying nothing.
    silent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    with pytest.raises(UserError, match=r"sliding window of 4096 .*Mistral v0\.2"):
        config_from_hf(silent)


@pytest.mark.parametrize(
    "hf",
    [
        {**MISTRAL, "sliding_window": 32768},
        {**QWEN25, "use_sliding_window": True},
        {**QWEN25, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 24},
        {
            **QWEN3,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention"],
        },
        {
            **{k: v for k, v in MISTRAL.items() if k != "sliding_window"},
            "max_position_embeddings": 4096,
        },
    ],
)
def test_windows_that_no_layer_sees_the_end_of_do_no_harm(hf):
    assert config_from_hf(hf).max_position_embeddings >= 4096


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("said", "theta", "scaled"),
    [
        ({"rope_scaling": {**LLAMA3, "rope_theta": 5e5}}, 5e5, True),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, 5e5, False),
        ({"rope_scaling": LLAMA3, "rope_theta": 3e5}, 3e5, True),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 3e5,
          "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, 3e5, False),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None},
          "original_max_position_embeddings": 4096}, 1e4, True),
    ],
)  # fmt: skip
def test_what_a_file_says_twice_is_what_transformers_takes(said, theta, scaled):
    plain = {k: v for k, v in LLAMA31.items() if not k.startswith("rope")}
    config = config_from_hf({**plain, **said})
    assert config.rope_theta == theta
    assert (config.rope_scaling is not None) == scaled


def test_unknown_names_get_an_offer():
    assert get_model_entry("Llama3.1-8B").config.name == "llama3.1-8b"
    with pytest.raises(UserError, match=r"did you mean .*llama3\.1-8b"):
        get_model_entry("llama-3.1-8b")
    with pytest.raises(UserError, match="known: llama2-7b"):
        get_model_entry("zzz")


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 63},
        {"num_layers": 0},
        {"num_kv_heads": 2},
        {"rope_theta": float("nan")},
        {"rms_norm_eps": 0.0},
        {"vocab_size": True},
    ],
)
def test_impossible_configurations(change):
    with pytest.raises(UserError, match=next(iter(change))):
        dataclasses.replace(MODELS["smollm2-135m"].config, **change)


def test_impossible_rope_scaling():
    with pytest.raises(UserError, match="factor"):
        RopeScaling(factor=0.0)
    with pytest.raises(UserError, match="must exceed"):
        RopeScaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0)


def test_configurations_are_static_arguments():
    config = MODELS["llama3.1-8b"].config
    assert hash(config) == hash(dataclasses.replace(config))
    assert isinstance(config, ModelConfig)
    assert config.group_size == 4
