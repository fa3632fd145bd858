"""The store: codecs, the bytes that are planned, and that nobody else knows either."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import cache as kv
from kvjax.cache.store import CacheSpec
from kvjax.cache.store.codec import Codec, Plain, Rounded
from kvjax.cache.store.scaled import Integers
from kvjax.engine import LLM, EngineConfig, warming
from kvjax.errors import UserError
from kvjax.kernels import explain, paged_attention
from kvjax.kernels.device import Device
from kvjax.models import LoadedModel
from tests.engine.conftest import TINY, tiny_params  # noqa: F401
from tests.engine.serving import greedy, prompts_of, tiny_tokenizer

S, L, H, D, B, M, T = 2, 2, 2, 8, 4, 8, 24
SIZES: dict[str, Any] = {
    "num_slots": S, "num_layers": L, "num_kv_heads": H, "head_dim": D,
    "num_blocks": 64, "max_blocks_per_head": M, "block_size": B,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Eighths(Codec):
    """Eight bits per number, and a power of two per row."""

    def encode(self, rows):
        _, exponent = jnp.frexp(jnp.max(jnp.abs(rows), axis=-1))
        scale = jnp.ldexp(jnp.float32(1), exponent - 7)
        values = jnp.clip(jnp.round(rows / scale[..., None]), -127, 127)
        return {"values": values.astype(jnp.int8), "scale": scale}

    def decode(self, stored):
        return stored["values"].astype(self.dtype) * stored["scale"][..., None]


@dataclasses.dataclass(frozen=True)
class Cast(Plain):
    """What a bfloat16 pool holds, in float32."""

    def encode(self, rows):
        return jax.lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7)


@dataclasses.dataclass(frozen=True)
class Coded(Plain):
    """The rows that another codec's decode to."""

    of: Codec = dataclasses.field(default_factory=Plain)

    def encode(self, rows):
        return self.of.decode(self.of.encode(rows))


def run(codec: Codec, rounded: Codec | None = None) -> Iterator[kv.PagedCache]:
    """The cache after each of: a compressed prompt, a whole one, three tokens, a compression.

    With `rounded`, rows go through that codec before they reach the cache.
    """
    rng = np.random.default_rng(7)

    def rows(*shape):
        """Of keys and of values."""
        pair = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2)]
        if rounded is None:
            return pair
        codecs = rounded.of_keys, rounded.of_values
        return [one.decode(one.encode(x)) for one, x in zip(codecs, pair, strict=True)]

    cache = kv.init_cache(**SIZES, codec=codec)
    k, v = rows(L, T, H, D)
    metric = jnp.asarray(rng.random((L, H, T)).astype(np.float32))
    cache, _, ok = jax.jit(kv.write_survivors)(cache, 0, k, v, metric, T, 12)
    assert ok
    yield cache
    cache, ok = jax.jit(kv.write_prompt)(cache, 1, k, v, metric, T - 3)
    assert ok
    yield cache
    append = jax.jit(kv.append)
    for _ in range(3):
        cache, ok = append(cache, *rows(L, S, H, D), jnp.ones(S, bool))
        assert ok
    yield cache
    slots, keep = jnp.arange(2, dtype=jnp.int32), jnp.asarray([9, 10], jnp.int32)
    cache, report = jax.jit(kv.compress)(cache, slots, keep)
    assert (report.freed > 0).all()
    yield cache


def decoded(cache: kv.PagedCache) -> tuple[np.ndarray, np.ndarray]:
    k, v = cache.kv.read(jnp.arange(cache.num_blocks, dtype=jnp.int32))
    return np.asarray(k), np.asarray(v)


def test_a_codec_is_one_class():
    """A cache of encoded KVs is that of the KVs as they decode: written, moved and attended to."""
    q = np.random.default_rng(8).standard_normal((S, 2 * H, D)).astype(np.float32)
    attend = jax.jit(paged_attention)
    for ours, plain in zip(run(Eighths()), run(Plain(), Eighths()), strict=True):
        for name in ("metric", "position", "block_table", "context_len", "seq_len"):
            assert np.array_equal(getattr(ours, name), getattr(plain, name)), name
        assert np.array_equal(ours.free.mask, plain.free.mask)
        assert {x.dtype.name for x in jax.tree.leaves(ours.kv)} == {"int8", "float32"}
        for got, want in zip(decoded(ours), decoded(plain), strict=True):
            assert np.array_equal(got, want)
        heads = (ours.block_table[:, 1], ours.context_len[:, 1])
        got = attend(q, *ours.kv.operands, *heads)
        want = attend(q, plain.kv.stored_k, plain.kv.stored_v, *heads)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    assert len(np.unique(decoded(plain)[0])) > 100


def test_device_kernels_leave_encoded_pools_to_xla(monkeypatch):
    hopper = Device("gpu", "H200", True, 132)
    monkeypatch.setattr("kvjax.kernels.device.of", lambda _: hopper)
    shapes = {**SIZES, "head_dim": 64, "block_size": 16}
    for codec, chosen in ((Plain("bfloat16"), "mosaic_gpu"), (Eighths(), "xla: mosaic_gpu")):
        cache = kv.init_cache(**shapes, codec=codec)
        q = jax.ShapeDtypeStruct((S, 2 * H, 64), jnp.dtype("bfloat16"))
        table, lengths = cache.block_table[:, 0], cache.context_len[:, 0]
        said = explain(paged_attention, q, *cache.kv.operands, table, lengths)
        assert said.startswith(chosen)
    assert "encoded pools" in said


@pytest.mark.parametrize(
    ("codec", "kv_bytes"),
    [
        (Plain(), 2 * 4 * D),
        (Rounded(), 2 * 2 * D),
        (Eighths(), 2 * (D + 4)),
    ],
    ids=lambda x: getattr(x, "name", None),
)
@pytest.mark.parametrize(
    "planes", [(), (kv.Plane("hits", "int32", 3), kv.Plane("last"))], ids=["bare", "planes"]
)
def test_planned_bytes_are_those_of_the_arrays(codec, kv_bytes, planes):
    cache = kv.init_cache(**SIZES, codec=codec, planes=planes)
    spec = CacheSpec(L, H, D, codec, B, planes)
    assert cache.spec == spec
    assert spec.kv_bytes == kv_bytes
    assert sum(x.nbytes for x in jax.tree.leaves(cache.kv)) == 64 * B * kv_bytes
    numbers = sum(x.nbytes for x in jax.tree.leaves((cache.metric, cache.position, cache.state)))
    assert spec.number_bytes * 64 * B == numbers
    assert cache.block_bytes * 64 == 64 * B * kv_bytes + numbers
    everything = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert spec.pool_bytes(64) + spec.table_bytes(S, M) == everything


def engine(params, **arguments) -> LLM:
    sizes = EngineConfig(
        max_batch=2, max_len=96, block_size=4, prefill_chunk=32, prefill_scratch=64,
        pool_tokens=200, methods=arguments.pop("methods", ()),
    )  # fmt: skip
    return LLM(LoadedModel(TINY, params, tiny_tokenizer(), ""), config=sizes, **arguments)


@pytest.mark.parametrize("cache_dtype", [None, "bfloat16", "int4w8"])
def test_the_memory_plan_is_what_the_engine_holds(tiny_params, cache_dtype):  # noqa: F811
    llm = engine(tiny_params, cache_dtype=cache_dtype, methods=("lazyeviction", "scissorhands"))
    held = sum(x.nbytes for x in jax.tree.leaves((llm.worker.cache, llm.worker.state)))
    assert llm.plan.pool + llm.plan.tables == held
    assert llm.worker.cache.state
    assert llm.plan.spec == llm.worker.cache.spec


def test_a_budget_in_bytes_is_what_the_blocks_take(tiny_params):  # noqa: F811
    asked = kv.CompressionConfig("streaming-llm", budget_bytes=9000, protected=4, sinks=2)
    llm = engine(tiny_params, cache_dtype="int4", compression=asked)
    least = llm.plan.heads * llm.plan.spec.block_bytes
    for request, size in ((None, 9000), (dataclasses.replace(asked, budget_bytes=5000), 5000)):
        (queued,) = warming.like(llm, [60], False, request)
        assert queued.budget is not None
        assert size - least < queued.budget * llm.plan.spec.block_bytes <= size
    asked = dataclasses.replace(asked, budget_bytes=least, protected=90)
    with pytest.raises(UserError, match="a cache of 4 tokens is smaller than the 92 tokens that"):
        llm.add_request(prompts_of(80)[0], greedy(4), asked)


@pytest.mark.parametrize(
    ("stored", "like"),
    [
        pytest.param("bfloat16", Cast(), marks=pytest.mark.slow),
        pytest.param("int8", Coded(of=Integers()), marks=pytest.mark.slow),
        pytest.param("int4", Coded(of=Integers(bits=4)), marks=pytest.mark.slow),
    ],
    ids=["bfloat16", "int8", "int4"],
)
def test_a_pool_of_fewer_bits_is_one_of_rounded_rows(stored, like, tiny_params):  # noqa: F811
    """Tokens and kept positions are those of a float32 pool of such rows.

    A prompt in its scratch, one in chunks in the pool, compression while decoding.
    """
    found = []
    for codec in (stored, like):
        asked = kv.CompressionConfig("h2o-decode", max_cache_tokens=16, compress_every=4)
        llm = engine(tiny_params, cache_dtype=codec, compression=asked)
        assert llm.worker.cache.k.dtype == ("bfloat16" if codec == "bfloat16" else "float32")
        rounds = []
        for prompt in prompts_of(30, 80):
            llm.add_request(prompt, greedy(10))
        while llm.has_unfinished():
            tokens = {output.request_id: output.token_ids for output in llm.step()}
            rounds.append((tokens, np.asarray(llm.worker.cache.position).tolist()))
        found.append(rounds)
    assert found[0] == found[1]
    held = [np.asarray(position) for _, position in found[0]]
    assert max(position.max() for position in held) > 80


@pytest.mark.parametrize("wrong", ["int3", "float64", "nonsense", 7])
@pytest.mark.usefixtures("unchecked_signatures")
def test_what_no_codec_stores_is_refused_in_one_line(wrong):
    asked = f"cache_dtype '?{wrong}'?: give one of bfloat16, .*int4, .*codec"
    with pytest.raises(UserError, match=f"^{asked}$"):
        kv.as_codec(wrong, "float32")
    assert kv.as_codec("float32", "float32") == kv.as_codec(None, jnp.float32) == Plain()
    assert kv.as_codec(jnp.bfloat16, np.float32) == Rounded()


ROOT = Path(kvjax.__file__).parent
NOT_A_POOL = {"view", "step", "prompt", "prefix", "dense", "teacher", "of", "exact", "weighed"}
"""What has keys and values that are no pool: prompts, layers, rows that were read."""
BYTES = {
    "cli/convert.py": "a model's file",
    "cli/throughput/limits.py": "weights",
    "engine/memory.py": "weights, activations and the slots' states",
}
"""Files beside the models' and the kernels' own that count bytes, and of what."""
WHOLE_PROMPTS = (
    *("kivi", "kvquant", "kvquant_calibrated", "minicache", "rotatekv", "xkv", "xquant"),
    "xquant_cl",
)
PER_HEAD = {
    "cli/throughput/limits.py": "floating-point operations of attention",
    **{f"eval/prompt_codecs/{name}.py": "bytes that no pool holds" for name in WHOLE_PROMPTS},
}
"""Files that multiply by the head dimension, and for what."""


def outside() -> Iterator[tuple[str, ast.AST]]:
    """Every node of every file outside the store, with the file's name."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("cache/store/"):
            for node in ast.walk(ast.parse(path.read_text())):
                yield name, node


def last_name(node: ast.AST) -> str | None:
    """The name of a variable, attribute or called function."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return getattr(node, "attr", getattr(node, "id", None))


def test_nobody_else_reads_or_writes_the_pool():
    wrong = []
    for name, node in outside():
        if isinstance(node, ast.Attribute):
            raw = node.attr in ("k", "v") and last_name(node.value) not in NOT_A_POOL
            if node.attr in ("stored_k", "stored_v") or (raw and not is_self(name, node)):
                wrong.append(f"{name}:{node.lineno}: .{node.attr}")
    assert wrong == []


def is_self(name: str, node: ast.Attribute) -> bool:
    """Whether it is a field of a class that has keys of its own, in a policy's file."""
    return last_name(node.value) == "self" and name.startswith("cache/policy/")


def test_nobody_else_counts_the_bytes_of_kvs():
    bytes_of, per_head = set(), set()
    for name, node in outside():
        if name.startswith(("kernels/", "models/")):
            continue
        if isinstance(node, ast.Attribute) and node.attr in ("itemsize", "nbytes"):
            bytes_of.add(name)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            factors = {last_name(node.left), last_name(node.right)}
            per_head |= {name} if "head_dim" in factors else set()
    assert bytes_of == set(BYTES)
    assert per_head == set(PER_HEAD)
