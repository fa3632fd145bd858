"""From the engine's outputs to the objects of the OpenAI interface."""

import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion

from kvjax.cache import CacheSpec
from kvjax.engine import RequestOutput, TokenLogprobs
from kvjax.models.streaming import StreamDecoder
from kvjax.models.tokenizer import Tokenizer
from kvjax.serve.tools import CallReader, Form, form_of

_REASONS = {"eos": "stop", "stop": "stop"}
"""Ends by the interface's names; all others cut the answer short, which is its "length"."""


def usage_of(prompts: Sequence[Sequence[int]], last: Iterable[RequestOutput]) -> dict[str, Any]:
    """Tokens of a whole request: each prompt once, and all that was generated."""
    last = list(last)
    prompt, generated = sum(map(len, prompts)), sum(len(output.token_ids) for output in last)
    # Of a prompt's choices the one that found the least: others found what that one had just run.
    found = [int(getattr(output.stats, "cached_tokens", 0) or 0) for output in last]
    each = max(1, len(found) // len(prompts))
    cached = sum(
        min(len(tokens), min(found[each * i : each * (i + 1)], default=0))
        for i, tokens in enumerate(prompts)
    )
    return CompletionUsage.model_validate(
        {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
    ).model_dump(exclude_unset=True)


def kept_of(outputs: Iterable[RequestOutput], spec: CacheSpec) -> dict[str, Any]:
    """What the caches of some choices held once their prompts were compressed.

    Args:
        outputs: the last of each.
        spec: what a cache keeps.
    """
    heads = spec.heads
    begun = [output for output in outputs if output.stats.kept is not None]
    before = sum(heads * len(output.prompt_token_ids) for output in begun)
    after = sum(int(np.sum(output.stats.kept)) for output in begun)  # type: ignore[arg-type]
    blocks = sum(output.stats.blocks_after for output in begun)
    return {
        "kvs_before": before,
        "kvs_after": after,
        "blocks": blocks,
        "blocks_before": sum(output.stats.blocks_before for output in begun),
        "bytes": blocks * spec.block_bytes + len(begun) * spec.window_bytes,
        "achieved_rate": round(before / after, 4) if after else None,
        "blocks_evicted_decoding": sum(o.stats.blocks_evicted_decoding for o in begun),
        "preemptions": sum(output.stats.preemptions for output in begun),
    }


def detail_of(output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Which tokens of a prompt each KV head kept; None where nobody asked.

    `heads` has, for each layer and head, the bits of the tokens that it holds in hexadecimal,
    the first token in the highest bit of the first byte.
    """
    kept = output.stats.kept_tokens
    if kept is None:
        return None
    stream = tokenizer.stream(skip_special_tokens=False)
    return {
        "layers": kept.shape[0],
        "kv_heads": kept.shape[1],
        "tokens": [stream.push(int(token)) for token in output.prompt_token_ids],
        "kept": np.asarray(output.stats.kept).tolist(),
        "heads": [[np.packbits(row).tobytes().hex() for row in layer] for layer in kept],
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; the interface writes −9999 for it."""
    return logprob if logprob > -9999.0 else -9999.0


class Answer:
    """Objects of one request: its id, its model, and the moment it was made."""

    prefix = ""
    part_object = ""

    def __init__(self, model: str, tokenizer: Tokenizer, ignore_eos: bool = False):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._tokenizer = tokenizer
        self._ends = frozenset() if ignore_eos else tokenizer.eos_ids
        self._common = {"id": self.id, "created": int(time.time()), "model": model}

    def whole(
        self, outputs: Sequence[RequestOutput], usage: dict[str, Any], kvjax: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer in one piece."""
        raise NotImplementedError

    def first(self, index: int) -> dict[str, Any] | None:
        """What a stream begins with, for one choice."""
        raise NotImplementedError

    def chunk(self, index: int, output: RequestOutput, seen: int, **extra: Any) -> dict[str, Any]:
        """A part of a stream: the text since the last one, and tokens from number `seen` on."""
        raise NotImplementedError

    def usage_chunk(self, usage: dict[str, Any], kvjax: dict[str, Any]) -> dict[str, Any]:
        """The part that follows the last, where usage was asked for."""
        return self._part([], usage=usage, kvjax=kvjax)

    def _part(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        # Written for every round of every request: nothing is checked here that tests can check.
        return {**self._common, "object": self.part_object, "choices": choices, **extra}

    def _text(self, token: int) -> tuple[str, list[int]]:
        """A token's text, with U+FFFD for half a character, and its bytes."""
        data = self._tokenizer.token_bytes(token)
        return data.decode(errors="replace"), list(data)

    def _entries(self, output: RequestOutput, seen: int) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens from number `seen` on that are in the text."""
        found = list((output.logprobs or ())[seen:])
        # By the token: a first one is handed over before it is known to be the last.
        if found and found[-1].token in self._ends:
            found.pop()
        return found


def _reason(output: RequestOutput, called: bool = False) -> str | None:
    if output.finish_reason is None:
        return None
    reason = _REASONS.get(output.finish_reason, "length")
    return "tool_calls" if called and reason == "stop" else reason


class ChatAnswer(Answer):
    """POST /v1/chat/completions"""

    prefix = "chatcmpl"
    part_object = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        tools: Collection[str] = (),
        most_calls: int | None = None,
        ignore_eos: bool = False,
    ):
        """Begin an answer of which each choice may call these tools, so many times."""
        super().__init__(model, tokenizer, ignore_eos)
        self._form: Form | None = form_of(tokenizer.tool_template or "") if tools else None
        self._tools, self._readers = tools, dict[int, CallReader]()
        self._most_calls = most_calls
        self._calls: dict[int, int] = {}
        """How many calls each choice has."""
        self._blank: dict[int, str] = {}
        """White space that ends the text of each choice so far: it may stand before a call."""
        self._said: set[int] = set()
        """Choices that have said something beside calls."""

    def _read(self, index: int, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """New text of a choice without the calls in it, and these."""
        if self._form is None:
            return text, []
        reader = self._readers.setdefault(index, CallReader(self._form, self._tools))
        shown, calls = reader.push(text)
        if ended:
            rest, last = reader.flush()
            shown, calls = shown + rest, calls + last
        begun = self._calls.get(index, 0)
        if self._most_calls is not None:
            calls = calls[: max(0, self._most_calls - begun)]
        self._calls[index] = begun + len(calls)
        shown = self._trimmed(index, shown, ended)
        return shown, [{"index": begun + i, **call.as_dict()} for i, call in enumerate(calls)]

    def _trimmed(self, index: int, text: str, ended: bool) -> str:
        """Text without the white space around calls: that at either end of all that is said."""
        text, called = self._blank.get(index, "") + text, self._calls[index] > 0
        if called and index not in self._said:
            text = text.lstrip()
        words = text.rstrip()
        self._blank[index] = text[len(words) :]
        self._said |= {index} if words else set()
        return text if ended and not called else words

    def whole(self, outputs, usage, kvjax):
        choices = []
        for index, output in enumerate(outputs):
            text, calls = self._read(index, output.text, ended=True)
            message = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message["content"] = text or None
                message["tool_calls"] = [
                    {name: x for name, x in call.items() if name != "index"} for call in calls
                ]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "finish_reason": _reason(output, bool(calls)),
                    "logprobs": self._logprobs(output, 0),
                }
            )
        value = {**self._common, "object": "chat.completion", "choices": choices}
        made = ChatCompletion.model_validate({**value, "usage": usage, "kvjax": kvjax})
        return made.model_dump(mode="json", exclude_unset=True)

    def first(self, index):
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
        return self._part([choice])

    def chunk(self, index, output, seen, **extra):
        text, calls = self._read(index, output.new_text, output.finished)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = calls
        choice = {
            "index": index,
            "delta": delta,
            "finish_reason": _reason(output, self._calls.get(index, 0) > 0),
            "logprobs": self._logprobs(output, seen),
        }
        return self._part([choice], **extra)

    def _logprobs(self, output: RequestOutput, seen: int) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None

        def named(token: int, logprob: float) -> dict[str, Any]:
            text, data = self._text(token)
            return {"token": text, "logprob": _finite(logprob), "bytes": data}

        content = [
            {**named(entry.token, entry.logprob), "top_logprobs": [named(*t) for t in entry.top]}
            for entry in self._entries(output, seen)
        ]
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    """POST /v1/completions"""

    prefix = "cmpl"
    part_object = "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, ignore_eos: bool = False):
        super().__init__(model, tokenizer, ignore_eos)
        self._decoders: dict[int, tuple[StreamDecoder, int]] = {}
        """Of each choice, and the letters of its text so far."""

    def whole(self, outputs, usage, kvjax):
        choices = [self._choice(i, output, output.text, 0) for i, output in enumerate(outputs)]
        value = {**self._common, "object": "text_completion", "choices": choices}
        made = Completion.model_validate({**value, "usage": usage, "kvjax": kvjax})
        return made.model_dump(mode="json", exclude_unset=True)

    def first(self, index):
        return None

    def chunk(self, index, output, seen, **extra):
        return self._part([self._choice(index, output, output.new_text, seen)], **extra)

    def _choice(self, index: int, output: RequestOutput, text: str, seen: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "finish_reason": _reason(output),
            "logprobs": self._logprobs(index, output, seen),
        }

    def _logprobs(self, index: int, output: RequestOutput, seen: int) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        entries = self._entries(output, seen)
        decoder, letters = self._decoders.get(index) or (self._tokenizer.stream(goes_on=True), 0)
        offsets = []
        for entry in entries:
            offsets.append(letters)
            # Parts of a letter are none until the last of them.
            letters += len(decoder.push(entry.token))
        self._decoders[index] = decoder, letters
        return {
            "tokens": [self._text(entry.token)[0] for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            # The one that was drawn is always told. Of tokens that read alike the likeliest is:
            # keys are texts here.
            "top_logprobs": [
                {
                    self._text(t)[0]: _finite(x)
                    for t, x in ((entry.token, entry.logprob), *reversed(entry.top))
                }
                for entry in entries
            ],
            "text_offset": offsets,
        }
