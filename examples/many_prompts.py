"""Many prompts at once through one engine: a question about every text of a folder.

    python examples/many_prompts.py notes/ "Who wrote this?"
    python examples/many_prompts.py          # chapters of Python's documentation

The prompts share one pool, each compressed to a quarter as it comes in. One that does not fit
waits; one that can never fit has an `error`.
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams, load_model

QUESTION = "What is this about? Answer in one sentence."
CHAPTERS = ("assert", "break", "del", "global", "pass", "return", "yield", "lambda")


def ask(model, texts: dict[str, str], question: str, new_tokens: int = 40) -> None:
    """Print each text's answer, and what its cache came to."""
    config = EngineConfig(max_batch=8, max_len=4096, pool_tokens=4096)
    llm = LLM(model, CompressionConfig(rate=4, floor=16), config)
    prompts = [
        model.tokenizer.chat([{"role": "user", "content": f"{text}\n\n{question}"}])
        for text in texts.values()
    ]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=new_tokens))
    for name, output in zip(texts, outputs, strict=True):
        stats, length = output.stats, len(output.prompt_token_ids)
        if output.error is not None:
            print(f"{name} ({length} tokens): {output.error}")
            continue
        blocks = f"{stats.blocks_before} blocks → {stats.blocks_after}"
        print(f"{name} ({length} tokens, {blocks}, first token after "
              f"{stats.time_to_first_token:.1f} s): {output.text.strip()}")  # fmt: skip
    found = llm.metrics.as_dict()
    print(f"{len(texts)} prompts in batches of up to {found['kvjax_batch_largest']:.0f}; "
          f"at most {found['kvjax_blocks_peak']:.0f} of {llm.plan.num_blocks} blocks")  # fmt: skip


def main() -> None:
    texts = {name: topics[name] for name in CHAPTERS}
    if len(sys.argv) > 1:
        files = sorted(Path(sys.argv[1]).glob("*.txt"))
        texts = {path.name: path.read_text("utf-8", errors="replace") for path in files}
        if not texts:
            sys.exit(f"{sys.argv[1]} holds no .txt file: give a folder of texts")
    question = sys.argv[2] if len(sys.argv) > 2 else QUESTION
    ask(load_model("smollm2-135m"), texts, question)


if __name__ == "__main__":
    main()
