"""Feed-forward blocks and mixtures of experts, written down for the program of a single token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from .feedforward import LIMIT, Activation, FusedFeedForward, GatedFeedForward, PlainFeedForward
from .kernels import products
from .kernels.single import CHOICE_FIELDS, choose
from .moe import SIGMOID, GatedShare, MixtureOfExperts
from .program import Program, UnknownError, check_known
from .weights import Linear
from .writer import Task

_ROUTER = {"linear", "used", "gating", "bias", "groups", "groups_used", "normalise", "scale", "offset"}
_MIXTURE = {"router", "experts", "shared", "reduction"}


@dataclass(frozen=True)
class _Kind:
    """How blocks of a class are put together.

    fields   what instances may hold
    first    the matrices of the first products, whose results lie one after the other: gates, and then what they let through
    hidden   what the last product takes
    biases   of the first results, and of the second ones
    """

    fields: set[str]
    first: Callable[[Any], list[Linear]]
    hidden: Callable[[Any], int]
    biases: tuple[str, str]


_KINDS = {
    GatedFeedForward: _Kind(
        {"gate", "up", "down", "activation", "bias", "_plans"}, lambda f: [f.gate, f.up], lambda f: f.gate.rows, ("gate", "up")
    ),
    FusedFeedForward: _Kind({"both", "down", "n_ff", "activation"}, lambda f: [f.both], lambda f: f.n_ff, ("", "")),
    PlainFeedForward: _Kind({"up", "down", "bias", "activation"}, lambda f: [f.up], lambda f: f.up.rows, ("up", "")),
}


class _Block:
    """A block's plans, and its stages."""

    def __init__(self, program: Program, block: Any):
        if type(block) not in _KINDS:
            raise UnknownError(type(block).__name__)
        kind = _KINDS[type(block)]
        check_known(block, kind.fields)
        self.program, self.activation, self._hidden, self._biases = program, block.activation, kind.hidden(block), kind.biases
        if type(self.activation) is not Activation:
            raise UnknownError("an activation")
        self.bias: dict[str, np.ndarray] = getattr(block, "bias", {})
        self.plans = [program.plan(linear) for linear in kind.first(block)]
        self._down = program.plan(block.down)

    def stages(
        self, inputs: dict[int, tuple], out: np.ndarray, jobs: np.ndarray | None = None, matrices: np.ndarray | None = None
    ) -> list[list[Task]]:
        """Those of one token, or of several experts' (as for `products.feed_forward`). The bias of `down` is not added."""
        program, hidden, rows = self.program, self._hidden, 1 if matrices is None else len(matrices)
        values = program.room(2 * rows * hidden)
        values[:] = 1  # what a block without a gate lets through
        gate, at, first = values[: rows * hidden], values.ctypes.data, []
        for plan in self.plans:
            first.append(program.product(plan, inputs, at, None if jobs is None else jobs[0]))
            at += 4 * rows * int(plan[products.ROWS])
        matrices = program.hold(np.zeros(1, np.int64)) if matrices is None else matrices
        behind, _ = program.quantised(gate, [self._down])
        ((block, quantised),) = behind.items()
        bias = [program.hold(np.ascontiguousarray(self.bias[p], np.float32)).ctypes.data if p in self.bias else 0
                for p in self._biases]  # fmt: skip
        table = program.table(
            *(gate.ctypes.data, *quantised, block, hidden, gate.ctypes.data + 4 * rows * hidden, self.activation.kind, 0),
            *(*bias, matrices.ctypes.data),
            _8=LIMIT,
        )
        return [
            first,
            [(products.gate_part.address, table, rows * -(-hidden // products.CHUNK))],
            [program.product(self._down, behind, out.ctypes.data, None if jobs is None else jobs[1])],
        ]

    def rest(self, out: np.ndarray) -> list[Task]:
        """What is still to be done to the result of one token."""
        bias = self.bias.get("down")
        return self.program.biased(None if bias is None else bias.reshape(-1), out)


def dense(program: Program, layer: int, block: Any, norm: Any, out: np.ndarray) -> list[Task]:
    """What is still to be done to the result, float32 [n_embd], once the stages are done."""
    written = _Block(program, block)
    for stage in written.stages(program.begin(norm, written.plans), out):
        program.stage(stage)
    return written.rest(out)


def mixture(program: Program, layer: int, block: MixtureOfExperts, norm: Any, out: np.ndarray) -> list[Task]:
    """As `dense`. The shared block, if there is one, runs beside the experts."""
    router, shared = block.router, block.shared
    check_known(block, _MIXTURE)
    check_known(router, _ROUTER)
    program.not_now.append(lambda: block.reduction is not None)
    gate = None
    if isinstance(shared, GatedShare):
        check_known(shared, {"gate", "block"})
        gate, shared = shared.gate, shared.block
    experts, route = _Block(program, block.experts), program.plan(router.linear)
    beside = None if shared is None else _Block(program, shared)
    inputs = program.begin(norm, [route, *experts.plans, *(beside.plans if beside is not None else [])])
    count, used, size = router.linear.rows, router.used, out.size
    scores, factors = program.room(count), program.room(used)
    matrices, jobs = program.hold(np.zeros(used, np.int64)), program.hold(np.zeros((2, used, 4), np.int64))
    words = {
        **{"scores": scores.ctypes.data, "experts": count, "sigmoid": router.gating == SIGMOID, "scale": 0, "used": used},
        "bias": 0 if router.bias is None else program.hold(np.ascontiguousarray(router.bias, np.float32)).ctypes.data,
        **{"groups": router.groups, "groups_used": router.groups_used, "normalised": router.normalise},
        **{"factors": factors.ctypes.data, "matrices": matrices.ctypes.data, "jobs": jobs.ctypes.data},
        **{"sums": out.ctypes.data, "n_sums": size if beside is None else 0},
    }
    choice = choose.address, program.table(*(words[field] for field in CHOICE_FIELDS), _7=router.scale), 1
    results = program.room(used * size)
    choose_them = program.in_turn([*program.biased(router.offset, scores), choice])
    own = [[program.product(route, inputs, scores.ctypes.data)], [choose_them]]
    own += experts.stages(inputs, results, jobs, matrices)
    for stages in zip_longest(own, beside.stages(inputs, out) if beside is not None else [], fillvalue=[]):
        program.stage(*stages)
    tasks = beside.rest(out) if beside is not None else []
    if gate is not None:
        tasks.append(program.share(program.input.ctypes.data, gate, out.ctypes.data))
    if "down" in experts.bias:
        tasks.append(program.add_each(experts.bias["down"], matrices, results.ctypes.data))
    return [*tasks, program.add(results, out.ctypes.data, size, factors)]
