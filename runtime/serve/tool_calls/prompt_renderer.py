"""Renders messages with a chat template that may expect earlier tool calls in another form than OpenAI's API has.

Clients send the arguments of a call as JSON text and, with calls, an empty content. Templates differ in whether they expect
arguments as an object and a content of null; which form a template needs is found by rendering a sample with each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from ....formats import PlanError
from ...text.chat import ChatTemplate
from ..requests.checks import JsonObject


class _CallForm(NamedTuple):
    """arguments_as_object: not as JSON text; null_content: None instead of an empty content with calls."""

    arguments_as_object: bool
    null_content: bool


_CALL_FORMS = (_CallForm(True, False), _CallForm(True, True), _CallForm(False, False), _CallForm(False, True))

_SAMPLE_ARGUMENTS = {"needle": "thread"}
_SAMPLE_FUNCTION = "sew"
_SAMPLE_MESSAGES: list[JsonObject] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "a1b2c3d4e",
                "type": "function",
                "function": {"name": _SAMPLE_FUNCTION, "arguments": json.dumps(_SAMPLE_ARGUMENTS)},
            }
        ],
    },
    {"role": "tool", "content": "y", "tool_call_id": "a1b2c3d4e"},
]


class PromptRenderer:
    """A chat template with the form of tool calls that it expects.

    template_text   Jinja source
    supports_tools  the template uses the variable `tools`
    """

    def __init__(self, template: ChatTemplate):
        self._template, self.template_text = template, template.text
        self.supports_tools = "tools" in _variable_names(template.text)
        self._call_form: _CallForm | None = None

    def render(self, messages: Sequence[JsonObject], variables: JsonObject) -> str:
        """The prompt text of a conversation. Raises PlanError as `ChatTemplate.render` does."""
        if any(message.get("tool_calls") for message in messages):
            self._call_form = self._call_form or self._find_call_form()
            messages = [_convert_calls(message, self._call_form) for message in messages]
        return self._template.render(messages, **variables)

    def _find_call_form(self) -> _CallForm:
        """The first form with which the template renders the sample's argument correctly; the most common one if none does."""
        properties = {name: {"type": "string", "description": ""} for name in _SAMPLE_ARGUMENTS}
        parameters = {"type": "object", "properties": properties, "required": []}
        tool = {"type": "function", "function": {"name": _SAMPLE_FUNCTION, "description": "", "parameters": parameters}}
        for form in _CALL_FORMS:
            try:
                text = self._template.render([_convert_calls(message, form) for message in _SAMPLE_MESSAGES], tools=[tool])
            except PlanError:
                continue
            # Searched by value, as families write pairs differently. Python's quotes show an object where JSON text was
            # expected.
            if '"thread"' in text.replace("\\", "") or ("thread" in text and "'thread'" not in text):
                return form
        return _CALL_FORMS[0]


def _variable_names(template: str) -> set[str]:
    """The words of a template's expressions and statements that are neither quoted nor attributes."""
    code = re.findall(r"\{[{%](.*?)[%}]\}", re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL), re.DOTALL)
    words = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\.\w+|(\w+)""", re.DOTALL)
    return {match[1] for expression in code for match in words.finditer(expression) if match[1]}


def _convert_calls(message: JsonObject, form: _CallForm) -> JsonObject:
    if not message.get("tool_calls"):
        return message
    content = None if form.null_content and not message.get("content") else message.get("content")
    calls = message["tool_calls"]
    if form.arguments_as_object:
        calls = [_parse_arguments(call) for call in calls]
    return {**message, "content": content, "tool_calls": list(calls)}


def _parse_arguments(call: JsonObject) -> JsonObject:
    """The call with its arguments as an object; unchanged if they are not a JSON object."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
