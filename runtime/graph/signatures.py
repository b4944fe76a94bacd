"""What a backend can run, where it has one function per op whose parameters are the fields of the op by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .graph import Support
from .ops import Op

Functions = Mapping[type[Op], tuple[Callable, list[str]]]


def functions_of(by_class: Mapping[type[Op], Callable]) -> Functions:
    """Class of ops -> (function, names of the fields that it takes); the first parameter, the pass, is none of them."""
    return {op: (function, [*inspect.signature(function).parameters][1:]) for op, function in by_class.items()}


def support_of(functions: Functions) -> Support:
    """As `check_support` takes it: an option with a limited number of values lists them in its annotation, as a Literal."""
    return {
        op: {name: _values(get_type_hints(function)[name]) for name in names} for op, (function, names) in functions.items()
    }


def _values(annotation: Any) -> tuple[Any, ...] | None:
    return get_args(annotation) if get_origin(annotation) is Literal else None
