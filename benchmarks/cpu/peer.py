"""The transformers half of `python -m benchmarks.cpu`; runs in an environment with torch.

    python benchmarks/cpu/peer.py 2048 3 float32

SmolLM2-135M's shapes with random weights, greedy, a key-value cache, all cores. Prints one
JSON object: tokens per second of prefill and of decoding.
"""

import json
import os
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    length, repeats, dtype = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3])
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    found: dict[str, object] = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "attention": model.config._attn_implementation,
    }
    with torch.inference_mode():
        prompt = torch.randint(0, config.vocab_size, (1, length))
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            out = model(prompt, use_cache=True, logits_to_keep=1)
            seconds.append(time.perf_counter() - start)
        found["prefill"] = length / min(seconds)
        times = []
        for _ in range(48):
            start = time.perf_counter()
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            times.append(time.perf_counter() - start)
        # The best stretch of eight steps, as on the other side.
        found["decode_1"] = 8 / min(sum(times[i : i + 8]) for i in range(8, 48, 8))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
