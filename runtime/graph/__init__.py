"""A model as a graph of ops: values with shapes, ops with options and weight names, checks; backends run it."""

from .graph import Graph, GraphBuilder, Support, check_support
from .observer import ExpertInputs, Observer
from .ops import Op
from .values import Value, Weight

__all__ = ["ExpertInputs", "Graph", "GraphBuilder", "Observer", "Op", "Support", "Value", "Weight", "check_support"]
