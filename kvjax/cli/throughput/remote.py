"""Load on a server over HTTP: what its clients wait for, by compression rate and prompt length."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checks import shown
from kvjax.cli.throughput.measure import percentiles
from kvjax.cli.throughput.work import MOST_CHARACTERS, Arrival, prompts_of
from kvjax.errors import UserError
from kvjax.extras import check_extra

MOST_SOURCE = min(MOST_CHARACTERS, 1 << 19)
"""Characters that prompts are cut from: servers bound what they are sent."""


class Remote:
    """A server, as far as its load is concerned."""

    def __init__(self, url: str, key: str | None):
        """Ask the server what it serves.

        Raises:
            UserError: it cannot be reached, or it refuses; the key is none.
        """
        check_extra("httpx", "serve", "--server")
        import httpx

        try:
            address = httpx.URL(url)
        except (httpx.InvalidURL, ValueError):
            address = httpx.URL("")
        if address.scheme not in ("http", "https") or not address.host:
            raise UserError(
                f"--server {shown(url)}: it gives no answer: give an address such as "
                "http://127.0.0.1:8000"
            )
        if key and not (key.isascii() and key.isprintable()):
            # Not repeated: it is a secret.
            raise UserError(
                "--api-key (or KVJAX_API_KEY): a header cannot hold it: give the server's key, "
                "letters and digits of ASCII"
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._options: dict[str, Any] = {
            "base_url": url.rstrip("/").removesuffix("/v1"),
            "headers": headers,
            "timeout": None,
            "trust_env": False,
            "limits": limits,
        }
        self._httpx = httpx
        self.status = self._asked("GET", "/kvjax/status", "max_len")

    def _asked(self, method: str, path: str, wanted: str, body: Any = None) -> Any:
        try:
            with self._httpx.Client(**self._options) as client:
                response = client.request(method, path, json=body)
                found = response.json() if response.status_code == 200 else {}
        except (self._httpx.HTTPError, self._httpx.InvalidURL, ValueError) as error:
            url = self._options["base_url"]
            raise UserError(
                f"--server {url}: it gives no answer ({type(error).__name__})"
            ) from error
        if response.status_code != 200:
            raise UserError(f"--server: {_refusal(response)}")
        if not isinstance(found, dict) or wanted not in found:
            raise UserError(
                f"--server {self._options['base_url']}: it answers {path} without {wanted!r}: "
                "give the address of a `kvjax serve`"
            )
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, as `source_tokens` asks a tokenizer for them."""
        body = {"prompt": text[:MOST_SOURCE], "add_special_tokens": False}
        return self._asked("POST", "/tokenize", "tokens", body)["tokens"]

    async def serve(
        self, prompts: Sequence[np.ndarray], arrivals: Sequence[Arrival], settings: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Send all requests, each at its arrival; what became of each, in order."""
        async with self._httpx.AsyncClient(**self._options) as client:
            start = time.perf_counter()

            async def one(number: int) -> dict[str, Any]:
                arrival = arrivals[number]
                await asyncio.sleep(max(0.0, arrival.seconds + start - time.perf_counter()))
                body = {
                    **settings,
                    "prompt": prompts[number].tolist(),
                    "max_tokens": arrival.output_len,
                    "seed": number,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "ignore_eos": True,
                }
                return await self._answer(client, body)

            return await asyncio.gather(*map(one, range(len(prompts))))

    async def _answer(self, client: Any, body: dict[str, Any]) -> dict[str, Any]:
        """When the parts of one answer came, its text, and how many tokens it had."""
        began = time.perf_counter()
        times: list[float] = []
        found: dict[str, Any] = {"times": times, "tokens": 0, "began": began, "error": None}
        found |= {"text": "", "cached_tokens": 0}
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    return {**found, "error": _refusal(response)}
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        return {**found, "error": event["error"]["message"]}
                    if event["choices"] and (text := event["choices"][0]["text"]):
                        times.append(time.perf_counter())
                        found["text"] += text
                    if usage := event.get("usage"):
                        found["tokens"] = usage["completion_tokens"]
                        found["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
                        found["kvjax"] = event.get("kvjax")
        except self._httpx.HTTPError as error:
            return {**found, "error": type(error).__name__}
        except (ValueError, LookupError, TypeError):
            return {**found, "error": "a stream that is none of `kvjax serve`"}
        found["ended"] = time.perf_counter()
        return found


def _refusal(response: Any) -> str:
    """What a response other than 200 says, or its status: a proxy may have written it."""
    try:
        found = response.json()
    except ValueError:
        found = None
    error = found.get("error") if isinstance(found, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return str(said or f"status {response.status_code}")


def measure_remote(
    remote: Remote,
    options: argparse.Namespace,
    rate: str,
    lengths: list[int],
    arrivals: list[Arrival],
    source: np.ndarray,
) -> dict[str, Any]:
    """One row: serve everything at one compression rate.

    Gaps between tokens are those between the parts of a stream, shared out among the tokens that
    an answer has; a part may bring several.
    """
    full = rate == "v"
    method = None if options.method == USUAL_METHOD else options.method
    compression: dict[str, Any] = {"method": "full"} if full else {"rate": float(rate)}
    if options.floor is not None and not full:
        # Else the server's own.
        compression["floor"] = options.floor
    if method and not full:
        compression["method"] = method
    settings = {"temperature": options.temperature, "compression": compression}
    prompts = prompts_of(source, lengths, options.seed)
    began = time.perf_counter()
    answers = asyncio.run(remote.serve(prompts, arrivals, settings))
    seconds = time.perf_counter() - began
    done = [answer for answer in answers if answer["error"] is None and answer["times"]]
    lost = [
        answer["error"] or "an answer without text"
        for answer in answers
        if answer["error"] is not None or not answer["times"]
    ]
    if not done:
        raise UserError(f"--server: no request was served: {lost[0]}")
    if lost:
        print(f"{len(lost)} of {len(answers)} requests were not served: {lost[0]}", file=sys.stderr)
    firsts = [answer["times"][0] - answer["began"] for answer in done]
    parts = [gap for answer in done for gap in np.diff(answer["times"]).tolist()]
    each = [
        (answer["times"][-1] - answer["times"][0]) / (answer["tokens"] - 1)
        for answer in done
        if answer["tokens"] > 1
    ]
    generated = sum(answer["tokens"] for answer in done)
    served = set(map(id, done))
    read = sum(n for n, answer in zip(lengths, answers, strict=True) if id(answer) in served)
    kept = [answer["kvjax"] for answer in done if answer.get("kvjax")]
    before = sum(one["kvs_before"] for one in kept)
    after = sum(one["kvs_after"] for one in kept)
    return {
        "model": remote.status["model"],
        "server": True,
        "rate": None if full else float(rate),
        "reached_rate": before / after if after else None,
        "method": "full" if full else method or remote.status["method"],
        "input_len": lengths[0] if len(set(lengths)) == 1 else None,
        "output_len": asked.pop() if len(asked := {a.output_len for a in arrivals}) == 1 else None,
        "trace": Path(options.trace).name if options.trace else None,
        "request_rate": options.request_rate,
        "num_prompts": len(prompts),
        "failed": len(answers) - len(done),
        "pool_tokens": remote.status["pool_tokens"],
        "seconds": seconds,
        "total_tokens_per_second": (read + generated) / seconds,
        "output_tokens_per_second": generated / seconds,
        "time_to_first_token": percentiles(firsts),
        "time_per_output_token": percentiles(each),
        "time_between_parts": percentiles(parts),
        "request_seconds": percentiles([answer["ended"] - answer["began"] for answer in done]),
    }


USUAL_METHOD = "kv-compress-continual"
"""`--method` where nothing is said: a server has a method of its own."""
