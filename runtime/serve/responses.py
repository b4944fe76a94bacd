"""Turns the events of an engine's task into an HTTP response, complete or streamed; a client that leaves ends the task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...formats import MillError, PlanError
from .engine import Busy, EndEvent, Engine, Task, TextEvent
from .replies import ReplyBuilder
from .requests import RequestError

_KEEP_ALIVE_SECONDS = 15.0  # after so much silence a stream sends a comment: proxies close idle connections


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response, escaped to ASCII: texts from a file may hold bytes that are not valid UTF-8."""
    return Response(json.dumps(value), status, headers, "application/json")


def error_response(error: RequestError) -> Response:
    """The error object with its status and the headers that belong to it."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(error.status)
    return json_response(error.as_json(), error.status, headers)


class TaskResponse:
    """A task of the engine on behalf of a client, and the response to that client."""

    def __init__(self, engine: Engine, prompt: list[int], options: dict[str, Any], request: Request):
        """Queues the task. Raises RequestError when the queue is full."""
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TextEvent | EndEvent] = asyncio.Queue()
        self._task = Task(prompt, options, lambda event: _post(loop, self._events, event))
        try:
            engine.submit(self._task)
        except Busy as error:
            raise as_request_error(error) from None
        # Watched from now on, not from the first iteration of `events`: if the client disconnects at once, starlette never
        # iterates over the stream.
        self._disconnected = asyncio.create_task(_wait_for_disconnect(request))
        self._disconnected.add_done_callback(lambda task: self._task.cancel())

    async def events(self) -> AsyncIterator[TextEvent | EndEvent | None]:
        """Yields text events and the end event, and None after each _KEEP_ALIVE_SECONDS of silence.

        Ends early when the client disconnects. Closing the iterator cancels the task.
        """
        waiting: asyncio.Task[TextEvent | EndEvent] | None = None
        try:
            while True:
                waiting = waiting or asyncio.create_task(self._events.get())
                tasks = {self._disconnected, waiting}
                await asyncio.wait(tasks, timeout=_KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    event, waiting = waiting.result(), None
                    yield event
                    if isinstance(event, EndEvent):
                        return
                elif self._disconnected.done():
                    return
                else:
                    yield None
        finally:
            self._task.cancel()
            self._disconnected.cancel()
            if waiting is not None:
                waiting.cancel()

    async def complete(self, replies: ReplyBuilder, headers: Mapping[str, str]) -> Response:
        """The response when the answer is complete: one JSON object."""
        pieces, sampled = [], []
        async for event in self.events():
            if isinstance(event, TextEvent):
                pieces.append(event.text)
                sampled += event.sampled
            elif isinstance(event, EndEvent):
                error = _error_of(event)
                if error is not None:
                    return error_response(error)
                return json_response(replies.complete("".join(pieces), sampled + event.sampled, event), 200, headers)
        return Response(status_code=499)  # the client has disconnected

    def stream(self, replies: ReplyBuilder, headers: Mapping[str, str], with_usage: bool) -> Response:
        """The answer as server-sent events. with_usage: a last chunk with the token counts (stream_options.include_usage)."""
        headers = {**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._stream_chunks(replies, with_usage), headers=headers, media_type="text/event-stream")

    async def _stream_chunks(self, replies: ReplyBuilder, with_usage: bool) -> AsyncIterator[bytes]:
        first = replies.first_chunk()
        if first is not None:
            yield _server_sent_event(first)
        async for event in self.events():
            if event is None:
                yield b": still here\n\n"
            elif isinstance(event, TextEvent):
                for chunk in replies.text_chunks(event.text, event.sampled):
                    yield _server_sent_event(chunk)
            else:
                error = _error_of(event)
                for chunk in replies.last_chunks(event) if error is None else [error.as_json()]:
                    yield _server_sent_event(chunk)
                if error is None and with_usage:
                    yield _server_sent_event(replies.usage_chunk(event))
                yield b"data: [DONE]\n\n"


def _post(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[TextEvent | EndEvent], event: TextEvent | EndEvent) -> None:
    """Puts an event into an asyncio queue from the engine's thread."""
    loop.call_soon_threadsafe(events.put_nowait, event)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_request_error(error: Exception) -> RequestError:
    """What the client is told about an exception of the engine; details of unexpected ones stay on the server."""
    if isinstance(error, Busy):
        return RequestError(str(error), code="server_overloaded", status=503)
    if isinstance(error, PlanError):
        return RequestError(str(error), code="invalid_value")
    expected = isinstance(error, MillError)
    return RequestError(str(error) if expected else "internal error; the terminal of the server tells more", status=500)


def _error_of(end: EndEvent) -> RequestError | None:
    if end.error is not None:
        return as_request_error(end.error)
    if end.reason == "cancelled":  # by the server: if the client had disconnected, nobody would receive this
        return RequestError("the server is shutting down", code="server_overloaded", status=503)
    return None


def _server_sent_event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()
