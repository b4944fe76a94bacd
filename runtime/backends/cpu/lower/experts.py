"""A mixture of experts: from the router's logits to the sum of the experts' results.

The ops from Route to CombineExperts, and an Add of one other value to the result, are lowered as one step. Rows of their values
are sorted by expert. For generated tokens, and for prompts of a few tokens whose products are those of bytes, the step is tasks
of the pass: one sorts the choices and fills in the jobs of the products, as many as there may be. For other prompts a Python
function reads which experts were chosen, and writes and runs programs of its own, for a number of experts at a time so that
intermediate results take bounded memory; see expert_batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .....formats import FormatError, PlanError
from ....graph import Observer
from ....graph.ops import Add, CombineExperts, ExpertLinear, IdentityExperts, Op, Route, ScaleByRouting
from ....graph.values import Value
from ..compiled_graph import CompiledGraph
from ..kernels import experts as kernels
from ..kernels.elementwise import SIGMOID_SCORES, SOFTMAX, SQRT_SOFTPLUS
from ..memory import View
from ..pass_program import PassProgram
from .elementwise import add
from .expert_batches import CHUNK_BYTES, ExpertBatches
from .expert_steps import Arranged, ExpertLinearStep, ScaleByRoutingStep, combine
from .mixture import Mixture
from .step import STEPS, Step

TASK_BYTES = 8 << 20  # of a result of all experts: up to it a prompt's experts are computed by tasks of its pass
_GATINGS = {"softmax": SOFTMAX, "sigmoid": SIGMOID_SCORES, "sqrt_softplus": SQRT_SOFTPLUS}


def find_mixtures(compiled: CompiledGraph, ops: Sequence[Op]) -> dict[int, ExpertsStep]:
    """id(last op) -> the step of each mixture of experts among ops."""
    out = {}
    for at, op in enumerate(ops):
        if isinstance(op, Route):
            members = _members(compiled, ops[at:], op)
            out[id(members[-1])] = ExpertsStep(compiled, members)
    return out


def _members(compiled: CompiledGraph, ops: Sequence[Op], route: Route) -> list[Op]:
    """Route, the ops that depend on it up to CombineExperts, and the Add of its result to a value that nothing else reads (the
    output of a shared expert)."""
    reached: set[int] = {route.out.index}
    members: list[Op] = []
    combined: Value | None = None
    for op in ops:
        if op is route or (combined is None and any(value.index in reached for value in op.inputs)):
            members.append(op)
            reached.update(value.index for value in op.outputs)
            if isinstance(op, CombineExperts):
                combined = op.out
    if combined is None:
        raise PlanError("the cpu backend does not support a Route without CombineExperts")
    users = [op for op in ops if combined in op.inputs]
    last = users[0] if len(users) == 1 else None
    if isinstance(last, Add) and last.scale == 1 and last.a is not last.b:
        other = last.b if last.a is combined else last.a
        if compiled.users[other.index] == [last]:
            members.append(last)
    return members


class ExpertsStep(Step, Mixture):
    def __init__(self, compiled: CompiledGraph, ops: Sequence[Op]):
        super().__init__(compiled, ops[0])
        self.ops = tuple(ops)
        self.add = ops[-1] if isinstance(ops[-1], Add) else None
        route, *inner = ops[: -1 if self.add is not None else None]
        assert isinstance(route, Route)
        assert isinstance(inner[-1], CombineExperts)
        self.route, self.combine = route, inner[-1]
        self.identity = next((op for op in inner if isinstance(op, IdentityExperts)), None)
        self.inner = [_inner_step(compiled, op) for op in inner[:-1] if op is not self.identity]
        self.bias, self.factors = (compiled.optional_vector(weight) for weight in (self.route.bias, self.route.factors))
        self.by_token = None if self.route.by_token is None else compiled.matrix(self.route.by_token)
        self.experts = self.route.logits.shape[0]
        self.matrices = [step.matrix for step in self.inner if isinstance(step, ExpertLinearStep)]
        self.columns = max(step.ops[0].out.shape[-1] for step in self.inner)

    def output(self, out: PassProgram, op: Op) -> np.ndarray | None:
        """Of Route the weights; of the ops of experts nothing: `ExpertBatches` reports those."""
        if op is self.route:
            return out.view(self.route.out).array.reshape(out.n, self.route.used)
        return super().output(out, op) if op in (self.combine, self.add, self.identity) and op.out.index in out.values else None

    def inner_bytes(self, counts: Sequence[int], context: int, observer: Observer | None) -> int:
        """Of a chunk of rows: what the matrices make of them, and the inputs of the last one once more, as codes of 8 bits."""
        n = sum(counts)
        if self._is_small(n):
            return 0
        rows = min(n * self.route.used, CHUNK_BYTES // (4 * self.columns))
        return rows * (4 * sum(matrix.rows for matrix in self.matrices) + self.matrices[-1].columns)

    def emit(self, out: PassProgram) -> None:
        used = self.route.used
        chosen, weights = out.words(out.n * used), out.numbers(out.n * used, np.float32)
        self._choose(out, chosen, weights)
        out.put(self.route.out, weights)
        if self.identity is not None:
            self._add_identities(out, self.identity, chosen, weights)
        observer = out.observer
        observed = [] if observer is None else [op for op in self.ops if observer.wants_output(op)]
        fused = self.add is not None and self.combine not in observed
        inner_observed = any(op.out is step.ops[0].out for op in observed for step in self.inner)
        if out.experts_by_gemv and self.has_gemv and not inner_observed and (out.gemv or self._is_small(out.n)):
            self._emit_tasks(out, chosen, weights, fused, None)
        elif observer is None and self._is_small(out.n) and self.gemm_tile is not None:
            self._emit_tasks(out, chosen, weights, fused, self.gemm_tile)
        else:
            result, fresh = self._result(out, fused)
            batches = ExpertBatches(self, out, chosen, weights, result, fresh)
            out.call(batches.run)
        if self.add is not None and not fused:
            add(out, self.add.a, self.add.b, self.add.scale, self.add.out)

    def _choose(self, out: PassProgram, chosen: View, weights: View) -> None:
        route, logits = self.route, out.dense(self.route.logits)
        if not out.overwritable(route.logits):
            logits = out.copied(logits)
        partition = out.by_rows(logits)
        least, share = out.settings.expert_reduction or (0, 0.0)
        operands = {"logits": logits, "chosen": chosen, "weights": weights, "experts": self.experts, "used": route.used}
        operands |= {"least": least, "share": share}
        if self.by_token is not None:
            self._choose_by_token(out, logits, chosen, weights)
        elif route.gating == "sparse_mixer":
            out.task(kernels.choose_by_sparse_mixer, partition, **operands, jitter=route.jitter)
        else:
            operands |= {"gating": _GATINGS[route.gating], "bias": self.bias, "groups": route.groups}
            operands |= {"groups_used": route.groups_used, "normalise": route.normalise, "scale": route.scale}
            out.task(kernels.choose_experts, partition, **operands)
        if self.factors is not None:
            operands = {"factors": self.factors, "used": route.used}
            out.task(kernels.multiply_weights, partition, chosen=chosen, weights=weights, **operands)

    def _choose_by_token(self, out: PassProgram, logits: View, chosen: View, weights: View) -> None:
        """The experts that a table has for each token id, weighted by their scores."""
        assert self.by_token is not None
        route, table, listed = self.route, self.by_token, np.zeros((out.n, self.route.used), np.int64)
        if route.gating != "sqrt_softplus":
            raise PlanError(f"experts by token id with {route.gating} scores are not supported")

        def look_up() -> None:
            listed[:] = table.lookup(out.run_inputs.tokens)
            if listed.min(initial=0) < 0 or listed.max(initial=0) >= self.experts:
                raise FormatError(f"{table.name}: a token has an expert that there is not, of {self.experts}")

        out.before_each_run(look_up)
        operands = {"experts": self.experts, "used": route.used, "normalise": route.normalise, "scale": route.scale}
        choice = {"logits": logits, "listed": listed, "chosen": chosen, "weights": weights}
        out.task(kernels.choose_listed, out.by_rows(logits), **choice, **operands)

    def _add_identities(self, out: PassProgram, op: IdentityExperts, chosen: View, weights: View) -> None:
        """Takes the experts without matrices out of the choice, and writes the input times the sum of their weights."""
        x, result = out.dense(op.x), out.new(op.out)
        operands = {"used": self.route.used, "last": self.experts - self.route.zeros, "width": x.size}
        out.task(kernels.add_identities, out.by_rows(x), chosen=chosen, weights=weights, x=x, out=result, **operands)

    def _is_small(self, n: int) -> bool:
        """Whether the experts' results for so many tokens take little memory."""
        return 4 * n * self.route.used * self.columns <= TASK_BYTES

    def _emit_tasks(self, out: PassProgram, chosen: View, weights: View, fused: bool, tile: int | None) -> None:
        """tile: rows of a tile of a GEMM, None: by GEMV."""
        n, used = out.n, self.route.used
        choices = n * used
        spare = -(-(choices + tile - 1) // tile) * tile - choices if tile else 0
        n_jobs = min(choices, self.experts)
        starts, counts = out.words(self.experts), out.words(self.experts)
        places, matrices, rows, jobs = (out.words(size) for size in (choices + spare, choices, choices, 8 * n_jobs))
        factors = out.words(choices, np.float32)
        views = {"starts": starts, "counts": counts, "places": places, "matrices": matrices, "rows": rows}
        views |= {"factors": factors, "jobs": jobs, "chosen": chosen, "weights": weights}
        partition = out.by_rows(out.view(self.route.logits))
        parts = partition if partition.parts == 1 else 1
        out.task(kernels.arrange_choices, parts, **views, tokens=n, used=used, experts=self.experts, spare=spare)
        places = replace(places, width=choices)
        arranged = Arranged(choices, places, matrices, jobs, n_jobs, n > 1, rows, factors, spare=spare)
        self.emit_inner(out, arranged, tile is None)
        result, fresh = self._result(out, fused)
        combine(out, out.view(self.combine.x), self.combine_factors(out, factors), rows, result, (0, choices), fresh)

    def _result(self, out: PassProgram, fused: bool) -> tuple[View, bool]:
        """Memory for the result, and whether it has to be set to zero before the experts' results are added. fused: it is the
        result of the Add, and begins as its other operand."""
        if self.add is None or not fused:
            return out.new(self.combine.out), True
        other = self.add.b if self.add.a is self.combine.out else self.add.a
        x = out.view(other)
        if x.is_dense and out.overwritable(other):
            out.put(self.add.out, x, out.by_rows(x))
            return x, False
        result = out.new(self.add.out, partition=out.by_rows(x))
        out.copy(x, result)
        return result, False


def _inner_step(compiled: CompiledGraph, op: Op) -> Step:
    if isinstance(op, ExpertLinear):
        return ExpertLinearStep(compiled, op)
    if isinstance(op, ScaleByRouting):
        return ScaleByRoutingStep(compiled, op)
    if type(op) not in STEPS:
        raise PlanError(f"the cpu backend does not support the op {type(op).__name__} within a mixture of experts")
    return STEPS[type(op)](compiled, op)
