"""The routes."""

import importlib.resources
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import kvjax
from kvjax.serve.answers import Answer, ChatAnswer, CompletionAnswer
from kvjax.serve.errors import ApiError, json_response, no_json, of_validation
from kvjax.serve.guard import Guard
from kvjax.serve.jobs import (
    Job,
    Tokens,
    asked_tokens,
    check_offered,
    compression_of,
    deadline_of,
    max_tokens_of,
    prompts_of,
    render,
    samplings_of,
    source_of,
)
from kvjax.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kvjax.serve.schema import Request as Body
from kvjax.serve.service import Service
from kvjax.serve.streams import CLOSED, EventStream, events, whole
from kvjax.serve.tools import names_of

PAGE_FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "cache.js": "text/javascript; charset=utf-8",
    "examples.js": "text/javascript; charset=utf-8",
}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def make_app(service: Service) -> ASGIApp:
    """The ASGI application of a service, which belongs to the event loop that runs it."""
    app = FastAPI(
        title="kvjax",
        version=kvjax.__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    _add_errors(app)
    _add_operation(app, service)
    _add_models(app, service)
    _add_generation(app, service)
    if service.settings.page:
        _add_page(app)
    return Guard(app, service, {getattr(route, "path", "") for route in app.routes})


def _add_errors(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        request.state.note(error=error.code or error.status)
        return error.response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await known(request, of_validation(error))

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:
            # A body that could not be read: bytes that are no text, too deep, too long a number.
            return await known(request, no_json())
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def failed(request: Request, error: Exception) -> Response:
        return ApiError(500, f"the server failed: {type(error).__name__}").response()

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(Exception, failed)


def _add_operation(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Whether the engine lives; 503 when it has to be started again."""
        if service.dead is not None:
            return json_response({"status": "dead", "reason": service.dead}, 503)
        return json_response({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests should be sent here: warmed up, alive and not shutting down."""
        if service.ready and service.dead is None:
            return json_response({"status": "ready"})
        reason = "shutting down" if service.draining else service.dead or "warming up"
        return json_response({"status": "not ready", "reason": reason}, 503)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": kvjax.__version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.llm.metrics.prometheus(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/kvjax/status")
    async def status() -> Response:
        """The model, its cache and its pool at this moment."""
        return json_response(service.status())


def _add_models(app: FastAPI, service: Service) -> None:
    def described() -> dict[str, Any]:
        fields = {"id": service.name, "created": service.created, "owned_by": "kvjax"}
        model = Model.model_validate({**fields, "object": "model"}).model_dump(exclude_unset=True)
        return model | {"max_model_len": service.llm.llm.max_len}

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [described()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(described())

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a text, or of messages as the model reads them."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt and messages: give one of them", param="prompt")
        tokenizer = service.tokenizer

        def tokens() -> Tokens:
            if body.messages is not None:
                return render(tokenizer, body.messages, body.tools)
            assert body.prompt is not None
            return tokenizer.encode(body.prompt, body.add_special_tokens and tokenizer.adds_bos)

        param = "prompt" if body.messages is None else "messages"
        found = await service.in_thread(param, tokens)
        return json_response(
            {"tokens": found, "count": len(found), "max_model_len": service.llm.llm.max_len}
        )

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of some tokens, marks included."""
        service.check_model(body.model)
        most = service.llm.llm.model.config.vocab_size
        wrong = next((token for token in body.tokens if not 0 <= token < most), None)
        if wrong is not None:
            raise ApiError(400, f"token {str(wrong)[:20]}: give ids from 0 to {most - 1}",
                           param="tokens")  # fmt: skip
        text = await service.in_thread("tokens", service.tokenizer.decode, body.tokens, False)
        return json_response({"prompt": text})


def _add_generation(app: FastAPI, service: Service) -> None:
    async def generate(
        request: Request, body: Body, answer: Answer, prompts: Callable[[], list[Tokens]]
    ) -> Response:
        note = request.state.note
        service.check_open()
        service.check_model(body.model)
        check_offered(body)
        compression = compression_of(body, service.llm.llm.compression, service.methods)
        source = source_of(body)
        found = await service.in_thread(source, prompts)
        max_len, settings = service.llm.llm.max_len, service.settings
        tokens = min(max_tokens_of(body, len(prompt), max_len, settings) for prompt in found)
        samplings = samplings_of(body, tokens, settings.max_choices // len(found))
        detail = body.kvjax is not None and body.kvjax.detail
        deadline, shortens = deadline_of(body.kvjax, settings), asked_tokens(body)[1] is None
        job = Job(found, samplings, compression, deadline, detail, source, shortens)
        running = service.begin(job)
        note(response_id=answer.id)
        if settings.log_prompts:
            note(prompts=[service.tokenizer.decode(p, False) for p in found])
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            parts = events(service, running, job, answer, include_usage, note)

            def gone() -> None:
                service.metrics.gone.inc()
                note(client="gone")

            return EventStream(running, parts, gone)
        result = await whole(service, running, job, answer, request.receive, note)
        if result is None:
            note(client="gone")
            return Response(status_code=CLOSED)
        if settings.log_prompts:
            note(answer=result)
        return json_response(result)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        tools = None if body.tool_choice == "none" else body.tools

        def prompts() -> list[Tokens]:
            return [render(service.tokenizer, body.messages, tools, body.chat_template_kwargs)]

        most_calls = 1 if body.parallel_tool_calls is False else None
        answer = ChatAnswer(
            service.name, service.tokenizer, names_of(tools), most_calls, body.ignore_eos
        )
        return await generate(request, body, answer, prompts)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        def prompts() -> list[Tokens]:
            return prompts_of(body, service.tokenizer, service.settings.max_choices)

        answer = CompletionAnswer(service.name, service.tokenizer, body.ignore_eos)
        return await generate(request, body, answer, prompts)


def _add_page(app: FastAPI) -> None:
    folder = importlib.resources.files("kvjax.serve") / "page"

    def file_of(name: str) -> Callable[[], Awaitable[Response]]:
        data, kind = (folder / name).read_bytes(), PAGE_FILES[name]

        async def file() -> Response:
            return Response(data, media_type=kind, headers=_PAGE_HEADERS)

        return file

    for name in PAGE_FILES:
        path = "/" if name == "index.html" else f"/page/{name}"
        app.add_api_route(path, file_of(name), methods=["GET", "HEAD"], include_in_schema=False)
