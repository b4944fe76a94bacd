"""Finding a recipe for a size: errors and sensitivities measured, types chosen, the recipe written and measured in turn.

What is measured is kept in a file beside the recipe, and not measured again for another size of the same model.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..formats import MillError, PlanError, TensorSource, TensorType
from ..jobs.plan import Plan
from ..quantize.planning import Importance, plan_quantize
from ..quantize.recipes.format_rules import rules_text
from ..quantize.recipes.rules import Rule, RuleMatcher, parse_rules
from ..quantize.search.quant_error import relative_errors, usable_types
from ..quantize.search.type_search import (
    Budget,
    TypeAssignment,
    TypeSearch,
    group_tensors,
    quantizable_tensors,
    use_packed_types,
)
from .console import progress_bar
from .measurements import Measured, measured_key, types_key
from .search_options import Target, Wishes
from .search_result import Result, described

if TYPE_CHECKING:
    from ..runtime.evaluate.sensitivity import Divergence, Reference

PROBES = (2.4, 4.4)  # bits per weight at which a group's sensitivity is measured
RESERVE = 512  # bytes of the header left for comments that are only known at the end
TRUST = 0.7  # how far a round of refining bends what was known before
TO_GO_ON = "what was measured is kept, the same command goes on with it"


class SearchJob:
    """A search over one model. fixed: rules that are not to be touched; the tensors they take keep what they say.

    state: where measurements are kept; None: nowhere; shared: see `Measured`. planning: what `plan_quantize` is to be told, so
    that a target is met by the very file that is wanted.
    """

    def __init__(
        self,
        source: TensorSource,
        importance: Importance | None,
        wishes: Wishes,
        *,
        fixed: Sequence[Rule] = (),
        fixed_text: str = "",
        state: Path | None = None,
        shared: bool = False,
        planning: Mapping[str, Any] | None = None,
    ):
        self.source, self.importance, self.wishes = source, importance, wishes
        self.planning = {"ignore_imatrix_rules": True, "allow_requantize": True, **(planning or {})}
        self.fixed, self.fixed_text = list(fixed), fixed_text.strip()
        matcher = RuleMatcher(self.fixed)
        self.tensors = {name: t for name, t in quantizable_tensors(source).items() if matcher.first(name) is None}
        if not self.tensors:
            raise PlanError(f"{source.path}: there is no tensor left that a type could be chosen for")
        has = {name: importance is not None and importance.for_tensor(t) is not None for name, t in self.tensors.items()}
        self.options = {name: usable_types(t, wishes.types, has[name]) for name, t in self.tensors.items()}
        self.state = Measured(state, measured_key(source, importance, wishes), shared)

    # -- measuring

    @cached_property
    def search(self) -> TypeSearch:
        """With all errors and sensitivities known."""
        try:
            return self._measured()
        except KeyboardInterrupt:
            self.state.save(now=True)
            raise KeyboardInterrupt(TO_GO_ON) from None

    def _measured(self) -> TypeSearch:
        wishes = self.wishes
        self.state.save(now=True)  # it can be written to
        with progress_bar(total=len(self.tensors), desc="errors of types", unit="tensor") as bar:
            work = relative_errors(
                self.tensors, self.options, self.importance, self.state.errors, rows=wishes.rows, seed=wishes.seed
            )
            for name, found in work:
                self.state.errors[name] = self.state.errors.get(name, {}) | found
                self.state.save()
                bar.update()
        self.state.save(now=True)
        search = TypeSearch(
            self.tensors, self.options, self.state.errors, group_tensors(list(self.tensors), wishes.measurements)
        )
        if wishes.text is None:
            return search
        probes = search.probes(PROBES)
        with progress_bar(total=len(probes), desc="sensitivity", unit="group") as bar:
            for group, types in probes:
                bar.set_postfix_str(group.name, refresh=False)
                search.add_measurement(group, types, self.divergence(types)[0])
                bar.update()
        self.state.save(now=True)
        return search

    def divergence(self, types: Mapping[str, TensorType]) -> tuple[float, float]:
        """(mean, standard error) of the model with these tensors quantised, from the state if it was measured before."""
        known = self.state.divergences.setdefault(self._text_key, {})
        key = types_key(types)
        if key not in known:
            found = self._reference.with_types(types, self.importance)
            known[key] = [found.mean, found.error]
            self.state.save()
        return known[key][0], known[key][1]

    @cached_property
    def _words(self) -> str:
        assert self.wishes.text is not None
        from ..imatrix.texts import decoded

        return decoded(self.wishes.text.read_bytes(), self.wishes.text)

    @cached_property
    def _tokens(self) -> list[int]:
        """Of the text. Raises PlanError if they do not fill a window."""
        from ..runtime.text.tokenizer import Tokenizer

        words, wanted = self._words, self.wishes.n_ctx
        tokens = Tokenizer(self.source.metadata).encode(words)
        if len(tokens) < wanted:
            raise PlanError(
                f"{self.wishes.text} has {len(tokens)} tokens, a window takes {wanted}: give a longer text or a smaller window "
                "(search: -c, a recipe: [search] ctx)"
            )
        return tokens

    @cached_property
    def _text_key(self) -> str:
        return f"{hashlib.sha256(self._words.encode()).hexdigest()[:24]}, {self.wishes.n_ctx}, {self.wishes.chunks}"

    @cached_property
    def _reference(self) -> Reference:
        from ..runtime.evaluate.sensitivity import Reference

        settings: dict[str, Any] = {"exact": True}
        if self.wishes.threads is not None:
            settings["threads"] = self.wishes.threads
        return Reference(self.source, self._tokens, self.wishes.n_ctx, self.wishes.chunks, **settings)

    # -- choosing

    def find(self, target: Target, command: str = "") -> Result:
        """The recipe for a target. Raises PlanError when the types allowed cannot reach it."""
        self.least(target)
        found = self._solve(target)
        if self.wishes.text is not None and self.wishes.refine:
            found = self._refined(found, target)
        types = use_packed_types(found.types, self.tensors, target.gpu) if self.wishes.repacked else found.types
        measured = None
        if self.wishes.text is not None:
            from ..runtime.evaluate.sensitivity import Divergence

            measured = Divergence(*self.divergence(found.types))
            self.state.save(now=True)
        text = self._text(found, target, types, measured, command)
        return Result(text, found, types, self.plan(text), measured)

    def _solve(self, target: Target) -> TypeAssignment:
        return self._of_size(target) if target.divergence is None else self._of_divergence(target.divergence)

    def _refined(self, found: TypeAssignment, target: Target) -> TypeAssignment:
        """The best of what was found and of what is found after each round of measuring around it."""
        try:
            tried = [found]
            for _ in range(self.wishes.refine):
                self._bend(tried[-1])
                tried.append(self._solve(target))
        except KeyboardInterrupt:
            self.state.save(now=True)
            raise KeyboardInterrupt(TO_GO_ON) from None
        if target.divergence is not None:
            return min(tried, key=lambda f: f.nbytes)
        return min(tried, key=lambda f: self.divergence(f.types)[0])

    def requantises(self, text: str) -> bool:
        """Whether `quantize` takes a recipe only with --allow-requantize."""
        try:
            self.plan(text, allow_requantize=False)
        except PlanError:
            return True
        return False

    def plan(self, text: str, out: str | Path = "out.gguf", **more: Any) -> Plan:
        """What `quantize` would make of a recipe. more: beside `planning`."""
        return plan_quantize(
            self.source,
            out,
            rules=parse_rules(text),
            recipe_text=text,
            importance=self.importance,
            version=__version__,
            **(self.planning | more),
        )

    def least(self, target: Target, out: str | Path = "out.gguf") -> Plan:
        """The plan with the smallest types allowed. Takes no measuring; raises PlanError when the target is smaller, or cannot
        be looked for."""
        if target.divergence is not None and self.wishes.text is None:
            raise PlanError(
                "--max-kld needs a text to measure on (search: -f TEXT, quantize: --calibration TEXT, a recipe: [search] text)"
            )
        if self.wishes.text is not None:
            _ = self._tokens  # it is a text, and long enough
        plan = self.plan(self._text(self._extreme(0), target) + "#" * RESERVE, out)
        if target.divergence is None:
            whole, taken = self._room(target, plan)
            if taken > whole:
                bits = math.ceil(8000 * taken / self._elements) / 1000
                takes = f"{taken:,} bytes" if target.size is not None else f"{bits:.3f} bits per weight"
                raise PlanError(
                    f"{target.text} cannot be reached: with the smallest types allowed it takes {takes} "
                    "(allow smaller ones with --types)"
                )
        self._gpu_budget(target, plan)
        return plan

    def most(self, target: Target) -> int:
        """Bytes on disk that the file for a target has at most."""
        if target.size is not None:
            return target.size
        plan = self.plan(self._text(self._extreme(-1), target) + "#" * RESERVE)
        beside = plan.file_bytes - plan.total_bytes
        return min(plan.file_bytes, beside + self._room(target, plan)[0]) if target.bits is not None else plan.file_bytes

    def _extreme(self, which: int) -> TypeAssignment:
        """The smallest (0) or the largest (-1) type allowed for every tensor."""
        types = {name: kinds[which] for name, kinds in self.options.items()}
        return TypeAssignment(types, sum(kind.nbytes(self.tensors[name].shape) for name, kind in types.items()), 0.0)

    @cached_property
    def _elements(self) -> int:
        return sum(t.n_elements for t in self.source.tensors.values())

    def _room(self, target: Target, plan: Plan) -> tuple[int, int]:
        """Bytes that the target allows, and what a plan takes of them."""
        if target.bits is not None:
            return int(target.bits * self._elements / 8), plan.total_bytes
        assert target.size is not None
        return target.size, plan.file_bytes

    def _of_size(self, target: Target) -> TypeAssignment:
        search, lowest = self.search, self._extreme(0)
        plan = self.plan(self._text(lowest, target) + "#" * RESERVE)
        whole, taken = self._room(target, plan)
        beside = taken - lowest.nbytes
        for _ in range(8):
            found = search.fit_budgets(self._budgets(target, plan, whole - beside))
            plan = self.plan(self._text(found, target) + "#" * RESERVE)
            over = self._room(target, plan)[1] - whole
            if over <= 0:
                return found
            beside += over  # a longer recipe makes a longer header
        raise MillError(f"no recipe of at most {target.text} was found; ask for a little more")

    def _bend(self, found: TypeAssignment) -> None:
        """Corrects the groups' sensitivities by what a step up and a step down from what was found do to the divergence."""
        search = self.search
        with progress_bar(total=len(search.groups), desc="refining", unit="group") as bar:
            for group in search.groups:
                down, up = search.neighbours(found, group)
                low, high = (sum(self.state.errors[n][k.name] for n, k in types.items()) for types in (up, down))
                if high > low:
                    worse, better = (self.divergence({**found.types, **types})[0] for types in (down, up))
                    search.correct_curve(group, found, (worse - better) / (high - low), TRUST)
                bar.update()

    def _budgets(self, target: Target, plan: Plan, room: int) -> list[Budget]:
        """room: bytes for the tensors that types are chosen for; plan: says what the others take."""
        gpu = self._gpu_budget(target, plan)
        return [Budget(room)] if gpu is None else [gpu, Budget(room - self.search.fit_budgets([gpu]).nbytes)]

    def _gpu_budget(self, target: Target, plan: Plan) -> Budget | None:
        """Raises PlanError if no types fit into it."""
        if target.gpu is None or target.gpu_bytes is None:
            return None
        others = sum(o.nbytes for o in plan.outputs if target.gpu.search(o.name) and o.name not in self.tensors)
        gpu = Budget(target.gpu_bytes - others, target.gpu)
        names = {name for name in self.tensors if target.gpu.search(name)}
        if not names:
            raise PlanError(f"--gpu {target.gpu.pattern!r} finds no tensor that a type could be chosen for")
        least = sum(self.options[name][0].nbytes(self.tensors[name].shape) for name in names)
        if least > gpu.nbytes:
            raise PlanError(
                f"a --gpu-size of {target.gpu_bytes:,} bytes cannot be reached: with the smallest types allowed these tensors "
                f"take {least + others:,} bytes (allow smaller ones with --types)"
            )
        return gpu

    def _of_divergence(self, wanted: float) -> TypeAssignment:
        """Predictions add up, which is too much where much is damaged: they are scaled by what is measured, until it fits."""
        search, allowed, best, got = self.search, wanted, None, 0.0
        for _ in range(8):
            try:
                found = search.fit_divergence(allowed)
            except PlanError:
                found = search.assignment({name: self._finest(name) for name in self.tensors})
            got = self.divergence(found.types)[0]
            if got <= wanted and (best is None or found.nbytes < best.nbytes):
                best = found
            if 0.95 * wanted <= got <= wanted:
                break
            allowed *= min(4.0, max(0.25, 0.975 * wanted / got)) if got > 0 else 4.0
        if best is None:
            raise PlanError(f"a KL divergence of {wanted:g} was not reached (last: {got:.4g}); allow larger types with --types")
        return best

    def _finest(self, name: str) -> TensorType:
        return min(self.options[name], key=lambda kind: (self.state.errors[name][kind.name], kind.name))

    # -- writing

    def _text(
        self,
        found: TypeAssignment,
        target: Target,
        types: Mapping[str, TensorType] | None = None,
        measured: Divergence | None = None,
        command: str = "",
    ) -> str:
        """types: as they are to be written, if not as they were found."""
        has = self.importance is not None
        lines = described(self.source, found, target, self.wishes, with_imatrix=has, measured=measured, command=command)
        others = [n for n in self.source.tensors if n not in found.types and n.startswith("blk.")]
        given = [self.fixed_text] if self.fixed_text else []
        return "\n".join([*lines, *given, rules_text(types or found.types, others)])


def command_line() -> str:
    """As it was typed, for the recipe's header."""
    return "ggufmill " + " ".join(shlex.quote(argument) for argument in sys.argv[1:])
