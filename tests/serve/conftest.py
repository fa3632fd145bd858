"""A server of a tiny model in a thread of the test process, on a socket of its own."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from kvjax.cache import CompressionConfig
from kvjax.engine import AsyncLLM, EngineConfig
from kvjax.models import LoadedModel
from kvjax.models.decoder import init_params
from kvjax.models.tokenizer import ByteTokenizer
from kvjax.serve import ServerSettings, Service, bind, run_server
from tests.tiny import TINY

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
EOS = 17
"""A byte that the tiny model sometimes draws, as the end of a turn."""
SIZES: dict[str, Any] = {
    "max_batch": 4,
    "max_len": 512,
    "block_size": 4,
    "decode_steps_per_sync": 4,
}
SIZES |= {"prefill_chunk": 128, "prefill_scratch": 256, "pool_tokens": 2048}
ONE = {"max_batch": 1, "decode_steps_per_sync": 1}
"""A slow one, for what has to be met half way; few sizes, as each is compiled."""
USUAL = CompressionConfig(method="kv-compress", rate=2, floor=8, window=4)


def until(found, seconds: float = 600.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


class ServerThread:
    """A server in a thread; leaving it stops the server."""

    _loop: asyncio.AbstractEventLoop
    _stop: asyncio.Event

    def __init__(
        self,
        settings: ServerSettings,
        compression: CompressionConfig = USUAL,
        tokenizer: Any = None,
        **sizes: Any,
    ):
        tokenizer = tokenizer or chat_tokenizer()
        model = LoadedModel(TINY, init_params(TINY, "float32", seed=3), tokenizer, "random")
        self.llm = AsyncLLM(model, compression, EngineConfig(**{**SIZES, **sizes}))
        self.service: Service | None = None
        self._settings, self._listener = settings, bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="test server")
        self.cut: int | None = None

    def _run(self) -> None:
        async def main() -> int:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self.service = Service(self.llm, self._settings)
            return await run_server(
                self.service, self._listener, started=self._started.set, stop=self._stop
            )

        try:
            self.cut = asyncio.run(main())
        finally:
            self._started.set()

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        assert self._started.wait(300)
        return self

    def stop(self) -> None:
        """As a signal would; does not wait."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(300)
        assert not self._thread.is_alive()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=600, trust_env=False, **options)

    def counts(self, name: str, value: float) -> None:
        """Wait for a metric of answers, which are counted when they have been sent."""
        until(lambda: self.llm.metrics.as_dict().get(f"kvjax_{name}") == value, 60)

    def metric(self, name: str) -> float:
        return self.llm.metrics.as_dict()[f"kvjax_{name}"]


def chat_tokenizer(template: str | None = TEMPLATE) -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    tokenizer.eos_ids = frozenset({EOS})
    return tokenizer


@pytest.fixture(scope="session")
def shared() -> Iterator[ServerThread]:
    """A server that many tests use and none changes."""
    with ServerThread(ServerSettings(methods=("streaming-llm",), drain_seconds=1)) as server:
        yield server


@pytest.fixture
def client(shared: ServerThread) -> Iterator[httpx.Client]:
    with shared.client() as client:
        yield client


@pytest.fixture
def serve() -> Callable[..., ServerThread]:
    """Makes a server with settings of its own; a context manager."""

    def make(compression: CompressionConfig = USUAL, tokenizer: Any = None, **given: Any):
        names = {field.name for field in dataclasses.fields(ServerSettings)}
        settings = {k: v for k, v in given.items() if k in names}
        sizes = {k: v for k, v in given.items() if k not in names}
        return ServerThread(
            ServerSettings(**{"drain_seconds": 1.0, **settings}), compression, tokenizer, **sizes
        )

    return make


@pytest.fixture(autouse=True)
def _log_records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvjax.serve")


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream, "[DONE]" among them; comments are passed over."""
    found = []
    for block in response.iter_lines():
        if not block or block.startswith(":"):
            continue
        kind, _, data = block.partition(": ")
        assert kind == "data"
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
