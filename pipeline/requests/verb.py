"""The library's functions from requests: flat, typed keywords, their signature and the lines of their reference."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from textwrap import wrap
from typing import Any, ParamSpec, TypeVar

from ...request_fields import Field, fields_of
from ..common.progress import hearing_of_kernels

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
                from difflib import get_close_matches

                names = [field.name for field in fields]
                near = [n for name in keywords if name not in names for n in get_close_matches(name, names, 2)]
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise TypeError(f"{function.__name__}() {error}{hint}") from None
            made = request(**given)  # type: ignore[call-arg]
            object.__setattr__(made, "given", tuple(given))  # of these, see `running.settings_of`
            with hearing_of_kernels(given.get("progress")) as progress:
                if "progress" in given:
                    object.__setattr__(made, "progress", progress)
                return function(made)

        called.__dict__ |= {"__signature__": signature, "request": request}
        called.__doc__ = documented(inspect.cleandoc(function.__doc__ or ""), request)
        return called

    return decorate


def _signature(request: type, fields: list[Field], function: Callable[..., Any]) -> inspect.Signature:
    made = inspect.signature(request).parameters
    positional = [parameter for parameter in made.values() if parameter.kind is not parameter.KEYWORD_ONLY]
    ordered = [
        made[field.name] if field.is_required else made[field.name].replace(default=field.default)
        for field in fields
        if made[field.name] not in positional
    ]
    return inspect.Signature([*positional, *ordered], return_annotation=inspect.signature(function).return_annotation)


def documented(text: str, request: type) -> str:
    """A docstring with a line or more for each field, before its paragraph that begins with "Returns" or "Raises", or at its
    end. Fields of a group that has a `reference` are named there, after it."""
    groups = [cls for cls in request.__mro__ if "reference" in cls.__dict__ and cls is not request]
    rest = [cls for cls in request.__mro__ if not any(issubclass(group, cls) for group in groups)]
    own = {name for cls in rest for name in inspect.get_annotations(cls)}
    elsewhere = {cls: [field.name for field in fields_of(cls) if field.name not in own] for cls in groups}
    grouped = {name for names in elsewhere.values() for name in names}
    lines = [line for field in fields_of(request) if field.name not in grouped for line in field_lines(field)]
    for cls, names in elsewhere.items():
        lines += row_lines(cls.__name__.lower(), f"{cls.__dict__['reference']}: {', '.join(names)}.")
    before, *after = re.split(r"\n(?=Returns |Raises |Example:)", text, maxsplit=1)
    return "\n".join([before.rstrip(), "", *lines, *("", *after) * bool(after)])


def field_lines(field: Field) -> list[str]:
    """The name of a field in a column, and what it is; the default where words are needed for it."""
    option = field.option
    text = option.doc or option.help
    if option.choices:
        text += f" One of {', '.join(option.choices)}."
    if option.shown and field.default is not True:
        text += f" Default: {option.shown}."
    return row_lines(field.name, text)


def row_lines(name: str, text: str) -> list[str]:
    """A name in a column, and a text beside it."""
    lines = wrap(text, _WIDTH - _NAMES - 4, break_long_words=False)
    own_line = [name] if len(name) >= _NAMES else []
    return [*own_line, *(f"{'' if own_line or i else name:{_NAMES}}{line}" for i, line in enumerate(lines))]
