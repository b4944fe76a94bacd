"""A mixture of experts: from the router's logits to the sum of the experts' results.

The ops from Route to CombineExperts, and an Add of one other value to the result, are lowered as one step. Rows of their values
are sorted by expert. For up to GEMV_TOKENS tokens the step is tasks of the pass: one sorts the choices and fills in the jobs of
the products, as many as there may be. For more tokens a Python function reads which experts were chosen, and writes and runs
programs of its own, for a number of experts at a time so that intermediate results take bounded memory; see expert_rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .....formats import PlanError
from ....graph.ops import Add, CombineExperts, ExpertLinear, IdentityExperts, Op, Route, ScaleByRouting
from ....graph.values import Value
from ..kernels.elementwise import SIGMOID_SCORES, SOFTMAX, SQRT_SOFTPLUS
from ..kernels.experts import arrange_part, combine_part, route_part
from ..kernels.gemv.gemv import TOKENS
from ..kernels.gemv_plan import GEMV_TOKENS
from ..kernels.special_parts import sparse_mixer_part
from ..memory import Partition, View, view_of
from ..passes import Pass, Step
from ..schedule import real
from .elementwise import AddStep
from .expert_rows import ExpertBatches
from .products import EXPERT_ROWS, gemm_inputs, gemm_task, gemv_inputs, gemv_task, input_partition

if TYPE_CHECKING:
    from ..executable import Executable

GATINGS = {"softmax": SOFTMAX, "sigmoid": SIGMOID_SCORES, "sqrt_softplus": SQRT_SOFTPLUS, "sparse_mixer": 3}


def find_mixtures(executable: Executable, ops: Sequence[Op]) -> dict[int, ExpertsStep]:
    """id(last op) -> the step of each mixture of experts among ops."""
    out = {}
    for at, op in enumerate(ops):
        if isinstance(op, Route):
            members = _members(executable, ops[at:], op)
            out[id(members[-1])] = ExpertsStep(executable, members)
    return out


def _members(executable: Executable, ops: Sequence[Op], route: Route) -> list[Op]:
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
        if executable.users[other.index] == [last]:
            members.append(last)
    return members


class ExpertsStep(Step):
    def __init__(self, executable: Executable, ops: Sequence[Op]):
        super().__init__(executable, ops[0])
        self.ops = tuple(ops)
        self.route: Route = ops[0]  # type: ignore[assignment]
        self.add = ops[-1] if isinstance(ops[-1], Add) else None
        inner = ops[1 : -1 if self.add is not None else None]
        self.combine: CombineExperts = inner[-1]  # type: ignore[assignment]
        self.identity = next((op for op in inner if isinstance(op, IdentityExperts)), None)
        self.inner = [self._inner(op) for op in inner[:-1] if op is not self.identity]
        self.bias, self.factors = self.vector(self.route.bias), self.vector(self.route.factors)
        self.by_token = None if self.route.by_token is None else executable.matrix(self.route.by_token)
        self.experts = self.route.logits.shape[0]
        self.matrices = [step.matrix for step in self.inner if isinstance(step, ExpertLinearStep)]
        self.columns = max(step.ops[0].out.shape[-1] for step in self.inner)

    def _inner(self, op: Op) -> Step:
        from . import STEPS

        if isinstance(op, ExpertLinear):
            return ExpertLinearStep(self.executable, op)
        if isinstance(op, ScaleByRouting):
            return ScaleByRoutingStep(self.executable, op)
        if type(op) not in STEPS:
            raise PlanError(f"the cpu backend does not support the op {type(op).__name__} within a mixture of experts")
        return STEPS[type(op)](self.executable, op)

    def output(self, out: Pass, op: Op) -> np.ndarray | None:
        """Of Route the weights; of the ops of experts nothing: `ExpertBatches` reports those."""
        if op is self.route:
            return out.view(self.route.out).array.reshape(out.n, self.route.used)
        return super().output(out, op) if op in (self.combine, self.add, self.identity) and op.out.index in out.values else None

    def emit(self, out: Pass) -> None:
        used = self.route.used
        chosen, weights = out.words(out.n * used), out.numbers(out.n * used, np.float32)
        self._choose(out, chosen, weights)
        out.put(self.route.out, weights)
        if self.identity is not None:
            self._add_identities(out, self.identity, chosen, weights)
        observer = out.observer
        observed = [] if observer is None else [op for op in self.ops if observer.wants_output(op)]
        fused = self.add is not None and self.combine not in observed
        if out.gemv and self.has_gemv and not any(op.out is step.ops[0].out for op in observed for step in self.inner):
            self._emit_gemv(out, chosen, weights, fused)
        else:
            result, fresh = self._result(out, fused)
            batches = ExpertBatches(self, out, chosen, weights, result, fresh)
            out.call(batches.run)
        if self.add is not None and not fused:
            AddStep(self.executable, self.add).emit(out)

    @property
    def has_gemv(self) -> bool:
        """Whether all matrices have a GEMV."""
        return all(matrix.gemv_plan is not None for matrix in self.matrices)

    def _choose(self, out: Pass, chosen: View, weights: View) -> None:
        route, logits = self.route, out.dense(self.route.logits)
        if not out.overwritable(route.logits):
            logits = out.copied(logits)
        partition = out.by_rows(logits)
        least, share = out.settings.expert_reduction or (0, 0.0)
        words = (logits.address, self.experts, GATINGS[route.gating], 0 if self.bias is None else out.constant(self.bias))
        words += (route.groups, route.groups_used, route.normalise, route.used, chosen.address, weights.address, least)
        is_mixer = route.gating == "sparse_mixer"
        table = (*partition.words(), *words, real(route.jitter if is_mixer else route.scale), real(share))
        part = sparse_mixer_part if is_mixer else route_part
        if self.by_token is None:
            out.schedule.task(part.address, table, partition, (logits,), (logits, chosen, weights))
        else:
            self._choose_by_token(out, logits, chosen, weights)
        if self.factors is not None:
            self._multiply_weights(out, chosen, weights)

    def _choose_by_token(self, out: Pass, logits: View, chosen: View, weights: View) -> None:
        """The experts that a table has for each token id, weighted by their scores."""
        assert self.by_token is not None
        route, table, state, n = self.route, self.by_token, out.run_state, out.n
        if route.gating != "sqrt_softplus":
            raise PlanError(f"experts by token id with {route.gating} scores are not supported")
        experts, factors = chosen.array.reshape(n, route.used), weights.array.reshape(n, route.used)

        def choose() -> None:
            experts[:] = table.lookup(state.tokens)
            scores = np.take_along_axis(logits.matrix, experts, axis=1)
            factors[:] = np.sqrt(np.logaddexp(np.float32(0), scores))
            if route.normalise:
                factors[:] /= np.maximum(factors.sum(axis=1, keepdims=True), np.float32(1e-20))
            factors[:] *= np.float32(route.scale)

        out.call(choose)

    def _multiply_weights(self, out: Pass, chosen: View, weights: View) -> None:
        experts, numbers, factors = chosen.array.reshape(-1), weights.array.reshape(-1), self.factors
        assert factors is not None

        def multiply() -> None:
            np.multiply(numbers, factors[experts], out=numbers)  # of a dropped expert (-1) the weight is 0

        out.call(multiply)

    def _add_identities(self, out: Pass, op: IdentityExperts, chosen: View, weights: View) -> None:
        """Takes the experts without matrices out of the choice, and writes the input times the sum of their weights."""
        used, last = self.route.used, self.experts - self.route.zeros
        experts, factors = chosen.array.reshape(out.n, used), weights.array.reshape(out.n, used)
        x, result = out.dense(op.x), out.new(op.out)

        def multiply() -> None:
            experts[experts >= last] = -1  # of a dropped expert, which is -1 already, the weight is 0
            np.multiply(x.matrix, np.where(experts < 0, factors, np.float32(0)).sum(axis=1, keepdims=True), out=result.matrix)

        out.call(multiply)

    def _emit_gemv(self, out: Pass, chosen: View, weights: View, fused: bool) -> None:
        n, used = out.n, self.route.used
        choices = n * used
        starts, counts = out.words(self.experts), out.words(self.experts)
        places, matrices, rows, jobs = (out.words(size) for size in (choices, choices, choices, 8 * choices))
        factors = out.words(choices, np.float32)
        views = (starts, counts, places, matrices, rows, factors, jobs)
        table = (chosen.address, weights.address, n, used, self.experts, *(view.address for view in views))
        partition = out.by_rows(out.view(self.route.logits))
        out.schedule.task(arrange_part.address, table, partition if partition.parts == 1 else 1, (chosen, weights), views)
        arranged = Arranged(choices, places, matrices, jobs, choices, n > 1, rows, factors)
        self.emit_inner(out, arranged)
        result, fresh = self._result(out, fused)
        combine(out, out.view(self.combine.x), self.combine_factors(out, factors), rows, result, (0, choices), fresh)

    def emit_inner(self, out: Pass, arranged: Arranged) -> None:
        """The ops between routing and combination, their products by GEMV."""
        for step in self.inner:
            if isinstance(step, ExpertLinearStep):
                step.emit_gemv(out, arranged)
            elif isinstance(step, ScaleByRoutingStep):
                step.emit_rows(out, arranged)
            else:
                step.emit(out)

    def combine_factors(self, out: Pass, factors: View) -> View:
        """What the experts' results are multiplied with: their weights, or ones."""
        if self.combine.weighted:
            return factors
        ones = np.ones(factors.array.size, np.float32)
        out.schedule.keep(ones)
        return view_of(ones)

    def _result(self, out: Pass, fused: bool) -> tuple[View, bool]:
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


class Arranged:
    """Choices of experts as rows, sorted by expert.

    places, matrices   int64 [rows], each row's token (-1: none) and expert
    jobs               int64 [2, n_jobs, 4] of GEMV (see arrange_part)
    gather             whether rows of tokens are copied before a product
    numbers, factors   of each token's choices, int64 and float32 [tokens * used]: their rows, the first of which here is
                       `first`, and weights
    """

    def __init__(
        self,
        rows: int,
        places: View,
        matrices: View,
        jobs: View,
        n_jobs: int,
        gather: bool,
        numbers: View,
        factors: View,
        first: int = 0,
    ):
        self.rows, self.places, self.matrices, self.jobs, self.n_jobs = rows, places, matrices, jobs, n_jobs
        self.gather, self.gathered = gather, dict[int, View]()
        self.numbers, self.factors, self.first = numbers, factors, first


def combine(
    out: Pass,
    results: View,
    factors: View,
    rows: View,
    result: View,
    row_range: tuple[int, int],
    fresh: bool,
    matrices: int = 0,
) -> None:
    """Adds results, of the rows row_range[0] to row_range[1] - 1, times their factors to their tokens' rows of result."""
    partition = Partition(result.axis, result.rows, out.by_rows(result).row_step, result.size, result.size)
    addresses = (view.address for view in (results, factors, rows, result))
    used = factors.width // result.rows
    table = (*addresses, result.rows, used, result.size, partition.row_step, 0, matrices, *row_range, fresh)
    reads = (results, factors, rows) if fresh else (results, factors, rows, result)
    out.schedule.task(combine_part.address, table, partition, reads, (result,))


class ScaleByRoutingStep(Step):
    """Rows of tokens, sorted by expert, times the weights of their experts."""

    of_tokens = True

    def __init__(self, executable: Executable, op: ScaleByRouting):
        super().__init__(executable, op)
        self.op = op

    def emit_rows(self, out: Pass, arranged: Arranged) -> None:
        stored = out.view(self.op.x)
        view = out.allocate(arranged.rows, 1, self.op.out.shape[-1], EXPERT_ROWS)
        out.put(self.op.out, view)
        x, target, places = stored.matrix, view.matrix, arranged.places.array.reshape(-1)
        numbers, factors, first = arranged.numbers.array.reshape(-1), arranged.factors.array.reshape(-1), arranged.first

        def scale_rows() -> None:
            of_rows, rows = np.zeros(len(target), np.float32), numbers - first
            here = (rows >= 0) & (rows < len(target)) & (numbers >= 0)
            of_rows[rows[here]] = factors[here]
            np.multiply(x[np.maximum(places, 0)], of_rows[:, None], out=target)

        out.call(scale_rows)


class ExpertLinearStep(Step):
    def __init__(self, executable: Executable, op: ExpertLinear):
        super().__init__(executable, op)
        self.op, self.matrix, self.bias = op, executable.matrix(op.weight), self.vector(op.bias)

    @property
    def of_tokens(self) -> bool:
        """Whether the op's input has one row per token, which all its experts multiply."""
        return len(self.op.x.shape) == 1

    def emit_gemv(self, out: Pass, arranged: Arranged) -> None:
        assert self.matrix.gemv_plan is not None
        stored, block = out.values[self.op.x.index], self.matrix.gemv_block
        x = stored.view if stored.view.is_row else out.copied(stored.view)
        gather = self.of_tokens and arranged.gather
        key = ("gathered", block) if gather else block
        if key not in stored.inputs:
            partition = input_partition(out, stored)
            if gather:
                x = self._gathered(out, x, arranged)
                partition = out.by_rows(x)

            def take(memory: View) -> View:
                return out.keep_with(self.op.x, memory)

            stored.inputs[key] = gemv_inputs(out, x, block, partition, take)
        view = out.allocate(arranged.rows, 1, self.op.out.shape[-1], EXPERT_ROWS)
        out.put(self.op.out, view)
        first = arranged.jobs.address + (0 if self.of_tokens else 32 * arranged.n_jobs)
        gemv_task(out, self.matrix.gemv_plan, stored.inputs[key], view, first, arranged.n_jobs, (arranged.jobs,))
        self._scale_and_add_bias(out, view, arranged.matrices)

    def emit_gemm(self, out: Pass, arranged: Arranged, jobs: np.ndarray) -> None:
        """jobs: int64 [jobs, 4], one per expert: its rows times its matrix."""
        stored, plan = out.values[self.op.x.index], self.matrix.gemm_plan
        view = out.allocate(arranged.rows, 1, self.op.out.shape[-1], EXPERT_ROWS)
        out.put(self.op.out, view)
        if plan is None:
            x, target, places = out.dense(self.op.x).matrix, view.matrix, arranged.places.array[0, 0]
            out.call(lambda: self._multiply_decoded(out, x, target, places, jobs))
        else:
            key = ("gathered", plan.form) if self.of_tokens else plan.form
            if key not in stored.inputs:

                def take(memory: View) -> View:
                    return out.keep_with(self.op.x, memory)

                places = arranged.places if self.of_tokens else None
                stored.inputs[key] = gemm_inputs(out, out.dense(self.op.x), plan.form, take, places)
            gemm_task(out, plan, stored.inputs[key], view, jobs)
        self._scale_and_add_bias(out, view, arranged.matrices)

    def _multiply_decoded(self, out: Pass, x: np.ndarray, target: np.ndarray, places: np.ndarray, jobs: np.ndarray) -> None:
        """The products of the experts' rows, expert by expert: for weights that have to be decoded."""

        def multiply(job: list[int]) -> None:
            matrix, first, count, to = job
            rows = places[first : first + count] if self.of_tokens else slice(first, first + count)
            target[to : to + count] = self.matrix.multiply(x[rows], matrix, out.use_gemv and count <= GEMV_TOKENS)

        out.workers.map(multiply, jobs.tolist(), int(jobs[:, TOKENS].sum()) * self.matrix.rows * self.matrix.columns)

    def _gathered(self, out: Pass, x: View, arranged: Arranged) -> View:
        if id(x.block) not in arranged.gathered:
            rows = out.temporary(arranged.rows, 1, x.size, EXPERT_ROWS)
            out.copy(x.reshaped(1, x.size), rows, index=arranged.places)
            arranged.gathered[id(x.block)] = rows
        return arranged.gathered[id(x.block)]

    def _scale_and_add_bias(self, out: Pass, view: View, matrices: View) -> None:
        """Multiplies with the factors of the matrices, if they have any, and adds the bias, if there is one."""
        if self.matrix.factors is not None:
            out.scale_rows(view, self.matrix.factors, out.by_cells(view), matrices)
        if self.bias is not None:
            out.add_bias(view, self.bias, out.by_cells(view), matrices)
