"""What a backend can run: derived where it has one function per op, whose parameters are the fields of the op by name; the
check of a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...formats import PlanError
from .graph import Graph
from .ops import Op

# Class of ops -> its fields that are used -> the values that are known (None: all).
Support = Mapping[type[Op], Mapping[str, Collection[Any] | None]]
Functions = Mapping[type[Op], tuple[Callable, list[str]]]


def functions_of(by_class: Mapping[type[Op], Callable]) -> Functions:
    """Class of ops -> (function, names of the fields that it takes); the first parameter, the pass, is none of them."""
    return {op: (function, [*inspect.signature(function).parameters][1:]) for op, function in by_class.items()}


def support_of(functions: Functions) -> Support:
    """As `check_support` takes it: an option with a limited number of values lists them in its annotation, as a Literal."""
    support: dict[type[Op], dict[str, Collection[Any] | None]] = {}
    for op, (function, names) in functions.items():
        hints = get_type_hints(function)
        support[op] = {name: _values(hints[name]) for name in names}
    return support


def _values(annotation: Any) -> tuple[Any, ...] | None:
    return get_args(annotation) if get_origin(annotation) is Literal else None


def check_support(graph: Graph, backend: str, support: Support) -> None:
    """Raises PlanError, naming the op and the field, for what a backend would ignore or compute wrongly."""
    for op in (*graph.ops, *graph.head):
        name = type(op).__name__
        if type(op) not in support:
            raise PlanError(f"the {backend} backend cannot run {graph.architecture}: it has no op {name}")
        problem = unsupported(op, support[type(op)])
        if problem is not None:
            raise PlanError(f"the {backend} backend cannot run {graph.architecture}: op {name} with {problem}")


def unsupported(op: Op, known: Mapping[str, Collection[Any] | None]) -> str | None:
    """The first field, with its value, that is not supported; None if all are.

    A field that is not in `known` may only have its default value, which stands for the op without that option.
    """
    for field in fields(op):
        value = getattr(op, field.name)
        if field.name in known:
            accepted = known[field.name]
            if accepted is not None and value not in accepted:
                return f"{field.name} {value!r} (known are {', '.join(map(repr, accepted))})"
        elif field.name != "out" and (field.default is MISSING or value != field.default):
            return f"{field.name} {value!r:.80}"
    return None
