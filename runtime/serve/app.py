"""The HTTP server: OpenAI's API over an `Engine`, llama-server's extras, and the page."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ...formats import PlanError
from ..generation.sampling import Sampling
from ..model import Model
from ..text.chat import ChatTemplate, find_template, prompt_tokens
from .engine import Engine, checked_length
from .history import History
from .model_info import describe, model_name
from .page import page
from .replies import Replies
from .requests import Completion, RequestError, parse_chat, parse_completion
from .responses import Answer, as_json, failed
from .security_middleware import Guard
from .stream_parser import Speech
from .tool_formats import calls_of, shown, thoughts_of

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


def make_app(
    model: Model,
    *,
    engine: Engine | None = None,
    template: str | None = None,
    alias: str | None = None,
    api_key: str | None = None,
    host: str = "127.0.0.1",
    max_body: int = 8 << 20,
    options: Mapping[str, Any] | None = None,
) -> Starlette:
    """An ASGI application that serves a model.

    engine: what generates (by default a new one, which is closed with the application); template: as `find_template` takes it;
    alias: the model's name in the API; api_key: asked of clients; host: what the server is bound to; max_body: most bytes of a
    request; options: n_predict and fields of `Sampling` for requests that do not say. Raises PlanError for a template that is
    asked for and not there, or options out of range; a model without template serves completions only.
    """
    defaults = {"n_predict": -1, **(options or {})}
    Sampling(**{key: value for key, value in defaults.items() if key != "n_predict"})
    own_for_tools = template is None and "tokenizer.chat_template.tool_use" in model.metadata
    templates = _template(model, template), _template(model, "tool_use" if own_for_tools else template)
    routes = _Routes(model, engine or Engine(model), templates, alias or model_name(model), max_body, defaults)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(routes.engine.close)

    get, post = ["GET"], ["POST"]
    table: list[tuple[str, Callable[[Request], Awaitable[Response]], list[str]]] = [
        ("/", routes.page, get),
        ("/favicon.ico", routes.icon, get),
        ("/health", routes.health, get),
        ("/v1/health", routes.health, get),
        ("/props", routes.props, get),
        ("/v1/models", routes.models, get),
        ("/v1/models/{name:path}", routes.one_model, get),
        ("/v1/chat/completions", routes.chat, post),
        ("/v1/completions", routes.completion, post),
        ("/tokenize", routes.tokenize, post),
        ("/detokenize", routes.detokenize, post),
        ("/apply-template", routes.apply_template, post),
    ]
    app = Starlette(
        routes=[Route(path, handler, methods=methods) for path, handler, methods in table],
        middleware=[Middleware(Guard, refuse=failed, bound_to=host, api_key=api_key)],
        exception_handlers={RequestError: _on_request_error, HTTPException: _on_http_error, Exception: _on_fault},
        lifespan=lifespan,
    )
    app.state.engine = routes.engine
    return app


def _template(model: Model, choice: str | None) -> ChatTemplate | PlanError:
    try:
        return find_template(model.metadata, choice)
    except PlanError as error:
        if choice is not None:
            raise
        return error


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return failed(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} is not possible here"}
    response = failed(RequestError(what.get(error.status_code, str(error.detail)), status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _on_fault(request: Request, error: Exception) -> Response:
    return failed(RequestError("a fault of the server; its terminal tells more", status=500))


class _Routes:
    """The handlers, and what they share."""

    def __init__(
        self,
        model: Model,
        engine: Engine,
        templates: tuple[ChatTemplate | PlanError, ChatTemplate | PlanError],
        name: str,
        max_body: int,
        defaults: Mapping[str, Any],
    ):
        """templates: for conversations without functions, and with them."""
        self.model, self.engine, self.name = model, engine, name
        self.template, *_ = self._histories = [History(t) if isinstance(t, ChatTemplate) else t for t in templates]
        self.max_body, self.defaults = max_body, defaults
        self._tokenizer = model.tokenizer
        self._about, self._since = describe(model), int(time.time())

    async def page(self, request: Request) -> Response:
        text, policy = page()
        return Response(text, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"}, media_type="text/html")

    async def icon(self, request: Request) -> Response:
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        load, slots = self.engine.load, self.engine.slots
        busy = min(load, slots)
        return as_json({"status": "ok", "slots_processing": busy, "slots_idle": slots - busy, "waiting": load - busy})

    async def props(self, request: Request) -> Response:
        tokens, vocabulary = self._tokenizer.vocabulary.tokens, self._tokenizer.vocabulary
        template = self.template.text if isinstance(self.template, History) else None
        sampling = {key: value for key, value in self.defaults.items() if key != "seed"}
        return as_json(
            {
                "default_generation_settings": {"n_ctx": self.model.n_ctx, "params": sampling},
                "total_slots": self.engine.slots,
                "model_alias": self.name,
                "model_path": self._about["file"],
                "chat_template": template,
                "bos_token": tokens[vocabulary.bos] if vocabulary.bos is not None else "",
                "eos_token": tokens[vocabulary.eos] if vocabulary.eos is not None else "",
                "model": self._about,
            }
        )

    async def models(self, request: Request) -> Response:
        return as_json({"object": "list", "data": [self._model_object()]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            raise RequestError(f"there is no model of that name, only {self.name}", "model", "model_not_found", 404)
        return as_json(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        meta = {"n_vocab": self._about["vocabulary"], "n_ctx_train": self._about["n_ctx_train"]}
        meta |= {"n_params": self._about["parameters"], "size": self._about["bytes"]}
        return {"id": self.name, "object": "model", "created": self._since, "owned_by": "ggufmill", "meta": meta}

    async def chat(self, request: Request) -> Response:
        wanted = parse_chat(await self._body(request), self.defaults)
        text = await run_in_threadpool(self._written, wanted)
        ids = await run_in_threadpool(prompt_tokens, self._tokenizer, text)
        return await self._answer(request, wanted, ids, self._speech(wanted, text))

    async def completion(self, request: Request) -> Response:
        wanted = parse_completion(await self._body(request), self.defaults)
        prompt = wanted.prompt
        if isinstance(prompt, str):
            ids = await run_in_threadpool(self._tokenizer.encode, prompt, parse_special=True)
        else:
            ids = self._checked_ids("prompt", prompt or [])
        return await self._answer(request, wanted, ids)

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        text = body.get("content")
        if not isinstance(text, str):
            raise RequestError("content has to be a text", param="content", code="invalid_value")
        special, parse = bool(body.get("add_special", False)), bool(body.get("parse_special", True))
        return as_json({"tokens": await run_in_threadpool(self._tokenizer.encode, text, special, parse)})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request)
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise RequestError("tokens has to be a list of token ids", param="tokens", code="invalid_value")
        ids = self._checked_ids("tokens", tokens)
        return as_json({"content": self._tokenizer.decode(ids, skip_special=False)})

    async def apply_template(self, request: Request) -> Response:
        wanted = parse_chat(await self._body(request), self.defaults)
        return as_json({"prompt": await run_in_threadpool(self._written, wanted)})

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object that a request brings. Raises RequestError when it is too large or no JSON object."""
        data = bytearray()
        try:
            async for chunk in request.stream():
                data += chunk
                if len(data) > self.max_body:
                    raise RequestError(f"the request is larger than {self.max_body} bytes", code="too_large", status=413)
            body = json.loads(data)
        except ClientDisconnect:
            raise RequestError("the client is gone", status=400) from None
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the request is not JSON: {error}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise RequestError("the request has to be a JSON object", code="invalid_json")
        return body

    def _history(self, wanted: Completion) -> History:
        """Raises RequestError when there is no template, or none that knows functions where there are some."""
        history = self._histories[bool(wanted.tools)]
        if isinstance(history, PlanError):
            raise RequestError(str(history), code="no_chat_template")
        if wanted.tools and not history.tools:
            message = "the model's chat template does not tell it of functions (--template chooses another)"
            raise RequestError(message, param="tools", code="unsupported_parameter")
        return history

    def _written(self, wanted: Completion) -> str:
        """The messages as text. Raises RequestError."""
        history, tools = self._history(wanted), {"tools": wanted.tools} if wanted.tools else {}
        try:
            return history.render(wanted.messages or [], {**wanted.variables, **tools})
        except PlanError as error:
            raise RequestError(str(error), param="messages", code="template_error") from None

    def _speech(self, wanted: Completion, text: str) -> Speech:
        """What tells the parts of the answer to a written conversation apart; the marks of the parts have to be written out."""
        template = self._history(wanted).text
        thoughts = thoughts_of(template) if wanted.reasoning else None
        calls = calls_of(template) if wanted.tools else None
        marks = [mark for form in (thoughts, calls) if form is not None for mark in form.marks]
        vocabulary = self._tokenizer.vocabulary
        special = ((text, id) for text, id, _ in vocabulary.splitting if vocabulary.is_control(id))
        wanted.options["shown"] = shown(marks, special) if marks else ()
        functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in wanted.tools}
        thinking = thoughts is not None and text.rstrip().endswith(thoughts.begin)
        return Speech(thoughts, calls, functions, thinking)

    def _checked_ids(self, name: str, tokens: list[Any]) -> list[int]:
        n = len(self._tokenizer.vocabulary.tokens)
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < n for i in tokens):
            raise RequestError(f"{name} has to hold token ids from 0 to {n - 1}", param=name, code="invalid_value")
        return tokens

    async def _answer(self, request: Request, wanted: Completion, ids: list[int], speech: Speech | None = None) -> Response:
        """speech: of a chat."""
        chat = speech is not None
        param = "messages" if chat else "prompt"
        try:
            checked_length(self.model, ids)
        except PlanError as error:
            raise RequestError(str(error), param=param, code="context_length_exceeded") from None
        replies = Replies(self._tokenizer, self.name, chat, "n_probs" in wanted.options, speech)
        shown = [name for name in wanted.ignored if _NAME.fullmatch(name)][:20]
        headers = {"X-Ignored-Fields": ", ".join(shown)} if shown else {}
        answer = Answer(self.engine, ids, wanted.options, request)
        if wanted.stream:
            return answer.streamed(replies, headers, wanted.include_usage)
        return await answer.whole(replies, headers)
