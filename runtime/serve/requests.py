"""What clients ask for: JSON of OpenAI's API, checked field by field, and the errors that answer what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


class RequestError(Exception):
    """An error object as OpenAI's API has them. param: the field at fault; code: a word for programs."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    def as_json(self) -> Json:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass
class Completion:
    """A checked request.

    messages or prompt  one of the two
    options             of `generate`: n_predict, stop, ignore_eos, n_probs and the fields of `Sampling`
    tools               functions that may be called, as the client described them
    reasoning           thoughts are told apart from the answer
    variables           what the chat template gets besides
    ignored             names of fields that have no effect here
    """

    messages: list[Json] | None = None
    prompt: str | list[int] | None = None
    stream: bool = False
    include_usage: bool = False
    options: Json = field(default_factory=dict)
    tools: list[Json] = field(default_factory=list)
    reasoning: bool = True
    variables: Json = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


Check = Callable[[str, Any], Any]


def _wrong(name: str, what: str, value: Any) -> RequestError:
    try:
        shown = json.dumps(value, default=str)
    except RecursionError:  # it was read a few calls above
        shown = "that"
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RequestError(f"{name} has to be {what}, not {shown}", param=name, code="invalid_value")


def _number(low: float, high: float, whole: bool = False) -> Check:
    kind = "an integer" if whole else "a number"

    def check(name: str, value: Any) -> Any:
        good = isinstance(value, int) if whole else isinstance(value, int | float)
        if not good or isinstance(value, bool) or not low <= value <= high:
            raise _wrong(name, f"{kind} from {low:g} to {high:g}", value)
        return value

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _object(name: str, value: Any) -> Json:
    if not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    return value


def _stops(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > 16 or not all(isinstance(t, str) and t for t in texts):
        raise _wrong(name, "a text or a list of up to 16 texts", value)
    return texts


def _limit(name: str, value: Any) -> int:
    if type(value) is not int or value != -1:
        _number(1, 1 << 30, whole=True)(name, value)
    return value


def _seed(name: str, value: Any) -> int | None:
    _number(-(1 << 63), (1 << 64) - 1, whole=True)(name, value)
    return None if value == -1 else value % (1 << 64)


# field -> (option of `generate`, check)
_OPTIONS: dict[str, tuple[str, Check]] = {
    "max_tokens": ("n_predict", _limit),
    "max_completion_tokens": ("n_predict", _limit),
    "n_predict": ("n_predict", _limit),
    "stop": ("stop", _stops),
    "ignore_eos": ("ignore_eos", _flag),
    "temperature": ("temp", _number(0, 100)),
    "top_p": ("top_p", _number(0, 1)),
    "top_k": ("top_k", _number(-1, 1 << 30, whole=True)),
    "min_p": ("min_p", _number(0, 1)),
    "repeat_penalty": ("repeat_penalty", _number(0.01, 100)),
    "repeat_last_n": ("repeat_last_n", _number(-1, 1 << 30, whole=True)),
    "presence_penalty": ("presence_penalty", _number(-100, 100)),
    "frequency_penalty": ("frequency_penalty", _number(-100, 100)),
    "seed": ("seed", _seed),
}

# Fields that ask for what is not there, and the values with which they ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
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
_READ_ELSEWHERE = ("model", "messages", "prompt", "stream", "stream_options", "logprobs", "top_logprobs", "user")
# Of these some are refused elsewhere, others without effect.
_CHAT_ONLY = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_format", "reasoning_effort", "chat_template_kwargs")
_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Completion:
    """A request to /v1/chat/completions. defaults: options where it says nothing. Raises RequestError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list of at least one message", messages)
    request = _common(body, defaults, _CHAT_ONLY)
    request.messages = [_message(i, message) for i, message in enumerate(messages)]
    if body.get("logprobs") is not None and _flag("logprobs", body["logprobs"]):
        top = body.get("top_logprobs")
        request.options["n_probs"] = _number(0, 20, whole=True)("top_logprobs", top) if top is not None else 0
    elif body.get("top_logprobs"):
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    if body.get("chat_template_kwargs") is not None:
        request.variables = dict(_object("chat_template_kwargs", body["chat_template_kwargs"]))
        taken = {"messages", "add_generation_prompt", "tools"} & request.variables.keys()
        if taken:
            raise RequestError(f"chat_template_kwargs cannot set {taken.pop()}", param="chat_template_kwargs")
    if body.get("reasoning_effort") is not None:
        if not isinstance(body["reasoning_effort"], str):
            raise _wrong("reasoning_effort", "a text", body["reasoning_effort"])
        request.variables.setdefault("reasoning_effort", body["reasoning_effort"])
    request.tools = _tools(body)
    request.reasoning = _reasoning(body.get("reasoning_format"))
    if body.get("parallel_tool_calls") is False:
        request.ignored.append("parallel_tool_calls")
    return request


def parse_completion(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Completion:
    """A request to /v1/completions: as `parse_chat`."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    tokens = isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
    if not isinstance(prompt, str) and not tokens:
        raise _wrong("prompt", "a text or a list of token ids", prompt)
    request = _common(body, defaults)
    request.prompt = prompt
    if body.get("logprobs") is not None:
        request.options["n_probs"] = _number(0, 20, whole=True)("logprobs", body["logprobs"])
    return request


def _common(body: Mapping[str, Any], defaults: Mapping[str, Any], reads: tuple[str, ...] = ()) -> Completion:
    """reads: further fields that the caller looks at itself."""
    for name, neutral in _REFUSED.items():
        value = body.get(name)
        if value is not None and name not in reads and value not in neutral:
            raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
    if body.get("model") is not None and not isinstance(body["model"], str):
        raise _wrong("model", "a text", body["model"])
    options = dict(defaults)
    for name, (option, check) in _OPTIONS.items():
        if body.get(name) is not None:
            options[option] = check(name, body[name])
    options["top_k"] = max(options.get("top_k", 0), 0)
    if options.get("top_p") == 0:  # only the most probable token is then left
        options |= {"top_p": 1.0, "top_k": 1}
    streams = _object("stream_options", body.get("stream_options") or {})
    known = {*_OPTIONS, *_REFUSED, *_READ_ELSEWHERE, *reads}
    return Completion(
        stream=_flag("stream", body.get("stream") or False),
        include_usage=_flag("stream_options.include_usage", streams.get("include_usage") or False),
        options=options,
        ignored=[name for name in body if name not in known],
    )


def _tools(body: Mapping[str, Any]) -> list[Json]:
    """Functions that may be called; none with tool_choice 'none'."""
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        message = "tool_choice can be none or auto: a model cannot be made to call a function here"
        raise RequestError(message, param="tool_choice", code="unsupported_parameter")
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise _wrong("tools", "a list", tools)
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"tools[{i}]", 'like {"type": "function", "function": {"name": ...}}', tool)
        if not isinstance(function.get("parameters", {}), dict):
            raise _wrong(f"tools[{i}].function.parameters", "an object", function["parameters"])
    return [] if choice == "none" else tools


def _reasoning(value: Any) -> bool:
    formats = {None: True, "auto": True, "deepseek": True, "none": False}
    if not isinstance(value, str | None) or value not in formats:
        raise _wrong("reasoning_format", "auto, deepseek or none", value)
    return formats[value]


def _message(number: int, message: Any) -> Json:
    where = f"messages[{number}]"
    if not isinstance(message, dict):
        raise _wrong(where, "an object", message)
    role = message.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    elif content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise _wrong(f"{where}.content", "a text or a list of parts", content)
    checked = {**message, "role": "system" if role == "developer" else role, "content": content}
    calls = checked.pop("tool_calls", None)
    return {**checked, "tool_calls": _past_calls(f"{where}.tool_calls", calls)} if calls else checked


def _past_calls(where: str, calls: Any) -> list[Json]:
    if not isinstance(calls, list):
        raise _wrong(where, "a list", calls)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not all(isinstance(function.get(key), str) for key in ("name", "arguments")):
            raise _wrong(
                f"{where}[{i}]", 'like {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}', call
            )
    return calls


def _part(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return text
    if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
        raise RequestError(f"{where}: parts of type {part['type']!r:.40} are not supported, only text is", param=where)
    raise _wrong(where, 'a part like {"type": "text", "text": ...}', part)
