"""A model as a graph of ops: values with shapes, ops with options and weight names, checks; backends run it."""

from .graph import Graph, GraphBuilder
from .observer import ExpertInputs, Observer
from .ops import Op
from .signatures import Support, check_support
from .values import Value, Weight

__all__ = ["ExpertInputs", "Graph", "GraphBuilder", "Observer", "Op", "Support", "Value", "Weight", "check_support"]
