"""From a request's body to what the engine is asked for."""

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Collection, Sequence
from typing import Any

from kvjax.cache import CompressionConfig
from kvjax.cache.config import AUTO, SIZES, as_method, takes_window
from kvjax.checks import shown
from kvjax.engine import SamplingParams
from kvjax.errors import UserError
from kvjax.models.tokenizer import Tokenizer
from kvjax.serve.errors import ApiError
from kvjax.serve.schema import ChatRequest, CompletionRequest, Extras, Message, Request
from kvjax.serve.settings import ServerSettings

Tokens = list[int]
_OWN = ("messages", "tools")
_RESERVED = (*_OWN, "add_generation_prompt", "as_of", "self")
"""What a template's variables cannot be called: names of `Tokenizer.chat`'s own arguments."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A request as the engine sees it: prompts, and how each of their choices is sampled."""

    prompts: list[Tokens]
    samplings: list[SamplingParams]
    """Of each choice of a prompt: they differ in their seeds."""
    compression: CompressionConfig
    deadline: float | None
    detail: bool
    source: str
    """The field that the prompts are from."""
    shortens: bool = False
    """Whether an answer may have fewer tokens than `samplings` say: no client asked for them."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * len(self.samplings)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    variables: dict[str, Any] | None = None,
) -> Tokens:
    """The tokens of a conversation, through the model's chat template.

    Raises:
        ApiError: the template has no place for tools, or a variable has a name of its own.
    """
    variables = dict(variables or {})
    if taken := [name for name in _RESERVED if name in variables]:
        way = "give it as a field of its own" if taken[0] in _OWN else "leave it out"
        raise ApiError(
            400, f"chat_template_kwargs has {taken[0]!r}: {way}", param="chat_template_kwargs"
        )
    if tools:
        if "tools" not in (tokenizer.tool_template or ""):
            raise ApiError(400, "tools: this model's chat template has no place for them: leave "
                           "them out, or serve a model that was taught to use tools",
                           param="tools")  # fmt: skip
        variables["tools"] = tools
    return tokenizer.chat([_turn(i, message) for i, message in enumerate(messages)], **variables)


def _turn(number: int, message: Message) -> dict[str, Any]:
    """A message as templates read it: one text, and the arguments of calls as mappings.

    Raises:
        ApiError: its calls have another form.
    """
    # Templates ask whether a field is there: one that is null, or lists no calls, is not.
    given = message.model_dump(exclude_unset=True)
    turn = {name: x for name, x in given.items() if x is not None}
    if turn.get("tool_calls") == []:
        del turn["tool_calls"]
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    turn["content"] = content or ""
    where = f"messages.{number}.tool_calls"
    calls = turn.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _wrong_call(where, calls, "give a list of calls")
    for i, call in enumerate(calls or []):
        if not isinstance(call, dict):
            raise _wrong_call(f"{where}.{i}", call, "give an object with a function")
        function = call.get("function")
        if function is None:
            continue
        if not isinstance(function, dict):
            raise _wrong_call(f"{where}.{i}.function", function, "give its name and arguments")
        if "arguments" in function:
            _read_arguments(f"{where}.{i}.function.arguments", function)
    return turn


def _read_arguments(where: str, function: dict[str, Any]) -> None:
    """Make a mapping of a call's arguments, which clients give as JSON, or as an empty text."""
    given = function["arguments"]
    if given is None or (isinstance(given, str) and not given.strip()):
        function["arguments"] = {}
    elif isinstance(given, str):
        # What cannot be read stays a text.
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"])
    if not isinstance(function["arguments"], dict):
        raise _wrong_call(where, given, "give a JSON object, {} for no arguments")


def _wrong_call(where: str, given: Any, way: str) -> ApiError:
    return ApiError(400, f"{where} {shown(given)}: {way}", param="messages")


def check_offered(body: Request) -> None:
    """Refuse known fields that ask for what this server does not do.

    Raises:
        ApiError: names the field.
    """
    asked: dict[str, bool] = {
        "frequency_penalty": bool(body.frequency_penalty),
        "presence_penalty": bool(body.presence_penalty),
        "logit_bias": bool(body.logit_bias),
    }
    if isinstance(body, CompletionRequest):
        asked["echo"] = bool(body.echo)
        asked["suffix"] = bool(body.suffix)
        asked["best_of"] = body.best_of not in (None, 1, body.n)
    if isinstance(body, ChatRequest):
        asked["response_format"] = (body.response_format or {"type": "text"}).get("type") != "text"
        asked["modalities"] = body.modalities not in (None, ["text"])
        asked["tool_choice"] = body.tool_choice not in (None, "auto", "none")
        asked["reasoning_effort"] = body.reasoning_effort not in (None, "none")
    for name, wanted in asked.items():
        if wanted:
            raise ApiError(
                400, f"{name}: this server does not offer it: leave it out", param=name,
                code="unsupported_parameter",
            )  # fmt: skip
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: they need stream=true", param="stream_options")


def named(error: UserError, names: Collection[str]) -> str | None:
    """The one of some names that an error begins with, as those of checks do."""
    first = str(error).partition(" ")[0]
    return first if first in names else None


def samplings_of(body: Request, max_tokens: int, most: int) -> list[SamplingParams]:
    """How each choice of a prompt is sampled.

    Args:
        body: the request.
        max_tokens: tokens of each.
        most: choices.

    Raises:
        ApiError: too many choices; log-probabilities that were not switched on; a value is out
            of range.
    """
    count = body.n or 1
    if count > most:
        raise ApiError(400, f"n {count}: give at most {most}", param="n")
    logprobs = None
    if isinstance(body, CompletionRequest):
        logprobs = body.logprobs
    elif isinstance(body, ChatRequest):
        if body.logprobs:
            logprobs = body.top_logprobs or 0
        elif body.top_logprobs is not None:
            raise ApiError(400, "top_logprobs: they need logprobs=true", param="top_logprobs")
    seed = secrets.randbits(32) if body.seed is None else body.seed
    stop = () if body.stop is None else body.stop
    settings = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_k": max(0, body.top_k or 0),
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "min_p": body.min_p or 0.0,
        "max_tokens": max_tokens,
        "stop": stop if isinstance(stop, str) else tuple(stop),
        "ignore_eos": body.ignore_eos,
        "logprobs": logprobs,
        "goes_on": isinstance(body, CompletionRequest),
    }
    try:
        return [SamplingParams(**settings, seed=(seed + i) % 2**32) for i in range(count)]
    except UserError as error:
        raise ApiError(400, str(error), param=named(error, settings)) from error


def compression_of(
    body: Request, usual: CompressionConfig, methods: Sequence[str]
) -> CompressionConfig:
    """The cache's settings: the server's, with what the request changes.

    Args:
        body: the request.
        usual: those of a request that says nothing.
        methods: that requests may ask for.

    Raises:
        ApiError: a method that is not among them, or a size that makes no sense.
    """
    if body.compression is None:
        return usual
    asked = {k: v for k, v in body.compression.model_dump().items() if v is not None}
    method = asked.get("method")
    if method is not None and method not in methods:
        known = ", ".join(methods)
        raise ApiError(
            400, f"compression.method {method[:60]!r}: this server offers {known}",
            param="compression",
        )  # fmt: skip
    sized = [name for name in SIZES if name in asked]
    if len(sized) == 1:
        # The one that is asked for replaces the server's, whichever that is.
        asked = {**dict.fromkeys(SIZES), **asked}
    if sized and asked.get("rate") != 1:
        if method is None and not usual.resolved.compresses:
            asked["method"] = AUTO
        elif method is not None and not as_method(method).compresses:
            raise ApiError(
                400, f"compression.{sized[0]} {asked[sized[0]]}: method {method} evicts nothing: "
                "leave one of them out", param="compression",
            )  # fmt: skip
    if method is not None and not takes_window(as_method(method)):
        # The server's window is of its own method; the request has named none.
        asked["window"] = None
    try:
        return dataclasses.replace(usual, **asked)
    except UserError as error:
        raise ApiError(400, f"compression: {error}", param="compression") from error


def source_of(body: Request) -> str:
    """The field that the prompts are from."""
    return "messages" if isinstance(body, ChatRequest) else "prompt"


def asked_tokens(body: Request) -> tuple[str, int | None]:
    """The field that limits an answer's tokens, and what it says."""
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def max_tokens_of(body: Request, prompt_len: int, max_len: int, settings: ServerSettings) -> int:
    """Tokens that an answer may have.

    Raises:
        ApiError: the prompt leaves no room, or more is asked for than may be.
    """
    name, asked = asked_tokens(body)
    room = max_len - prompt_len
    # Clients that shorten a conversation know this refusal by its words, not by its code.
    too_long = f"this model's maximum context length is {max_len} tokens"
    if room < 1:
        raise ApiError(
            400,
            f"{too_long} and the prompt has {prompt_len}: shorten it (context_length_exceeded)",
            param=source_of(body),
            code="context_length_exceeded",
        )
    most = settings.max_tokens
    if asked is None:
        return min(settings.default_max_tokens, room, most or room)
    if most is not None and asked > most:
        raise ApiError(400, f"{name} {asked}: this server gives at most {most}", param=name)
    if asked > room:
        raise ApiError(
            400,
            f"{too_long}, the prompt has {prompt_len}, and {name} is {asked}: shorten the prompt "
            "or ask for fewer tokens (context_length_exceeded)",
            param=name,
            code="context_length_exceeded",
        )
    return asked


def deadline_of(extras: Extras | None, settings: ServerSettings) -> float | None:
    """Seconds that a request may take: the client's or the server's, whichever are fewer."""
    asked = None if extras is None or extras.deadline is None else float(extras.deadline)
    given = [x for x in (asked, settings.deadline) if x is not None]
    return min(given) if given else None


def prompts_of(body: CompletionRequest, tokenizer: Tokenizer, most: int) -> list[Tokens]:
    """The prompts of a completion request, as tokens.

    Raises:
        ApiError: they are more than `most`, or one is empty.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        texts: list[Any] = [prompt]
    elif not prompt or isinstance(prompt[0], int):
        texts = [prompt]
    else:
        texts = list(prompt)
    # Before any becomes tokens: a body may have a million.
    if len(texts) > most:
        raise ApiError(400, f"prompt has {len(texts)} prompts: give at most {most}", param="prompt")
    found = [
        tokenizer.encode(text, add_bos=tokenizer.adds_bos) if isinstance(text, str) else list(text)
        for text in texts
    ]
    if not all(found):
        raise ApiError(400, "prompt: it is empty: give at least one token", param="prompt")
    return found
