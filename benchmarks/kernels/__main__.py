"""Time the kernels against the bandwidth of the same machine, measured in the same run.

A decode kernel has done its work when every kept key and value was read once, so what counts is
the share of the copy bandwidth that it reaches on exactly these bytes.

    python -m benchmarks.kernels --out bench.json                 # on a GPU: a few minutes
    python -m benchmarks.kernels --size small                     # anywhere, to see it work
    python -m benchmarks.kernels --only check decode --no-rivals

Sections: `check` (every kernel against the XLA reference on the same inputs), `decode` (attention
of one layer, against JAX's own paged attention, cuDNN, torch, and FlashInfer where it is
installed), `window` (window metrics as a share of a layer's prefill), `move` (MoveCache), `step` (a
whole decode step with random weights against the bytes it must read). The last line is one compact
JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kernels.targets import targets
from kvjax import startup
from kvjax.cli import ArgumentParser, check_output_file, run_script
from kvjax.cli.throughput.limits import (
    ROUNDS,
    TIMED_SECONDS,
    copy_bandwidth,
    loop_seconds,
    median_seconds,
)

SECTIONS = ("check", "decode", "window", "move", "step")
RIVALS = ("jax paged_attention", "cuDNN, dense", "torch SDPA, dense", "FlashInfer, paged")
"""What others provide: not every machine has them, and that is no failure of ours."""


@dataclasses.dataclass
class Bench:
    """The run: its sizes, its copy bandwidth, its results so far."""

    small: bool
    rivals: bool
    bandwidth: float
    out: Path | None = None
    results: list[dict] = dataclasses.field(default_factory=list)

    def report(self) -> str:
        """All results so far as compact JSON; also written to the file, if there is one."""
        import jax

        report = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "copy_bytes_per_s": round(self.bandwidth),
            "targets": list(targets(self.results, RIVALS)),
            "results": self.results,
        }
        text = json.dumps(report, separators=(",", ":"), ensure_ascii=False)
        if self.out is not None:
            self.out.write_text(text + "\n")
        return text

    def record(self, row: dict) -> None:
        """Keep a result. A run that is cut short has written what it found by then."""
        self.results.append(row)
        self.report()

    def add(self, section: str, name: str, what: str, seconds: float, moved: int, **more) -> float:
        """Record a timing and print it."""
        share = moved / seconds / self.bandwidth
        row = {"section": section, "case": name, "what": what, "us": round(seconds * 1e6, 2)}
        row |= {"bytes": moved, "share": round(share, 4)} | more
        self.record(row)
        rate = f"{moved / seconds / 1e9:9.1f} GB/s {100 * share:6.1f} %"
        print(f"{section:7} {name:28} {what:24} {seconds * 1e6:11.1f} us {rate}", flush=True)
        return share

    def failed(self, section: str, name: str, what: str, error: Exception) -> None:
        """Record that something could not run here."""
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        self.record({"section": section, "case": name, "what": what, "error": text})
        print(f"{section:7} {name:28} {what:24} {text}", flush=True)


def check(bench: Bench) -> None:
    """Every kernel that is chosen here against the XLA reference on the same inputs."""
    from benchmarks.kernels.checks import checks

    for name, chosen, errors, limit in checks(bench.small):
        good = all(error <= limit for error in errors.values())
        row = {"section": "check", "case": name, "what": chosen, "errors": errors, "good": good}
        bench.record(row)
        worst = ", ".join(f"{k} {e:.1e}" for k, e in errors.items())
        print(f"check   {name:28} {chosen[:24]:24} {worst}{'' if good else '  WRONG'}", flush=True)


def decode(bench: Bench) -> None:
    """One layer's decode attention, ours and others', with and without the statistic."""
    from benchmarks.kernels.cases import decode_cases

    for case in decode_cases(bench.small):
        ours(bench, case)
        if bench.rivals:
            rivals(bench, case)


def timed(bench: Bench, case, what: str, body: Callable, carry: Any, *fixed: Any) -> None:
    """Time one implementation of one decode case."""
    try:
        seconds = loop_seconds(body, carry, case.kv_bytes / bench.bandwidth, *fixed)
    except Exception as error:
        bench.failed("decode", case.name, what, error)
    else:
        bench.add("decode", case.name, what, seconds, case.kv_bytes)


def ours(bench: Bench, case) -> None:
    """`paged_attention`: the kernel chosen here with and without metric, and the reference.

    An output is the next turn's query, so that every turn waits for the one before.
    """
    import jax
    import jax.numpy as jnp

    from benchmarks.kernels.cases import paged_problem
    from kvjax.kernels import explain, paged_attention, plan_paged_attention

    p = paged_problem(case)
    copies, max_blocks = p.tables.shape[0], p.tables.shape[-1]
    name = explain(paged_attention, p.q, p.k, p.v, p.tables[0], p.lengths).partition(":")[0]

    @jax.jit
    def plan(lengths, k):
        return plan_paged_attention(lengths, k, num_query_heads=p.q.shape[1], max_blocks=max_blocks)

    work = plan(p.lengths, p.k)
    fixed = (p.k, p.v, p.tables, p.lengths, work)

    def plain(i, q, k, v, tables, lengths, work, implementation=None):
        table = tables[i % copies]
        return paged_attention(q, k, v, table, lengths, work=work, implementation=implementation)

    def with_metric(i, carry, k, v, tables, lengths, work):
        q, metric = carry
        table = tables[i % copies]
        return paged_attention(
            q, k, v, table, lengths, work=work, metric=metric, return_metric=True
        )

    timed(bench, case, name, plain, p.q, *fixed)
    timed(bench, case, f"{name} + metric", with_metric, (p.q, p.metric), *fixed)
    if work is not None:
        xla = functools.partial(plain, implementation="xla")
        timed(bench, case, "xla", xla, p.q, *fixed)
        layers = jnp.broadcast_to(p.lengths, (32, *p.lengths.shape))
        bench.add(
            "decode", case.name, "plan of 32 layers", median_seconds(lambda: plan(layers, p.k)), 0
        )


def rivals(bench: Bench, case) -> None:
    """What else can read the same bytes: JAX's kernel, and dense attention without pages."""
    import jax
    import jax.numpy as jnp

    from benchmarks.kernels.cases import dense_cache, paged_problem, shipped
    from benchmarks.kernels.torch_rivals import flashinfer_seconds, sdpa_seconds

    p = paged_problem(case)
    copies, attend = p.tables.shape[0], shipped(case)

    def folded(i, q, k, v, tables, lengths):
        return attend(q, k, v, tables[i % copies], lengths)

    paged, cudnn, sdpa, flashinfer = RIVALS
    timed(bench, case, paged, folded, p.q, p.k, p.v, p.tables, p.lengths)
    del p
    timed_in_torch(bench, case, flashinfer, flashinfer_seconds)
    if case.spread != "uniform":
        return
    q = jnp.ones((case.seqs, case.heads * case.group, case.head_dim), case.dtype)
    timed(
        bench,
        case,
        cudnn,
        lambda _, q, k, v: jax.nn.dot_product_attention(q[:, None], k, v, implementation="cudnn")[
            :, 0
        ],
        q,
        *dense_cache(case),
    )
    timed_in_torch(bench, case, sdpa, sdpa_seconds)


def timed_in_torch(bench: Bench, case, what: str, seconds_of: Callable) -> None:
    """Time one of torch's implementations of one decode case."""
    turns = max(4, math.ceil(TIMED_SECONDS / (case.kv_bytes / bench.bandwidth)))
    try:
        seconds = seconds_of(case, turns)
    except Exception as error:
        bench.failed("decode", case.name, what, error)
    else:
        bench.add("decode", case.name, what, seconds, case.kv_bytes)


def window(bench: Bench) -> None:
    """Window metrics of the last 8 queries beside the prefill of the same layer."""
    import jax
    import jax.numpy as jnp

    from kvjax.kernels import prefill_attention, window_metrics
    from kvjax.models.config import get_model_entry
    from kvjax.models.decoder import forward, init_params

    tokens = 256 if bench.small else 8192
    model = get_model_entry("smollm2-135m" if bench.small else "llama3.1-8b").config
    model = dataclasses.replace(model, num_layers=1)
    params = init_params(model, jnp.float32 if bench.small else jnp.bfloat16)
    ids = jnp.arange(tokens)[None] % model.vocab_size

    def attend(carry, layer, q, k, v, _):
        return carry, prefill_attention(q[0], k[0], v[0])[None], (q[0, -32:], k[0])

    def layer(params):
        hidden, _, (queries, keys) = forward(
            model, params, ids, jnp.arange(tokens)[None], attend, 0
        )
        return hidden, queries[0], keys[0]

    whole = jax.jit(layer)
    _, queries, keys = whole(params)
    prefill_seconds = median_seconds(lambda: whole(params))
    bench.add("window", f"{model.name} {tokens}", "prefill of one layer", prefill_seconds, 0)
    moved = keys.size * keys.dtype.itemsize
    for w in (8, 32):
        position = jnp.arange(tokens - w, tokens, dtype=jnp.int32)
        measure = jax.jit(functools.partial(window_metrics, query_position=position))
        seconds = median_seconds(lambda m=measure, w=w: m(queries[-w:], keys))
        share = round(seconds / prefill_seconds, 4)
        bench.add("window", f"{model.name} {tokens}", f"w = {w}", seconds, moved, of_prefill=share)


def move(bench: Bench) -> None:
    """MoveCache: half of what every head holds is evicted at random."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from kvjax.cache import allocate, init_cache, schedule_evictions
    from kvjax.cache.move import move_cache
    from kvjax.kernels import explain, move_kvs

    slots, layers, tokens = (2, 2, 64) if bench.small else (8, 32, 4096)
    dtype = jnp.float32 if bench.small else jnp.bfloat16
    heads, d, b = 8, 128, 16
    blocks = slots * layers * heads * tokens // b
    sizes: dict[str, Any] = {
        "num_slots": slots,
        "num_layers": layers,
        "num_kv_heads": heads,
        "head_dim": d,
    }

    def fill():
        cache = init_cache(
            **sizes, num_blocks=blocks, max_blocks_per_head=tokens // b, block_size=b, dtype=dtype
        )
        cache, _ = allocate(cache, jnp.full((slots, layers, heads), tokens, jnp.int32))
        metric = jax.random.uniform(jax.random.key(0), cache.metric.shape)
        position = jnp.zeros(cache.position.shape, jnp.int32)
        return dataclasses.replace(
            cache, metric=metric, position=position, seq_len=cache.seq_len + tokens
        )

    made = jax.jit(fill)
    index = jnp.arange(slots, dtype=jnp.int32)
    evict = jnp.full(slots, blocks // slots // 2, jnp.int32)
    schedule = jax.jit(schedule_evictions)(made(), index, evict)
    carry_out = jax.jit(move_cache, donate_argnums=0)
    times = []
    for _ in range(ROUNDS + 1):
        cache = jax.block_until_ready(made())
        start = time.perf_counter()
        jax.block_until_ready(carry_out(cache, schedule))
        times.append(time.perf_counter() - start)
    # A survivor moves if it lies in the half that is given up, and half of these survive.
    count = np.asarray(schedule.count)
    moves = int(np.sum(count * (tokens - count) // tokens))
    spec = jax.eval_shape(fill).spec
    moved = 2 * moves * (spec.kv_bytes + spec.number_bytes)
    name = f"{slots} × {layers} × {heads} × {tokens}"
    bench.add("move", name, "move_cache", sorted(times[1:])[ROUNDS // 2], moved, moves=moves)

    rows, width = slots * layers * heads, tokens // 2
    k = v = jnp.ones((blocks, b, d), dtype)
    order = jax.random.permutation(jax.random.key(1), jnp.arange(blocks * b, dtype=jnp.int32))
    source, target = order.reshape(2, -1)[:, : rows * width].reshape(2, rows, width)
    each = jnp.full(rows, width // 2, jnp.int32)
    call = (k, v, source, target, each)
    chosen = explain(move_kvs, *call).partition(":")[0]
    moved = 2 * int(each.sum()) * 2 * d * jnp.dtype(dtype).itemsize
    for what in dict.fromkeys((chosen, "xla")):

        def turn(_, pools, what=what, rest=call[2:]):
            return move_kvs(*pools, *rest, implementation=what)

        seconds = loop_seconds(turn, call[:2], moved / bench.bandwidth)
        bench.add("move", name, f"move_kvs, {what}", seconds, moved)


def step(bench: Bench) -> None:
    """A whole decode step of 64 sequences with random weights, against the bytes it must read."""
    import jax
    import jax.numpy as jnp

    from kvjax.cache import allocate, get_method, init_cache
    from kvjax.engine.decode import decode_step
    from kvjax.models import stacks_layers
    from kvjax.models.config import get_model_entry
    from kvjax.models.decoder import init_params

    model = get_model_entry("smollm2-135m" if bench.small else "llama3.1-8b").config
    if bench.small:
        model = dataclasses.replace(model, num_layers=2)
    dtype = jnp.float32 if bench.small else jnp.bfloat16
    # As the engine holds them.
    params = init_params(model, dtype, stacked=stacks_layers(jax.default_backend()))
    seqs, held = (4, 64) if bench.small else (64, 1024)
    steps, b = (4, 16) if bench.small else (24, 16)
    heads = (seqs, model.num_layers, model.num_kv_heads)
    per_head = -(-(held + 4 * steps) // b)

    def fill():
        cache = init_cache(
            num_slots=seqs,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            num_blocks=math.prod(heads) * per_head,
            max_blocks_per_head=per_head,
            block_size=b,
            dtype=dtype,
        )
        cache, _ = allocate(cache, jnp.full(heads, held, jnp.int32))
        return dataclasses.replace(cache, seq_len=cache.seq_len + held)

    tied = model.tie_word_embeddings
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    # A row of the embedding table is read per token, all of it only where it also gives logits.
    weights -= 0 if tied else model.vocab_size * model.hidden_size * jnp.dtype(dtype).itemsize
    kvs = math.prod(heads) * (held + steps) * jax.eval_shape(fill).spec.kv_bytes
    for name in ("full", "kv-compress-continual"):
        run = jax.jit(
            functools.partial(decode_step, model, get_method(name).decode), donate_argnums=1
        )
        cache = jax.jit(fill)()
        tokens, active = jnp.zeros(seqs, jnp.int32), jnp.ones(seqs, bool)
        cache, _, ok = run(params, cache, tokens, active)
        jax.block_until_ready(cache.k)
        start = time.perf_counter()
        for _ in range(steps):
            cache, scores, ok = run(params, cache, tokens, active)
            tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        jax.block_until_ready(tokens)
        seconds = (time.perf_counter() - start) / steps
        if not bool(ok):
            raise RuntimeError("the pool was too small for the steps")
        case = f"{model.name} {seqs} × {held}"
        bench.add("step", case, name, seconds, weights + kvs, tokens_per_s=round(seqs / seconds))
        del cache


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--size", choices=("small", "large"), help="large on GPUs and TPUs")
    parser.add_argument("--no-rivals", action="store_true", help="time only what is ours")
    parser.add_argument("--out", type=Path, help="write all results to this JSON file")
    options = parser.parse_args(arguments)
    if options.out is not None:
        check_output_file("--out", options.out)
    import jax

    startup.started()
    device = jax.devices()[0]
    small = options.size == "small" or (options.size is None and device.platform == "cpu")
    bandwidth = copy_bandwidth(1 << (26 if small else 31), 2e10 if small else 4e12)
    bench = Bench(small, not (options.no_rivals or small), bandwidth, options.out)
    print(f"{device.device_kind}: copy bandwidth {bench.bandwidth / 1e9:.0f} GB/s", flush=True)
    sections = {"check": check, "decode": decode, "window": window, "move": move, "step": step}
    for name in options.only:
        try:
            sections[name](bench)
        except Exception as error:
            bench.failed(name, "", "", error)
    for row in targets(bench.results, RIVALS):
        wanted = f"at most {row['at_most']}" if "at_most" in row else f"at least {row['at_least']}"
        verdict = "met" if row["met"] else "MISSED"
        print(f"{row['target']:70} {row['got']:8.3f}, wanted {wanted}: {verdict}")
    print(bench.report())
    ours = [row for row in bench.results if row["what"] not in RIVALS]
    return 0 if all(row.get("good", "error" not in row) for row in ours) else 1


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
