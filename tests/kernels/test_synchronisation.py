"""The Hopper kernels wait for what they have to wait for.

Interpreters run a copy where it is issued, so that no run on a CPU tells a missing wait from one
that is there: where the race detector does not see it either, only the program text can. What is
written down here is each kernel's protocol, in program order, once for every place in its code.
Whoever changes a kernel changes it here, with a reason:

- a tile is copied in (`in`) only once its stage was freed (`wait`), and used only once it is full;
- a page beyond a head's end arrives (`arrive`) in place of its copy, twice: keys and values;
- what was written to shared memory is committed before a copy or a tensor core reads it;
- before shared memory that a copy out reads is written again, that copy is awaited (`drain`), and
  all of them are before a program ends;
- what is added to pages goes out in copies that add (`add`), which no interpreter knows.
"""

from collections.abc import Iterator
from itertools import groupby

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import cases
from kvjax.kernels import append_and_attend, move_kvs, paged_attention, window_metrics
from kvjax.kernels.paged_attention import spec
from kvjax.kernels.paged_attention.mosaic_gpu import MAX_STAGES
from tests.kernels.devices import H200

WORDS = {
    "barrier_wait": "wait",
    "barrier_arrive": "arrive",
    "copy_gmem_to_smem": "in",
    "copy_smem_to_gmem": "out",
    "wait_smem_to_gmem": "drain",
    "commit_smem": "commit",
}


def inner_jaxprs(eqn) -> Iterator:
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def words_of(jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.params.get("reduction_op") is not None:
            yield eqn.params["reduction_op"]
        elif eqn.primitive.name in WORDS:
            yield WORDS[eqn.primitive.name]
        for inner in inner_jaxprs(eqn):
            yield from words_of(inner)


def kernels_of(jaxpr) -> Iterator[tuple[str, str]]:
    """Each kernel's name and its words, with how often each comes in a row."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map" and eqn.params["name"]:
            words = [(word, len(list(run))) for word, run in groupby(words_of_kernel(eqn))]
            yield eqn.params["name"], " ".join(f"{word}{n if n > 1 else ''}" for word, n in words)
            continue
        for inner in inner_jaxprs(eqn):
            yield from kernels_of(inner)


def words_of_kernel(eqn) -> list[str]:
    return [word for inner in inner_jaxprs(eqn) for word in words_of(inner)]


def protocol(function, *arguments) -> dict[str, str]:
    with jax.sharding.use_abstract_mesh(H200):
        return dict(kernels_of(jax.make_jaxpr(function)(*arguments).jaxpr))


COPY = "wait in wait arrive2 in2 arrive2 in2 arrive2 in2 arrive2 in2 wait5"
"""The warpgroup that copies: a query slot that is free, a stage that is free, four pages of keys
and values each, or none; at the end every phase of 3 stages and 2 query slots."""
PAGES = 16
"""Of one round of the kernel that takes no stages."""


@pytest.mark.parametrize("family", ["llama-3.1-8b", "float32 d=96"])
@pytest.mark.parametrize("with_metric", [True, False])
def test_paged_attention(family: str, with_metric: bool) -> None:
    """Zeros of empty heads go out before the first tile is awaited. In float32, warps meet, halves
    are split and committed, and those of a query copied one by one; 96 channels are written in two
    copies that overlap: the second waits for the first."""
    wide = "96" in family
    twice = " out drain" if wide else ""
    logits = "drain commit out" if with_metric else "commit"
    empty = "commit out drain out" if wide else "commit out"
    head = f"{empty} wait2 {logits} wait commit arrive2 drain commit out drain{twice} {COPY}"
    if wide:
        head = head.replace("wait2 drain", "wait2 commit2 drain").replace(
            "wait2 commit wait", "wait2 commit3 wait"
        )
        head = head.replace("wait in wait", "wait in2 wait")
    finish = f"commit out drain{twice}"
    if with_metric:
        # Of the first unit and of the one ahead: logits of 4 query heads, and log-sum-exps, which
        # of a shared head are not copied. Sums of the unit before are read before others leave.
        unit = "in5 arrive"
        finish = f"{unit} {unit} wait commit drain add4 drain {finish}"
    want = {"paged_attention": head, "paged_attention_finish": finish}

    def call(q, k, v, table, lengths, metric):
        return paged_attention(
            q, k, v, table, lengths, metric=metric, return_metric=with_metric
        )  # fmt: skip

    assert protocol(call, *spec.FAMILIES[family].arguments()) == want


def test_exact_kvs_beside_the_pool() -> None:
    """What a head begins with comes with its queries. Nothing else is waited for or committed."""
    shape = cases.CODES["int8 int8 b=16 d=128"]
    q, *rest = cases.coded(shape, metric=False)

    def call(exact, *call):
        return paged_attention(*call, exact=exact)

    without = protocol(call, None, q, *rest)
    words = protocol(call, cases.exact_of(shape), q, *rest)
    assert "wait in wait arrive4 in4" in without["paged_attention"]
    with_begun = without["paged_attention"].replace("wait in wait", "wait in2 wait")
    assert words == {**without, "paged_attention": with_begun}


def test_finer_codes() -> None:
    """A page of finer codes, or none, is counted beside each of codes: keys, values and the scales
    of both. Warps meet before each of two rounds overwrites what the one before multiplied."""
    of_rounds = {}
    for name in ("int4 int4 b=16 d=128", "int4+ int4+ b=16 d=128"):
        call = cases.coded(cases.CODES[name], metric=False)
        of_rounds[name] = protocol(paged_attention, *call)["paged_attention"]
    codes, finer = of_rounds.values()
    pages, stages = " ".join(4 * ["arrive4 in4"]), MAX_STAGES
    empty, end = "commit out", "drain commit out drain"
    # Scales, converted keys; weights with the wait for values; converted values.
    tile = "wait2 commit3 wait commit arrive2"
    assert codes == f"{empty} {tile} {end} wait in wait {pages} wait{stages + 2}"
    tile = "wait2 commit3 wait commit2 arrive2"
    pages = " ".join(8 * ["arrive4 in4"])
    stages = int(finer.rsplit("wait", 1)[1]) - 2
    assert finer == f"{empty} {tile} {end} wait in wait {pages} wait{stages + 2}"


def test_append_and_attend() -> None:
    """The newest key and value come with the queries, are put into their tile and committed before
    it is multiplied, and are copied out before the queries' slot is freed."""
    q, *rest = spec.FAMILIES["llama-3.1-8b"].arguments(metric=False)
    rows = jax.ShapeDtypeStruct((4, 2, 128), jnp.bfloat16)
    words = protocol(append_and_attend, q, rows, rows, *rest)
    tile = "wait2 commit2 wait commit arrive"
    head = f"commit out {tile} out2 drain arrive drain commit out drain"
    copy = COPY.replace("wait in wait", "wait in3 wait")
    finish = "commit out drain"
    assert words == {"paged_attention": f"{head} {copy}", "paged_attention_finish": finish}


def test_window_metrics() -> None:
    """Keys and a tile of queries (offsets and positions beside them) are awaited before they are
    multiplied, a buffer of queries before it is filled again, and each of its phases at the end."""
    q, k = (jax.ShapeDtypeStruct((600, n, 128), jnp.bfloat16) for n in (8, 2))
    log_sum = jax.ShapeDtypeStruct((8, 600), jnp.float32)

    def call(q, k, log_sum):
        at = jnp.arange(600, dtype=jnp.int32)
        return window_metrics(q, k, query_position=at, log_sum=log_sum)

    want = {"attention_received": "wait2 arrive in wait in3 wait2"}
    assert protocol(call, q, k, log_sum) == want


def test_move_kvs() -> None:
    pool = jax.ShapeDtypeStruct((64, 16, 128), jnp.bfloat16)
    rows, count = jax.ShapeDtypeStruct((8, 32), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    pages = " ".join(["in2 arrive2"] * PAGES)
    want = {"move_kvs": f"{pages} wait out{2 * PAGES} drain"}
    assert protocol(move_kvs, pool, pool, rows, rows, count) == want
