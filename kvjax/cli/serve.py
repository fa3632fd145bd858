"""Serve a model over HTTP as OpenAI does, from a compressed cache, with a page that shows it.

    kvjax serve --rate 8
    kvjax serve --model llama3.1-8b --weights ./Llama-3.1-8B-Instruct --rate 8 --port 8000
    KVJAX_API_KEY=secret kvjax serve --host 0.0.0.0 --max-waiting 64
    kvjax serve --coordinator node0:8476 --num-processes 2 --process-id 0   # and 1 on the other

Then open http://127.0.0.1:8000/, or point any OpenAI client at http://127.0.0.1:8000/v1. What it
offers, and how it is operated: docs/serving.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

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
from kvjax.cli.processes import add_process_options, follow, joined, lead
from kvjax.cli.progress import Progress
from kvjax.errors import UserError
from kvjax.extras import check_extra

if TYPE_CHECKING:
    from kvjax.cache import CompressionConfig
    from kvjax.engine import EngineConfig
    from kvjax.models import LoadedModel
    from kvjax.serve import ServerSettings, Service

KEY_VARIABLE = "KVJAX_API_KEY"
COMPARED = (
    "model", "dummy_weights", "dtype", "weight_dtype", "context_length", "rate",
    "max_cache_tokens", "budget_bytes", "method", "methods", "cache_dtype", "floor",
    "compress_every", "share_prefix", "retained_prefixes", "max_batch", "max_len", "block_size",
    "prefill_chunk", "prefill_scratch", "decode_steps_per_sync", "pool_tokens", "memory_fraction",
    "tensor_parallel", "kv_replicas",
)  # fmt: skip
"""Options that all processes of a server have to be given alike: the others are the first one's, or
of its machine."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
WARM_UP = (128, 1024)
"""Lengths of prompts that are compiled for, where no others are given and the context has room."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser.add_argument_group("model"))

    cache = parser.add_argument_group("cache")
    cache.add_argument("--rate", type=float, help="compression rate of requests that name none (8)")
    cache.add_argument("--max-cache-tokens", type=int, help="tokens' worth of KVs, instead")
    add_budget_option(cache)
    cache.add_argument(
        "--method",
        help="compression method (one that needs no question for a model with a calibration, else "
        "snapkv)",
    )
    cache.add_argument(
        "--methods",
        default="",
        metavar="A,B",
        help="further methods that requests may ask for, beside the own one and full",
    )
    add_calibration_option(cache)
    add_draft_option(cache)
    add_cache_dtype_option(cache)
    add_floor_option(cache)
    cache.add_argument(
        "--compress-every", type=int, metavar="N", help="compress after every N generated tokens"
    )
    cache.add_argument(
        "--share-prefix",
        choices=("never", "auto", "always"),
        default="never",
        help="let prompts go on from what is left of others that they begin with; auto: with "
        "methods that look at no question (%(default)s)",
    )
    cache.add_argument(
        "--retained-prefixes", type=int, default=16, help="held for that at most (%(default)s)"
    )

    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--max-batch", type=int, default=64, help="sequences at once (%(default)s)")
    sizes.add_argument("--max-len", type=int, help="most tokens of a sequence (the model's limit)")
    sizes.add_argument("--block-size", type=int, help="KVs per block (16; small caches: 8)")
    sizes.add_argument("--prefill-chunk", type=int, default=2048, help="tokens (%(default)s)")
    sizes.add_argument("--prefill-scratch", type=int, default=8192, help="tokens (%(default)s)")
    sizes.add_argument("--decode-steps-per-sync", type=int, default=8, help="(%(default)s)")
    sizes.add_argument("--pool-tokens", type=int, help="size of the pool in tokens' worth of KVs")
    sizes.add_argument("--memory-fraction", type=float, default=0.9, help="(%(default)s)")
    add_devices_option(sizes, of_processes=True)
    add_process_options(parser.add_argument_group("processes"))

    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    server.add_argument("--port", type=int, default=8000, help="0 for any (%(default)s)")
    server.add_argument("--served-name", help="what clients call the model (its own name)")
    server.add_argument(
        "--api-key", help=f"that clients have to send; better in {KEY_VARIABLE}; A,B for several"
    )
    server.add_argument(
        "--allowed-hosts",
        metavar="A,B",
        help="names by which clients may ask for the server, * for any (this machine's, for a "
        "server of this machine alone without a key; else any)",
    )
    server.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        help="requests in the queue, beside --max-batch that run (%(default)s)",
    )
    server.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        help="seconds per request; 0 for none (%(default)s)",
    )
    server.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    server.add_argument(
        "--default-max-tokens",
        type=int,
        default=1024,
        help="tokens of an answer whose client sets no limit (%(default)s)",
    )
    server.add_argument(
        "--max-body-bytes", type=int, default=4 << 20, help="of a request (%(default)s)"
    )
    server.add_argument(
        "--max-choices", type=int, default=64, help="prompts × n of a request (%(default)s)"
    )
    server.add_argument(
        "--drain", type=float, default=30.0, help="seconds to end in after SIGTERM (%(default)s)"
    )
    server.add_argument(
        "--warm-up",
        default=None,
        metavar="N,N",
        help="lengths of prompts to compile for before /ready; 0 for none "
        f"({','.join(map(str, WARM_UP))})",
    )
    server.add_argument(
        "--warm-up-logprobs", action="store_true", help="also for requests with logprobs"
    )
    server.add_argument("--no-page", dest="page", action="store_false", help="no page at /")
    server.add_argument(
        "--log-prompts", action="store_true", help="write prompts and answers into the log"
    )


def engine_settings(options: argparse.Namespace) -> tuple[CompressionConfig, EngineConfig]:
    """What the options ask of the cache and the engine.

    Raises:
        UserError: a value is out of range.
    """
    from kvjax.cache import CompressionConfig
    from kvjax.cache.config import AUTO
    from kvjax.checks import check_whole
    from kvjax.engine import EngineConfig

    compression = CompressionConfig(
        method=AUTO if options.method is None else options.method,
        rate=asked_rate(options),
        max_cache_tokens=options.max_cache_tokens,
        budget_bytes=options.budget_bytes,
        compress_every=options.compress_every,
        floor=floor_of(options),
    )
    config = EngineConfig(
        max_batch=options.max_batch,
        max_len=options.context_length if options.max_len is None else options.max_len,
        block_size=options.block_size,
        prefill_chunk=options.prefill_chunk,
        prefill_scratch=max(
            check_whole("--prefill-scratch", options.prefill_scratch, 1), options.prefill_chunk
        ),
        decode_steps_per_sync=options.decode_steps_per_sync,
        pool_tokens=options.pool_tokens,
        memory_fraction=options.memory_fraction,
        max_waiting=options.max_waiting,
        methods=further_methods(options),
        share_prefix=options.share_prefix,
        retained_prefixes=options.retained_prefixes,
        tensor_parallel=options.tensor_parallel or 1,
        kv_replicas=options.kv_replicas,
    )
    return compression, config


def further_methods(options: argparse.Namespace) -> tuple[str, ...]:
    """The methods of `--methods`."""
    return tuple(name.strip() for name in options.methods.split(",") if name.strip())


def server_settings(options: argparse.Namespace) -> ServerSettings:
    """What the options say of the server.

    Raises:
        UserError: a value is out of range.
    """
    from kvjax.checks import check_whole
    from kvjax.serve import ServerSettings

    check_whole("--port", options.port, 0, 65535)
    name, keys = "--api-key", options.api_key
    if keys is None:
        name, keys = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
    if keys is not None and not keys.strip(","):
        raise UserError(f"{name} is empty: give a key, or leave it out for an open server")
    return ServerSettings(
        served_name=options.served_name,
        api_keys=tuple(key for key in (keys or "").split(",") if key),
        hosts=allowed_hosts(options, keys is not None),
        deadline=options.deadline or None,
        max_body_bytes=options.max_body_bytes,
        max_tokens=options.max_tokens,
        default_max_tokens=options.default_max_tokens,
        max_choices=options.max_choices,
        methods=further_methods(options),
        drain_seconds=options.drain,
        log_prompts=options.log_prompts,
        page=options.page,
    )


def allowed_hosts(options: argparse.Namespace, keyed: bool) -> tuple[str, ...] | None:
    """Names by which clients may ask for the server; None for any.

    A server for this machine alone that has no key is asked for by this machine's names: a page
    of another site may let its own lead here, and would be answered.

    Raises:
        UserError: none is given, or what no client can ask for.
    """
    from kvjax.checks import shown
    from kvjax.serve.guard import host_name

    given, host = options.allowed_hosts, options.host.lower()
    alone = not keyed and (host in LOOPBACK or host.startswith("127."))
    listed = [name.strip() for name in (given or "").split(",") if name.strip()]
    if "*" in listed or (given is None and not alone):
        return None
    if given is not None and not listed:
        raise UserError("--allowed-hosts is empty: give names, or * for any")
    named = []
    for name in listed:
        # An address of IPv6 may come without the brackets that it has in a URL.
        bare = name.count(":") > 1 and not name.startswith("[")
        named.append(host_name(f"[{name}]" if bare else name))
        if not named[-1] or any(letter in "/*" or letter.isspace() for letter in name):
            raise UserError(
                f"--allowed-hosts {shown(name)}: give names as in a.example,b.example, or * for any"
            )
    return tuple(dict.fromkeys([*LOOPBACK, host, *named]))


def warm_up_lengths(options: argparse.Namespace, max_len: int) -> list[int]:
    """Lengths of prompts to compile for.

    Raises:
        UserError: one is no length.
    """
    from kvjax.checks import check_whole, shown

    if options.warm_up is None:
        return sorted({min(length, max_len - 1) for length in WARM_UP if max_len > 1})
    try:
        lengths = [int(part) for part in options.warm_up.split(",")]
    except ValueError as error:
        raise UserError(
            f"--warm-up {shown(options.warm_up)}: give lengths as in 128,1024"
        ) from error
    # A prompt leaves room for a token.
    return [check_whole("--warm-up", n, 1, max(1, max_len - 1)) for n in lengths if n != 0]


def key_words(options: argparse.Namespace) -> str:
    """What stands for a key in a shell: no key is printed."""
    return "$KEY" if options.api_key is not None else f"${{{KEY_VARIABLE}%%,*}}"


def curl_line(url: str, model: str, key: str | None = None) -> str:
    """A line for a shell that asks the server something, with what stands for the key there."""
    sent = f' -H "Authorization: Bearer {key}"' if key is not None else ""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    return (
        f"curl {shlex.quote(f'{url}/v1/chat/completions')} -H 'Content-Type: application/json'"
        f"{sent} -d {shlex.quote(json.dumps(body))}"
    )


def run(options: argparse.Namespace) -> int:
    for package in ("fastapi", "uvicorn", "openai"):
        check_extra(package, "serve", "kvjax serve")
    from kvjax.cache.config import as_method
    from kvjax.checks import INT32_MAX
    from kvjax.engine.compilation import enable_compilation_cache
    from kvjax.engine.draft import ALONE

    # What can be refused without a model is refused before one is loaded.
    check_model_options(options)
    check_cache_dtypes([options.cache_dtype])
    compression, config = engine_settings(options)
    settings = server_settings(options)
    warm_up_lengths(options, INT32_MAX)
    if options.draft is not None and options.coordinator is not None:
        raise UserError(f"--draft: {ALONE}")
    check_draft(options, map(as_method, (compression.method, *config.methods)))
    with joined(options, COMPARED) as processes:
        listener = None
        if processes is None or processes.leads:
            from kvjax.serve import bind

            listener = bind(options.host, options.port)
        with listener or contextlib.nullcontext():
            enable_compilation_cache()
            with Progress() as progress:
                model = _model(options, progress)
                if listener is None:
                    return _follow(options, model, progress)
                return _serve(options, settings, model, listener, progress)


def load_service(
    options: argparse.Namespace, settings: ServerSettings, progress: Progress
) -> tuple[Service, list[int]]:
    """What one process serves by itself, for programs that run the server in their own way.

    Args:
        options: of `add_options`.
        settings: of `server_settings`.
        progress: is told of what takes long.

    Returns:
        The service, and the lengths of prompts that it is to be warmed up for.

    Raises:
        UserError: the options do not go together, or the model cannot be had.
    """
    return _service(options, settings, _model(options, progress), progress)


def _model(options: argparse.Namespace, progress: Progress) -> LoadedModel:
    """The model; from here on the options name a method."""
    model, _ = load_chosen_model(options, progress)
    if options.method is None:
        options.method = chosen_method(options, model, progress)
    return model


def _service(
    options: argparse.Namespace, settings: ServerSettings, model: LoadedModel, progress: Progress
) -> tuple[Service, list[int]]:
    from kvjax.engine import AsyncLLM
    from kvjax.serve import Service

    llm = AsyncLLM(**_engine(options, model, progress))
    return Service(llm, settings), warm_up_lengths(options, llm.llm.max_len)


def _engine(options: argparse.Namespace, model: LoadedModel, progress: Progress) -> dict[str, Any]:
    """The arguments of the engine."""
    from kvjax.cache.config import as_method

    compression, config = engine_settings(options)
    methods = [as_method(name) for name in (compression.method, *config.methods)]
    calibration = chosen_calibration(options, model, methods, progress)
    longest = config.max_len or model.config.max_position_embeddings
    return {
        "model": model,
        "compression": compression,
        "config": config,
        "cache_dtype": options.cache_dtype,
        "calibration": calibration,
        "draft": chosen_draft(options, longest, progress),
    }


def _follow(options: argparse.Namespace, model: LoadedModel, progress: Progress) -> int:
    """Do what the first process does, until it ends."""
    from kvjax.engine import LLM

    llm = LLM(**_engine(options, model, progress))
    progress.clear()
    follow(llm)
    return 0


def _serve(
    options: argparse.Namespace,
    settings: ServerSettings,
    model: LoadedModel,
    listener: Any,
    progress: Progress,
) -> int:
    from kvjax.serve import run_server
    from kvjax.serve.logs import write_logs

    service, lengths = _service(options, settings, model, progress)
    llm = service.llm
    progress.clear()
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{listener.getsockname()[1]}"

    def started() -> None:
        print(f"memory: {llm.llm.plan}", file=sys.stderr)
        print(f"{service.name} at {url}/v1, its page at {url}/", file=sys.stderr)
        key = key_words(options) if settings.api_keys else None
        print(f"try: {curl_line(url, service.name, key)}", file=sys.stderr)
        sys.stderr.flush()

    async def main() -> int:
        stop = asyncio.Event()
        lead(llm, stop)
        return await run_server(
            service,
            listener,
            warm_up=lengths,
            warm_up_logprobs=options.warm_up_logprobs,
            started=started,
            stop=stop,
        )

    write_logs(sys.stderr, settings.log_prompts)
    asyncio.run(main())
    return 0
