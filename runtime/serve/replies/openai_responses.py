"""OpenAI's API of responses: its requests as those of chat completions, and answers in its form. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from ..requests.checks import JsonObject, RequestError, invalid, json_object, text
from ..tasks import EndEvent
from .blocks import CALL, THOUGHT, BlockWriter, ContentBlock

_RENAMED = {"max_output_tokens": "max_tokens"}
_SAME_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "top_k",
    "min_p",
    "seed",
)
# Fields of what is not there -> values that do not use it
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "max_tool_calls": (),
}

_KNOWN = {"input", "instructions", "text", "tools", "tool_choice", "reasoning", *_RENAMED, *_SAME_FIELDS, *_UNSUPPORTED}
_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "tool_choice", "tools", "parallel_tool_calls")
_ECHOED_DEFAULTS = {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True}


# Fields of a chat completion -> fields of a response that they are made of
_SENT = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def chat_request(body: Mapping[str, Any]) -> tuple[JsonObject, dict[str, str]]:
    """(the body of a request to /v1/responses as one to /v1/chat/completions, where its values are checked, the fields that its
    fields were made of, for `fields_named`). Raises RequestError that names the field.
    """
    sent = dict(_SENT)
    for name, neutral in _UNSUPPORTED.items():
        if body.get(name) is not None and body[name] not in neutral:
            reason = ": no response is stored here" if name in ("previous_response_id", "conversation", "background") else ""
            raise RequestError(f"{name} is not supported{reason}", param=name, code="unsupported_parameter")
    chat: JsonObject = {"messages": []}
    if body.get("instructions") is not None:
        if not isinstance(body["instructions"], str):
            raise invalid("instructions", "a text", body["instructions"])
        chat["messages"].append({"role": "system", "content": body["instructions"]})
        sent["messages[0]"] = "instructions"
    _add_messages(chat["messages"], body.get("input"), sent)
    chat |= {name: body[name] for name in _SAME_FIELDS if body.get(name) is not None}
    chat |= {new: body[name] for name, new in _RENAMED.items() if body.get(name) is not None}
    if body.get("text") is not None:
        form = json_object("text", body["text"]).get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
        chat["response_format"] = form
    if body.get("tools"):
        chat["tools"] = _tools(body["tools"])
        sent |= {f"tools[{i}].function": f"tools[{i}]" for i in range(len(chat["tools"]))}
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            raise invalid("tool_choice", 'none, auto, required or like {"type": "function", "name": ...}', choice)
        choice = {"type": "function", "function": {"name": choice["name"]}}
    if choice is not None:
        chat["tool_choice"] = choice
    if body.get("reasoning") is not None and json_object("reasoning", body["reasoning"]).get("effort") is not None:
        chat["reasoning_effort"] = body["reasoning"]["effort"]
    return chat | {name: body[name] for name in body if name not in _KNOWN and name != "messages"}, sent


def _tools(tools: Any) -> list[JsonObject]:
    if not isinstance(tools, list):
        raise invalid("tools", "a list", tools)
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise invalid(f"tools[{i}]", 'like {"type": "function", "name": ...}; there are no other tools here', tool)
        text(f"tools[{i}].name", tool.get("name"))
    return [{"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}} for tool in tools]


def _add_messages(messages: list[JsonObject], items: Any, sent: dict[str, str]) -> None:
    """Appends the messages of an input, and says in `sent` what they are made of. Calls one after the other belong to one
    message."""
    if isinstance(items, str):
        sent[f"messages[{len(messages)}]"] = "input"
        messages.append({"role": "user", "content": items})
        return
    if not isinstance(items, list) or not items:
        raise invalid("input", "a text or a list of at least one item", items)
    for i, item in enumerate(items):
        where, kind = f"input[{i}]", item.get("type", "message") if isinstance(item, dict) else None
        made = f"messages[{len(messages)}]"
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {name: text(f"{where}.{name}", item.get(name)) for name in ("name", "arguments")}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": output})
            sent[f"{made}.content"] = f"{where}.output"
        elif kind == "reasoning":
            continue
        else:
            expected = "a message, a function_call, a function_call_output or a reasoning"
            raise invalid(where, f"{expected}; others are not supported", item)
        sent.setdefault(made, where)


class ResponseWriter(BlockWriter):
    """An answer as a response: each block is an item of its output."""

    def __init__(self, model: str, body: Mapping[str, Any]):
        """body: of the request; what says how it is answered is repeated."""
        super().__init__()
        self._number = 0
        self._common: JsonObject = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **{name: _ECHOED_DEFAULTS.get(name) if body.get(name) is None else body[name] for name in _ECHOED},
            "text": body.get("text") or {"format": {"type": "text"}},
            "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            "metadata": body.get("metadata") or {},
            "previous_response_id": None,
            "truncation": "disabled",
            "store": False,
        }
        self._ids: list[str] = []

    def _response(self, status: str, end: EndEvent | None = None, error: RequestError | None = None) -> JsonObject:
        usage = None
        if end is not None:
            timings = end.timings
            n_prompt = timings.prompt_tokens + timings.cached_tokens
            usage = {
                "input_tokens": n_prompt,
                "input_tokens_details": {"cached_tokens": timings.cached_tokens},
                "output_tokens": timings.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": n_prompt + timings.generated_tokens,
            }
        cut = status == "incomplete"
        return {
            **self._common,
            "status": status,
            "error": {"code": "server_error", "message": error.message} if error is not None else None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block, "completed") for block in self.blocks],
            "usage": usage,
        }

    def _item(self, block: ContentBlock, status: str) -> JsonObject:
        item: JsonObject = {"id": self._ids[block.index], "status": status}
        done = status == "completed"
        if block.kind == CALL:
            arguments = block.text if done else ""
            return {**item, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": arguments}
        part = [self._part(block, block.text)] if done else []
        if block.kind == THOUGHT:
            return {**item, "type": "reasoning", "summary": [], "content": part}
        return {**item, "type": "message", "role": "assistant", "content": part}

    def _part(self, block: ContentBlock, text: str) -> JsonObject:
        if block.kind == THOUGHT:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, block: ContentBlock | None = None, **fields: Any) -> JsonObject:
        place: JsonObject = {}
        if block is not None:
            place = {"output_index": block.index}
            if "item" not in fields:
                place |= {"item_id": self._ids[block.index]} | ({"content_index": 0} if block.kind != CALL else {})
        event = {"type": f"response.{kind}", "sequence_number": self._number, **place, **fields}
        self._number += 1
        return event

    def complete(self, end: EndEvent) -> JsonObject:
        return self._response(_status(end), end)

    def started(self) -> list[JsonObject]:
        response = self._response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def opened(self, block: ContentBlock) -> list[JsonObject]:
        self._ids.append({CALL: "fc_", THOUGHT: "rs_"}.get(block.kind, "msg_") + uuid.uuid4().hex)
        events = [self._event("output_item.added", block, item=self._item(block, "in_progress"))]
        if block.kind != CALL:
            events.append(self._event("content_part.added", block, part=self._part(block, "")))
        return events

    def added(self, block: ContentBlock, text: str) -> list[JsonObject]:
        if block.kind == CALL:
            return [self._event("function_call_arguments.delta", block, delta=text)]
        if block.kind == THOUGHT:
            return [self._event("reasoning_text.delta", block, delta=text)]
        return [self._event("output_text.delta", block, delta=text, logprobs=[])]

    def closed(self, block: ContentBlock) -> list[JsonObject]:
        if block.kind == CALL:
            events = [self._event("function_call_arguments.done", block, arguments=block.text, name=block.name)]
        elif block.kind == THOUGHT:
            events = [self._event("reasoning_text.done", block, text=block.text)]
        else:
            events = [self._event("output_text.done", block, text=block.text, logprobs=[])]
        if block.kind != CALL:
            events.append(self._event("content_part.done", block, part=self._part(block, block.text)))
        return [*events, self._event("output_item.done", block, item=self._item(block, "completed"))]

    def ended(self, end: EndEvent) -> list[JsonObject]:
        status = _status(end)
        return [self._event(status, response=self._response(status, end))]

    def failed(self, error: RequestError) -> list[JsonObject]:
        return [self._event("failed", response=self._response("failed", error=error))]


def _status(end: EndEvent) -> str:
    return "incomplete" if end.was_cut else "completed"
