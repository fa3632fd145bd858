"""What an engine can serve: requests are checked before they are queued."""

import dataclasses
from typing import TYPE_CHECKING

from kvjax.cache import CompressionConfig
from kvjax.cache.calibration import lacking
from kvjax.cache.methods import METHODS
from kvjax.cache.policy.method import OF_THE_MODEL
from kvjax.checks import shown
from kvjax.engine.parallel import check_on_devices
from kvjax.engine.prefixes import sharing_of
from kvjax.engine.prompts import Prompt, token_ids
from kvjax.engine.request import Request
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import ScratchTooSmall, UserError

if TYPE_CHECKING:
    from kvjax.engine.llm import LLM


def checked_request(
    llm: "LLM",
    prompt: Prompt,
    sampling: SamplingParams,
    compression: CompressionConfig,
    name: str,
    order: int,
) -> Request:
    """The request, if an engine can serve it.

    Raises:
        UserError: it can never be served; says why, and what would do.
    """
    for name_, value, kind in (
        ("sampling", sampling, SamplingParams),
        ("compression", compression, CompressionConfig),
    ):
        if not isinstance(value, kind):
            raise UserError(f"{name_} {shown(value)}: give a {kind.__name__}")
    if sampling.goes_on is None and isinstance(prompt, str):
        sampling = dataclasses.replace(sampling, goes_on=True)
    compression = compression.chosen(llm.usual).in_tokens(llm.plan.spec)
    tokens = token_ids(prompt, llm.model.tokenizer, llm.model.config.vocab_size)
    if len(tokens) + sampling.max_tokens > llm.max_len:
        raise UserError(
            f"the prompt has {len(tokens)} tokens and {sampling.max_tokens} may follow, but "
            f"the limit is {llm.max_len}: shorten the prompt or ask for fewer tokens"
        )
    size = (len(tokens), llm.plan.heads, llm.plan.spec.block_size)
    budget = compression.blocks(*size)
    method = compression.resolved
    if budget is None:
        method = METHODS["full"] if method.pruner is None else method.whole
    request = Request(
        name, order, tokens, sampling, compression, method, budget,
        llm.plan.heads, llm.plan.spec.block_size, method.decode,
    )  # fmt: skip
    request.sharing = sharing_of(llm.config.share_prefix, compression, method)
    if method.measured is not None:
        request.shared_tokens = min(method.measured, len(tokens))
    request.stats.rate = compression.reached_rate(*size)
    check_method(llm, request)
    needs = request.blocks_to_finish(llm.scheduler.chunk_in_pool(request, request.remaining))
    if not llm.scheduler.accounts.could_hold(needs):
        pool = -(-needs // llm.plan.heads) * llm.plan.spec.block_size
        raise UserError(
            f"the request needs {needs} blocks and the pool has {llm.plan.num_blocks}: give "
            f"a pool of {pool} tokens, a higher rate, or fewer tokens"
        )
    return request


def check_fits(llm: "LLM", request: Request, why: str) -> None:
    """Raise `ScratchTooSmall` where the scratch does not hold all of a request's prompt with what
    it generates, since it may be prefilled again."""
    length, scratch = request.length + request.remaining, llm.config.prefill_scratch
    if length > scratch:
        what = f"method {request.method.name} {why}: {length} tokens with those to generate"
        raise ScratchTooSmall(what, scratch)


def check_method(llm: "LLM", request: Request) -> None:
    """Raise `UserError` where the engine lacks what the method needs."""
    method = request.method
    check_on_devices(method, llm.config.tensor_parallel)
    missing = [plane.name for plane in method.planes if plane.name not in llm.worker.planes]
    if missing:
        raise UserError(
            f"method {method.name} keeps {', '.join(missing)} of each KV; there is no room "
            f"for it: give EngineConfig(methods=({method.name!r},))"
        )
    missing = [name for name in method.artefacts if name not in llm.worker.artefacts]
    if missing and missing[0] in OF_THE_MODEL:
        raise UserError(
            f"method {method.name} reads {missing[0]}, which was not measured when the engine "
            f"began: give EngineConfig(methods=({method.name!r},))"
        )
    if missing:
        raise lacking(f"method {method.name}", missing[0])
    if method.probed:
        check_fits(llm, request, "runs tokens behind what the scratch holds")
        drafts = getattr(method.scorer, "drafts", 0)
        if drafts and llm.draft is not None:
            # Its prompt may be prefilled again with all that it has generated.
            llm.draft.check(request.length + request.remaining, drafts)
    if method.pruner is not None:
        check_fits(llm, request, "prunes prompts that run whole")
    window = None if method.probed else getattr(method.scorer, "window", None)
    in_parts = request.length + request.remaining > llm.config.prefill_chunk
    if window is not None and in_parts and llm.config.prefill_chunk < 2 * window:
        raise UserError(
            f"window {window} of {method.name}: give at most half the prefill_chunk of "
            f"{llm.config.prefill_chunk} tokens"
        )
