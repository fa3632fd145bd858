"""Decode text through a compressed KV cache that is paged per (layer, KV head).

Without options it answers a question about a chapter of the Python documentation with a small
real model, and shows what the cache held before and after compression:

    kvjax decode --rate 8

Other models, prompts and methods:

    kvjax decode --model llama3.1-8b --rate 32 --prompt-file report.txt \\
        --question "Who signed it?"
    kvjax decode --model llama3.1-8b --weights ./Llama-3.1-8B-Instruct \\
        --max-cache-tokens 1024 --prompt-file book.txt --question "Who is Ishmael?"
    kvjax decode --weights ./any-llama --prompt "Once upon a time" --no-chat
    cat notes.txt | kvjax decode --prompt-file - --question "Summarise." --json
    kvjax decode --method kv-compress-w32-l2 --rate 16 --plot kept.png
    kvjax decode --method full
    kvjax decode --model llama3.2-1b --dummy-weights --max-new-tokens 8
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from kvjax.cli.command import check_output_file
from kvjax.cli.models import (
    add_budget_option,
    add_cache_dtype_option,
    add_calibration_option,
    add_devices_option,
    add_draft_option,
    add_floor_option,
    add_model_options,
    asked_rate,
    check_cache_dtypes,
    check_draft,
    check_model_options,
    chosen_calibration,
    chosen_draft,
    chosen_method,
    floor_of,
    load_chosen_model,
)
from kvjax.cli.progress import Progress
from kvjax.cli.told import Shown, print_table, report, tell_reached_rate
from kvjax.errors import ScratchTooSmall, UserError

if TYPE_CHECKING:
    import numpy as np

    from kvjax.cache import CompressionConfig
    from kvjax.engine import LLM, EngineConfig, RequestOutput, SamplingParams
    from kvjax.models import LoadedModel

TOPIC = "debugger"
PROMPT_GRAIN = 256
"""Prompts are padded to a multiple of this many tokens, so that few shapes are compiled."""
MOST_PROMPT_BYTES = 1 << 26
"""Far more than any model reads, and far less than /dev/zero has."""
QUESTION = "What is the command to continue execution until the next breakpoint?"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser.add_argument_group("model"))

    prompt = parser.add_argument_group("prompt (default: a chapter of the Python documentation)")
    prompt.add_argument("--prompt", help="the text itself")
    prompt.add_argument("--prompt-file", help="a UTF-8 file with the text; - reads stdin")
    prompt.add_argument("--question", help="asked after the text")
    prompt.add_argument("--system", help="system message")
    prompt.add_argument(
        "--no-chat", action="store_true", help="no chat template: continue the text"
    )

    cache = parser.add_argument_group("cache")
    cache.add_argument("--rate", type=float, help="compression rate (8, if no size is given)")
    cache.add_argument("--max-cache-tokens", type=int, help="tokens' worth of KVs to keep")
    add_budget_option(cache)
    add_floor_option(cache)
    cache.add_argument(
        "--method",
        help="compression method (one that needs no question for a model with a calibration, else "
        "snapkv)",
    )
    add_calibration_option(cache)
    add_draft_option(cache)
    add_cache_dtype_option(cache)
    cache.add_argument("--window", type=int, help="observation window, in queries")
    cache.add_argument("--protected", type=int, help="newest tokens that are never evicted")
    cache.add_argument("--sinks", type=int, help="oldest tokens that are never evicted")
    cache.add_argument("--block-size", type=int, help="KVs per block (16; small caches: 8)")
    cache.add_argument(
        "--prefill-chunk",
        type=int,
        default=8192,
        help="longer prompts run in chunks, compressed in between (%(default)s tokens)",
    )
    cache.add_argument("--pool-tokens", type=int, help="size of the pool in tokens' worth of KVs")
    add_devices_option(cache)
    cache.add_argument(
        "--compress-every", type=int, metavar="N", help="compress after every N generated tokens"
    )
    cache.add_argument(
        "--no-compress-on-prefill",
        dest="on_prefill",
        action="store_false",
        help="write the whole prompt; leave compression to the other triggers",
    )
    cache.add_argument(
        "--no-compress-before-preemption",
        dest="before_preemption",
        action="store_false",
        help="do not compress when blocks run out while decoding",
    )

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=128, help="(%(default)s)")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)"
    )
    sampling.add_argument("--top-k", type=int, default=0, help="0 for all (%(default)s)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="(%(default)s)")
    sampling.add_argument("--min-p", type=float, default=0.0, help="(%(default)s)")
    sampling.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this; repeatable"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens")

    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, all else on stderr"
    )
    output.add_argument("--plot", metavar="FILE", help="picture of the KVs each layer × head kept")


def read_prompt(options: argparse.Namespace) -> tuple[str, str | None]:
    """The text and the question."""
    if options.no_chat and options.system:
        raise UserError("--system is a part of a chat: leave it out, or leave out --no-chat")
    if options.prompt is not None and options.prompt_file is not None:
        raise UserError("--prompt and --prompt-file: give one of them")
    if options.prompt_file is not None:
        text = _read_text(options.prompt_file)
    elif options.prompt is not None:
        text = options.prompt
    else:
        from pydoc_data.topics import topics

        return topics[TOPIC], options.question or QUESTION
    if not text.strip() and not (options.question or "").strip():
        raise UserError("the prompt is empty: give --prompt, --prompt-file or --question")
    return text, options.question


def _read_text(name: str) -> str:
    try:
        with sys.stdin.buffer if name == "-" else open(name, "rb") as stream:
            data = stream.read(MOST_PROMPT_BYTES + 1)
        if len(data) > MOST_PROMPT_BYTES:
            raise UserError(f"{name!r} is longer than {MOST_PROMPT_BYTES >> 20} MB: shorten it")
        # Some editors put a mark before the text.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name!r} is not UTF-8 (byte {error.start}): convert it, for instance with iconv"
        ) from error
    except IsADirectoryError as error:
        raise UserError(f"{name!r} is a folder: give a text file") from error
    except OSError as error:
        raise UserError(f"cannot read {name!r}: {error.strerror}") from error


def tokenise(options: argparse.Namespace, tokenizer: Any) -> list[int]:
    """The prompt's tokens, through the model's chat template if it has one."""
    text, question = read_prompt(options)
    content = "\n\n".join(part for part in (text, question) if part)
    if options.no_chat:
        return tokenizer.encode(content, add_bos=tokenizer.adds_bos)
    messages = [{"role": "user", "content": content}]
    if options.system:
        messages.insert(0, {"role": "system", "content": options.system})
    return tokenizer.chat(messages)


def request_settings(options: argparse.Namespace) -> tuple[CompressionConfig, SamplingParams]:
    """What the options ask of the cache and of the sampler.

    Raises:
        UserError: a value is out of range.
    """
    from kvjax.cache import CompressionConfig
    from kvjax.cache.config import AUTO
    from kvjax.engine import SamplingParams

    compression = CompressionConfig(
        method=AUTO if options.method is None else options.method,
        rate=asked_rate(options),
        max_cache_tokens=options.max_cache_tokens,
        budget_bytes=options.budget_bytes,
        window=options.window,
        protected=options.protected,
        sinks=options.sinks,
        on_prefill=options.on_prefill,
        compress_every=options.compress_every,
        before_preemption=options.before_preemption,
        floor=floor_of(options),
    )
    sampling = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        max_tokens=options.max_new_tokens,
        stop=tuple(options.stop),
        ignore_eos=options.ignore_eos,
        goes_on=options.no_chat,
    )
    return compression, sampling


def sizes_of(options: argparse.Namespace, max_len: int | None = None) -> EngineConfig:
    """An engine for one sequence of at most `max_len` tokens.

    Raises:
        UserError: a value is out of range.
    """
    from kvjax.engine import EngineConfig

    chunk = options.prefill_chunk
    if max_len is not None:
        # One piece of at most --prefill-chunk tokens at a time; alone, nobody waits for it.
        chunk = min(chunk, -(-max_len // PROMPT_GRAIN) * PROMPT_GRAIN)
    return EngineConfig(
        max_batch=1,
        max_len=max_len,
        block_size=options.block_size,
        prefill_chunk=chunk,
        prefill_scratch=chunk,
        pool_tokens=options.pool_tokens,
        tensor_parallel=options.tensor_parallel,
        kv_replicas=options.kv_replicas,
    )


def make_engine(
    options: argparse.Namespace, model: LoadedModel, prompt_tokens: int, progress: Progress
) -> tuple[LLM, SamplingParams]:
    """An engine whose pool holds the prompt and its answer, and how the answer is sampled.

    Raises:
        UserError: they are longer than the model's context, or the pool is too small.
    """
    from kvjax.cache.config import as_method
    from kvjax.engine import LLM, pool_tokens_for
    from kvjax.eval.sizes import cache_spec

    compression, sampling = request_settings(options)
    limit = options.context_length or model.config.max_position_embeddings
    if prompt_tokens + sampling.max_tokens > limit:
        room, rest = limit - sampling.max_tokens, limit - prompt_tokens
        if room > 0:
            way = f"shorten the prompt to {room} tokens"
        elif rest > 0:
            way = f"give at most --max-new-tokens {rest}"
        else:
            way = "shorten the prompt and give fewer --max-new-tokens"
        raise UserError(
            f"the prompt has {prompt_tokens} tokens and {sampling.max_tokens} may follow, but the "
            f"context of {model.config.name} is {limit}: {way} or give --context-length"
        )
    spec = cache_spec(model, cache_dtype=options.cache_dtype)
    config = sizes_of(options, prompt_tokens + sampling.max_tokens)
    config = config.blocks_for(compression, spec.token_bytes)
    b = config.block_size or spec.block_size
    compression = compression.in_tokens(dataclasses.replace(spec, block_size=b))
    tell_reached_rate(compression, prompt_tokens, spec.heads, b)
    if config.pool_tokens is None:
        tokens = pool_tokens_for(
            model.config, config, compression, prompt_tokens, sampling.max_tokens
        )
        config = dataclasses.replace(config, pool_tokens=tokens)
    calibration = chosen_calibration(options, model, [as_method(compression.method)], progress)
    llm = LLM(
        model,
        compression,
        config,
        cache_dtype=options.cache_dtype,
        calibration=calibration,
        draft=chosen_draft(options, prompt_tokens + sampling.max_tokens, progress),
    )
    return llm, sampling


def answer(
    llm: LLM, prompt: np.ndarray, sampling: SamplingParams, show: Shown, progress: Progress
) -> tuple[RequestOutput, int]:
    """Generate, showing the text as it comes; the last output, and the exit code so far."""
    from kvjax.engine import RateWarning

    with warnings.catch_warnings():
        # `tell_reached_rate` has said it.
        warnings.simplefilter("ignore", RateWarning)
        try:
            name = llm.add_request(prompt, sampling)
        except ScratchTooSmall as error:
            # Scratch and chunk are one size here, with one option.
            raise ScratchTooSmall(error.what, error.tokens, "--prefill-chunk") from error
    progress("compile and prefill")
    output, status = None, 0
    try:
        while llm.has_unfinished():
            for output in llm.step():
                progress.clear()
                show(output.new_text)
            if output is None:
                progress("compile and prefill", llm.prefilled(name), len(prompt))
    except KeyboardInterrupt:
        progress.clear()
        if output is None:
            raise
        status = 130
    show("\n")
    assert output is not None
    return output, status


def run(options: argparse.Namespace) -> int:
    start, progress = time.perf_counter(), Progress()
    import numpy as np

    from kvjax.engine.compilation import enable_compilation_cache
    from kvjax.eval.plots import check_picture, plot_kept

    # What can be refused without a model is refused before one is loaded.
    check_draft(options, [request_settings(options)[0].resolved])
    check_cache_dtypes([options.cache_dtype])
    check_model_options(options)
    sizes_of(options)
    options.prompt, options.question = read_prompt(options)
    options.prompt_file = None
    if options.plot is not None:
        check_picture("--plot", options.plot)
        check_output_file("--plot", options.plot)
    enable_compilation_cache()

    model, _ = load_chosen_model(options, progress)
    seconds = {"load": time.perf_counter() - start}
    prompt = np.asarray(tokenise(options, model.tokenizer), np.int32)
    if options.method is None:
        options.method = chosen_method(options, model, progress)
    llm, sampling = make_engine(options, model, len(prompt), progress)
    show = Shown(sys.stderr if options.json else sys.stdout)
    output, status = answer(llm, prompt, sampling, show, progress)
    if output.finish_reason == "error":
        tokens = len(output.token_ids)
        raise UserError(
            f"the answer ended after {tokens} tokens, as the engine failed: {output.error}"
        )
    found = llm.metrics.as_dict()
    for phase in ("compile", "prefill", "compress", "decode"):
        seconds[phase] = found[f'kvjax_seconds_total{{phase="{phase}"}}']
    if llm.compression.resolved.probed:
        seconds["probe"] = found['kvjax_seconds_total{phase="probe"}']
    if output.stats.kept is None:
        raise UserError(
            f"the pool of {llm.plan.num_blocks} blocks is too small for what the prompt keeps: "
            "give a larger --pool-tokens or a higher rate"
        )
    result = report(output, llm, seconds)
    print_table(result)
    if options.json:
        print(json.dumps(result, ensure_ascii=False), flush=True)
    if options.plot is not None:
        title = f"{result['model']}, {result['method']}, {result['achieved_rate']:.1f}× fewer KVs"
        plot_kept(output.stats.kept, title, options.plot)
    if show.error is not None:
        raise UserError(f"cannot write the text to stdout: {show.error.strerror}; it is above")
    if output.finish_reason == "pool":
        raise UserError(
            f"the pool of {llm.plan.num_blocks} blocks was full after {len(output.token_ids)} "
            "tokens and nothing more may be evicted: give a larger --pool-tokens or a higher rate"
        )
    return status
