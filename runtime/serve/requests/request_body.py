"""The body of a request, within limits of bytes and of time."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request

from .checks import JsonObject, RequestError

READ = "ggufmill.body"  # in a request's scope: its `ReadBody`, where what has chosen the model has read it


class ReadBody(NamedTuple):
    """A body, and the object in it if it was loaded already."""

    data: bytes
    loaded: JsonObject | None = None


async def read_bytes(request: Request, most: int, seconds: float) -> bytes:
    """The body of a request. most: bytes. Raises RequestError when there are more, it takes longer, or the client has gone."""
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise RequestError(f"the request is larger than {most} bytes", code="too_large", status=413)
    except TimeoutError:
        message = f"the body of the request did not arrive within {seconds:g} seconds"
        raise RequestError(message, code="request_timeout", status=408) from None
    except ClientDisconnect:
        raise RequestError("the client is gone", status=400) from None
    return bytes(data)
