"""Prompts that are retained when asked for, and their files: what `LLM` has methods for."""

import os
import time
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.cache.store import saved, typed
from kvjax.engine import prefix_files
from kvjax.engine.checks import checked_request
from kvjax.engine.interrupts import held
from kvjax.engine.prefix_files import Kind
from kvjax.engine.prefixes import Prefix, sharing_of
from kvjax.engine.prompts import Prompt
from kvjax.engine.request import RequestOutput
from kvjax.engine.sampling import SamplingParams
from kvjax.engine.worker import Worker
from kvjax.errors import UserError

if TYPE_CHECKING:
    from kvjax.engine.llm import LLM

SHORTEST = SamplingParams(max_tokens=1)
PAUSE_SECONDS = 0.01
"""Between looks at a step that is compiled beside the rounds."""


def retain(llm: "LLM", prompt: Prompt, compression: CompressionConfig | None) -> Prefix:
    """See `LLM.retain`."""
    compression = llm.compression if compression is None else compression
    request = checked_request(llm, prompt, SHORTEST, compression, "prefix", -1)
    if request.sharing is None:
        ways = [
            f"EngineConfig(share_prefix={share!r})"
            for share in ("auto", "always")
            if sharing_of(share, request.compression, request.method) is not None
        ]
        raise UserError(
            f"method {request.method.name} shares no prefixes with share_prefix "
            f"{llm.config.share_prefix!r}: give {ways[0] if ways else 'another method'}"
        )
    tokens = request.prompt
    outputs: list[RequestOutput] = []
    with llm.engine.owner("retain"):
        request = llm.enqueue(
            tokens, SHORTEST, compression, on_output=outputs.append, shared=len(tokens)
        )
        try:
            while not (outputs and outputs[-1].finished):
                llm.recovery.step()
                if llm.engine.only_compiles:
                    time.sleep(PAUSE_SECONDS)
        finally:
            llm.abandon([request])
        prefix = llm.scheduler.prefixes.exactly(request.sharing, tokens)
    if prefix is None:
        reason = outputs[-1].error or "give a larger pool or more retained_prefixes"
        raise UserError(f"the prompt of {len(tokens)} tokens was not retained: {reason}")
    return prefix


def save(
    llm: "LLM",
    path: str | os.PathLike[str],
    prompt: Prompt,
    compression: CompressionConfig | None,
) -> int:
    """See `LLM.save_prefix`."""
    _check_one_device(llm)
    with llm.engine.owner("save_prefix"):
        # Its row is another's, once it is forgotten.
        prefix = retain(llm, prompt, compression)
        kind = Kind.of(llm.model, llm.worker, prefix.settings)
        kept = saved(llm.worker.cache, prefix.row)
    prefix_files.write(path, kind, prefix.tokens, prefix.logits, kept)
    return len(prefix.tokens)


def _check_one_device(llm: "LLM") -> None:
    if (devices := llm.config.tensor_parallel) > 1:
        raise UserError(
            f"prefixes in files with tensor_parallel {devices}: they are written and read on one "
            "device only; retain the document in this engine"
        )


class Saved(NamedTuple):
    """A prefix that was read from a file."""

    path: str | os.PathLike[str]
    tokens: np.ndarray
    settings: Hashable
    logits: np.ndarray | None
    held: Mapping[str, np.ndarray]


def read(
    llm: "LLM",
    worker: Worker,
    path: str | os.PathLike[str],
    compression: CompressionConfig | None,
) -> Saved:
    """A file that `save` wrote, in the types of a worker's cache; of that no array is read."""
    _check_one_device(llm)
    found, arrays = prefix_files.read(path)
    tokens, logits = arrays.pop("tokens"), arrays.pop("logits", None)
    compression = llm.compression if compression is None else compression
    settings = checked_request(llm, tokens, SHORTEST, compression, "prefix", -1).sharing
    if settings is None:
        raise UserError(f"prefix {path}: nothing is shared with these settings")
    if not llm.config.retained_prefixes:
        raise UserError(f"prefix {path}: retained_prefixes is 0: give the engine 1 or more")
    prefix_files.check(path, found, Kind.of(llm.model, worker, settings))
    try:
        arrays = typed(worker.cache, {n.removeprefix("held."): x for n, x in arrays.items()})
        if int(arrays["seq_len"]) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens, and KVs of {int(arrays['seq_len'])}")
        size = llm.model.config.vocab_size
        if logits is not None and logits.shape != (size,):
            raise ValueError(f"logits {list(logits.shape)}, of a vocabulary of {size}")
    except ValueError as error:
        raise UserError(f"prefix {path}: {error}; save it again with this engine") from None
    return Saved(path, tokens, settings, logits, arrays)


def put(llm: "LLM", prefix: Saved) -> int:
    """Retain a prefix that was read. Returns its tokens."""
    with llm.engine.owner("load_prefix"), held():
        llm.check_lives()
        logits = None if prefix.logits is None else jnp.asarray(prefix.logits)
        if not llm.engine.keeper.load(prefix.tokens, prefix.settings, logits, prefix.held):
            raise UserError(f"prefix {prefix.path}: no room for its blocks; give a larger pool")
        llm.engine.observe()
    return len(prefix.tokens)
