"""A model as a graph of ops: values with shapes, ops with options and weight names, checks; backends run it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .graph import Graph, GraphBuilder
    from .observer import ExpertInputs, Observer
    from .ops import Op
    from .signatures import Support, check_support
    from .values import Value, Weight

__all__ = ["ExpertInputs", "Graph", "GraphBuilder", "Observer", "Op", "Support", "Value", "Weight", "check_support"]

_MODULES = {
    "graph": ("Graph", "GraphBuilder"),
    "observer": ("ExpertInputs", "Observer"),
    "ops": ("Op",),
    "signatures": ("Support", "check_support"),
    "values": ("Value", "Weight"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports what is first asked for: planning needs values and no ops."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
