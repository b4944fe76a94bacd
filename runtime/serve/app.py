"""The HTTP application: routes of OpenAI's API and of llama-server over an `Engine`, and the built-in page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...formats import PlanError
from ..draft_head import check_draft_layers
from ..generation.sampling_options import Sampling
from ..model import Model
from ..text.chat import ChatTemplate, find_template
from .engine import Engine
from .memory_middleware import MemoryMiddleware
from .model_info import model_name
from .page import PAGES, load_page
from .requests.checks import RequestError
from .responses import error_response
from .routes.anthropic import anthropic_routes
from .routes.embeddings import embedding_routes
from .routes.llama_server import llama_server_routes
from .routes.models import models_routes
from .routes.openai import openai_routes
from .routes.slots import slot_routes
from .security_middleware import SecurityMiddleware
from .served_models import ServedModels
from .server_settings import DEFAULTS, RefusedRequest, ServerSettings
from .service import Service
from .work_threads import WorkThreads


def make_app(
    model: Model,
    settings: ServerSettings = DEFAULTS,
    *,
    engine: Engine | None = None,
    alias: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Starlette:
    """Returns an ASGI application that serves a model. A model without a chat template serves completions only.

    engine   generates (default: a new one); it is closed with the application
    alias    the model's name in the API (default: general.name)
    options  n_predict, draft_max and fields of `Sampling` for requests that do not set them

    Raises PlanError if the chat template does not exist, options are out of range, or draft_max is set for a model without
    draft layers.
    """
    service = make_service(model, engine, WorkThreads(), settings, alias, options)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.engine.close)

    app = _application(service_routes(service, settings.slot_save_path), lifespan, settings)
    app.state.engine = service.engine
    return app


def make_models_app(models: ServedModels, settings: ServerSettings = DEFAULTS) -> Starlette:
    """Returns an ASGI application that serves the models of a folder, each when it is asked for. All models are unloaded with
    the application."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(models.run())
        yield
        models.stop()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    # Only to know the paths: a handler is that of the model that a request names.
    of_each = service_routes(cast(Service, None), None)
    return _application(models_routes(models, of_each, settings), lifespan, settings)


def make_service(
    model: Model,
    engine: Engine | None,
    threads: WorkThreads,
    settings: ServerSettings = DEFAULTS,
    alias: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Service:
    """What serves a model; arguments as of `make_app`, threads: of the server. Raises PlanError as that."""
    defaults = {"n_predict": -1, **(options or {})}
    Sampling(**{key: value for key, value in defaults.items() if key not in ("n_predict", "draft_max")})  # raises PlanError
    if defaults.get("draft_max"):
        check_draft_layers(model)
    template = settings.template
    has_tool_template = template is None and "tokenizer.chat_template.tool_use" in model.metadata
    templates = _template(model, template), _template(model, "tool_use" if has_tool_template else template)
    name = alias or model_name(model)
    return Service(model, engine or Engine(model), templates, name, defaults, settings, threads)


def service_routes(service: Service, slot_save_path: Path | None) -> list[Route]:
    """The routes that a model has, always in the same order. slot_save_path: as of `ServerSettings`."""
    return [
        *openai_routes(service),
        *llama_server_routes(service),
        *anthropic_routes(service),
        *embedding_routes(service),
        *slot_routes(service, slot_save_path),
    ]


def _application(
    routes: Sequence[Route],
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
    settings: ServerSettings,
) -> Starlette:
    """The application with the page, these routes, and what all requests pass through."""

    def respond(request: Request | Mapping[str, Any], error: RequestError) -> Response:
        scope = request.scope if isinstance(request, Request) else request
        if settings.on_refused is not None:
            settings.on_refused(RefusedRequest(scope["method"], scope["path"], error))
        return error_response(error, typed=scope["path"].startswith("/v1/messages"))

    async def on_request_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return respond(request, error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} is not possible here"}
        response = respond(request, RequestError(messages.get(error.status_code, str(error.detail)), status=error.status_code))
        response.headers.update(error.headers or {})
        return response

    async def on_exception(request: Request, error: Exception) -> Response:
        return respond(request, RequestError("internal error; see the server's terminal", status=500))

    async def page(request: Request) -> Response:
        text, policy = load_page(request.url.path)
        return Response(text, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"}, media_type="text/html")

    async def icon(request: Request) -> Response:
        return Response(status_code=204)

    return Starlette(
        routes=[*(Route(path, page, methods=["GET"]) for path in PAGES), Route("/favicon.ico", icon, methods=["GET"]), *routes],
        middleware=[
            Middleware(MemoryMiddleware),
            Middleware(SecurityMiddleware, respond=respond, host=settings.host, api_key=settings.api_key, hosts=settings.hosts),
        ],
        exception_handlers={RequestError: on_request_error, HTTPException: on_http_error, Exception: on_exception},
        lifespan=lifespan,
    )


def _template(model: Model, choice: str | None) -> ChatTemplate | PlanError:
    """The chat template; for the model's own template, the error instead if it has none or an invalid one."""
    try:
        return find_template(model.metadata, choice)
    except PlanError as error:
        if choice is not None:
            raise
        return error
