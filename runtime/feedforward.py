"""The gated feed-forward block: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import numpy as np

from .weights import Linear, WeightStore


def silu_times(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gate * sigmoid(gate) * up, element by element; overwrites gate."""
    denominator = np.negative(gate)
    np.exp(denominator, out=denominator)  # overflows to infinity for very negative gates, which gives the right limit: 0
    denominator += np.float32(1)
    gate /= denominator
    gate *= up
    return gate


class GatedFeedForward:
    """One dense block, or, with `matrix`, one expert of a stack."""

    def __init__(self, gate: Linear, up: Linear, down: Linear):
        self.gate, self.up, self.down = gate, up, down

    @classmethod
    def load(cls, store: WeightStore, prefix: str, suffix: str, n_embd: int, n_ff: int, *stack: int) -> GatedFeedForward:
        """The tensors PREFIXffn_{gate,up,down}SUFFIX.weight; stack = (number of experts,) for an expert stack."""
        return cls(
            store.linear(f"{prefix}ffn_gate{suffix}.weight", n_embd, n_ff, *stack),
            store.linear(f"{prefix}ffn_up{suffix}.weight", n_embd, n_ff, *stack),
            store.linear(f"{prefix}ffn_down{suffix}.weight", n_ff, n_embd, *stack),
        )

    def __call__(self, x: np.ndarray, matrix: int = 0) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        hidden = silu_times(self.gate.matmul(x, matrix), self.up.matmul(x, matrix))
        return self.down.matmul(hidden, matrix)
