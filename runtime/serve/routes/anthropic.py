"""Anthropic's API: messages, and how many tokens they have."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..replies.anthropic_messages import MessageWriter, chat_request
from ..requests.checks import JsonObject, fields_named
from ..requests.field_limits import ANTHROPIC
from ..requests.fields import CompletionRequest, parse_chat
from ..responses import json_response
from ..service import Service


def anthropic_routes(service: Service) -> list[Route]:
    """The routes, for a served model."""

    def parse(body: JsonObject, needs_limit: bool = True) -> tuple[CompletionRequest, dict[str, str]]:
        converted, sent = chat_request(body, needs_limit)
        with fields_named(sent):
            return parse_chat(converted, service.defaults), sent

    async def messages(request: Request) -> Response:
        parsed, sent = await service.read(request, ANTHROPIC, parse)
        with fields_named(sent):
            ids, parser = await service.encode_chat(parsed)
            return await service.answer_in_blocks(request, parsed, ids, parser, MessageWriter(service.name, len(ids)))

    async def count_tokens(request: Request) -> Response:
        parsed, sent = await service.read(request, ANTHROPIC, partial(parse, needs_limit=False))
        with fields_named(sent):
            ids, _ = await service.encode_chat(parsed)
            return json_response({"input_tokens": len(ids)})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
