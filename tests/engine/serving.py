"""A small engine of fixed sizes for the tests: steps are compiled once for all of them."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import CompressionConfig, as_codec, check_invariants, init_cache, write_prompt
from kvjax.cache.policy import Observer
from kvjax.cache.store import KeySmoothing
from kvjax.engine.config import EngineConfig
from kvjax.engine.decode import decode_step
from kvjax.engine.llm import LLM
from kvjax.engine.prefill import prefill
from kvjax.engine.request import RequestOutput
from kvjax.engine.sampling import SamplingParams
from kvjax.models import LoadedModel
from tests.engine.conftest import TINY
from tests.models.decoder_helpers import dense_scores
from tests.models.tokenizer_builders import tiny_tokenizer

FULL = CompressionConfig(method="full")
SMALL = CompressionConfig(max_cache_tokens=16, protected=8)
"""A cache of 16 tokens' worth of KVs."""
LATE = dataclasses.replace(SMALL, on_prefill=False)
"""Compressed only where blocks run out."""
HEADS = TINY.num_layers * TINY.num_kv_heads
ROOMY, TIGHT = 600, 100
"""Pools in tokens: one in which everything fits, one in which it does not."""
SIZES = {"max_batch": 4, "max_len": 256, "block_size": 4, "decode_steps_per_sync": 4}
SIZES |= {"prefill_chunk": 32, "prefill_scratch": 128, "pool_tokens": ROOMY}


def make_llm(
    params,
    compression=FULL,
    pool_tokens=ROOMY,
    clock=time.perf_counter,
    cache_dtype=None,
    **config,
) -> LLM:
    model = LoadedModel(TINY, params, tiny_tokenizer(), "random weights")
    sizes = EngineConfig(**{**SIZES, "pool_tokens": pool_tokens, **config})
    return LLM(model, compression, sizes, cache_dtype=cache_dtype, clock=clock)


def prompts_of(*lengths: int) -> list[np.ndarray]:
    """A random prompt of each length, the same one each time."""
    return [
        np.random.default_rng(n).integers(0, TINY.vocab_size, n).astype(np.int32) for n in lengths
    ]


def greedy(max_tokens: int = 12, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


def alone(params, prompts, sampling, compression=FULL) -> list[tuple[int, ...]]:
    """The tokens of each prompt when nothing else runs."""
    llm = make_llm(params, compression)
    return [tokens_of(llm.generate([prompt], sampling))[0] for prompt in prompts]


def drain(llm: LLM, most: int = 2000) -> dict[str, RequestOutput]:
    """The last output of every request, when all have ended: in so many steps at most."""
    last = {}
    for _ in range(most):
        if not llm.has_unfinished():
            return last
        last |= {output.request_id: output for output in llm.step()}
    raise AssertionError(f"requests are open after {most} steps")


def dense_greedy(params, prompt, steps: int) -> list[int]:
    """Greedy tokens without any cache: the whole sequence again for every token."""

    @jax.jit
    def scores(tokens, last):
        return dense_scores(TINY, params, tokens, last)

    tokens = np.zeros(len(prompt) + steps, np.int32)
    tokens[: len(prompt)] = prompt
    for i in range(len(prompt), len(tokens)):
        tokens[i] = int(jnp.argmax(scores(tokens, i - 1)))
    return tokens[len(prompt) :].tolist()


def assert_empty(llm: LLM) -> None:
    """Nothing runs, no block and no slot is lost, and the cache is sound."""
    assert not llm.has_unfinished()
    assert not list(llm.scheduler)
    assert llm.worker.free_blocks() == llm.plan.num_blocks == llm.scheduler.accounts.num_free
    assert sorted(llm.scheduler._slots) == list(range(llm.config.max_batch))
    check_invariants(llm.worker.cache)


def cache_behind(model, params, ids, stored: str, smoothing: KeySmoothing | None = None):
    """A cache of one slot that holds a prompt in a type."""
    run = jax.jit(prefill, static_argnums=(0, 1))
    prompt, _ = run(model, Observer(None), params, {}, ids, jnp.int32(len(ids)))
    cache = init_cache(
        num_slots=1, num_layers=model.num_layers, num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim, num_blocks=160, max_blocks_per_head=10, block_size=4,
        codec=as_codec(stored, "float32"), smoothing=smoothing,
    )  # fmt: skip
    cache, ok = jax.jit(write_prompt)(
        cache, 0, prompt.k, prompt.v, prompt.scores.metric, prompt.length
    )
    assert ok
    return cache


def told_behind(model, params, cache, ids) -> np.ndarray:
    """Log-probabilities of the next token behind each of some tokens, step by step."""
    step, rows = jax.jit(decode_step, static_argnums=(0, 1)), []
    for token in ids:
        cache, out, ok = step(model, None, params, cache, jnp.asarray([token]), jnp.ones(1, bool))
        assert ok
        rows.append(np.asarray(jax.nn.log_softmax(out[0]), np.float64))
    return np.array(rows)


def mean_kl(exact: np.ndarray, rows: np.ndarray) -> float:
    return np.sum(np.exp(exact) * (exact - rows), axis=-1).mean()
