"""Feed-forward blocks: down(activation(gate(x)) * up(x)), and without a gate down(activation(up(x)))."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np

from ....simd.workers import Workers
from .kernels import products
from .kernels.elementwise import CLAMPED_SWISH, GELU, RUN, SILU, SQUARED_RELU, gate_part, gated
from .kernels.gemm import gemm
from .kernels.gemm import parts as gemm_parts
from .weights import Linear, Tokens, WeightStore

LIMIT = 7.0  # of gpt-oss's activations


@dataclass(frozen=True)
class Activation:
    """activation(gate) * up, element by element; kind is one of kernels.small."""

    kind: int

    def __call__(self, gate: np.ndarray, up: np.ndarray, workers: Workers | None = None) -> np.ndarray:
        """Two contiguous float32 [n, size] -> the first, overwritten. workers: whom it may be shared out to."""
        team = workers.ready() if workers is not None and gate.size > RUN else 0
        gated(team, gate_part.address, self.kind, gate, up, LIMIT)
        return gate


silu_times = Activation(SILU)
gelu_times = Activation(GELU)  # in the form with tanh (arXiv:1606.08415, section 2)
clamped_swish_times = Activation(CLAMPED_SWISH)
squared_relu_times = Activation(SQUARED_RELU)  # arXiv:2109.08668


_NO_BIAS = np.zeros((0, 0), np.float32)


@cache
def _parts() -> np.ndarray:
    return np.array([products.quantise_part.address, products.gate_part.address], np.int64)


@lru_cache(1 << 12)
def _one_matrix(matrix: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Jobs and matrices (see kernels.products) of n tokens that all use the same ones."""
    return np.array([[[matrix, 0, n, 0]]] * 2, np.int64), np.full(n, matrix, np.int64)


class GatedFeedForward:
    """One dense block, or, with `matrix`, one expert of a stack.

    bias: of gate, up and down, those that there are, float32 [matrices, size]
    """

    def __init__(
        self,
        gate: Linear,
        up: Linear,
        down: Linear,
        activation: Activation = silu_times,
        bias: dict[str, np.ndarray] | None = None,
    ):
        self.gate, self.up, self.down = gate, up, down
        self.activation, self.bias = activation, bias or {}

    @classmethod
    def load(
        cls,
        store: WeightStore,
        prefix: str,
        suffix: str,
        n_embd: int,
        n_ff: int,
        *stack: int,
        activation: Activation = silu_times,
    ) -> GatedFeedForward:
        """The tensors PREFIXffn_{gate,up,down}SUFFIX.weight, and their .bias where a model has them.

        stack = (number of experts,) for an expert stack.
        """
        names = {part: f"{prefix}ffn_{part}{suffix}" for part in ("gate", "up", "down")}
        sizes = {"gate": n_ff, "up": n_ff, "down": n_embd}
        present = {part: f"{name}.bias" for part, name in names.items() if f"{name}.bias" in store}
        return cls(
            store.linear(f"{names['gate']}.weight", n_embd, n_ff, *stack),
            store.linear(f"{names['up']}.weight", n_embd, n_ff, *stack),
            store.linear(f"{names['down']}.weight", n_ff, n_embd, *stack),
            activation,
            {part: store.vectors(name, sizes[part], *stack) for part, name in present.items()},
        )

    @cached_property
    def _plans(self) -> np.ndarray | None:
        plans = [plan for linear in (self.gate, self.up, self.down) if (plan := linear.plan) is not None]
        return np.concatenate(plans) if len(plans) == 3 else None

    def for_few(self, x: np.ndarray, jobs: np.ndarray, matrices: np.ndarray, biased: bool = True) -> np.ndarray | None:
        """All products of a few tokens at once, or None where that cannot be (or somebody wants to see what is in between).

        x float32 [n, n_embd]; jobs, matrices: as for kernels.products.feed_forward. Returns float32 [len(matrices), n_embd],
        with down's bias if `biased`.
        """
        store = self.gate.store
        if self._plans is None or store.observer is not None or store.watch:
            return None
        out = np.empty((len(matrices), self.down.rows), np.float32)
        gate, up = self.bias.get("gate", _NO_BIAS), self.bias.get("up", _NO_BIAS)
        x, kind = np.ascontiguousarray(x, np.float32), self.activation.kind
        products.feed_forward(store.workers.ready(), _parts(), self._plans, jobs, matrices, kind, LIMIT, gate, up, x, out)
        if biased and "down" in self.bias:
            out += self.bias["down"][matrices]
        return out

    @property
    def many(self) -> tuple[gemm.Plan, gemm.Plan, gemm.Plan] | None:
        """Of gate, up and down: what `for_many` needs, or None."""
        gate, up, down = self.gate.many, self.up.many, self.down.many
        return None if gate is None or up is None or down is None else (gate, up, down)

    @property
    def few_at_once(self) -> bool:
        """Whether `for_few` has what it needs."""
        return self._plans is not None

    @property
    def unit(self) -> int:
        """Rows of jobs for `for_many` begin at multiples of it."""
        return math.lcm(*(gemm.unit_of(plan.way) for plan in self.many)) if self.many is not None else 1

    def for_many(
        self,
        x: np.ndarray,
        jobs: np.ndarray,
        out: np.ndarray,
        places: np.ndarray | None = None,
        matrices: np.ndarray | None = None,
    ) -> Iterator[np.ndarray]:
        """The block for many tokens, each with its expert's matrices, as one program: only where there is `many`, and without
        the bias of down.

        x float32 [any, n_embd]; jobs int64 [jobs, 4] as for gemm.Program.product; places int64 [rows]: which row of x each row
        is (None: all of x), a multiple of `unit` of them; matrices int64 [rows]: of each row, needed for biases; out float32
        [rows, n_embd]. Gives the inputs of down, float32 [rows, n_ff], when these are known, and has to be called on then.
        """
        assert self.many is not None
        (gate, up, down), workers = self.many, self.gate.store.workers
        rows = len(out)
        padded = -(-rows // self.unit) * self.unit
        values = gemm.room("gate and up", (2, rows, gate.rows))
        program = gemm.Program(workers.count)
        first = program.inputs(0, gate.way, x, padded, places, "of gate")
        second = first if up.way == gate.way else program.inputs(0, up.way, x, padded, places, "of up")
        program.product(1, gate, first, values[0], jobs)
        program.product(1, up, second, values[1], jobs)
        inner = gemm.Inputs(down.way, values[0], padded, None, "of down")
        table = np.zeros(8, np.int64)
        table[:3] = values[0].ctypes.data, values[1].ctypes.data, self.activation.kind
        table.view(np.float64)[3] = LIMIT
        table[4:6] = [self.bias[part].ctypes.data if part in self.bias else 0 for part in ("gate", "up")]
        table[6:] = 0 if matrices is None else matrices.ctypes.data, inner.table.ctypes.data
        program.task(2, gemm_parts.gate_part.address, table, inner.parts)
        if self.gate.store.observer is not None:
            program.run(workers.ready())
            yield values[0]
            program = gemm.Program(workers.count)
        program.product(3, down, inner, out, jobs)
        program.run(workers.ready())

    def __call__(self, x: np.ndarray, matrix: int = 0) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        if len(x) <= products.FEW:
            out = self.for_few(x, *_one_matrix(matrix, len(x)))
            if out is not None:
                return out
        elif self.many is not None and not self.gate.store.watch:
            return self._with_many(np.ascontiguousarray(x, np.float32), matrix)
        tokens = Tokens(x)
        gate, up = self.gate.matmul(tokens, matrix), self.up.matmul(tokens, matrix)
        if "gate" in self.bias:
            gate += self.bias["gate"][matrix]
        if "up" in self.bias:
            up += self.bias["up"][matrix]
        out = self.down.matmul(self.activation(gate, up, self.gate.store.workers), matrix)
        if "down" in self.bias:
            out += self.bias["down"][matrix]
        return out

    def _with_many(self, x: np.ndarray, matrix: int) -> np.ndarray:
        out = np.empty((len(x), self.down.rows), np.float32)
        self.gate.observe(x, matrix)
        self.up.observe(x, matrix)
        matrices = np.full(len(x), matrix, np.int64) if self.bias else None
        for values in self.for_many(x, gemm.one_job(len(x), matrix), out, None, matrices):
            self.down.observe(values, matrix)
        if "down" in self.bias:
            out += self.bias["down"][matrix]
        return out


class PlainFeedForward:
    """down(activation(up(x))), from the tensors PREFIXffn_{up,down}.weight and their .bias where a model has them.

    activation: used with ones for what it multiplies
    """

    def __init__(self, store: WeightStore, prefix: str, n_embd: int, n_ff: int, activation: Activation = gelu_times):
        self.up = store.linear(f"{prefix}ffn_up.weight", n_embd, n_ff)
        self.down = store.linear(f"{prefix}ffn_down.weight", n_ff, n_embd)
        sizes = {"up": n_ff, "down": n_embd}
        self.bias = {p: store.vector(f"{prefix}ffn_{p}.bias", n) for p, n in sizes.items() if f"{prefix}ffn_{p}.bias" in store}
        self.activation = activation

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        up = self.up.matmul(x)
        if "up" in self.bias:
            up += self.bias["up"]
        out = self.down.matmul(self.activation(up, np.ones_like(up), self.up.store.workers))
        if "down" in self.bias:
            out += self.bias["down"]
        return out


class FusedFeedForward:
    """A gated block whose ffn_up has the rows of the gate and behind them those of up (Phi 3)."""

    def __init__(self, store: WeightStore, prefix: str, n_embd: int, n_ff: int, activation: Activation = silu_times):
        self.both = store.linear(f"{prefix}ffn_up.weight", n_embd, 2 * n_ff)
        self.down = store.linear(f"{prefix}ffn_down.weight", n_ff, n_embd)
        self.n_ff, self.activation = n_ff, activation

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        both = self.both.matmul(x)
        gate, up = np.ascontiguousarray(both[:, : self.n_ff]), np.ascontiguousarray(both[:, self.n_ff :])
        return self.down.matmul(self.activation(gate, up, self.both.store.workers))
