"""What `kvjax decode` tells of a run: text as it comes, the rate reached, a closing table."""

import resource
import sys
from typing import Any

RATE_TOLERANCE = 0.1
"""Share by which the rate that is reached may differ from the one that was asked for, unsaid."""


def differs(rate: float, reached: float) -> bool:
    """Whether a rate that is reached is another than was asked for."""
    return abs(reached - rate) > RATE_TOLERANCE * rate


def tell_reached_rate(compression: Any, prompt_tokens: int, heads: int, block_size: int) -> None:
    """Say, on stderr, where a prompt is not compressed as much as was asked for."""
    rate, reached = compression.rate, compression.reached_rate(prompt_tokens, heads, block_size)
    if rate is None or not differs(rate, reached):
        return
    blocks = compression.blocks(prompt_tokens, heads, block_size)
    if blocks is None:
        print(
            f"warning: rate {rate:g}: method {compression.method} evicts nothing: leave one of "
            "them out",
            file=sys.stderr,
        )
        return
    print(
        f"warning: this prompt of {prompt_tokens} tokens is compressed {reached:.1f} times, not "
        f"{rate:g}: a rate gives it {blocks * block_size // heads} tokens in whole blocks, at "
        f"least {compression.floor} and a block of {block_size} in each head; --floor says less",
        file=sys.stderr,
    )


class Shown:
    """Where the text goes as it comes: stdout, or stderr beside --json.

    Where stdout cannot be written any more, all of the text so far goes to stderr.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self._text = ""
        self.error: OSError | None = None

    def __call__(self, text: str) -> None:
        self._text += text
        try:
            print(text, end="", file=self._stream, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._stream is sys.stderr:
                raise
            self._stream, self.error = sys.stderr, error
            print(self._text, end="", file=sys.stderr, flush=True)


def report(output: Any, llm: Any, seconds: dict[str, float]) -> dict[str, Any]:
    """Everything there is to say about a run, as one JSON object."""
    stats, cache, compression = output.stats, llm.worker.cache, llm.compression
    prompt_tokens, found = len(output.prompt_token_ids), llm.metrics.as_dict()
    kvs_before, kvs_after = llm.plan.heads * prompt_tokens, int(stats.kept.sum())
    block = cache.block_bytes
    decoded = max(0, len(output.token_ids) - 1)
    return {
        "model": llm.model.config.name,
        "weights": llm.model.source,
        "method": compression.method,
        "rate": compression.rate,
        "reached_rate": compression.reached_rate(prompt_tokens, llm.plan.heads, cache.block_size),
        "max_cache_tokens": compression.cap(prompt_tokens, cache.block_size),
        "dtype": cache.spec.codec.name,
        "block_size": cache.block_size,
        "prompt_tokens": prompt_tokens,
        "generated_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason or "interrupted",
        "text": output.text,
        "kvs_before": kvs_before,
        "kvs_after": kvs_after,
        "blocks_before": stats.blocks_before,
        "blocks_after": stats.blocks_after,
        "bytes_before": stats.blocks_before * cache.spec.plain.block_bytes,
        "bytes_after": stats.blocks_after * block + cache.spec.window_bytes,
        "achieved_rate": kvs_before / kvs_after,
        "pool_bytes": cache.num_blocks * block,
        "peak_blocks": int(found["kvjax_blocks_peak"]),
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "budget_shortfall_blocks": stats.shortfall,
        "blocks_evicted_decoding": stats.blocks_evicted_decoding,
        "kept_per_layer_head": stats.kept.tolist(),
        "seconds": seconds,
        "prefill_tokens_per_second": prompt_tokens / seconds["prefill"],
        "decode_tokens_per_second": decoded / seconds["decode"] if decoded else None,
    }


def print_table(result: dict[str, Any]) -> None:
    """The closing table, on stderr."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    kept = np.asarray(result["kept_per_layer_head"])
    layers = kept.sum(axis=1)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 100)

    def spread(values) -> str:
        return f"{values.min():,} / {np.median(values):,.0f} / {values.max():,}"

    def size(count: int) -> str:
        return f"{count / 1e6:,.1f} MB"

    asked = f"rate {result['rate']:g}" if result["rate"] else f"{result['max_cache_tokens']} tokens"
    if result["rate"] and differs(result["rate"], result["reached_rate"]):
        asked += f" ({result['reached_rate']:.1f} reached)"
    if result["max_cache_tokens"] is None:
        asked = "nothing evicted"
    title = f"{result['model']}, {result['method']}, {asked}, KVs in {result['dtype']}"
    table = Table(title=title, title_justify="left", show_edge=False)
    for name in ("cache", "before compression", "after", "smaller by"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for name, key in (("KVs", "kvs"), ("blocks", "blocks"), ("bytes", "bytes")):
        before, after = result[f"{key}_before"], result[f"{key}_after"]
        form = size if key == "bytes" else "{:,}".format
        table.add_row(name, form(before), form(after), f"{before / after:.2f}×")
    console.print(table)
    facts = Table(show_header=False, show_edge=False, box=None)
    facts.add_row("KVs kept per head, smallest / median / largest", spread(kept))
    facts.add_row("KVs kept per layer, smallest / median / largest", spread(layers))
    facts.add_row("pool allocated, on all devices", size(result["pool_bytes"]))
    facts.add_row("prompt tokens", f"{result['prompt_tokens']:,}")
    ended = result["finish_reason"]
    facts.add_row("generated tokens", f"{result['generated_tokens']:,} (ended by: {ended})")
    if result["budget_shortfall_blocks"]:
        facts.add_row("blocks over the budget", f"{result['budget_shortfall_blocks']:,}")
    if result["blocks_evicted_decoding"]:
        facts.add_row("blocks evicted while decoding", f"{result['blocks_evicted_decoding']:,}")
    for name, value in result["seconds"].items():
        rate = result.get(f"{name}_tokens_per_second")
        speed = f", {rate:,.1f} tokens/s" if rate else ""
        facts.add_row(name, f"{value:.2f} s{speed}")
    console.print(facts)
