"""What devices tell each other in a step: the sums that the design names, and nothing of the
pool."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from kvjax.engine import SamplingParams
from kvjax.engine.checks import checked_request
from kvjax.engine.parallel import AXIS, _decoded
from tests.sharded.tiny import SIZES, TINY, engine_of

OPERATION = re.compile(
    r'"?stablehlo\.(all_reduce|all_gather|all_to_all|collective_permute|reduce_scatter|'
    r'collective_broadcast)"?\('
)
EXCHANGES = ("psum", "pmin", "pmax", "all_gather", "all_to_all", "ppermute", "reduce_scatter")
"""Beginnings of the names of what devices exchange, before it is lowered."""
RESULT = re.compile(r"-> (?:\()?tensor<([^>]*)>")
PROMPTS = [(30, "prefill", 32), (61, "prefill in scratch", 32), (90, "prefill in pool", 32)]
"""Tokens, by which step they run, and how many at once."""
NAMES = "owned", "growth", "kvs", "longest"
FITS = "all_reduce", "i32"
"""Whether every device has room."""


def collectives(call) -> list[tuple[str, str]]:
    """Name and result of every exchange in a step, as it stands in the program's text."""
    text = call.step.lower(*call.args).as_text()
    found = []
    for match in OPERATION.finditer(text):
        # An all_reduce has a region of its own before its type.
        rest = text[match.end() :]
        end = rest.index("})", rest.index("({")) if match[1] == "all_reduce" else 0
        result = RESULT.search(rest, end)
        assert result is not None
        found.append((match[1], result[1]))
    return sorted(found)


def in_loops(call) -> list[tuple[str, tuple[int, ...], tuple[int | None, ...]]]:
    """Name and shape of every exchange that stands in a loop, and how often each loop runs, the
    outermost first; None where that is not known."""
    found = []

    def visit(jaxpr, loops):
        for equation in jaxpr.eqns:
            name, inside = equation.primitive.name, loops
            if name in ("scan", "while"):
                inside = *loops, equation.params.get("length")
            if loops and name.startswith(EXCHANGES):
                found.append(
                    (name.removesuffix("_invariant"), equation.outvars[0].aval.shape, loops)
                )
            for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner, inside)

    visit(call.step.jitted.trace(*call.args).jaxpr.jaxpr, ())
    return found


@pytest.fixture(scope="module")
def engine():
    return engine_of(3, "kv-compress")


def test_a_decode_step(engine):
    groups, hidden = 2, TINY.hidden_size
    call = engine.worker.decode_call([0, 1], 1, 1, None, None)
    stream = ("all_reduce", f"{groups}x1x{hidden}xf32")
    assert collectives(call) == sorted(
        [
            stream,  # embeddings
            stream,  # the layer's attention
            stream,  # the layer's MLP
            ("all_gather", f"{groups}x{-(-TINY.vocab_size // 3) * 3}xf32"),  # logits
            FITS,
            ("all_gather", f"{4 * groups + 1}x3xi32"),  # told to the host: blocks and KVs
        ]
    )


def test_what_rounds_are_told_again_is_on_the_devices_already(engine):
    """It would be put onto each of them in every round, by the host."""
    first, again = (engine.worker.decode_call([0, 1], 1, 1, None, None).args for _ in range(2))
    assert all(one is other for one, other in zip(first[7:9], again[7:9], strict=True))
    other = engine.worker.decode_call([1], 1, 1, None, None).args
    assert (first[7].tolist(), other[7].tolist()) == ([0, 1], [1])
    assert int(other[8]) == 1
    assert first[7].sharding.is_fully_replicated
    assert len(first[7].sharding.device_set) == 3
    assert engine.worker.decode_call([1], 1, 5, None, None).args[9] == 5


def test_what_the_host_is_told_is_of_all_devices_and_lies_on_each(engine):
    """Blocks by device, KVs over all of them: fetched from one device, however many there are."""
    parallel = engine.worker.parallel
    call = engine.worker.decode_call([0, 1], 1, 1, None, None)
    told = call.step.eval_shape(*call.args)[2]
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(told))

    def local(number):
        device = number[0]
        rows = {name: jnp.array([1, 2]) * 10**n + device for n, name in enumerate(NAMES)}
        others = dict.fromkeys(("tokens", "active", "ok", "log_probs"))
        return _decoded(dataclasses.replace(told, **others, **rows, free=7 * device))

    specs = PartitionSpec(AXIS), PartitionSpec()
    mapped = jax.shard_map(local, mesh=parallel.mesh, in_specs=specs[:1], out_specs=specs[1],
                           check_vma=False)  # fmt: skip
    found = jax.jit(mapped)(np.arange(3, dtype=np.int32))
    assert found.owned.tolist() == [[1, 2, 3], [2, 3, 4]]
    assert found.growth.tolist() == [[10, 11, 12], [20, 21, 22]]
    assert found.kvs.tolist() == [303, 603]
    assert found.longest.tolist() == [1002, 2002]
    assert found.free.tolist() == [0, 7, 14]


def job_of(engine, length: int):
    """A prompt of so many tokens, none of which have run."""
    tokens, sampling = np.arange(length, dtype=np.int32), SamplingParams(max_tokens=8)
    request = checked_request(engine, tokens, sampling, engine.compression, "one", 0)
    return engine.worker.begin(request)


@pytest.mark.parametrize(("length", "step", "size"), PROMPTS)
def test_a_prompt_tells_what_a_token_does(engine, length, step, size):
    """Whole, in parts of a scratch, and chunk by chunk in the pool."""
    job, worker = job_of(engine, length), engine.worker
    if step == "prefill in scratch":
        job.prompt = jax.eval_shape(worker.scratch_maker(job))
    call = worker.chunk_call(job)
    assert (call.key.step, call.key.sizes[0]) == (step, size)
    stream = ("all_reduce", f"1x{size}x{TINY.hidden_size}xf32")
    room = [FITS] if job.in_pool else []
    assert collectives(call) == sorted(
        [
            stream,  # embeddings
            stream,  # the layer's attention
            stream,  # the layer's MLP
            ("all_gather", f"{-(-TINY.vocab_size // 3) * 3}xf32"),  # logits
            *room,
        ]
    )


def test_a_prompt_that_is_compressed_tells_no_scores(engine):
    job, worker = job_of(engine, 30), engine.worker
    prompt = jax.eval_shape(worker.scratch_maker(job))
    call = worker.place_call(job.request, prompt, 0, 10)
    a_number = "all_reduce", "i32"
    assert collectives(call) == sorted(
        [
            a_number,  # blocks that it would own, for the budget
            a_number,  # and for the split
            a_number,  # those that may go
            a_number,  # those below a number: of every bit
            ("all_reduce", f"{TINY.num_layers}x{TINY.num_kv_heads}x2xi32"),
            a_number,  # those that stay
            FITS,
            a_number,  # told to the host: blocks that went
        ]
    )
    assert in_loops(call) == [("psum", (), (32,))]


def test_replicas_gather_the_queries_of_their_heads():
    """Once in the layer, and nothing else is told beside what devices without replicas do."""
    engine = engine_of(6, "kv-compress", replicas=2)
    vocab, hidden = -(-TINY.vocab_size // 6) * 6, TINY.hidden_size
    own = f"1x{TINY.group_size}x{TINY.head_dim}xf32"
    for call, rows, logits, told in (
        (
            engine.worker.decode_call([0, 1], 1, 1, None, None),
            "2x1x",
            "2x",
            [FITS, ("all_gather", "9x3xi32")],
        ),
        (engine.worker.chunk_call(job_of(engine, 30)), "1x32x", "", []),
    ):
        assert collectives(call) == sorted(
            [
                *[("all_reduce", f"{rows}{hidden}xf32")] * 3,
                ("all_gather", f"{rows}{own}"),
                ("all_gather", f"{logits}{vocab}xf32"),
                *told,
            ]
        )


def test_a_compression_tells_no_scores(engine):
    """Counts of each sequence, and two of each head: cheaper blocks, and those that cost as much.
    The count of the 32 bits of the last cost to go stands in one loop."""
    method, groups = engine.compression.resolved, SIZES.max_batch
    slots = list(range(groups))
    call = engine.worker.compress_call(slots, slots, slots, method, 10**6, 64)
    a_number = "all_reduce", f"{groups}xi32"
    assert collectives(call) == sorted(
        [
            a_number,  # blocks that it owns, for what is to go
            a_number,  # and for the budget
            a_number,  # and for the split
            a_number,  # those that may go
            a_number,  # those below a number: of every bit
            ("all_reduce", f"{groups}x{TINY.num_layers}x{TINY.num_kv_heads}x2xi32"),
        ]
    )
    assert in_loops(call) == [("psum", (groups,), (32,))]


def test_one_device_tells_nobody_anything():
    worker = engine_of(1, "kv-compress").worker
    assert collectives(worker.decode_call([0, 1], 1, 1, None, None)) == []
