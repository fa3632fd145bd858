"""Several replicas of the server behind one address, by Ray Serve: each turn of a conversation goes
to the replica that holds what was said before.

    pip install '.[ray]'
    python examples/ray_serve.py --replicas 2 --rate 8 --share-prefix auto
    python examples/ray_serve.py --replicas 4 --num-gpus 1 --weights ./Llama-3.1-8B-Instruct

Options are those of `kvjax serve`, beside the first two. Started on a machine of a Ray cluster, the
replicas are spread over all of it. A front reads each request and hands it to the replica that
Ray's ring of hashes has for its conversation: `x-session-id`, where the client sends one, or how
the conversation opens. When a replica is gone, its conversations go to the others and begin anew
there.
"""

import argparse
import asyncio
import signal
import sys
import threading
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from kvjax.checks import check_whole
from kvjax.cli import ArgumentParser, run_script
from kvjax.cli.models import check_cache_dtypes, check_model_options
from kvjax.cli.progress import Progress
from kvjax.cli.serve import add_options, engine_settings, load_service, server_settings
from kvjax.errors import UserError, in_one_line
from kvjax.extras import check_extra

if TYPE_CHECKING:
    from kvjax.serve import ServerSettings

MOST_OPEN = 100_000
"""Requests that a replica is handed at most: how many wait is for its engine to say."""
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
SERVED_BY = b"x-kvjax-replica"


class Replica:
    """One engine with the application that serves it, in a process of its own."""

    async def __init__(self, options: argparse.Namespace, settings: "ServerSettings"):
        from ray import serve  # pyright: ignore[reportMissingImports]

        from kvjax.engine.compilation import enable_compilation_cache
        from kvjax.serve import make_app
        from kvjax.serve.logs import write_logs

        write_logs(sys.stderr, settings.log_prompts)
        enable_compilation_cache()
        options.tensor_parallel = options.tensor_parallel or 1
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._service, lengths = await asyncio.to_thread(
            load_service, options, settings, Progress()
        )
        self._app = make_app(self._service)
        await self._service.warm_up(lengths, options.warm_up_logprobs)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Any, None]:
        """The messages of an answer. Ray cancels it when the client has left."""
        from kvjax.serve.replicas import messages_of

        async for message in messages_of(self._app, scope, body):
            if message["type"] == "http.response.start":
                # Ray's proxy names the request itself.
                own = [h for h in message["headers"] if h[0].lower() != b"x-request-id"]
                message = {**message, "headers": [*own, (SERVED_BY, self._name)]}
            yield message

    def check_health(self) -> None:
        """Ray starts a replica anew that raises here."""
        if self._service.dead is not None:
            raise RuntimeError(self._service.dead)

    async def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            await service.drain(service.settings.drain_seconds)
            service.close()
            await service.llm.aclose()


class Ingress:
    """Where requests come in."""

    def __init__(self, replicas: Any, max_body_bytes: int):
        self._replicas, self._most = replicas.options(stream=True), max_body_bytes

    def __serve_build_asgi_app__(self) -> Any:
        from kvjax.serve.replicas import Front

        front = Front(self._ask, self._most)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await front(scope, receive, send)

        return app

    async def _ask(
        self, conversation: str | None, scope: dict[str, Any], body: bytes
    ) -> AsyncGenerator[Any, None]:
        # Without a name Ray draws a replica.
        named = {} if conversation is None else {"session_id": conversation}
        told = self._replicas.options(**named).answer.remote(scope, body)
        try:
            async for message in told:
                yield message
        finally:
            told.cancel()


def application(options: argparse.Namespace, settings: "ServerSettings") -> Any:
    """What `serve.run` runs."""
    from ray import serve  # pyright: ignore[reportMissingImports]
    from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]

    replicas = serve.deployment(
        name="replicas",
        num_replicas=options.replicas,
        # Of cores each takes what is there: Ray need not have one for it.
        ray_actor_options={"num_cpus": 0, "num_gpus": options.num_gpus},
        max_ongoing_requests=MOST_OPEN,
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=settings.drain_seconds + 10,
        logging_config={"enable_access_log": False},  # there is a log of our own
        # Whoever holds a conversation answers it, also when others have less to do.
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": 0}
        ),
    )(Replica)
    front = serve.deployment(
        name="front", max_ongoing_requests=MOST_OPEN, ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False},
    )  # fmt: skip
    ingress = front(serve.ingress()(Ingress))
    return ingress.bind(replicas.bind(options, settings), settings.max_body_bytes)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python examples/ray_serve.py", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--num-gpus", type=int, default=0, help="of each replica (%(default)s)")
    add_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    for package, extra in (("fastapi", "serve"), ("ray", "ray")):
        check_extra(package, extra, "examples/ray_serve.py")
    check_whole("--replicas", options.replicas, 1, 10_000)
    check_whole("--num-gpus", options.num_gpus, 0, 64)
    if options.coordinator is not None:
        raise UserError(
            "--coordinator: a replica is one process; give it --tensor-parallel devices"
        )
    check_model_options(options)
    check_cache_dtypes([options.cache_dtype])
    engine_settings(options)
    settings = server_settings(options)

    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    stop = threading.Event()
    ray.init(include_dashboard=False)
    # Ray has taken the signals, and would abort.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        serve.start(http_options={"host": options.host, "port": options.port})
        serve.run(application(options, settings), name="kvjax")
        print(f"{options.replicas} replicas at http://{options.host}:{options.port}/v1",
              file=sys.stderr, flush=True)  # fmt: skip
        stop.wait()
    except RuntimeError as error:
        raise UserError(f"the replicas did not start: {in_one_line(error)}") from error
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


if __name__ == "__main__":
    run_script(main)
