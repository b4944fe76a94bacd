"""Gradients of the KL divergence from another model, of the continuous numbers of a quantised one, for its codes as they are.

As in `gradients`, the graph is computed part by part, forward and then from the head to the first layer; only what parts hand
on is kept. The loss is the mean over positions of KL(original || quantised), whose gradient at the logits is the difference of
both distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ...graph import Graph
from .gradient_parts import GraphPart
from .gradients import BACK, HEAD_ROWS, Gradients, WindowGroup, as_tensor
from .tunable import TunableWeights, WithLeaves
from .weights import Weights

WINDOWS = 1  # that are computed together


class ParameterGradients(Gradients):
    """weights: of the quantised model; original, original_graph: of the one that it is to come near to; threads: of the
    processor, with the same bits for any number; device: where all is computed but the last sums of scales. Raises as
    `Gradients`."""

    def __init__(
        self,
        graph: Graph,
        weights: TunableWeights,
        original_graph: Graph,
        original: Weights,
        threads: int,
        device: torch.device | str = "cpu",
    ):
        super().__init__(graph, weights, device, threads)
        self._tunable, self._original_graph, self._original = weights, original_graph, original
        self._in_head |= set(map(id, original_graph.head))

    @property
    def _head_work(self) -> float:
        return super()._head_work + sum(op.multiplied for op in self._original_graph.head)

    def windows_of_group(self, n_ctx: int) -> int:
        return WINDOWS

    def of_windows(
        self,
        windows: np.ndarray,
        hidden: Sequence[np.ndarray],
        *,
        with_gradients: bool,
        on_share: Callable[[float], None] = lambda share: None,
    ) -> tuple[float, dict[str, np.ndarray]]:
        """(the mean divergence, its gradients by tensor, those of `TunableWeights.matrices` and `vectors`).

        windows: int64 [n, n_ctx], each from scratch; hidden: for each what the original model hands to its head; on_share:
        called with the share of all products that are made.
        """
        groups = [WindowGroup(windows[part]) for part in self.groups(windows)]
        layers = sum(op.multiplied for part in self.parts for op in part.ops)
        self._expect(len(groups) * (layers * (1 + BACK * with_gradients) + self._head_work), on_share)
        sums: dict[str, Tensor] = {}

        def add(found: dict[str, Tensor]) -> None:
            for name, gradient in found.items():
                sums[name] = sums[name] + gradient if name in sums else gradient

        with self._one_thread_each() as pool:
            for part in self.parts:
                for _ in self._each(pool, groups, partial(self._forward, part)):
                    pass
            by_group = {id(group): each for group, each in zip(groups, hidden, strict=True)}
            total = 0.0
            for loss, found in self._each(pool, groups, lambda group: self._divergence(group, by_group[id(group)])):
                total += loss
                add(found)
            for number in reversed(range(len(self.parts))) if with_gradients else ():
                run = partial(self._of_part, self.parts[number], number == 0)
                for found in self._each(pool, groups, run):
                    add(found)
        return total / windows.size, {name: gradient.numpy() / windows.size for name, gradient in sums.items()}

    def _divergence(self, group: WindowGroup, original: np.ndarray) -> tuple[float, dict[str, Tensor]]:
        """The sum of a group's divergences, and the gradients of what the head is made of; the rest are left for the parts."""
        hidden, total = as_tensor(group.values[self.graph.hidden.index]), 0.0
        wanted = torch.from_numpy(np.ascontiguousarray(original, np.float32)).to(self.device)
        back, sums = torch.empty_like(hidden), dict[str, Tensor]()
        for rows in (slice(i, i + HEAD_ROWS) for i in range(0, len(hidden), HEAD_ROWS)):
            tokens = group.windows.reshape(1, -1)[:, rows]
            log_p = torch.log_softmax(self._logits(self._original_graph, tokens, wanted[rows], self._original), dim=1)
            leaf, weights = hidden[rows].to(self.device).detach().requires_grad_(), WithLeaves(self._tunable)
            with torch.enable_grad():
                log_q = torch.log_softmax(self._logits(self.graph, tokens, leaf, cast(Weights, weights)), dim=1)
            total += float((log_p.exp() * (log_p - log_q.detach())).sum(dim=1).double().sum())
            inputs = [leaf, *weights.leaves.values()]
            grads = torch.autograd.grad(log_q, inputs, -log_p.exp(), allow_unused=True)
            back[rows] = 0 if grads[0] is None else grads[0].cpu()
            self._computed.add(self._head_work * len(leaf) / len(hidden))
            for name, gradient in zip(weights.leaves, grads[1:], strict=True):
                if gradient is not None:
                    sums[name] = sums[name] + gradient if name in sums else gradient
        group.gradients = {self.graph.hidden.index: back}
        return total, sums

    def _logits(self, graph: Graph, tokens: np.ndarray, hidden: Tensor, weights: Weights) -> Tensor:
        assert graph.logits is not None
        step, values = self._step(tokens, []), {graph.hidden.index: hidden}
        for op in graph.head:
            self._compute(op, step, values, weights=weights)  # type: ignore[arg-type]
        return values[graph.logits.index]

    def _of_part(self, part: GraphPart, is_end: bool, group: WindowGroup) -> dict[str, Tensor]:
        weights = WithLeaves(self._tunable)
        again = self._again(part, group, cast(Weights, weights))
        names = [*weights.leaves]
        found = self._carry_back(part, group, again, [weights.leaves[name] for name in names], is_end)
        return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}
