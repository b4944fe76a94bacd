"""How model families write thoughts and calls of functions: a row of marks each, known by what their chat templates contain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

Json = dict[str, Any]


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


class Call(NamedTuple):
    """A call of a function. arguments: a JSON object as text; id: what the model named it, '' if it did not."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class Calls:
    """How calls are written: between two marks stand JSON objects with a name and arguments, or what `head` says.

    told       templates of the family contain all of these
    begins     any of these begins calls
    end        ends them; '': the end of the answer
    head       expression for what stands before the arguments of a call, with groups `name` and perhaps `id`; '': JSON objects
               hold the name too
    pair       expression for an argument, with groups `key` and `value`; '': the arguments are a JSON object
    inside     marks that may stand between calls or in a head
    bare       nothing but the answer's beginning tells calls from text: only functions that the client has named are called
    """

    told: tuple[str, ...]
    begins: tuple[str, ...]
    end: str = ""
    head: str = ""
    pair: str = ""
    inside: tuple[str, ...] = ()
    bare: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.begins, self.end, *self.inside)

    @cached_property
    def _between(self) -> re.Pattern[str]:
        begins = () if self.bare else (mark for mark in self.begins if not self.head.startswith(mark))
        marks = sorted(filter(None, (*begins, self.end, *self.inside)), key=len, reverse=True)
        return re.compile("(?:" + "|".join([*map(re.escape, marks), r"[\s,;]"]) + ")*")

    def read(self, text: str, functions: Mapping[str, Any]) -> list[Call] | None:
        """The calls in a text that one of `begins` begins; None if anything in it is not understood.

        functions: name -> JSON schema of its parameters, of those that the client has.
        """
        at, calls = 0, []
        while (at := self._skip(text, at)) < len(text):
            head = re.compile(self.head).match(text, at) if self.head else None
            try:
                if head is None:
                    value, at = _DECODER.raw_decode(text, at)
                    found = [_call(each) for each in (value if isinstance(value, list) else [value])]
                elif self.pair:
                    at, values = self._pairs(text, head.end(), functions.get(head["name"]))
                    found = [_named(head, values)]
                else:
                    value, at = _DECODER.raw_decode(text, head.end())
                    found = [_named(head, value)]
            except (ValueError, RecursionError):
                return None
            if not all(found):
                return None
            calls += found
        if not calls or (self.bare and any(call.name not in functions for call in calls)):
            return None
        return calls

    def _skip(self, text: str, at: int) -> int:
        match = self._between.match(text, at)
        return match.end() if match else at

    def _pairs(self, text: str, at: int, schema: Any) -> tuple[int, Json]:
        """Where the arguments end, and they."""
        values: Json = {}
        known = schema.get("properties") if isinstance(schema, dict) else None
        while match := re.compile(r"\s*" + self.pair, re.DOTALL).match(text, at):
            at, key = match.end(), match["key"]
            about = known.get(key) if isinstance(known, dict) else None
            values[key] = _value(match["value"], about.get("type") if isinstance(about, dict) else None)
        return at, values


def _value(text: str, kind: Any) -> Any:
    """An argument that is written without quotes: JSON, unless its type is that of texts or it is none."""
    if kind == "string":
        return text
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def _call(value: Any) -> Call | None:
    """A call from an object that holds the name too."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value, **value["function"]}
    if not isinstance(value, dict):
        return None
    name = next((value[key] for key in ("name", "tool_name") if key in value), None)
    arguments = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    id = next((value[key] for key in ("id", "tool_call_id", "call_id") if key in value), "")
    return _checked(name, arguments, id)


def _named(head: re.Match[str], arguments: Any) -> Call | None:
    return _checked(head["name"], arguments, head.groupdict().get("id") or "")


def _checked(name: Any, arguments: Any, id: Any) -> Call | None:
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False), str(id))


_XML_HEAD, _XML_PAIR = r"<function=(?P<name>[^>\s]+)>", r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>"

# The first row that fits counts.
_CALLS = (
    Calls(  # Seed OSS
        ("<seed:tool_call>", "<function="),
        ("<seed:tool_call>",),
        "</seed:tool_call>",
        _XML_HEAD,
        _XML_PAIR,
        ("</function>",),
    ),
    Calls(  # MiniMax M2
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>",),
        "</minimax:tool_call>",
        r'<invoke name="(?P<name>[^"]+)">',
        r'<parameter name="(?P<key>[^"]+)">\n?(?P<value>.*?)\n?</parameter>',
        ("</invoke>",),
    ),
    Calls(  # Qwen 3 Coder
        ("<tool_call>", "<function=", "<parameter="),
        ("<tool_call>",),
        "</tool_call>",
        _XML_HEAD,
        _XML_PAIR,
        ("</function>",),
    ),
    Calls(  # GLM 4.5
        ("<tool_call>", "<arg_key>"),
        ("<tool_call>",),
        "</tool_call>",
        r"(?P<name>[\w.-]+)",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    Calls(("<tool_calls>[",), ("<tool_calls>",), "</tool_calls>"),  # Apriel
    Calls(("<tool_call>",), ("<tool_call>",), "</tool_call>"),  # Hermes, Qwen, ERNIE 4.5, EXAONE 4
    Calls(
        ("<｜tool▁calls▁begin｜>",),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        "<｜tool▁calls▁end｜>",
        r"(?:function<｜tool▁sep｜>)?(?P<name>[^\s<｜]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*(?=\{)",
        inside=("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```"),
    ),
    Calls(  # Kimi K2
        ("<|tool_call_begin|>",),
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_end|>",
        r"(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
        inside=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    Calls(  # Mistral: a list of objects, later a name with arguments
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        head=r"(?P<name>[A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{)",
        inside=("[CALL_ID]", "[ARGS]"),
    ),
    Calls(  # gpt-oss
        ("<|channel|>",),
        ("<|channel|>commentary to=functions.", " to=functions."),
        head=r"(?P<name>[\w.-]+)(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*\s*<\|message\|>",
        inside=("<|start|>assistant", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
    ),
    Calls(("<|START_ACTION|>",), ("<|START_ACTION|>",), "<|END_ACTION|>"),  # Command R
    Calls(("<|tool_call|>",), ("<|tool_call|>",), "<|/tool_call|>"),  # Granite, Phi 4
    Calls(("<TOOLCALL>",), ("<TOOLCALL>",), "</TOOLCALL>"),  # Nemotron
    Calls(("<function=", "</function>"), ("<function=",), "</function>", r"<function=(?P<name>[^>\s]+)>"),  # Functionary
    Calls(('{"name": function name, "parameters"',), ("{", "<|python_tag|>"), inside=("<|python_tag|>",), bare=True),  # Llama 3
)


@dataclass(frozen=True)
class Thoughts:
    """How a model writes what it thinks before it answers.

    told      templates of the family contain this
    begin     thoughts begin with this; where a template's text ends with it already, the answer begins within them
    end       the answer goes on after this
    again     thoughts may begin anywhere, instead of at the answer's beginning only
    left_out  marks around the answer that are no part of it
    """

    told: str
    begin: str
    end: str
    again: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, *self.left_out)


_CHANNELS = ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>")
_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")

_THOUGHTS = (
    Thoughts("<|channel|>", "<|channel|>analysis<|message|>", "<|end|>", True, _CHANNELS),
    Thoughts("<|START_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>", left_out=_RESPONSE),
    Thoughts("<seed:think>", "<seed:think>", "</seed:think>"),
    Thoughts("[THINK]", "[THINK]", "[/THINK]"),
    Thoughts("<think>", "<think>", "</think>"),
    Thoughts("</think>", "<think>", "</think>"),
)


def calls_of(template: str) -> Calls | None:
    """How the models write calls that a chat template belongs to; None if it is not known."""
    return next((form for form in _CALLS if all(mark in template for mark in form.told)), None)


def thoughts_of(template: str) -> Thoughts | None:
    """How they write thoughts; None if they have none, or in an unknown way."""
    return next((form for form in _THOUGHTS if form.told in template), None)


def shown(marks: Iterable[str], special: Iterable[tuple[str, int]]) -> frozenset[int]:
    """The special tokens, given as (text, id), that marks are made of: they have to be written out to be found."""
    wanted = [mark for mark in marks if mark]
    return frozenset(id for text, id in special if any(text in mark for mark in wanted))
