"""The check that a backend can run a graph: every op, every field of it, every value of an option."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

from ...formats import PlanError
from .graph import Graph
from .ops import Op

# Class of ops -> its fields that a backend takes into account -> the values that it knows (None: all).
Support = Mapping[type[Op], Mapping[str, Collection[Any] | None]]


def check_support(graph: Graph, backend: str, support: Support) -> None:
    """Raises PlanError, naming the op and the field, for what a backend would ignore or compute wrongly.

    A field that is not in `support` may only have its default value, which stands for the op without that option.
    """
    for op in (*graph.ops, *graph.head):
        name, known = type(op).__name__, support.get(type(op))
        if known is None:
            raise PlanError(f"the {backend} backend cannot run {graph.architecture}: it has no op {name}")
        for field in fields(op):
            value = getattr(op, field.name)
            if field.name in known:
                accepted = known[field.name]
                if accepted is None or value in accepted:
                    continue
                values = f"{value!r} (known are {', '.join(map(repr, accepted))})"
            elif field.name == "out" or (field.default is not MISSING and value == field.default):
                continue
            else:
                values = f"{value!r:.80}"
            raise PlanError(f"the {backend} backend cannot run {graph.architecture}: op {name} with {field.name} {values}")
