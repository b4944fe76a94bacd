"""A model as a graph of ops: values with shapes, ops with options and weight names, checks; backends run it."""

from .graph import Graph, GraphBuilder
from .observer import Observer
from .ops import Op, Value, Weight
from .support import check_support

__all__ = ["Graph", "GraphBuilder", "Observer", "Op", "Value", "Weight", "check_support"]
