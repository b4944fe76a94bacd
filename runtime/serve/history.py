"""Messages as a chat template wants them: families differ in how they want to be told of calls made before."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ...formats import PlanError
from ..text.chat import ChatTemplate

Json = dict[str, Any]

_NEEDLE = {"needle": "thread"}
_NAME = "sew"
_TRIAL: list[Json] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": {"name": _NAME, "arguments": json.dumps(_NEEDLE)}}],
    },
    {"role": "tool", "content": "y", "tool_call_id": "a1b2c3d4e"},
]

# (arguments are objects instead of JSON texts, there is no content instead of an empty one)
_WAYS = ((True, False), (True, True), (False, False), (False, True))


class History:
    """A template, and what it gets. text: its source; tools: whether it knows functions at all."""

    def __init__(self, template: ChatTemplate):
        self._template, self.text = template, template.text
        self.tools = "tools" in _names(template.text)
        self._way: tuple[bool, bool] | None = None

    def render(self, messages: Sequence[Json], variables: Json) -> str:
        """The text of a conversation. Raises PlanError as the template's `render` does."""
        if any(message.get("tool_calls") for message in messages):
            self._way = self._way or self._tried()
            messages = [_told(message, *self._way) for message in messages]
        return self._template.render(messages, **variables)

    def _tried(self) -> tuple[bool, bool]:
        """The first way in which the template writes a call's arguments; if there is none, the one that most want."""
        properties = {name: {"type": "string", "description": ""} for name in _NEEDLE}
        parameters = {"type": "object", "properties": properties, "required": []}
        tool = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": parameters}}
        for way in _WAYS:
            try:
                text = self._template.render([_told(message, *way) for message in _TRIAL], tools=[tool])
            except PlanError:
                continue
            # By its value: families write a pair in ways of their own. Python's quotes would mean that a text was wanted.
            if '"thread"' in text.replace("\\", "") or ("thread" in text and "'thread'" not in text):
                return way
        return _WAYS[0]


def _names(text: str) -> set[str]:
    """The words of a template's expressions that are neither within quotes nor attributes."""
    code = re.findall(r"\{[{%](.*?)[%}]\}", re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL), re.DOTALL)
    words = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\.\w+|(\w+)""", re.DOTALL)
    return {match[1] for expression in code for match in words.finditer(expression) if match[1]}


def _told(message: Json, as_object: bool, without_content: bool) -> Json:
    if not message.get("tool_calls"):
        return message
    content = None if without_content and not message.get("content") else message.get("content")
    calls = message["tool_calls"]
    return {**message, "content": content, "tool_calls": [_with_objects(call) if as_object else call for call in calls]}


def _with_objects(call: Json) -> Json:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
