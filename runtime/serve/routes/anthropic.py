"""Anthropic's API: messages, and how many tokens they have."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..checks import fields_named
from ..replies.anthropic_messages import MessageWriter, chat_request
from ..requests import parse_chat
from ..responses import json_response
from ..service import Service


def anthropic_routes(service: Service) -> list[Route]:
    """The routes, for a served model."""

    async def messages(request: Request) -> Response:
        converted, sent = chat_request(await service.read_json(request))
        with fields_named(sent):
            parsed = parse_chat(converted, service.defaults)
            ids, parser = await service.encode_chat(parsed)
            return await service.answer_in_blocks(request, parsed, ids, parser, MessageWriter(service.name, len(ids)))

    async def count_tokens(request: Request) -> Response:
        converted, sent = chat_request(await service.read_json(request), needs_limit=False)
        with fields_named(sent):
            ids, _ = await service.encode_chat(parse_chat(converted, service.defaults))
            return json_response({"input_tokens": len(ids)})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
