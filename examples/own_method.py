"""A compression method of your own: a formula, what it protects, and nothing else to touch.

    python examples/own_method.py

Here a KV counts what the last queries gave its key, times the length of its value: attention to a
value that is nearly zero changes nothing.
"""

import dataclasses

import jax.numpy as jnp

from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams, load_model
from kvjax.cache import METHODS, Method, Scores
from kvjax.cache.policy import Artefacts, AttentionScorer, LayerView
from kvjax.cache.policy.attention import received

TEXT = "The keys of the boat are under the blue bucket. " + "Rain fell on the harbour. " * 60
QUESTION = "Where are the keys of the boat?"


@dataclasses.dataclass(frozen=True)
class AttendedValues(AttentionScorer):
    """Attention of the last queries, averaged over the group, times the norm of the value."""

    window: int | None = 16

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        attention = received(view, self.window).mean(axis=1)  # [H, r, P] -> [H, P]
        assert view.v is not None
        return Scores(attention * jnp.linalg.norm(view.v, axis=-1).T)


OWN = Method(
    "attended-values",
    "attention of the last 16 queries times the norm of the value",
    AttendedValues(),
    protected=16,
    sinks=4,
)


def compare(model, text: str, question: str, new_tokens: int = 24) -> None:
    """Print what the model answers from the whole cache, from ours, and from SnapKV's."""
    prompt = model.tokenizer.chat([{"role": "user", "content": f"{text}\n\n{question}"}])
    llm = LLM(model, config=EngineConfig(max_batch=1, max_len=2048, pool_tokens=2048))
    for method in (METHODS["full"], OWN, METHODS["snapkv"]):
        rate = 8 if method.compresses else None
        compression = CompressionConfig(method, rate=rate, floor=16)
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=new_tokens), compression)
        stats = output.stats
        print(f"{method.name}: {stats.blocks_before} blocks → {stats.blocks_after}: {output.text}")


if __name__ == "__main__":
    compare(load_model("smollm2-135m"), TEXT, QUESTION)
