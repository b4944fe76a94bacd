"""Turns the events of an engine's tasks into an HTTP response, complete or streamed; a client that leaves ends the tasks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...formats import MillError, PlanError
from .engine import Busy, Engine
from .replies.openai_replies import Generated
from .requests.checks import RequestError
from .tasks import EndEvent, Event, PromptEvent, Task

_KEEP_ALIVE_SECONDS = 15.0  # after so much silence a stream sends a comment: proxies close idle connections


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response, escaped to ASCII: texts from a file may hold bytes that are not valid UTF-8."""
    return Response(json.dumps(value), status, headers, "application/json")


_AT_ONCE = 256  # elements of a list


def dump_in_pieces(value: Any) -> str:
    """A large value as JSON. Python writes a value in one call that lets nothing else run: a million log probabilities take
    0.8 s."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {dump_in_pieces(each)}" for key, each in value.items()) + "}"
    if not isinstance(value, list):
        return json.dumps(value)
    if len(value) <= _AT_ONCE:
        return "[" + ", ".join(map(dump_in_pieces, value)) + "]"
    return "[" + ", ".join(json.dumps(value[i : i + _AT_ONCE])[1:-1] for i in range(0, len(value), _AT_ONCE)) + "]"


def error_response(error: RequestError, typed: bool = False) -> Response:
    """The error object with its status and the headers that belong to it. typed: as Anthropic's clients expect it."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}, 503: {"Retry-After": "1"}}.get(error.status)
    return json_response({**({"type": "error"} if typed else {}), **error.as_json()}, error.status, headers)


class Replies(Protocol):
    """Builds the objects of one reply, as `ReplyBuilder` does."""

    @property
    def last_line(self) -> bytes:
        """The end of a stream."""
        ...

    def complete(self, answers: Sequence[Generated]) -> Any: ...

    def first_chunks(self) -> list[dict[str, Any]]: ...

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]: ...

    def usage_chunk(self, ends: Sequence[EndEvent]) -> dict[str, Any]: ...


class TaskResponse:
    """The tasks of one request, and the response to the client."""

    def __init__(self, engine: Engine, tasks: Sequence[tuple[list[int], dict[str, Any]]], request: Request, slot: int = -1):
        """Queues the tasks, given as prompts and options of `generate`, for a slot (-1: any).

        Raises RequestError when the queue is full.
        """
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        def listener(index: int) -> Callable[[Event], None]:
            return lambda event: _post(loop, self._events, (index, event))

        self._tasks = [Task(prompt, options, listener(i), slot=slot) for i, (prompt, options) in enumerate(tasks)]
        try:
            engine.submit(*self._tasks)
        except Busy as error:
            raise as_request_error(error) from None
        # Watched from now on, not from the first iteration of `events`: if the client disconnects at once, starlette never
        # iterates over the stream.
        self._disconnected = asyncio.create_task(wait_for_disconnect(request))
        self._disconnected.add_done_callback(lambda task: self._cancel())

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def events(self) -> AsyncGenerator[tuple[int, Event] | None]:
        """Yields the number of a task and its event, up to the end events of all, and None after each _KEEP_ALIVE_SECONDS of
        silence.

        Ends early when the client disconnects. Closing the iterator cancels the tasks.
        """
        waiting: asyncio.Task[tuple[int, Event]] | None = None
        n_running = len(self._tasks)
        try:
            while n_running:
                waiting = waiting or asyncio.create_task(self._events.get())
                tasks = {self._disconnected, waiting}
                await asyncio.wait(tasks, timeout=_KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    (index, event), waiting = waiting.result(), None
                    n_running -= isinstance(event, EndEvent)
                    yield index, event
                elif self._disconnected.done():
                    return
                else:
                    yield None
        finally:
            self._cancel()
            self._disconnected.cancel()
            if waiting is not None:
                waiting.cancel()

    async def complete(self, replies: Replies, headers: Mapping[str, str]) -> Response:
        """The response when all answers are complete: one JSON object. The first error ends the others."""
        answers = [Generated() for _ in self._tasks]
        events = self.events()
        try:
            async for item in events:
                if item is None:
                    continue
                index, event = item
                if isinstance(event, EndEvent) and (error := error_of(event)) is not None:
                    return error_response(error)
                answers[index].add(event)
        finally:
            await events.aclose()
        if not all(answer.end.reason for answer in answers):
            return Response(status_code=499)  # the client has disconnected

        # Outside the event loop: there may be a million log probabilities.
        def written() -> bytes:
            return dump_in_pieces(replies.complete(answers)).encode()

        return Response(await run_in_threadpool(written), 200, headers, "application/json")

    def stream(self, replies: Replies, headers: Mapping[str, str], with_usage: bool) -> Response:
        """The answers as server-sent events. with_usage: a last chunk with the token counts (stream_options.include_usage)."""
        headers = {**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._stream_chunks(replies, with_usage), headers=headers, media_type="text/event-stream")

    async def _stream_chunks(self, replies: Replies, with_usage: bool) -> AsyncIterator[bytes]:
        ends: dict[int, EndEvent] = {}

        def encoded(index: int, event: Event) -> list[bytes]:
            return [_server_sent_event(chunk) for chunk in replies.chunks(index, event)]

        for chunk in replies.first_chunks():
            yield _server_sent_event(chunk)
        events = self.events()
        try:
            async for item in events:
                if item is None:
                    yield b": still here\n\n"
                    continue
                index, event = item
                if isinstance(event, EndEvent):
                    ends[index] = event
                    if (error := error_of(event)) is not None:
                        yield _server_sent_event(error.as_json()) + replies.last_line
                        return
                if isinstance(event, PromptEvent):  # outside the event loop: a prompt may have many tokens
                    chunks = await run_in_threadpool(encoded, index, event)
                else:
                    chunks = encoded(index, event)
                for chunk in chunks:
                    yield chunk
        finally:
            await events.aclose()
        if len(ends) == len(self._tasks):
            if with_usage:
                yield _server_sent_event(replies.usage_chunk([ends[i] for i in range(len(ends))]))
            yield replies.last_line


def _post(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[tuple[int, Event]], item: tuple[int, Event]) -> None:
    """Puts an event into an asyncio queue from the engine's thread."""
    loop.call_soon_threadsafe(events.put_nowait, item)


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def result_while_connected(request: Request, computing: Future[Any]) -> Any:
    """What the engine computes, which ends when the client disconnects: then RequestError is raised."""
    result, gone = asyncio.wrap_future(computing), asyncio.create_task(wait_for_disconnect(request))
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise RequestError("the client is gone", status=499)
        return result.result()
    finally:
        gone.cancel()
        result.cancel()


def as_request_error(error: Exception) -> RequestError:
    """What the client gets to know about an exception of the engine; details of unexpected ones stay on the server."""
    if isinstance(error, Busy):
        return RequestError(str(error), code="server_overloaded", status=503)
    if isinstance(error, PlanError):
        return RequestError(str(error), code="invalid_value")
    expected = isinstance(error, MillError)
    return RequestError(str(error) if expected else "internal error; see the server's terminal", status=500)


def error_of(end: EndEvent) -> RequestError | None:
    """The error that the client gets for an answer that failed; None of one that did not."""
    if end.error is not None:
        return as_request_error(end.error)
    if end.reason == "cancelled":  # by the server: if the client had disconnected, nobody would receive this
        return RequestError("the server is shutting down", code="server_overloaded", status=503)
    return None


def _server_sent_event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()
