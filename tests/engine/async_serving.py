"""The small engine of the tests under asyncio."""

import asyncio

from kvjax.engine.async_llm import AsyncLLM
from kvjax.engine.config import EngineConfig
from kvjax.models import LoadedModel
from tests.engine.conftest import TINY
from tests.engine.serving import FULL, SIZES
from tests.models.tokenizer_builders import tiny_tokenizer


def make(params, **config) -> AsyncLLM:
    model = LoadedModel(TINY, params, tiny_tokenizer(), "random weights")
    return AsyncLLM(model, FULL, EngineConfig(**{**SIZES, **config}))


async def settled(llm: AsyncLLM) -> None:
    """Nothing runs any more."""
    async with asyncio.timeout(60):
        while llm.llm.has_unfinished():
            await asyncio.sleep(0.01)
        # The round in which the last one ended is over, too.
        await llm._call(lambda: None)


async def asleep(llm: AsyncLLM) -> None:
    """Nothing runs, and the thread waits for what comes."""
    await settled(llm)
    async with asyncio.timeout(60):
        while not vars(llm._driver._wake)["_waiters"]:
            await asyncio.sleep(0.01)


def run(main) -> None:
    async def watched():
        async with asyncio.timeout(300):
            await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left

    asyncio.run(watched(), debug=True)
