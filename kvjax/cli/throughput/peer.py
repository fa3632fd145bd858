"""Hugging Face transformers serving the same load as a row of `kvjax throughput`.

`ask_peer` runs this file in a Python that has torch and transformers: weights are random, the
shapes those of the model. On a GPU its continuous batching serves all prompts; on a CPU `generate`
does, in batches as large as the row's own pool holds without compression.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""Of a model: what its speed depends on."""


def ask_peer(options: Any, model: Any, row: dict[str, Any]) -> dict[str, Any]:
    """The peer's row for the load of `row`, which has one prompt length.

    The peer has the model's dtype, whatever keys and values are stored in here.
    """
    from kvjax.cli.models import dtype_of
    from kvjax.errors import UserError
    from kvjax.models.architectures import config_to_hf

    shapes = config_to_hf(model.config)
    tokens = row["input_len"] + row["output_len"]
    load = {name: shapes[name] for name in SHAPES}
    load |= {
        "max_position_embeddings": max(tokens, shapes["max_position_embeddings"]),
        **{name: row[name] for name in ("num_prompts", "input_len", "output_len")},
        "dtype": dtype_of(options),
        "batch": max(1, min(row["num_prompts"], row["pool_tokens"] // tokens)),
        "warmup": options.warmup,
    }
    command = [options.peer_python, str(Path(__file__)), json.dumps(load)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise UserError(f"--peer-python {options.peer_python}: {told[-1]}") from error
    same = ("model", "input_len", "output_len", "num_prompts", "pool_tokens", "device")
    own = {name: row[name] for name in same} | {"dtype": load["dtype"]}
    return own | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    load = json.loads(sys.argv[1])
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    dtype = getattr(torch, load["dtype"])
    names = ("dtype", "num_prompts", "input_len", "output_len", "batch", "warmup")
    shapes = {name: value for name, value in load.items() if name not in names}
    gpu = torch.cuda.is_available()
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shapes)).to(dtype).eval()
    num, length, new = (load[name] for name in ("num_prompts", "input_len", "output_len"))
    prompts = torch.randint(0, load["vocab_size"], (num, length))
    settings = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}

    def serve(prompts: Any, new: int) -> None:
        if gpu:
            config = transformers.GenerationConfig(max_new_tokens=new, **settings)
            model.generate_batch(inputs=prompts.tolist(), generation_config=config)
            return
        with torch.inference_mode():
            for first in range(0, len(prompts), load["batch"]):
                rows = prompts[first : first + load["batch"]]
                model.generate(
                    rows,
                    attention_mask=torch.ones_like(rows),
                    min_new_tokens=new,
                    max_new_tokens=new,
                    **settings,
                )

    if load["warmup"]:
        # As the row's own engine: what begins with the first call is there before the clock runs.
        serve(prompts[: load["batch"]], min(2, new))
    start = time.perf_counter()
    serve(prompts, new)
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "method": f"transformers {transformers.__version__}, torch {torch.__version__}",
                "weights": "random weights",
                "seconds": seconds,
                "total_tokens_per_second": num * (length + new) / seconds,
                "output_tokens_per_second": num * new / seconds,
                "max_batch": None if gpu else load["batch"],
                "peer": True,
            }
        )
    )


if __name__ == "__main__":
    main()
