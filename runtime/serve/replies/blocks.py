"""Answers as blocks, each a text, a thought or a call: for APIs that send these complete or as named events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import field
from typing import Any

from starlette.responses import Response, StreamingResponse

from ....data_classes import dataclass
from ..requests.checks import JsonObject, RequestError
from ..responses import TaskResponse, error_of, json_response
from ..tasks import EndEvent, TextEvent
from ..tool_calls.stream_parser import StreamParser

TEXT, THOUGHT, CALL = "text", "thought", "call"
_KINDS = {"content": TEXT, "reasoning_content": THOUGHT}


@dataclass
class ContentBlock:
    """A part of an answer. kind: TEXT, THOUGHT or CALL; text: that of the block, or the arguments of a call, JSON; id and name:
    of a call."""

    kind: str
    index: int
    text: str = ""
    id: str = ""
    name: str = ""


class BlockWriter(ABC):
    """Writes one answer in the form of an API. Every event is an object with its name as `type`."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._open = False

    @abstractmethod
    def started(self) -> list[JsonObject]:
        """The events with which the stream begins."""

    @abstractmethod
    def opened(self, block: ContentBlock) -> list[JsonObject]:
        """The events of a block that begins."""

    @abstractmethod
    def added(self, block: ContentBlock, text: str) -> list[JsonObject]:
        """The events of more text in a block; the block has it already."""

    @abstractmethod
    def closed(self, block: ContentBlock) -> list[JsonObject]:
        """The events of a block that has ended."""

    @abstractmethod
    def ended(self, end: EndEvent) -> list[JsonObject]:
        """The last events."""

    @abstractmethod
    def failed(self, error: RequestError) -> list[JsonObject]:
        """The events of an error in the middle of a stream."""

    @abstractmethod
    def complete(self, end: EndEvent) -> JsonObject:
        """The whole answer as one object."""

    def silent(self) -> list[JsonObject]:
        """The events with which a stream is kept open."""
        return []

    def feed(self, deltas: Iterable[JsonObject]) -> list[JsonObject]:
        """The events of deltas of a `StreamParser`."""
        events: list[JsonObject] = []
        for delta in deltas:
            for key, kind in _KINDS.items():
                if delta.get(key):
                    if not self._open or self.blocks[-1].kind != kind:
                        events += self._begin(ContentBlock(kind, len(self.blocks)))
                    events += self._add(delta[key])
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                events += self._begin(ContentBlock(CALL, len(self.blocks), id=call["id"], name=function["name"]))
                events += [*self._add(function["arguments"]), *self.close()]
        return events

    def _begin(self, block: ContentBlock) -> list[JsonObject]:
        events = self.close()
        self.blocks.append(block)
        self._open = True
        return [*events, *self.opened(block)]

    def _add(self, text: str) -> list[JsonObject]:
        self.blocks[-1].text += text
        return self.added(self.blocks[-1], text)

    def close(self) -> list[JsonObject]:
        """The events of the end of the block that is open, if one is."""
        events = self.closed(self.blocks[-1]) if self._open else []
        self._open = False
        return events


@dataclass
class BlockResponse:
    """The HTTP response to a request whose answer is written in blocks."""

    tasks: TaskResponse
    parser: StreamParser
    writer: BlockWriter
    headers: Mapping[str, str] = field(default_factory=dict)

    async def complete(self) -> Response:
        """The whole answer. Raises RequestError."""
        async for item in self.tasks.events():
            event = item and item[1]
            if isinstance(event, TextEvent):
                self.writer.feed(self.parser.feed(event.text))
            elif isinstance(event, EndEvent):
                error = error_of(event)
                if error is not None:
                    raise error
                self.writer.feed(self.parser.finish(event.was_cut))
                self.writer.close()
                return json_response(self.writer.complete(event), 200, self.headers)
        return Response(status_code=499)  # the client has disconnected

    def stream(self) -> Response:
        """The answer as server-sent events."""
        headers = {**self.headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(), headers=headers, media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        yield _named(self.writer.started())
        async for item in self.tasks.events():
            event = item and item[1]
            if event is None:
                yield _named(self.writer.silent()) or b": still here\n\n"
            elif isinstance(event, TextEvent):
                yield _named(self.writer.feed(self.parser.feed(event.text)))
            elif isinstance(event, EndEvent):
                error = error_of(event)
                if error is not None:
                    yield _named(self.writer.failed(error))
                    return
                rest = self.writer.feed(self.parser.finish(event.was_cut))
                yield _named([*rest, *self.writer.close(), *self.writer.ended(event)])


def _named(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
