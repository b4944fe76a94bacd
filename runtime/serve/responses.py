"""From what the engine tells of a job to HTTP responses: whole or as a stream, ended when the client goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...formats import MillError, PlanError
from .engine import Busy, End, Engine, Job, Text
from .replies import Replies
from .requests import RequestError

_SILENCE = 15.0  # seconds after which a stream says that it is alive: proxies close what is silent


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Escaped to ASCII: texts from a file may hold what is no UTF-8."""
    return Response(json.dumps(value), status, headers, "application/json")


def failed(error: RequestError) -> Response:
    """The error object, with the headers that belong to its status."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(error.status)
    return as_json(error.as_json(), error.status, headers)


class Answer:
    """A job of the engine on behalf of a client, who may go away."""

    def __init__(self, engine: Engine, prompt: list[int], options: dict[str, Any], request: Request):
        """Queues the job. Raises RequestError when the queue is full."""
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Text | End] = asyncio.Queue()
        self._job = Job(prompt, options, lambda event: _post(loop, self._events, event))
        try:
            engine.submit(self._job)
        except Busy as error:
            raise as_request_error(error) from None
        # Watched from now on, not from when somebody listens: a stream whose client is gone at once is never listened to.
        self._gone = asyncio.create_task(_disconnected(request))
        self._gone.add_done_callback(lambda task: self._job.cancel())

    async def events(self) -> AsyncIterator[Text | End | None]:
        """Texts and the end, None now and then while it is silent; ends early when the client goes. Whoever stops listening
        cancels the job."""
        coming: asyncio.Task[Text | End] | None = None
        try:
            while True:
                coming = coming or asyncio.create_task(self._events.get())
                await asyncio.wait({self._gone, coming}, timeout=_SILENCE, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    event, coming = coming.result(), None
                    yield event
                    if isinstance(event, End):
                        return
                elif self._gone.done():
                    return
                else:
                    yield None
        finally:
            self._job.cancel()
            self._gone.cancel()
            if coming is not None:
                coming.cancel()

    async def whole(self, replies: Replies, headers: Mapping[str, str]) -> Response:
        """The answer when it is complete, as one object."""
        pieces, drawn = [], []
        async for event in self.events():
            if isinstance(event, Text):
                pieces.append(event.text)
                drawn += event.drawn
            elif isinstance(event, End):
                problem = _problem(event)
                if problem is not None:
                    return failed(problem)
                return as_json(replies.whole("".join(pieces), drawn + event.drawn, event), 200, headers)
        return Response(status_code=499)  # nobody is there to read it

    def streamed(self, replies: Replies, headers: Mapping[str, str], with_usage: bool) -> Response:
        """The answer as it comes, as server-sent events. with_usage: another chunk at the end, as stream_options ask for it."""
        headers = {**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._chunks(replies, with_usage), headers=headers, media_type="text/event-stream")

    async def _chunks(self, replies: Replies, with_usage: bool) -> AsyncIterator[bytes]:
        begin = replies.begin()
        if begin is not None:
            yield _event(begin)
        async for event in self.events():
            if event is None:
                yield b": still here\n\n"
            elif isinstance(event, Text):
                for piece in replies.pieces(event.text, event.drawn):
                    yield _event(piece)
            else:
                problem = _problem(event)
                for last in replies.last(event) if problem is None else [problem.as_json()]:
                    yield _event(last)
                if problem is None and with_usage:
                    yield _event(replies.used(event))
                yield b"data: [DONE]\n\n"


def _post(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Text | End], event: Text | End) -> None:
    loop.call_soon_threadsafe(events.put_nowait, event)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_request_error(error: Exception) -> RequestError:
    """What to tell a client of something that went wrong while generating."""
    if isinstance(error, Busy):
        return RequestError(str(error), code="server_overloaded", status=503)
    if isinstance(error, PlanError):
        return RequestError(str(error), code="invalid_value")
    known = isinstance(error, MillError)
    return RequestError(str(error) if known else "a fault of the server; its terminal tells more", status=500)


def _problem(end: End) -> RequestError | None:
    if end.error is not None:
        return as_request_error(end.error)
    if end.reason == "cancelled":  # not by the client, who would not be there
        return RequestError("the server is shutting down", code="server_overloaded", status=503)
    return None


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()
