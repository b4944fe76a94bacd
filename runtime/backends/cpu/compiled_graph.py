"""A graph as steps see it: its ops, what its layers keep, its weights as the backend has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ....simd.workers import Workers
from ...cache_layout import CachePart, graph_layers, state_offsets
from ...graph import Graph, Weight
from ...graph.graph import users
from ...graph.ops import Attention, LatentAttention, Op, Route
from ...settings import Settings
from .kernels.gemv_plan import GEMV_TOKENS
from .weights import WeightMatrix, WeightStore

_EXPERT_TOKENS = 3  # of an expert, on average, up to which GEMV of a mixture is faster than GEMM, with all that is not experts
_MOST_TOKENS = 24
_PROMPT_EXPERT_TOKENS, _SHORT_PROMPT = 8, 64  # the same where all that is not experts is by GEMM


class CompiledGraph:
    """What a graph is compiled to, apart from its steps.

    store     the weights
    layers    what each layer keeps; observed_layers: while somebody observes
    users     value index -> ops that read it
    last_use  value index -> number of the last step that reads it: filled in when there are steps
    gemv_tokens  most tokens of a pass whose products are made by GEMV: of mixtures, whose experts have few of them each, more
    short_prompt  most tokens of a prompt whose experts' products are made by GEMV, and all others by GEMM if it has more than
                  gemv_tokens
    """

    def __init__(self, graph: Graph, store: WeightStore, settings: Settings):
        self.graph, self.store, self.settings = graph, store, settings
        self.all_ops: tuple[Op, ...] = (*graph.ops, *graph.head)
        self.users = users(self.all_ops)
        self.last_use: dict[int, int] = {}
        sparsest = max((op.logits.shape[0] // op.used for op in graph.ops if isinstance(op, Route)), default=0)
        self.gemv_tokens = max(GEMV_TOKENS, min(_EXPERT_TOKENS * sparsest, _MOST_TOKENS))
        self.short_prompt = max(self.gemv_tokens, min(_PROMPT_EXPERT_TOKENS * sparsest, _SHORT_PROMPT))
        self.layers, self.observed_layers = graph_layers(graph, settings)
        self.state_offsets, _ = state_offsets(self.layers)
        self.attention_layers = sum(isinstance(op, Attention | LatentAttention) for op in graph.ops)
        self._matrices: dict[str, WeightMatrix] = {}
        self._vectors: dict[tuple[str, object], np.ndarray] = {}

    @property
    def workers(self) -> Workers:
        """The threads that it computes with."""
        return self.store.workers

    def matrix(self, weight: Weight) -> WeightMatrix:
        """A weight tensor for products."""
        if weight.name not in self._matrices:
            self._matrices[weight.name] = self.store.matrix(weight.name, *weight.shape)
        return self._matrices[weight.name]

    def vector(self, weight: Weight, arranged: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
        """A small tensor decoded, float32, its shape in numpy's order; or what a function makes of that, once."""
        key = weight.name, arranged
        if key not in self._vectors:
            tensor = self.store.tensor(weight.name, weight.shape)
            array = np.array(tensor.read(0, tensor.n_rows), np.float32).reshape(weight.shape[::-1])
            self._vectors[key] = array if arranged is None else arranged(array)
        return self._vectors[key]

    def optional_vector(self, weight: Weight | None) -> np.ndarray | None:
        return None if weight is None else self.vector(weight)

    def shared_rows(self, names: Sequence[str]) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Rows that several tokens share: how many, int64 of the layers, and of their names' numbers among `names`."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, layer in enumerate(self.layers):
            for name, part in layer.rows.items():
                if part.every > 1 and name in names:
                    found.setdefault(part.every, []).append((number, names.index(name)))
        return [(every, *np.array(places, np.int64).T) for every, places in found.items()]

    def part(self, layer: int, name: str) -> CachePart:
        """What a layer keeps per token under this name."""
        return self.observed_layers[layer].rows[name]
