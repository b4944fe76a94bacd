"""The library's functions from requests: flat, typed keywords, their signature and the lines of their reference."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from textwrap import wrap
from typing import Any, ParamSpec, TypeVar

from ...request_fields import Field, fields_of

P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")

_NAMES, _WIDTH = 22, 120  # columns of the names, and of the text


def verb(request: Callable[P, Q]) -> Callable[[Callable[[Q], R]], Callable[P, R]]:
    """Makes a function of a request one that takes the request's fields as arguments.

    The lines that describe them come into its docstring, before "Returns". Its attribute `request` is the class.
    """
    assert isinstance(request, type)
    fields = fields_of(request)

    def decorate(function: Callable[[Q], R]) -> Callable[P, R]:
        signature = _signature(request, fields, function)

        @functools.wraps(function)
        def called(*arguments: P.args, **keywords: P.kwargs) -> R:
            try:
                given = signature.bind(*arguments, **keywords).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(request(**given))  # type: ignore[call-arg]

        called.__dict__ |= {"__signature__": signature, "request": request}
        called.__doc__ = documented(inspect.cleandoc(function.__doc__ or ""), fields)
        return called

    return decorate


def _signature(request: type, fields: list[Field], function: Callable[..., Any]) -> inspect.Signature:
    made = inspect.signature(request).parameters
    ordered = sorted((made[field.name] for field in fields), key=lambda parameter: parameter.kind)
    return inspect.Signature(ordered, return_annotation=inspect.signature(function).return_annotation)


def documented(text: str, fields: list[Field]) -> str:
    """A docstring with a line or more for each field, before its paragraph that begins with "Returns", or at its end."""
    lines = [line for field in fields for line in field_lines(field)]
    before, returns, after = text.partition("\nReturns ")
    return "\n".join([before.rstrip(), "", *lines, *((returns + after).split("\n") if returns else [])])


def field_lines(field: Field) -> list[str]:
    """The name of a field in a column, and what it is; the default where words are needed for it."""
    option = field.option
    text = option.doc or option.help
    if option.choices:
        text += f" One of {', '.join(option.choices)}."
    if option.shown and field.default is not True:
        text += f" Default: {option.shown}."
    lines = wrap(text, _WIDTH - _NAMES - 4, break_long_words=False)
    own_line = [field.name] if len(field.name) >= _NAMES else []
    rows = [f"{'' if own_line or i else field.name:{_NAMES}}{line}" for i, line in enumerate(lines)]
    return [*own_line, *rows]
