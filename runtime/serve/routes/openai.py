"""OpenAI's API: chat completions, completions, models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..replies.openai_replies import Prompt
from ..replies.openai_responses import ResponseWriter, chat_request
from ..requests.checks import JsonObject, RequestError, fields_named
from ..requests.field_limits import CHAT, COMPLETION, RESPONSES
from ..requests.fields import CompletionRequest, parse_chat, parse_completion
from ..responses import json_response
from ..service import Service


def model_object(service: Service) -> dict[str, Any]:
    """A served model as /v1/models shows it."""
    meta = {"n_vocab": service.description["vocabulary"], "n_ctx_train": service.description["n_ctx_train"]}
    meta |= {"n_ctx": service.model.n_ctx, "n_embd": service.model.graph.n_embd}
    meta |= {"n_params": service.description["parameters"], "size": service.description["bytes"]}
    meta["ftype"] = service.description["types"][0]["type"].upper()
    model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "ggufmill"}
    return {**model, "aliases": [service.name], "tags": [], "meta": meta}


def openai_routes(service: Service) -> list[Route]:
    """The routes, for a served model."""

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model_object(service)]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != service.name:
            raise RequestError(f"there is no model of that name, only {service.name}", "model", "model_not_found", 404)
        return json_response(model_object(service))

    def parse_messages(body: JsonObject) -> CompletionRequest:
        return parse_chat(body, service.defaults)

    def parse_items(body: JsonObject) -> tuple[CompletionRequest, dict[str, str], JsonObject]:
        converted, sent = chat_request(body)
        with fields_named(sent):
            return parse_chat(converted, service.defaults), sent, body

    async def chat(request: Request) -> Response:
        parsed = await service.read(request, CHAT, parse_messages)
        ids, parser = await service.encode_chat(parsed)
        return await service.answer(request, parsed, [Prompt(ids)], parser)

    async def completion(request: Request) -> Response:
        parsed = await service.read(request, COMPLETION, lambda body: parse_completion(body, service.defaults))
        await service.prepare_options(parsed)
        return await service.answer(request, parsed, await service.encode_prompts(parsed))

    async def responses(request: Request) -> Response:
        parsed, sent, body = await service.read(request, RESPONSES, parse_items)
        with fields_named(sent):
            ids, parser = await service.encode_chat(parsed)
            return await service.answer_in_blocks(request, parsed, ids, parser, ResponseWriter(service.name, body))

    async def count_of_chat(request: Request) -> Response:
        return await counted(await service.read(request, CHAT, parse_messages))

    async def count_of_response(request: Request) -> Response:
        parsed, sent, _ = await service.read(request, RESPONSES, parse_items)
        with fields_named(sent):
            return await counted(parsed)

    async def counted(parsed: CompletionRequest) -> Response:
        ids, _ = await service.encode_chat(parsed)
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    return [
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
        Route("/v1/completions", completion, methods=["POST"]),  # /completions is llama-server's
        *(Route(f"{version}/models", models, methods=["GET"]) for version in ("/v1", "")),
        *(
            Route(f"{version}{path}", handler, methods=["POST"])
            for version in ("/v1", "")
            for path, handler in (
                ("/chat/completions", chat),
                ("/chat/completions/input_tokens", count_of_chat),
                ("/responses", responses),
                ("/responses/input_tokens", count_of_response),
            )
        ),
    ]
