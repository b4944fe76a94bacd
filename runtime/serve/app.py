"""The HTTP application: routes of OpenAI's API and of llama-server over an `Engine`, and the built-in page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ...formats import PlanError
from ..draft_head import check_draft_layers
from ..generation.sampling import Sampling
from ..model import Model
from ..text.chat import ChatTemplate, find_template, prompt_tokens
from .engine import Engine, check_prompt_length
from .model_info import describe, model_name
from .prompt_renderer import PromptRenderer
from .replies import ReplyBuilder
from .requests import CompletionRequest, RequestError, parse_chat, parse_completion
from .responses import TaskResponse, error_response, json_response
from .security_middleware import SecurityMiddleware
from .stream_parser import StreamParser
from .tool_formats import find_reasoning_format, find_tool_format, special_tokens_in_tags

_TEXT_THREADS = 2  # texts that are encoded or decoded at once
_HEADER_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


class RefusedRequest(NamedTuple):
    """A request that was answered with an error."""

    method: str
    path: str
    error: RequestError

    def __str__(self) -> str:
        """One line: what was asked, the status, the field at fault, and the message."""
        field = f" ({self.error.param})" if self.error.param else ""
        line = f"refused {self.method} {self.path[:80]}: {self.error.status}{field} {self.error.message[:300]}"
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def make_app(
    model: Model,
    *,
    engine: Engine | None = None,
    template: str | None = None,
    alias: str | None = None,
    api_key: str | None = None,
    host: str = "127.0.0.1",
    hosts: Collection[str] = (),
    max_body: int = 8 << 20,
    body_seconds: float = 60.0,
    on_refused: Callable[[RefusedRequest], None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Starlette:
    """Returns an ASGI application that serves a model. A model without a chat template serves completions only.

    engine        generates (default: a new one); it is closed with the application
    template      chat template, as for `find_template`
    alias         the model's name in the API (default: general.name)
    api_key       key that clients have to send
    host          name or address that the server is bound to
    hosts         further names of this machine that a request's Host may have
    max_body      largest size of a request in bytes
    body_seconds  time that a client has for the body of a request
    on_refused    called with each request that is answered with an error
    options       n_predict, draft_max and fields of `Sampling` for requests that do not set them

    Raises PlanError if `template` does not exist, options are out of range, or draft_max is set for a model without draft
    layers.
    """
    defaults = {"n_predict": -1, **(options or {})}
    Sampling(**{key: value for key, value in defaults.items() if key not in ("n_predict", "draft_max")})  # raises PlanError
    if defaults.get("draft_max"):
        check_draft_layers(model)
    has_tool_template = template is None and "tokenizer.chat_template.tool_use" in model.metadata
    templates = _template(model, template), _template(model, "tool_use" if has_tool_template else template)
    routes = _Routes(model, engine or Engine(model), templates, alias or model_name(model), defaults, max_body, body_seconds)

    def respond(request: Request | Mapping[str, Any], error: RequestError) -> Response:
        if on_refused is not None:
            scope = request.scope if isinstance(request, Request) else request
            on_refused(RefusedRequest(scope["method"], scope["path"], error))
        return error_response(error)

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
        return respond(request, RequestError("internal error; the terminal of the server tells more", status=500))

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
        middleware=[Middleware(SecurityMiddleware, respond=respond, host=host, api_key=api_key, hosts=hosts)],
        exception_handlers={RequestError: on_request_error, HTTPException: on_http_error, Exception: on_exception},
        lifespan=lifespan,
    )
    app.state.engine = routes.engine
    return app


def _template(model: Model, choice: str | None) -> ChatTemplate | PlanError:
    """The chat template; for the model's own template, the error instead if it has none or an invalid one."""
    try:
        return find_template(model.metadata, choice)
    except PlanError as error:
        if choice is not None:
            raise
        return error


class _Routes:
    """The handlers of all routes."""

    def __init__(
        self,
        model: Model,
        engine: Engine,
        templates: tuple[ChatTemplate | PlanError, ChatTemplate | PlanError],
        name: str,
        defaults: Mapping[str, Any],
        max_body: int,
        body_seconds: float,
    ):
        """templates: for conversations without tools, and with tools."""
        self.model, self.engine, self.name = model, engine, name
        self._renderers = [PromptRenderer(t) if isinstance(t, ChatTemplate) else t for t in templates]
        self.defaults, self.max_body, self.body_seconds = defaults, max_body, body_seconds
        self._text_threads = CapacityLimiter(_TEXT_THREADS)
        self._tokenizer = model.tokenizer
        self._description, self._created = describe(model), int(time.time())

    async def page(self, request: Request) -> Response:
        text, policy = _load_page()
        return Response(text, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"}, media_type="text/html")

    async def icon(self, request: Request) -> Response:
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        n_tasks, n_slots = self.engine.n_tasks, self.engine.n_slots
        n_busy = min(n_tasks, n_slots)
        counts = {"slots_processing": n_busy, "slots_idle": n_slots - n_busy, "waiting": n_tasks - n_busy}
        return json_response({"status": "ok", **counts})

    async def props(self, request: Request) -> Response:
        tokens, vocabulary = self._tokenizer.vocabulary.tokens, self._tokenizer.vocabulary
        renderer = self._renderers[0]
        template = renderer.template_text if isinstance(renderer, PromptRenderer) else None
        sampling = {key: value for key, value in self.defaults.items() if key != "seed"}
        return json_response(
            {
                "default_generation_settings": {"n_ctx": self.model.n_ctx, "params": sampling},
                "total_slots": self.engine.n_slots,
                "model_alias": self.name,
                "model_path": self._description["file"],
                "chat_template": template,
                "bos_token": tokens[vocabulary.bos] if vocabulary.bos is not None else "",
                "eos_token": tokens[vocabulary.eos] if vocabulary.eos is not None else "",
                "model": self._description,
            }
        )

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_object()]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            raise RequestError(f"there is no model of that name, only {self.name}", "model", "model_not_found", 404)
        return json_response(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        meta = {"n_vocab": self._description["vocabulary"], "n_ctx_train": self._description["n_ctx_train"]}
        meta |= {"n_params": self._description["parameters"], "size": self._description["bytes"]}
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "ggufmill", "meta": meta}

    async def chat(self, request: Request) -> Response:
        parsed = parse_chat(await self._read_json(request), self.defaults)
        text = await run_in_threadpool(self._render, parsed)
        self._check_length(text, "messages")
        ids = await self._in_thread(prompt_tokens, self._tokenizer, text)
        return await self._answer(request, parsed, ids, self._stream_parser(parsed, text))

    async def completion(self, request: Request) -> Response:
        parsed = parse_completion(await self._read_json(request), self.defaults)
        prompt = parsed.prompt
        if isinstance(prompt, str):
            self._check_length(prompt, "prompt")
            ids = await self._in_thread(self._tokenizer.encode, prompt, True, True)
        else:
            ids = self._check_token_ids("prompt", prompt or [])
        return await self._answer(request, parsed, ids)

    async def tokenize(self, request: Request) -> Response:
        body = await self._read_json(request)
        text = body.get("content")
        if not isinstance(text, str):
            raise RequestError("content has to be a text", param="content", code="invalid_value")
        special, parse = bool(body.get("add_special", False)), bool(body.get("parse_special", True))
        return json_response({"tokens": await self._in_thread(self._tokenizer.encode, text, special, parse)})

    async def detokenize(self, request: Request) -> Response:
        body = await self._read_json(request)
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise RequestError("tokens has to be a list of token ids", param="tokens", code="invalid_value")
        ids = self._check_token_ids("tokens", tokens)
        return json_response({"content": await self._in_thread(self._tokenizer.decode, ids, False)})

    async def apply_template(self, request: Request) -> Response:
        parsed = parse_chat(await self._read_json(request), self.defaults)
        return json_response({"prompt": await run_in_threadpool(self._render, parsed)})

    async def _read_json(self, request: Request) -> dict[str, Any]:
        """The JSON object in the body of a request. Raises RequestError when it is too large or not a JSON object."""
        data = bytearray()
        try:
            async with asyncio.timeout(self.body_seconds):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > self.max_body:
                        raise RequestError(f"the request is larger than {self.max_body} bytes", code="too_large", status=413)
            body = json.loads(data)
        except TimeoutError:
            message = f"the body of the request did not arrive within {self.body_seconds:g} seconds"
            raise RequestError(message, code="request_timeout", status=408) from None
        except ClientDisconnect:
            raise RequestError("the client is gone", status=400) from None
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the request is not JSON: {error}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise RequestError("the request has to be a JSON object", code="invalid_json")
        return body

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function that may take long for a long text. Few run at once: other requests go on meanwhile."""
        return await to_thread.run_sync(function, *arguments, limiter=self._text_threads)

    def _check_length(self, text: str, param: str) -> None:
        """Raises RequestError for a text that cannot fit into the context, before it is encoded."""
        least = self._tokenizer.least_tokens(text)
        if least >= self.model.n_ctx:
            message = f"the prompt has at least {least} tokens, and the context holds {self.model.n_ctx} with the answer"
            raise RequestError(message, param=param, code="context_length_exceeded")

    def _renderer(self, parsed: CompletionRequest) -> PromptRenderer:
        """Raises RequestError when there is no template, or the request has tools and the template does not support them."""
        renderer = self._renderers[bool(parsed.tools)]
        if isinstance(renderer, PlanError):
            raise RequestError(str(renderer), code="no_chat_template")
        if parsed.tools and not renderer.supports_tools:
            message = "the model's chat template does not tell it of functions (--template chooses another)"
            raise RequestError(message, param="tools", code="unsupported_parameter")
        return renderer

    def _render(self, parsed: CompletionRequest) -> str:
        """The prompt text of a chat request. Raises RequestError."""
        renderer, tools = self._renderer(parsed), {"tools": parsed.tools} if parsed.tools else {}
        try:
            return renderer.render(parsed.messages or [], {**parsed.variables, **tools})
        except PlanError as error:
            raise RequestError(str(error), param="messages", code="template_error") from None

    def _stream_parser(self, parsed: CompletionRequest, prompt: str) -> StreamParser:
        """The parser for the answer to a rendered prompt. Sets the option `visible_special`: control tokens that are part of
        the tags that the parser looks for."""
        template = self._renderer(parsed).template_text
        reasoning = find_reasoning_format(template) if parsed.separate_reasoning else None
        tools = find_tool_format(template) if parsed.tools else None
        tags = [tag for format in (reasoning, tools) if format is not None for tag in format.tags]
        vocabulary = self._tokenizer.vocabulary
        special_tokens = ((text, id) for text, id, _ in vocabulary.special_tokens if vocabulary.is_control(id))
        parsed.options["visible_special"] = special_tokens_in_tags(tags, special_tokens) if tags else ()
        functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in parsed.tools}
        in_reasoning = reasoning is not None and prompt.rstrip().endswith(reasoning.start_tag)
        return StreamParser(reasoning, tools, functions, in_reasoning)

    def _check_token_ids(self, name: str, tokens: list[Any]) -> list[int]:
        n = len(self._tokenizer.vocabulary.tokens)
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < n for i in tokens):
            raise RequestError(f"{name} has to hold token ids from 0 to {n - 1}", param=name, code="invalid_value")
        return tokens

    async def _answer(
        self, request: Request, parsed: CompletionRequest, ids: list[int], parser: StreamParser | None = None
    ) -> Response:
        """Generates the response to a prompt given as token ids. parser: for chats, None for completions."""
        chat = parser is not None
        param = "messages" if chat else "prompt"
        try:
            check_prompt_length(self.model, ids)
        except PlanError as error:
            raise RequestError(str(error), param=param, code="context_length_exceeded") from None
        replies = ReplyBuilder(self._tokenizer, self.name, chat, "n_probs" in parsed.options, parser)
        ignored = [name for name in parsed.ignored if _HEADER_SAFE_NAME.fullmatch(name)][:20]
        headers = {"X-Ignored-Fields": ", ".join(ignored)} if ignored else {}
        response = TaskResponse(self.engine, ids, parsed.options, request)
        if parsed.stream:
            return response.stream(replies, headers, parsed.include_usage)
        return await response.complete(replies, headers)


@cache
def _load_page() -> tuple[str, str]:
    """The built-in page, which loads nothing from elsewhere: its HTML, and its Content-Security-Policy, which allows only
    the page's own script and style sheet."""
    text = files(str(__package__)).joinpath("page.html").read_text("utf-8")

    def hashes(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(b.encode()).digest()).decode()}'" for b in bodies)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy
