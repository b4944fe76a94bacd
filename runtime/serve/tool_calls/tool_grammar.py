"""The grammar of the calls that an answer has to make: the tags of a model's family around arguments that fit the schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from ....formats import PlanError
from ...generation.grammar import MAX_GRAMMAR_LENGTH, Grammar, compile_grammar, json_rule
from ...text.tokenizer import Tokenizer
from ..requests.checks import JsonObject
from .tool_formats import CallForm, ToolFormat

_ANY_OBJECT: JsonObject = {"type": "object"}


def tool_grammar(
    tokenizer: Tokenizer,
    format: ToolFormat,
    tools: Sequence[JsonObject],
    *,
    parallel: bool,
    forced: bool,
    with_schemas: bool = True,
    content: str | None = None,
    starts_after: str = "",
) -> Grammar:
    """The grammar of an answer that calls functions.

    tools         functions that may be called, as clients of OpenAI's API declare them
    parallel      several calls may follow each other
    forced        the answer begins with a call; else the grammar holds from the first start tag on, and what is before is free
    with_schemas  arguments fit the functions' schemas; else they are any object
    content       an expression of Lark for an answer that calls nothing, which is possible too
    starts_after  as of `compile_grammar`, with `forced`

    Raises PlanError for schemas that llguidance does not know.
    """
    form = format.call_form
    if form is None:
        raise PlanError("it is not known how the model writes calls")
    calls = " ".join(
        (
            _literal(tokenizer, form.opening),
            f"call ({_literal(tokenizer, form.separator)} call)*" if parallel else "call",
            _literal(tokenizer, form.closing),
        )
    )
    names = [f"call_{i}" for i in range(len(tools))]
    rules = [f"calls: {calls}", f"call: {' | '.join(names)}"]
    rules.append("start: calls" if content is None else f"start: calls | content\ncontent: {content}")
    size = 0
    for name, tool in zip(names, tools, strict=True):
        function = tool["function"]
        schema = function.get("parameters") if with_schemas else None
        for rule in _call_rules(tokenizer, form, name, function["name"], schema or _ANY_OBJECT):
            rules.append(rule)
            size += len(rule)
            if size > MAX_GRAMMAR_LENGTH:  # before a list of thousands of properties is gone through
                raise PlanError(f"the functions make a grammar of more than {MAX_GRAMMAR_LENGTH} characters")
    begin = {"starts_after": starts_after} if forced else {"starts_at": _first_tag(format, form)}
    return compile_grammar(tokenizer, "\n".join(rules), **begin)


def _first_tag(format: ToolFormat, form: CallForm) -> str:
    """The start tag with which an answer's first call begins."""
    text = form.opening + form.call
    return next(tag for tag in sorted(format.start_tags, key=len, reverse=True) if text.startswith(tag))


def _call_rules(tokenizer: Tokenizer, form: CallForm, rule: str, name: str, schema: JsonObject) -> Iterator[str]:
    """The rules of a call of one function."""
    before, after = (part.replace("{name}", name) for part in form.call.split("{arguments}"))
    yield f"{rule}: {_literal(tokenizer, before)} {rule}_arguments {_literal(tokenizer, after)}"
    if not form.parameter:
        yield f"{rule}_arguments: {json_rule(schema)}"
        return
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required") if isinstance(schema.get("required"), list) else []
    parts = []
    for i, (key, value) in enumerate(properties.items()):
        opening, closing = (part.replace("{key}", key) for part in form.parameter.split("{value}"))
        end = _literal(tokenizer, closing)
        values = value.get("enum") if isinstance(value, dict) else None
        if not isinstance(value, dict) or value.get("type") != "string":
            body = json_rule(value if isinstance(value, dict) else {})
        elif isinstance(values, list) and all(isinstance(each, str) for each in values):
            if sum(map(len, values)) + 4 * len(values) > MAX_GRAMMAR_LENGTH:
                raise PlanError(f"the texts of {key[:40]!r} make a grammar of more than {MAX_GRAMMAR_LENGTH} characters")
            body = f"({' | '.join(_literal(tokenizer, each) for each in values)})"
        else:  # a text without quotes, up to the closing tag
            body, end = f"{rule}_{i}_text", ""
            yield f"{body}[suffix={_quoted(closing)}]: /(.|\\n)*/"
        yield f"{rule}_{i}: {_literal(tokenizer, opening)} {body} {end}"
        parts.append(f"{rule}_{i}" + ("" if key in required else "?"))
    yield f"{rule}_arguments: " + (" ".join(parts) or '""')


def _literal(tokenizer: Tokenizer, text: str) -> str:
    """A text as an expression of Lark, in which control tokens are tokens."""
    if not text:
        return '""'
    control = tokenizer.vocabulary.control_texts
    present = sorted((each for each in control if each in text), key=len, reverse=True)
    if not present:
        return _quoted(text)
    parts = re.split("(" + "|".join(map(re.escape, present)) + ")", text)
    return " ".join(f"<[{control[part]}]>" if part in control else _quoted(part) for part in parts if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
