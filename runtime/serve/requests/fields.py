"""Parses and checks the JSON of requests to OpenAI's API, field by field; invalid ones raise RequestError."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeGuard

from ....data_classes import dataclass
from ....request_fields import Field, fields_of
from ...generation.sampling_options import Sampling
from .checks import (
    Check,
    JsonObject,
    RequestError,
    breakers,
    flag,
    invalid,
    json_object,
    logit_bias,
    number,
    samplers,
    seed,
    stop_texts,
    text,
    token_limit,
)


@dataclass
class CompletionRequest:
    """A checked request for a chat completion or a completion.

    messages, prompts   one of the two; the other is None. A prompt is a text, or token ids with texts among them
    n, best_of          choices per prompt that are returned, and that are generated
    echo                begin each choice with its prompt
    suffix              text that follows what is generated; None: nothing does
    options             keyword arguments of `generate`: n_predict, stop, ignore_eos, n_probs and the fields of `Sampling`
    grammar_fields      fields that say what form the answer has, not checked yet
    tools               functions that may be called, as the client declared them
    must_call           the answer has to call functions; called_function: this one, '' any
    parallel_calls      it may call several
    separate_reasoning  return reasoning as `reasoning_content`, not as part of the content
    variables           further variables of the chat template
    slot                number of the slot to use; -1: any
    ignored             names of fields of the request that have no effect
    """

    messages: list[JsonObject] | None = None
    prompts: list[str | list[int | str]] | None = None
    n: int = 1
    best_of: int = 1
    echo: bool = False
    suffix: str | None = None
    stream: bool = False
    include_usage: bool = False
    options: JsonObject = field(default_factory=dict)
    grammar_fields: JsonObject = field(default_factory=dict)
    tools: list[JsonObject] = field(default_factory=list)
    must_call: bool = False
    called_function: str = ""
    parallel_calls: bool = True
    separate_reasoning: bool = True
    variables: JsonObject = field(default_factory=dict)
    slot: int = -1
    ignored: list[str] = field(default_factory=list)


MAX_CHOICES = 128  # of a request, those included that best_of drops
_COUNT = number(1, MAX_CHOICES, integer=True)
# fields of `Sampling` that are not numbers in a range
_SAMPLING_CHECKS: dict[str, Check] = {
    "dry_sequence_breakers": breakers,
    "samplers": samplers,
    "seed": seed,
    "logit_bias": logit_bias,
}


def _sampling_check(sampling: Field) -> Check:
    if sampling.name in _SAMPLING_CHECKS:
        return _SAMPLING_CHECKS[sampling.name]
    low, high = sampling.option.json_range or (sampling.option.least, sampling.option.most)
    assert low is not None
    assert high is not None
    return number(low, high, integer=sampling.type == "int")


# field -> (option of `generate`, check)
_OPTIONS: dict[str, tuple[str, Check]] = {
    "max_tokens": ("n_predict", token_limit),
    "max_completion_tokens": ("n_predict", token_limit),
    "n_predict": ("n_predict", token_limit),
    "stop": ("stop", stop_texts),
    "ignore_eos": ("ignore_eos", flag),
    **{each.option.json or each.name: (each.name, _sampling_check(each)) for each in fields_of(Sampling)},
}

# Fields of features that are not implemented -> values that do not use the feature
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
}
_GRAMMAR_FIELDS = ("response_format", "grammar", "json_schema")  # see answer_grammar.py
_OTHER_FIELDS = (
    *_GRAMMAR_FIELDS,
    "model",
    "messages",
    "prompt",
    "n",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "user",
    "id_slot",
)
# Fields of chat completions that `parse_chat` checks.
_CHAT_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_format", "reasoning_effort", "chat_template_kwargs")
_COMPLETION_FIELDS = ("echo", "best_of", "suffix")  # fields of completions that `parse_completion` checks
_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """Parses a request to /v1/chat/completions. defaults: options that the request does not set. Raises RequestError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "a list of at least one message", messages)
    request = _parse_common(body, defaults, _CHAT_FIELDS)
    request.messages = [_parse_message(i, message) for i, message in enumerate(messages)]
    if body.get("logprobs") is not None and flag("logprobs", body["logprobs"]):
        top = body.get("top_logprobs")
        request.options["n_probs"] = number(0, 20, integer=True)("top_logprobs", top) if top is not None else 0
    elif body.get("top_logprobs"):
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    if body.get("chat_template_kwargs") is not None:
        request.variables = dict(json_object("chat_template_kwargs", body["chat_template_kwargs"]))
        reserved = {"messages", "add_generation_prompt", "tools"} & request.variables.keys()
        if reserved:
            raise RequestError(f"chat_template_kwargs cannot set {reserved.pop()}", param="chat_template_kwargs")
    if body.get("reasoning_effort") is not None:
        if not isinstance(body["reasoning_effort"], str):
            raise invalid("reasoning_effort", "a text", body["reasoning_effort"])
        request.variables.setdefault("reasoning_effort", body["reasoning_effort"])
    request.tools, request.must_call, request.called_function = _parse_tools(body)
    if body.get("parallel_tool_calls") is not None:
        request.parallel_calls = flag("parallel_tool_calls", body["parallel_tool_calls"])
    request.separate_reasoning = _parse_reasoning_format(body.get("reasoning_format"))
    return request


def parse_completion(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """Parses a request to /v1/completions, as `parse_chat`."""
    prompts = _parse_prompts(body.get("prompt"))
    echo = flag("echo", body.get("echo") or False)
    only_prompt = echo and type(body.get("max_tokens")) is int and body["max_tokens"] == 0
    request = _parse_common({**body, "max_tokens": None} if only_prompt else body, defaults, _COMPLETION_FIELDS)
    request.prompts, request.echo = prompts, echo
    if only_prompt:
        request.options["n_predict"] = 0
    if body.get("suffix"):
        request.suffix = text("suffix", body["suffix"])
        if echo:
            raise RequestError("suffix cannot be combined with echo", param="suffix", code="invalid_value")
    if body.get("logprobs") is not None:
        request.options["n_probs"] = number(0, 20, integer=True)("logprobs", body["logprobs"])
    request.best_of = _COUNT("best_of", body["best_of"]) if body.get("best_of") is not None else request.n
    if request.best_of < request.n:
        raise RequestError(f"best_of has to be at least n, {request.n}", param="best_of", code="invalid_value")
    if request.best_of > request.n and request.stream:
        raise RequestError("best_of cannot be streamed: it chooses among whole answers", "best_of", "invalid_value")
    if len(prompts) * request.best_of > MAX_CHOICES:
        message = (
            f"{len(prompts)} prompts with {request.best_of} choices each are too many: a request has at most {MAX_CHOICES}"
        )
        raise RequestError(message, param="prompt", code="invalid_value")
    return request


def is_token_list(value: Any) -> TypeGuard[list[int | str]]:
    """Whether this is a list of token ids, which are not checked further, and texts among them; a list of texts is none."""
    if not isinstance(value, list) or not all(type(each) is int or isinstance(each, str) for each in value):
        return False
    return not value or any(type(each) is int for each in value)


def _parse_prompts(value: Any) -> list[str | list[int | str]]:
    """The prompts; a single one is a list of one. llama-server's {"prompt_string": ...} is that text."""

    def parsed(each: Any) -> str | list[int | str]:
        each = each["prompt_string"] if isinstance(each, dict) and set(each) == {"prompt_string"} else each
        if isinstance(each, str) or is_token_list(each):
            return each
        raise invalid("prompt", "a text, a list of token ids, or a list of texts or of lists of token ids", value)

    return list(map(parsed, value)) if isinstance(value, list) and not is_token_list(value) else [parsed(value)]


def _parse_common(
    body: Mapping[str, Any], defaults: Mapping[str, Any], other_fields: tuple[str, ...] = ()
) -> CompletionRequest:
    """Parses what both kinds of requests have in common. other_fields: fields that the caller checks itself."""
    for name, neutral in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and name not in other_fields and value not in neutral:
            raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
    if body.get("model") is not None and not isinstance(body["model"], str):
        raise invalid("model", "a text", body["model"])
    options = dict(defaults)
    for name, (option, check) in _OPTIONS.items():
        if body.get(name) is not None:
            options[option] = check(name, body[name])
    options["top_k"] = max(options.get("top_k", 0), 0)
    if options.get("top_p") == 0:  # keeps only the most probable token
        options |= {"top_p": 1.0, "top_k": 1}
    stream_options = json_object("stream_options", body.get("stream_options") or {})
    known = {*_OPTIONS, *_UNSUPPORTED, *_OTHER_FIELDS, *other_fields}
    return CompletionRequest(
        stream=flag("stream", body.get("stream") or False),
        include_usage=flag("stream_options.include_usage", stream_options.get("include_usage") or False),
        n=_COUNT("n", body["n"]) if body.get("n") is not None else 1,
        options=options,
        grammar_fields={name: body[name] for name in _GRAMMAR_FIELDS if body.get(name) not in (None, "")},
        slot=number(-1, 1 << 30, integer=True)("id_slot", body["id_slot"]) if body.get("id_slot") is not None else -1,
        ignored=[name for name in body if name not in known],
    )


_MAX_TOOLS = 128
_FUNCTION_NAME = re.compile(r"[\w.:-]{1,128}")


def _parse_tools(body: Mapping[str, Any]) -> tuple[list[JsonObject], bool, str]:
    """(the functions that may be called, whether any has to be, its name or '' for any)"""
    tools = body.get("tools") or []
    if not isinstance(tools, list) or len(tools) > _MAX_TOOLS:
        raise invalid("tools", f"a list of at most {_MAX_TOOLS} functions", tools)
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{i}]", 'like {"type": "function", "function": {"name": ...}}', tool)
        if not _FUNCTION_NAME.fullmatch(function["name"]):
            raise invalid(f"tools[{i}].function.name", "up to 128 letters, digits and . : _ -", function["name"])
        if not isinstance(function.get("parameters") or {}, dict):
            raise invalid(f"tools[{i}].function.parameters", "an object", function["parameters"])
    choice = body.get("tool_choice")
    if choice == "none":
        return [], False, ""
    if choice in (None, "auto"):
        return tools, False, ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        expected = 'none, auto, required or like {"type": "function", "function": {"name": ...}}'
        raise invalid("tool_choice", expected, choice)
    if not any(name in (None, tool["function"]["name"]) for tool in tools):
        raise RequestError("tool_choice names no function of tools", param="tool_choice", code="invalid_value")
    return tools, True, name or ""


def _parse_reasoning_format(value: Any) -> bool:
    """Whether reasoning is returned separately."""
    formats = {None: True, "auto": True, "deepseek": True, "none": False}
    if not isinstance(value, str | None) or value not in formats:
        raise invalid("reasoning_format", "auto, deepseek or none", value)
    return formats[value]


def _parse_message(index: int, message: Any) -> JsonObject:
    """A checked message with its content as one text; role 'developer' becomes 'system'."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise invalid(where, "an object", message)
    role = message.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_parse_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    elif content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise invalid(f"{where}.content", "a text or a list of parts", content)
    checked = {**message, "role": "system" if role == "developer" else role, "content": content}
    calls = checked.pop("tool_calls", None)
    return {**checked, "tool_calls": _parse_tool_calls(f"{where}.tool_calls", calls)} if calls else checked


def _parse_tool_calls(where: str, calls: Any) -> list[JsonObject]:
    """The calls of an assistant message."""
    if not isinstance(calls, list):
        raise invalid(where, "a list", calls)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not all(isinstance(function.get(key), str) for key in ("name", "arguments")):
            raise invalid(
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
    raise invalid(where, 'a part like {"type": "text", "text": ...}', part)
