"""Parses and checks the JSON of requests to OpenAI's API, field by field; invalid ones raise RequestError."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

JsonObject = dict[str, Any]


class RequestError(Exception):
    """An error of OpenAI's API. param: the invalid field; code: an identifier for programs; status: of HTTP."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    def as_json(self) -> JsonObject:
        """The error object."""
        types = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        error_type = types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


@dataclass
class CompletionRequest:
    """A checked request for a chat completion or a completion.

    messages, prompt    one of the two; the other is None
    options             keyword arguments of `generate`: n_predict, stop, ignore_eos, n_probs and the fields of `Sampling`
    tools               functions that may be called, as the client declared them
    separate_reasoning  return reasoning as `reasoning_content`, not as part of the content
    variables           further variables of the chat template
    ignored             names of fields of the request that have no effect
    """

    messages: list[JsonObject] | None = None
    prompt: str | list[int] | None = None
    stream: bool = False
    include_usage: bool = False
    options: JsonObject = field(default_factory=dict)
    tools: list[JsonObject] = field(default_factory=list)
    separate_reasoning: bool = True
    variables: JsonObject = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


Check = Callable[[str, Any], Any]

_MAX_STOP_LENGTH = 4096  # characters; each token of an answer is compared with the stop texts


def _invalid(name: str, expected: str, value: Any) -> RequestError:
    try:
        text = json.dumps(value, default=str)
    except RecursionError:  # nested almost as deep as the JSON decoder accepts
        text = "that"
    text = text if len(text) <= 60 else text[:57] + "..."
    return RequestError(f"{name} has to be {expected}, not {text}", param=name, code="invalid_value")


def _number(low: float, high: float, integer: bool = False) -> Check:
    expected = "an integer" if integer else "a number"

    def check(name: str, value: Any) -> Any:
        valid = isinstance(value, int) if integer else isinstance(value, int | float)
        if not valid or isinstance(value, bool) or not low <= value <= high:
            raise _invalid(name, f"{expected} from {low:g} to {high:g}", value)
        return value

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _invalid(name, "true or false", value)
    return value


def _object(name: str, value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise _invalid(name, "an object", value)
    return value


def _stop_texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    valid = isinstance(texts, list) and len(texts) <= 16
    if not valid or not all(isinstance(t, str) and 0 < len(t) <= _MAX_STOP_LENGTH for t in texts):
        raise _invalid(name, f"a text or a list of up to 16 texts of at most {_MAX_STOP_LENGTH} characters", value)
    return texts


def _token_limit(name: str, value: Any) -> int:
    if type(value) is not int or value != -1:
        _number(1, 1 << 30, integer=True)(name, value)
    return value


def _seed(name: str, value: Any) -> int | None:
    _number(-(1 << 63), (1 << 64) - 1, integer=True)(name, value)
    return None if value == -1 else value % (1 << 64)


# field -> (option of `generate`, check)
_OPTIONS: dict[str, tuple[str, Check]] = {
    "max_tokens": ("n_predict", _token_limit),
    "max_completion_tokens": ("n_predict", _token_limit),
    "n_predict": ("n_predict", _token_limit),
    "stop": ("stop", _stop_texts),
    "ignore_eos": ("ignore_eos", _flag),
    "temperature": ("temp", _number(0, 100)),
    "top_p": ("top_p", _number(0, 1)),
    "top_k": ("top_k", _number(-1, 1 << 30, integer=True)),
    "min_p": ("min_p", _number(0, 1)),
    "repeat_penalty": ("repeat_penalty", _number(0.01, 100)),
    "repeat_last_n": ("repeat_last_n", _number(-1, 1 << 30, integer=True)),
    "presence_penalty": ("presence_penalty", _number(-100, 100)),
    "frequency_penalty": ("frequency_penalty", _number(-100, 100)),
    "seed": ("seed", _seed),
}

# Fields of features that are not implemented -> values that do not use the feature
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "grammar": ("",),
    "json_schema": ({},),
    "logit_bias": ({}, []),
    "audio": (),
    "modalities": (["text"],),
    "suffix": ("",),
    "echo": (False,),
}
_OTHER_FIELDS = ("model", "messages", "prompt", "stream", "stream_options", "logprobs", "top_logprobs", "user")
# Fields of chat completions that `parse_chat` checks.
_CHAT_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_format", "reasoning_effort", "chat_template_kwargs")
_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """Parses a request to /v1/chat/completions. defaults: options that the request does not set. Raises RequestError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", "a list of at least one message", messages)
    request = _parse_common(body, defaults, _CHAT_FIELDS)
    request.messages = [_parse_message(i, message) for i, message in enumerate(messages)]
    if body.get("logprobs") is not None and _flag("logprobs", body["logprobs"]):
        top = body.get("top_logprobs")
        request.options["n_probs"] = _number(0, 20, integer=True)("top_logprobs", top) if top is not None else 0
    elif body.get("top_logprobs"):
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    if body.get("chat_template_kwargs") is not None:
        request.variables = dict(_object("chat_template_kwargs", body["chat_template_kwargs"]))
        reserved = {"messages", "add_generation_prompt", "tools"} & request.variables.keys()
        if reserved:
            raise RequestError(f"chat_template_kwargs cannot set {reserved.pop()}", param="chat_template_kwargs")
    if body.get("reasoning_effort") is not None:
        if not isinstance(body["reasoning_effort"], str):
            raise _invalid("reasoning_effort", "a text", body["reasoning_effort"])
        request.variables.setdefault("reasoning_effort", body["reasoning_effort"])
    request.tools = _parse_tools(body)
    request.separate_reasoning = _parse_reasoning_format(body.get("reasoning_format"))
    if body.get("parallel_tool_calls") is False:
        request.ignored.append("parallel_tool_calls")
    return request


def parse_completion(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """Parses a request to /v1/completions, as `parse_chat`."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    tokens = isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
    if not isinstance(prompt, str) and not tokens:
        raise _invalid("prompt", "a text or a list of token ids", prompt)
    request = _parse_common(body, defaults)
    request.prompt = prompt
    if body.get("logprobs") is not None:
        request.options["n_probs"] = _number(0, 20, integer=True)("logprobs", body["logprobs"])
    return request


def _parse_common(
    body: Mapping[str, Any], defaults: Mapping[str, Any], other_fields: tuple[str, ...] = ()
) -> CompletionRequest:
    """Parses what both kinds of requests have in common. other_fields: fields that the caller checks itself."""
    for name, neutral in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and name not in other_fields and value not in neutral:
            raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
    if body.get("model") is not None and not isinstance(body["model"], str):
        raise _invalid("model", "a text", body["model"])
    options = dict(defaults)
    for name, (option, check) in _OPTIONS.items():
        if body.get(name) is not None:
            options[option] = check(name, body[name])
    options["top_k"] = max(options.get("top_k", 0), 0)
    if options.get("top_p") == 0:  # keeps only the most probable token
        options |= {"top_p": 1.0, "top_k": 1}
    stream_options = _object("stream_options", body.get("stream_options") or {})
    known = {*_OPTIONS, *_UNSUPPORTED, *_OTHER_FIELDS, *other_fields}
    return CompletionRequest(
        stream=_flag("stream", body.get("stream") or False),
        include_usage=_flag("stream_options.include_usage", stream_options.get("include_usage") or False),
        options=options,
        ignored=[name for name in body if name not in known],
    )


def _parse_tools(body: Mapping[str, Any]) -> list[JsonObject]:
    """The functions that may be called; none with tool_choice 'none'."""
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        message = "tool_choice can be none or auto: a model cannot be made to call a function here"
        raise RequestError(message, param="tool_choice", code="unsupported_parameter")
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise _invalid("tools", "a list", tools)
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _invalid(f"tools[{i}]", 'like {"type": "function", "function": {"name": ...}}', tool)
        if not isinstance(function.get("parameters", {}), dict):
            raise _invalid(f"tools[{i}].function.parameters", "an object", function["parameters"])
    return [] if choice == "none" else tools


def _parse_reasoning_format(value: Any) -> bool:
    """Whether reasoning is returned separately."""
    formats = {None: True, "auto": True, "deepseek": True, "none": False}
    if not isinstance(value, str | None) or value not in formats:
        raise _invalid("reasoning_format", "auto, deepseek or none", value)
    return formats[value]


def _parse_message(index: int, message: Any) -> JsonObject:
    """A checked message with its content as one text; role 'developer' becomes 'system'."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise _invalid(where, "an object", message)
    role = message.get("role")
    if role not in _ROLES:
        raise _invalid(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_parse_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    elif content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise _invalid(f"{where}.content", "a text or a list of parts", content)
    checked = {**message, "role": "system" if role == "developer" else role, "content": content}
    calls = checked.pop("tool_calls", None)
    return {**checked, "tool_calls": _parse_tool_calls(f"{where}.tool_calls", calls)} if calls else checked


def _parse_tool_calls(where: str, calls: Any) -> list[JsonObject]:
    """The calls of an assistant message."""
    if not isinstance(calls, list):
        raise _invalid(where, "a list", calls)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not all(isinstance(function.get(key), str) for key in ("name", "arguments")):
            raise _invalid(
                f"{where}[{i}]", 'like {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}', call
            )
    return calls


def _parse_part(where: str, part: Any) -> str:
    """The text of one part of a message's content."""
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return text
    if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
        raise RequestError(f"{where}: parts of type {part['type']!r:.40} are not supported, only text is", param=where)
    raise _invalid(where, 'a part like {"type": "text", "text": ...}', part)
