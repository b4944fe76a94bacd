"""The grammar of an answer: `response_format`, `json_schema` and `grammar` of a request, and the calls that it has to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...formats import PlanError
from ..generation.grammar import Grammar, compile_grammar, json_rule
from ..text.tokenizer import Tokenizer
from .requests.checks import RequestError, invalid
from .requests.fields import CompletionRequest
from .tool_calls.tool_formats import ToolFormat
from .tool_calls.tool_grammar import tool_grammar

_NO_CALL = r'/[^{](.|\n)*/ | ""'  # an answer of a family whose calls have no tags, only their position


def answer_grammar(
    request: CompletionRequest, tokenizer: Tokenizer, tool_format: ToolFormat | None = None, starts_after: str = ""
) -> Grammar | None:
    """The grammar that the answer to a request has to follow; None without one.

    tool_format   how the model writes calls; None: unknown, or there are no functions
    starts_after  what ends the part of the answer that is free

    Raises RequestError that names the field.
    """
    rules = {name: rule for name, value in request.grammar_fields.items() if (rule := _rule(name, value)) is not None}
    if len(rules) > 1:
        raise RequestError(f"only one of {' and '.join(rules)} can be given", param=next(iter(rules)), code="invalid_value")
    param, rule = next(iter(rules.items()), ("", None))
    if request.must_call or (request.tools and tool_format is not None and param != "grammar"):
        return _call_grammar(request, tokenizer, tool_format, param, rule, starts_after)
    if rule is None:
        return None
    text = rule if param == "grammar" else f"start: {rule}"
    return _compiled(param, lambda: compile_grammar(tokenizer, text, starts_after))


def _call_grammar(
    request: CompletionRequest, tokenizer: Tokenizer, format: ToolFormat | None, param: str, rule: str | None, starts_after: str
) -> Grammar | None:
    """The grammar of an answer that may or has to call functions. param, rule: of an answer without calls, if it has a form."""
    if format is None or format.call_form is None:
        message = "the model cannot be made to call a function: it is not known how it writes calls"
        raise RequestError(message, param="tool_choice", code="unsupported_parameter")
    strict = any(tool["function"].get("strict") for tool in request.tools)
    if not (request.must_call or strict or rule or not request.parallel_calls):
        return None
    content = None if request.must_call else rule or (_NO_CALL if format.untagged else None)
    forced = request.must_call or content is not None
    tools = [tool for tool in request.tools if request.called_function in ("", tool["function"]["name"])]

    def build(with_schemas: bool) -> Grammar:
        return tool_grammar(
            tokenizer,
            format,
            tools,
            parallel=request.parallel_calls,
            forced=forced,
            with_schemas=with_schemas,
            content=content,
            starts_after=starts_after,
        )

    if not strict:  # arguments of a schema that llguidance does not know are any object
        try:
            return build(with_schemas=True)
        except PlanError:
            return _compiled(param or "tools", lambda: build(with_schemas=False))
    return _compiled("tools", lambda: build(with_schemas=True))


def _compiled(param: str, build: Callable[[], Grammar]) -> Grammar:
    try:
        return build()
    except PlanError as error:
        raise RequestError(f"{param}: {error}", param=param, code="invalid_value") from None


def _rule(name: str, value: Any) -> str | None:
    """A field as a grammar, or as an expression of Lark; None if it leaves the answer free."""
    if name == "grammar":
        if not isinstance(value, str):
            raise invalid(name, "a text", value)
        return value
    schema = _response_schema(value) if name == "response_format" else value
    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise invalid(name, "a JSON schema", schema)
    try:
        return json_rule(schema)
    except PlanError as error:
        raise RequestError(f"{name}: {error}", param=name, code="invalid_value") from None


def _response_schema(value: Any) -> Any:
    """The JSON schema of a response_format; None for text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return value.get("schema") or {"type": "object"}
    if kind != "json_schema":
        raise invalid(
            "response_format", 'like {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", ...}', value
        )
    holder = value.get("json_schema", value)
    if not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict):
        raise invalid("response_format.json_schema", 'like {"name": ..., "schema": {...}}', holder)
    return holder["schema"]
