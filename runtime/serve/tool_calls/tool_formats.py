"""How model families write tool calls and reasoning: a table row of tags per family, found by the text of its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from ....data_classes import dataclass


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")  # NaN and infinities, which Python's decoder accepts


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class ToolCall(NamedTuple):
    """A call of a function. arguments: a JSON object as text; id: as given by the model, '' if it gave none."""

    name: str
    arguments: str
    id: str


class CallForm(NamedTuple):
    """The form in which a model is made to write calls, one of those that its `ToolFormat` reads.

    call                one call, with {name} and {arguments}, a JSON object
    separator           between two calls
    opening, closing    around all calls
    parameter           an argument, with {key} and {value}, where the arguments are not a JSON object; {value} is JSON, or a
                        text without quotes
    """

    call: str
    separator: str = ""
    opening: str = ""
    closing: str = ""
    parameter: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes tool calls: between a start tag and the end tag one or several calls, each of them either a JSON
    object with name and arguments, or a header followed by the arguments.

    template_tags  a template of this family contains all of these
    start_tags     any of these starts a block of calls
    end_tag        ends the block; '': it ends with the answer
    header         regular expression for the text before the arguments of a call, with groups `name` and optionally `id`;
                   '': the name is part of the JSON object
    argument       regular expression for one argument, with groups `key` and `value`; '': the arguments are a JSON object
    inner_tags     tags that may occur between calls or in a header
    untagged       calls have no start tag of their own, only their position at the beginning of the answer: they are accepted
                   only for functions that the client has declared
    call_form      how calls are written where a request forces them; None: they cannot be
    """

    template_tags: tuple[str, ...]
    start_tags: tuple[str, ...]
    end_tag: str = ""
    header: str = ""
    argument: str = ""
    inner_tags: tuple[str, ...] = ()
    untagged: bool = False
    call_form: CallForm | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags; may contain ''."""
        return (*self.start_tags, self.end_tag, *self.inner_tags)

    @cached_property
    def _separators(self) -> re.Pattern[str]:
        """Matches what may stand between two calls."""
        start_tags = () if self.untagged else (tag for tag in self.start_tags if not self.header.startswith(tag))
        tags = sorted(filter(None, (*start_tags, self.end_tag, *self.inner_tags)), key=len, reverse=True)
        return re.compile("(?:" + "|".join([*map(re.escape, tags), r"[\s,;]"]) + ")*")

    def parse(self, text: str, functions: Mapping[str, Any]) -> list[ToolCall] | None:
        """The calls of a block that begins with a start tag; None if any part of it cannot be parsed.

        functions: name -> JSON schema of its parameters, of the functions that the client has declared.
        """
        position, calls = 0, []
        while (position := self._skip_separators(text, position)) < len(text):
            header = re.compile(self.header).match(text, position) if self.header else None
            try:
                if header is None:
                    value, position = _DECODER.raw_decode(text, position)
                    parsed = [_call_of_object(item) for item in (value if isinstance(value, list) else [value])]
                elif self.argument:
                    position, arguments = self._parse_arguments(text, header.end(), functions.get(header["name"]))
                    parsed = [_call_of_header(header, arguments)]
                else:
                    value, position = _DECODER.raw_decode(text, header.end())
                    parsed = [_call_of_header(header, value)]
            except (ValueError, RecursionError):
                return None
            if not all(parsed):
                return None
            calls += parsed
        if not calls or (self.untagged and any(call.name not in functions for call in calls)):
            return None
        return calls

    def _skip_separators(self, text: str, position: int) -> int:
        match = self._separators.match(text, position)
        return match.end() if match else position

    def _parse_arguments(self, text: str, position: int, schema: Any) -> tuple[int, dict[str, Any]]:
        """(position after the arguments, their values by name). schema: JSON schema of the function's parameters, or None."""
        values: dict[str, Any] = {}
        properties = schema.get("properties") if isinstance(schema, dict) else None
        while match := re.compile(r"\s*" + self.argument, re.DOTALL).match(text, position):
            position, key = match.end(), match["key"]
            argument_schema = properties.get(key) if isinstance(properties, dict) else None
            values[key] = _argument_value(
                match["value"], argument_schema.get("type") if isinstance(argument_schema, dict) else None
            )
        return position, values


def _argument_value(text: str, json_type: Any) -> Any:
    """The value of an argument without quotes: decoded JSON, or the text if its type is string or it is not JSON."""
    if json_type == "string":
        return text
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def _call_of_object(value: Any) -> ToolCall | None:
    """The call of a JSON object with name and arguments; None if it is not one."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value, **value["function"]}
    if not isinstance(value, dict):
        return None
    name = next((value[key] for key in ("name", "tool_name") if key in value), None)
    arguments = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    id = next((value[key] for key in ("id", "tool_call_id", "call_id") if key in value), "")
    return _checked_call(name, arguments, id)


def _call_of_header(header: re.Match[str], arguments: Any) -> ToolCall | None:
    return _checked_call(header["name"], arguments, header.groupdict().get("id") or "")


def _checked_call(name: Any, arguments: Any, id: Any) -> ToolCall | None:
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False), str(id))


_FUNCTION_HEADER = r"<function=(?P<name>[^>\s]+)>"
_PARAMETER = r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>"

_OBJECT = '{"name": "{name}", "arguments": {arguments}}'
_TAGGED_PARAMETER = "<parameter={key}>\n{value}\n</parameter>\n"

# The first row whose template_tags all occur in the template applies.
TOOL_FORMATS = (
    ToolFormat(  # Seed OSS
        ("<seed:tool_call>", "<function="),
        ("<seed:tool_call>",),
        "</seed:tool_call>",
        _FUNCTION_HEADER,
        _PARAMETER,
        ("</function>",),
        call_form=CallForm(
            "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>", "\n", parameter=_TAGGED_PARAMETER
        ),
    ),
    ToolFormat(  # MiniMax M2
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>",),
        "</minimax:tool_call>",
        r'<invoke name="(?P<name>[^"]+)">',
        r'<parameter name="(?P<key>[^"]+)">\n?(?P<value>.*?)\n?</parameter>',
        ("</invoke>",),
        call_form=CallForm(
            '<invoke name="{name}">\n{arguments}</invoke>\n',
            opening="<minimax:tool_call>\n",
            closing="</minimax:tool_call>",
            parameter='<parameter name="{key}">{value}</parameter>\n',
        ),
    ),
    ToolFormat(  # Qwen 3 Coder
        ("<tool_call>", "<function=", "<parameter="),
        ("<tool_call>",),
        "</tool_call>",
        _FUNCTION_HEADER,
        _PARAMETER,
        ("</function>",),
        call_form=CallForm(
            "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>", "\n", parameter=_TAGGED_PARAMETER
        ),
    ),
    ToolFormat(  # GLM 4.5
        ("<tool_call>", "<arg_key>"),
        ("<tool_call>",),
        "</tool_call>",
        r"(?P<name>[\w.-]+)",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        call_form=CallForm(
            "<tool_call>{name}\n{arguments}</tool_call>",
            "\n",
            parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        ),
    ),
    ToolFormat(  # Apriel
        ("<tool_calls>[",),
        ("<tool_calls>",),
        "</tool_calls>",
        call_form=CallForm(_OBJECT, ", ", "<tool_calls>[", "]</tool_calls>"),
    ),
    ToolFormat(  # Hermes, Qwen, ERNIE 4.5, EXAONE 4
        ("<tool_call>",),
        ("<tool_call>",),
        "</tool_call>",
        call_form=CallForm(f"<tool_call>\n{_OBJECT}\n</tool_call>", "\n"),
    ),
    ToolFormat(  # DeepSeek V3, R1, V3.1
        ("<｜tool▁calls▁begin｜>",),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        "<｜tool▁calls▁end｜>",
        r"(?:function<｜tool▁sep｜>)?(?P<name>[^\s<｜]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*(?=\{)",
        inner_tags=("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```"),
        call_form=CallForm(
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
            opening="<｜tool▁calls▁begin｜>",
            closing="<｜tool▁calls▁end｜>",
        ),
    ),
    ToolFormat(  # Kimi K2
        ("<|tool_call_begin|>",),
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_end|>",
        r"(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
        inner_tags=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        call_form=CallForm(
            "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
            opening="<|tool_calls_section_begin|>",
            closing="<|tool_calls_section_end|>",
        ),
    ),
    ToolFormat(  # Mistral: a list of objects; newer models write a name followed by arguments
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        header=r"(?P<name>[A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{)",
        inner_tags=("[CALL_ID]", "[ARGS]"),
        call_form=CallForm(_OBJECT, ", ", "[TOOL_CALLS][", "]"),
    ),
    ToolFormat(  # gpt-oss
        ("<|channel|>",),
        ("<|channel|>commentary to=functions.", " to=functions."),
        header=r"(?P<name>[\w.-]+)(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*\s*<\|message\|>",
        inner_tags=("<|start|>assistant", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
        call_form=CallForm("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"),
    ),
    ToolFormat(  # Command R
        ("<|START_ACTION|>",),
        ("<|START_ACTION|>",),
        "<|END_ACTION|>",
        call_form=CallForm(
            '{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}',
            ", ",
            "<|START_ACTION|>[",
            "]<|END_ACTION|>",
        ),
    ),
    ToolFormat(  # Granite, Phi 4
        ("<|tool_call|>",),
        ("<|tool_call|>",),
        "<|/tool_call|>",
        call_form=CallForm(_OBJECT, ", ", "<|tool_call|>[", "]<|/tool_call|>"),
    ),
    ToolFormat(  # Nemotron
        ("<TOOLCALL>",), ("<TOOLCALL>",), "</TOOLCALL>", call_form=CallForm(_OBJECT, ", ", "<TOOLCALL>[", "]</TOOLCALL>")
    ),
    ToolFormat(  # Functionary
        ("<function=", "</function>"),
        ("<function=",),
        "</function>",
        _FUNCTION_HEADER,
        call_form=CallForm("<function={name}>{arguments}</function>"),
    ),
    ToolFormat(  # Llama 3
        ('{"name": function name, "parameters"',),
        ("{", "<|python_tag|>"),
        inner_tags=("<|python_tag|>",),
        untagged=True,
        call_form=CallForm('{"name": "{name}", "parameters": {arguments}}', "; "),
    ),
)


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family writes its reasoning before the answer.

    template_tag  a template of this family contains this
    start_tag     starts the reasoning; if the prompt ends with it, the answer begins within the reasoning
    end_tag       ends the reasoning
    anywhere      reasoning may start anywhere, not only at the beginning of the answer
    removed_tags  tags around the content that are not part of it
    """

    template_tag: str
    start_tag: str
    end_tag: str
    anywhere: bool = False
    removed_tags: tuple[str, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.start_tag, self.end_tag, *self.removed_tags)


_HARMONY_TAGS = ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>")
_RESPONSE_TAGS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")

_REASONING_FORMATS = (
    ReasoningFormat("<|channel|>", "<|channel|>analysis<|message|>", "<|end|>", True, _HARMONY_TAGS),  # gpt-oss
    ReasoningFormat("<|START_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>", removed_tags=_RESPONSE_TAGS),  # Command R
    ReasoningFormat("<seed:think>", "<seed:think>", "</seed:think>"),
    ReasoningFormat("[THINK]", "[THINK]", "[/THINK]"),
    ReasoningFormat("<think>", "<think>", "</think>"),
    ReasoningFormat("</think>", "<think>", "</think>"),
)


def find_tool_format(template: str) -> ToolFormat | None:
    """The tool format of the family that a chat template belongs to; None if it is unknown."""
    return next((row for row in TOOL_FORMATS if all(tag in template for tag in row.template_tags)), None)


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """The reasoning format of the family that a chat template belongs to; None if it does not reason or is unknown."""
    return next((row for row in _REASONING_FORMATS if row.template_tag in template), None)


def special_tokens_in_tags(tags: Iterable[str], special_tokens: Iterable[tuple[str, int]]) -> frozenset[int]:
    """Ids of the special tokens, given as (text, id), that occur in tags: their text has to be part of the generated text."""
    tags = [tag for tag in tags if tag]
    return frozenset(id for text, id in special_tokens if any(text in tag for tag in tags))
