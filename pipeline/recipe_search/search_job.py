"""Finding a recipe for a size: errors and sensitivities are measured, types chosen, the recipe written and measured in turn.

Measurements are stored in a file next to the recipe, which searches for other sizes of the same model reuse.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...formats import MillError, PlanError, TensorSource, TensorType
from ...formats.file_range import read_file
from ...jobs.plan import Plan
from ...quantize.recipes.format_rules import rules_text
from ...quantize.recipes.rules import RuleMatcher
from ...quantize.search.quant_error import relative_errors, usable_types
from ...quantize.search.type_search import (
    Budget,
    TypeAssignment,
    TypeSearch,
    group_tensors,
    on_one_scale,
    quantizable_tensors,
    use_packed_types,
)
from ..common.figures import bits_per_weight_text
from ..common.messages import note, warn
from ..common.progress import OnProgress, Stage
from .measurements import Measurements, measurements_key, types_key
from .options import SearchOptions, SearchTarget
from .result import SearchResult, header_lines
from .weighting import ErrorWeighting

if TYPE_CHECKING:
    from ...runtime.evaluate.sensitivity import Divergence, Reference
    from ..cluster.measuring import SearchWorkers
    from ..planning import Quantization

PROBES = (2.4, 4.4)  # bits per weight at which a group's sensitivity is measured
RESERVE = "#" * 512  # of the header, for comments that are only known at the end
TRUST = 0.7  # how much a round of refining counts against what was known before
ATTEMPTS = 8  # at meeting a target
CAUTION = 3.0  # a divergence that nothing measures is predicted to be this many times smaller than what is allowed: measured
# ones were 1.1 to 2.9 times the predictions (docs/curvature.md)
INTERRUPTED = "what was measured is kept, the same command continues it"


class SearchJob:
    """A search over one model, for one target or several.

    job       what is quantised by the recipe: its source, its data, the rules that stay as they are, and its plan, so that a
              target is met by the very file that is wanted. With covariances errors are weighted by them, what is measured is
              encoded with them; `strict` refuses a tensor whose errors could be weighted by importance only
    state     file for the measurements; None: they are not stored; shared: see `Measurements`
    running   gives what runs in place of the source, where divergences are measured; None: the source itself
    workers   of a cluster, which measure; None: this process does

    Raises PlanError when no tensor is left whose type could be chosen, and for covariances of another model.
    """

    def __init__(
        self,
        job: Quantization,
        options: SearchOptions,
        *,
        state: Path | None = None,
        shared: bool = False,
        workers: SearchWorkers | None = None,
        report: OnProgress = lambda progress: None,
        running: Callable[[], TensorSource] | None = None,
    ):
        self._running = running
        self.job, self.options, self._report = job, options, report
        self.source, self.importance, self.covariances = job.source, job.importance, job.covariances
        self._workers = workers
        source, importance, covariances = self.source, self.importance, self.covariances
        matcher = RuleMatcher(job.types[1])
        self.tensors = {name: t for name, t in quantizable_tensors(source).items() if matcher.first(name) is None}
        if not self.tensors:
            raise PlanError(f"{source.path}: there is no tensor left that a type could be chosen for")
        self.weighting = ErrorWeighting.of(self.tensors, importance, covariances)
        if job.request.strict:
            self.weighting.refuse_diagonal()
        covered = self.weighting.has_importance
        self.candidates = {
            name: usable_types(t, options.types, covered[name], options.program) for name, t in self.tensors.items()
        }
        self.measurements = Measurements(state, measurements_key(source, importance, options, covariances), shared)

    # -- measuring

    @cached_property
    def _by_errors(self) -> TypeSearch:
        """The knapsack, with all errors measured."""
        options, known = self.options, self.measurements
        known.save(now=True)  # fails here if it cannot be written to
        for line in self.weighting.notes:
            note(f"note: {line}")
        stage = Stage(self._report, "errors of types", len(self.tensors), "tensor")
        sampling = {"rows": options.rows, "seed": options.seed, "threads": options.threads, "covariances": self.covariances}
        if self._workers is not None:
            work = self._workers.errors(self.candidates, known.errors)
        else:
            work = relative_errors(
                self.tensors, self.candidates, self.importance, known.errors, **sampling, on_share=stage.within
            )
        with closing(work):  # its threads end with it
            for name, measured in work:
                known.errors[name] = known.errors.get(name, {}) | measured
                known.save()
                stage.advance(1, name)
        known.save(now=True)
        errors = {name: known.errors[name] for name in self.tensors}
        if self.weighting.curvature:
            errors = on_one_scale(errors, self.weighting.diagonal)
        return TypeSearch(self.tensors, self.candidates, errors, group_tensors(list(self.tensors), options.measurements))

    @cached_property
    def search(self) -> TypeSearch:
        """The knapsack, with all errors and sensitivities measured."""
        search, known = self._by_errors, self.measurements
        if self.options.text is None:
            return search
        probes = search.probes(PROBES, known.probes.setdefault(self._text_key, {}))
        stage = Stage(self._report, "sensitivity", len(probes), "group")
        measured = self._divergences([types for _, types in probes], stage)
        for (group, types), (mean, _) in zip(probes, measured, strict=True):
            search.add_measurement(group, types, mean)
            stage.advance(1, group.name)
        known.save(now=True)
        return search

    def divergence(self, types: Mapping[str, TensorType], stage: Stage | None = None) -> tuple[float, float]:
        """(mean, standard error) of the KL divergence with these tensors quantised, in nats; measured once for each choice.
        stage: of which it is a unit; None: one of its own."""
        known = self.measurements.divergences.setdefault(self._text_key, {})
        key = types_key(types)
        if key not in known:
            self._stage = stage or Stage(self._report, "divergence", 1, "recipe")
            measured = self._reference.with_types(types, self.importance, self.covariances)
            if stage is None:
                self._stage.advance()
            known[key] = [measured.mean, measured.error]
            self.measurements.save()
        return known[key][0], known[key][1]

    def is_measured(self, types: Mapping[str, TensorType]) -> bool:
        """Whether the divergence with these tensors quantised is known."""
        return types_key(types) in self.measurements.divergences.get(self._text_key, {})

    def _on_windows(self, windows: float) -> None:
        self._stage.within(windows / self.options.chunks)

    def _divergences(self, choices: Sequence[Mapping[str, TensorType]], stage: Stage) -> Iterator[tuple[float, float]]:
        """`divergence` of each choice; those that are not known yet are shared out to workers, if there are any."""
        if self._workers is not None:
            from ..cluster.measuring import MeasuringText

            known = self.measurements.divergences.setdefault(self._text_key, {})
            missing = {key: types for types in choices if (key := types_key(types)) not in known}
            tokens = tuple(self._tokens[: self.options.n_ctx * self.options.chunks])
            text = MeasuringText(tokens, self.options.n_ctx, self.options.chunks)
            with closing(self._workers.divergences(list(missing.values()), text)) as results:
                for key, measured in zip(missing, results, strict=True):
                    known[key] = [measured.mean, measured.error]
                    self.measurements.save()
        yield from (self.divergence(types, stage) for types in choices)

    @cached_property
    def _text(self) -> str:
        assert self.options.text is not None
        from ...imatrix.texts import decode_text

        return decode_text(read_file(self.options.text, pipes=True), self.options.text)

    @property
    def _is_table(self) -> bool:
        from ...imatrix.texts import TABLE_SUFFIXES

        return self.options.text is not None and self.options.text.suffix in TABLE_SUFFIXES

    @cached_property
    def _tokens(self) -> list[int]:
        """Tokens of the text. Raises PlanError if they do not fill a window."""
        from ...imatrix.texts import calibration_tokens
        from ...runtime.text.tokenizer import Tokenizer

        path, n_ctx, metadata = self.options.text, self.options.n_ctx, self.source.metadata
        assert path is not None
        tokenizer = Tokenizer(metadata)
        tokens = calibration_tokens(path, tokenizer, metadata) if self._is_table else tokenizer.encode(self._text)
        if len(tokens) < n_ctx:
            raise PlanError(
                f"{self.options.text} has {len(tokens)} tokens, a window takes {n_ctx}: give a longer text or a smaller window "
                "(search: -c, a recipe: [search] ctx)"
            )
        return tokens

    @cached_property
    def _text_key(self) -> str:
        content = repr(self._tokens) if self._is_table else self._text
        return f"{hashlib.sha256(content.encode()).hexdigest()[:24]}, {self.options.n_ctx}, {self.options.chunks}"

    @property
    def running_source(self) -> TensorSource:
        """The model that reads the text."""
        return self._running() if self._running is not None else self.source

    @property
    def running_settings(self) -> dict[str, Any]:
        """The settings of `load_model` that it reads with."""
        threads = {"threads": self.options.threads} if self.options.threads is not None else {}
        return {"exact": True, **threads, **self.options.placement}

    @cached_property
    def _reference(self) -> Reference:
        from ...runtime.evaluate.sensitivity import Reference

        n_ctx, chunks = self.options.n_ctx, self.options.chunks
        reference = Reference(self.running_source, self._tokens, n_ctx, chunks, self._on_windows, **self.running_settings)
        warn(reference.model.notes, detail=True)
        return reference

    # -- choosing

    def find(self, target: SearchTarget, command: str = "") -> SearchResult:
        """The recipe for a target. command: goes into its header. Raises PlanError when the types allowed cannot reach it."""
        try:
            return self._found(target, command)
        except KeyboardInterrupt:
            self.measurements.save(now=True)
            raise KeyboardInterrupt(INTERRUPTED) from None

    def _found(self, target: SearchTarget, command: str) -> SearchResult:
        self.smallest_plan(target)
        finest = self._finest_within(target) if target.divergence is None else None
        assignment = finest or self._solve(target)
        if finest is None and self.options.text is not None and self.options.refine:
            assignment = self._refined(assignment, target)
        types = use_packed_types(assignment.types, self.tensors, target.gpu) if self.options.repacked else assignment.types
        measured = None
        if self.options.text is not None:
            from ...runtime.evaluate.sensitivity import Divergence

            measured = Divergence(*self.divergence(assignment.types))
            self.measurements.save(now=True)
        text = self._recipe_text(assignment, target, types, measured, command)
        requantizes = self._requantizes(text)
        return SearchResult(target, text, assignment, types, self.plan(text), measured, requantizes, self.weighting)

    def _solve(self, target: SearchTarget) -> TypeAssignment:
        return self._of_size(target) if target.divergence is None else self._of_divergence(target.divergence)

    def _refined(self, assignment: TypeAssignment, target: SearchTarget) -> TypeAssignment:
        """The best of the choice and of those after each round of measuring around the one before."""
        tried = [assignment]
        for _ in range(self.options.refine):
            self._refine_sensitivities(tried[-1])
            tried.append(self._solve(target))
        if target.divergence is not None:
            return min(tried, key=lambda f: f.nbytes)
        return min(tried, key=lambda f: self.divergence(f.types)[0])

    def _requantizes(self, text: str) -> bool:
        try:
            self.plan(text, allow_requantize=False)
        except PlanError:
            return True
        return False

    def plan(self, text: str, out: str | Path = "out.gguf", **changed: Any) -> Plan:
        """The plan of quantising by a recipe. changed: arguments of `plan_quantize`."""
        return self.job.plan(text, out, strict=False, **changed)

    def smallest_plan(self, target: SearchTarget, out: str | Path = "out.gguf") -> Plan:
        """The plan with the smallest types allowed, without any measuring. Raises PlanError when the target is smaller than
        that, or cannot be searched for."""
        if target.divergence is not None and self.options.text is None and not self.weighting.curvature:
            raise PlanError(
                "--max-kld needs a text to measure on (search: -f TEXT, quantize: --calibration TEXT, a recipe: [search] text) "
                "or --curvature, which predicts it"
            )
        if self.options.text is not None:
            _ = self._tokens  # raises for what is no text, or too short
        plan = self.plan(self._recipe_text(self._extreme_types(0), target) + RESERVE, out)
        if target.divergence is None:
            allowed, taken = target.limit(self._elements), target.size_of(plan)
            if taken > allowed:
                bits = math.ceil(8000 * taken / self._elements) / 1000
                takes = f"{taken:,} bytes" if target.size is not None else bits_per_weight_text(bits)
                raise PlanError(
                    f"{target.text} cannot be reached: with the smallest types allowed it takes {takes} "
                    "(allow smaller ones with --types)"
                )
        self._gpu_budget(target, plan)
        return plan

    def largest_file(self, target: SearchTarget) -> int:
        """Bytes on disk that the file for a target has at most."""
        plan = self.plan(self._recipe_text(self._extreme_types(-1), target) + RESERVE)
        if target.divergence is not None:
            return plan.file_bytes
        return min(plan.file_bytes, target.limit(self._elements) + plan.file_bytes - target.size_of(plan))

    def _extreme_types(self, index: int) -> TypeAssignment:
        """The smallest (0) or the largest (-1) type allowed for every tensor."""
        types = {name: candidates[index] for name, candidates in self.candidates.items()}
        return TypeAssignment(types, sum(type.nbytes(self.tensors[name].shape) for name, type in types.items()), 0.0)

    @cached_property
    def _elements(self) -> int:
        return sum(t.n_elements for t in self.source.tensors.values())

    def _of_size(self, target: SearchTarget) -> TypeAssignment:
        search, lowest = self.search, self._extreme_types(0)
        plan = self.plan(self._recipe_text(lowest, target) + RESERVE)
        limit = target.limit(self._elements)
        others = target.size_of(plan) - lowest.nbytes  # header, and tensors whose type is not chosen
        for attempt in range(ATTEMPTS):
            assignment = search.fit_budgets(self._budgets(target, plan, limit - others))
            plan = self.plan(self._recipe_text(assignment, target) + RESERVE)
            excess = target.size_of(plan) - limit
            if excess <= 0:
                return assignment
            # A longer recipe makes a longer header, and each choice has another recipe: the margin grows after the first ones.
            others += excess << max(0, attempt - 2)
        raise MillError(f"no recipe of at most {target.text} was found; ask for a little more")

    def _finest_within(self, target: SearchTarget) -> TypeAssignment | None:
        """The type of the least error for each tensor, if all fit: then it is the best, whatever their sensitivities are."""
        finest = self._by_errors.assignment({name: self._finest(name) for name in self.tensors})
        plan = self.plan(self._recipe_text(finest, target) + RESERVE)
        if target.gpu is not None or target.size_of(plan) > target.limit(self._elements):
            return None
        return finest if self.options.text is None else replace(finest, predicted=self.divergence(finest.types)[0])

    def _refine_sensitivities(self, assignment: TypeAssignment) -> None:
        """Corrects the groups' sensitivities by what a step up and a step down from the choice do to the divergence."""
        search = self.search
        stage = Stage(self._report, "refining", len(search.groups), "group")
        neighbours = {group.name: search.neighbours(assignment, group) for group in search.groups}
        steps = {name: [self._error(up), self._error(down)] for name, (down, up) in neighbours.items()}
        changed = [types for name, pair in neighbours.items() if steps[name][1] > steps[name][0] for types in pair]
        measured = self._divergences([{**assignment.types, **types} for types in changed], stage)
        for group in search.groups:
            low, high = steps[group.name]
            if high > low:
                worse, better = next(measured)[0], next(measured)[0]
                search.correct_curve(group, assignment, (worse - better) / (high - low), TRUST)
            stage.advance(1, group.name)

    def _error(self, types: Mapping[str, TensorType]) -> float:
        return sum(self.search.errors[name][type.name] for name, type in types.items())

    def _budgets(self, target: SearchTarget, plan: Plan, nbytes: int) -> list[Budget]:
        """nbytes: for the tensors whose types are chosen; plan: says what the others take."""
        gpu = self._gpu_budget(target, plan)
        return [Budget(nbytes)] if gpu is None else [gpu, Budget(nbytes - self.search.fit_budgets([gpu]).nbytes)]

    def _gpu_budget(self, target: SearchTarget, plan: Plan) -> Budget | None:
        """Raises PlanError if no types fit into it."""
        if target.gpu is None or target.gpu_bytes is None:
            return None
        others = sum(o.nbytes for o in plan.outputs if target.gpu.search(o.name) and o.name not in self.tensors)
        gpu = Budget(target.gpu_bytes - others, target.gpu)
        names = {name for name in self.tensors if target.gpu.search(name)}
        if not names:
            raise PlanError(f"--gpu {target.gpu.text!r} finds no tensor that a type could be chosen for")
        smallest = sum(self.candidates[name][0].nbytes(self.tensors[name].shape) for name in names)
        if smallest > gpu.nbytes:
            raise PlanError(
                f"a --gpu-size of {target.gpu_bytes:,} bytes cannot be reached: with the smallest types allowed these tensors "
                f"take {smallest + others:,} bytes (allow smaller ones with --types)"
            )
        return gpu

    def _of_divergence(self, wanted: float) -> TypeAssignment:
        """Predictions add up, which is too much where much is damaged: they are scaled by what is measured, until it fits."""
        search, allowed, best, measured = self.search, wanted, None, 0.0
        if self.options.text is None:
            return search.fit_divergence(wanted / CAUTION)
        for _ in range(ATTEMPTS):
            try:
                assignment = search.fit_divergence(allowed)
            except PlanError:
                assignment = search.assignment({name: self._finest(name) for name in self.tensors})
            measured = self.divergence(assignment.types)[0]
            if measured <= wanted and (best is None or assignment.nbytes < best.nbytes):
                best = assignment
            if 0.95 * wanted <= measured <= wanted:
                break
            allowed *= min(4.0, max(0.25, 0.975 * wanted / measured)) if measured > 0 else 4.0
        if best is None:
            raise PlanError(
                f"a KL divergence of {wanted:g} was not reached (last: {measured:.4g}); allow larger types with --types"
            )
        return best

    def _finest(self, name: str) -> TensorType:
        errors, shape = self._by_errors.errors[name], self.tensors[name].shape
        return min(self.candidates[name], key=lambda type: (errors[type.name], type.nbytes(shape)))

    # -- writing

    def _recipe_text(
        self,
        assignment: TypeAssignment,
        target: SearchTarget,
        types: Mapping[str, TensorType] | None = None,
        measured: Divergence | None = None,
        command: str = "",
    ) -> str:
        """types: as they are to be written, if they are not those of the assignment."""
        lines = header_lines(self.source, assignment, target, self.options, self.weighting, measured=measured, command=command)
        others = [n for n in self.source.tensors if n not in assignment.types and n.startswith("blk.")]
        fixed_text = self.job.given.rules_text.strip()
        fixed = [fixed_text] if fixed_text else []
        return "\n".join([*lines, *fixed, rules_text(types or assignment.types, others)])
