"""Anthropic's API of messages: its requests as those of OpenAI's chat, and answers in its form."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from ..requests.checks import JsonObject, RequestError, flag, invalid, json_object
from ..tasks import EndEvent
from .blocks import CALL, TEXT, THOUGHT, BlockWriter, ContentBlock

# reason of a Generation -> stop_reason
_STOP_REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "context": "max_tokens"}
_SAME_FIELDS = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "seed", "min_p")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_KNOWN = {"messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "metadata", *_SAME_FIELDS}


def chat_request(body: Mapping[str, Any], needs_limit: bool = True) -> tuple[JsonObject, dict[str, str]]:
    """(the body of a request to /v1/messages as one to /v1/chat/completions, where its values are checked, the fields that its
    fields were made of, for `fields_named`).

    needs_limit: max_tokens has to be given. Raises RequestError that names the field.
    """
    sent = {"stop": "stop_sequences"}
    if needs_limit and body.get("max_tokens") is None:
        raise RequestError("max_tokens is missing", param="max_tokens", code="invalid_value")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "a list of at least one message", messages)
    system = _text("system", body["system"]) if body.get("system") is not None else ""
    chat: JsonObject = {"messages": [{"role": "system", "content": system}] if system else []}
    if system:
        sent["messages[0]"] = "system"
    for i, message in enumerate(messages):
        for each in _chat_messages(f"messages[{i}]", message):
            sent[f"messages[{len(chat['messages'])}]"] = f"messages[{i}]"
            chat["messages"].append(each)
    chat |= {name: body[name] for name in _SAME_FIELDS if body.get(name) is not None}
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if body.get("thinking") is not None:
        kind = json_object("thinking", body["thinking"]).get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise invalid("thinking.type", "enabled, adaptive or disabled", kind)
        chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled", **(chat.get("chat_template_kwargs") or {})}
    if body.get("tools"):
        chat["tools"] = _tools(body["tools"])
        for i in range(len(chat["tools"])):
            sent |= {f"tools[{i}].function": f"tools[{i}]", f"tools[{i}].function.parameters": f"tools[{i}].input_schema"}
    if body.get("tool_choice") is not None:
        chat |= _tool_choice(json_object("tool_choice", body["tool_choice"]))
    return chat | {name: body[name] for name in body if name not in _KNOWN}, sent


def _tool_choice(choice: JsonObject) -> JsonObject:
    kind = choice.get("type")
    if kind == "tool" and isinstance(choice.get("name"), str):
        converted: Any = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in _CHOICES:
        converted = _CHOICES[kind]
    else:
        raise invalid("tool_choice", 'like {"type": "auto"}, "any", "none" or {"type": "tool", "name": ...}', choice)
    single = flag("tool_choice.disable_parallel_tool_use", choice.get("disable_parallel_tool_use") or False)
    return {"tool_choice": converted, **({"parallel_tool_calls": False} if single else {})}


def _tools(tools: Any) -> list[JsonObject]:
    if not isinstance(tools, list):
        raise invalid("tools", "a list", tools)
    converted = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type", "custom") not in ("custom", None):
            raise invalid(f"tools[{i}]", 'like {"name": ..., "input_schema": {...}}', tool)
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise invalid(f"tools[{i}]", 'like {"name": ..., "input_schema": {...}}', tool)
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
        converted.append({"type": "function", "function": function | ({"strict": True} if tool.get("strict") else {})})
    return converted


def _text(where: str, content: Any) -> str:
    """The text of a content that has to be text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "a text or a list of blocks of text", content)
    return "\n".join(_block_text(f"{where}[{i}]", block) for i, block in enumerate(content))


def _block_text(where: str, block: Any) -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise invalid(where, 'a block like {"type": "text", "text": ...}; others are not supported', block)
    return block["text"]


def _chat_messages(where: str, message: Any) -> list[JsonObject]:
    """The messages of OpenAI's API for one of Anthropic's: results of tools are messages of their own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise invalid(f"{where}.role", "user or assistant", role)
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid(f"{where}.content", "a text or a list of blocks", content)
    texts, calls, results = [], [], []
    for i, block in enumerate(content):
        at, kind = f"{where}.content[{i}]", block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
                raise invalid(at, 'like {"type": "tool_use", "id": ..., "name": ..., "input": {...}}', block)
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = _text(f"{at}.content", block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": result})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(_block_text(at, block))
    text = "\n".join(texts)
    if role == "user":
        return [*results, *([{"role": "user", "content": text}] if texts or not results else [])]
    return [{"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}]


class MessageWriter(BlockWriter):
    """An answer as a message."""

    def __init__(self, model: str, n_prompt: int):
        super().__init__()
        self._model, self._n_prompt, self._id = model, n_prompt, f"msg_{uuid.uuid4().hex[:24]}"

    def _message(self, content: list[JsonObject], reason: str | None, text: str | None, usage: JsonObject) -> JsonObject:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": text,
            "usage": usage,
        }

    def _usage(self, end: EndEvent) -> JsonObject:
        timings = end.timings
        return {
            "input_tokens": timings.prompt_tokens,
            "cache_read_input_tokens": timings.cached_tokens,
            "output_tokens": timings.generated_tokens,
        }

    def _reason(self, end: EndEvent) -> str:
        reason = _STOP_REASONS[end.reason]
        called = any(block.kind == CALL for block in self.blocks)
        return "tool_use" if called and reason in ("end_turn", "stop_sequence") else reason

    def _content(self, block: ContentBlock, text: str) -> JsonObject:
        if block.kind == CALL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": json.loads(text) if text else {}}
        if block.kind == THOUGHT:
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text}

    def complete(self, end: EndEvent) -> JsonObject:
        content = [self._content(block, block.text) for block in self.blocks]
        return self._message(content, self._reason(end), end.stop_text or None, self._usage(end))

    def started(self) -> list[JsonObject]:
        usage = {"input_tokens": self._n_prompt, "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], None, None, usage)}]

    def opened(self, block: ContentBlock) -> list[JsonObject]:
        return [{"type": "content_block_start", "index": block.index, "content_block": self._content(block, "")}]

    def added(self, block: ContentBlock, text: str) -> list[JsonObject]:
        kind, key = {
            TEXT: ("text_delta", "text"),
            THOUGHT: ("thinking_delta", "thinking"),
            CALL: ("input_json_delta", "partial_json"),
        }[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": {"type": kind, key: text}}]

    def closed(self, block: ContentBlock) -> list[JsonObject]:
        return [{"type": "content_block_stop", "index": block.index}]

    def ended(self, end: EndEvent) -> list[JsonObject]:
        delta = {"stop_reason": self._reason(end), "stop_sequence": end.stop_text or None}
        return [{"type": "message_delta", "delta": delta, "usage": self._usage(end)}, {"type": "message_stop"}]

    def failed(self, error: RequestError) -> list[JsonObject]:
        return [{"type": "error", **error.as_json()}]

    def silent(self) -> list[JsonObject]:
        return [{"type": "ping"}]
