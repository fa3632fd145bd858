"""The outputs of some requests as an iterator."""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.engine.prompts import Prompt
from kvjax.engine.request import Request, RequestOutput, RequestStats
from kvjax.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from kvjax.engine.llm import LLM


class OutputStream(Iterator[RequestOutput]):
    """The outputs of some requests as they come. Close it, or drop it, to end them."""

    def __init__(
        self,
        llm: "LLM",
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        compression: CompressionConfig | Sequence[CompressionConfig] | None,
    ):
        self._llm = llm
        self._requests: list[Request | RequestOutput] = []
        self._queue: deque[RequestOutput] = deque()
        try:
            llm.add_all(self._requests, prompts, sampling, compression, self._queue.append)
        except BaseException:
            self.close()
            raise
        self._running = {one.id for one in self._requests if isinstance(one, Request)}
        self._queue.extend(one for one in self._requests if not isinstance(one, Request))

    def __next__(self) -> RequestOutput:
        while not self._queue and self._running:
            with self._llm.engine.owner("stream"):
                self._llm.recovery.step()
        if not self._queue:
            raise StopIteration
        output = self._queue.popleft()
        if output.finished:
            self._running.discard(output.request_id)
        return output

    def close(self) -> None:
        """End those of the requests that still run; their outputs are dropped."""
        self._llm.abandon(self._requests)
        self._requests, self._running = [], set()
        self._queue.clear()

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self):
        # Once the interpreter ends, what closing needs may be gone before this is.
        if not sys.is_finalizing():
            self.close()


def refused(name: str, error: str) -> RequestOutput:
    """The output of a prompt that no request was made of."""
    empty = np.zeros(0, np.int32)
    return RequestOutput(name, empty, (), "", "", "error", error, None, RequestStats())
