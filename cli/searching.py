"""Finding a recipe for a size: errors and sensitivities measured, types chosen, the recipe written and measured in turn.

What is measured is kept in a file beside the recipe, and not measured again for another size of the same model.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from .. import __version__
from ..formats import MillError, PlanError, TensorSource, TensorType
from ..formats.plan import Plan, parse_size
from ..quantize.damage import USUAL, errors, fitting
from ..quantize.planning import Importance, plan_quantize
from ..quantize.recipe import Matcher, Recipe, Rule, parse_rules, parse_type
from ..quantize.rules_text import rules_text
from ..quantize.search import Budget, Found, Search, choosable, grouped, packed
from .console import gib

if TYPE_CHECKING:
    from ..runtime.sensitivity import Divergence, Reference

PROBES = (2.4, 4.4)  # bits per weight at which a group's sensitivity is measured
RESERVE = 512  # bytes of the header left for comments that are only known at the end
SAVE_EVERY = 5.0  # seconds
TRUST = 0.7  # how far a round of refining bends what was known before
TO_GO_ON = "what was measured is kept, the same command goes on with it"


@dataclass(frozen=True)
class Target:
    """What to reach, one of: bytes of the file, bits per weight of its tensors, divergence in nats.

    gpu: tensors with a budget of their own, of gpu_bytes.
    """

    size: int | None = None
    bits: float | None = None
    divergence: float | None = None
    gpu: re.Pattern[str] | None = None
    gpu_bytes: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.size, self.bits, self.divergence) if value is not None]
        if len(given) != 1:
            raise PlanError("a search needs one target: --target-size, --target-bpw or --max-kld")
        if given[0] <= 0:
            raise PlanError(f"a target of {given[0]} cannot be reached: it has to be above 0")
        if self.gpu_bytes is not None and (self.gpu is None or self.divergence is not None):
            raise PlanError("--gpu-size needs --gpu REGEX beside it, and --target-size or --target-bpw")

    @property
    def text(self) -> str:
        if self.size is not None:
            return f"{self.size:,} bytes"
        return f"{self.bits:g} bits per weight" if self.bits is not None else f"a KL divergence of {self.divergence:g}"


@dataclass(frozen=True)
class Wishes:
    """How to search. text: what sensitivity is measured on; None: every tensor's relative error counts alike.

    rows, seed    of the sample that errors are worked out on
    measurements  about the most groups of tensors whose sensitivity is measured one by one
    refine        rounds of measuring once more around what was found
    """

    types: tuple[TensorType, ...]
    repacked: bool = False
    text: Path | None = None
    n_ctx: int = 512
    chunks: int = 8
    rows: int = 64
    seed: int = 0
    measurements: int = 128
    refine: int = 0
    threads: int | None = None


@dataclass
class Result:
    """A recipe and what is known of it. measured: on the calibration text, which the search has seen."""

    text: str
    found: Found
    types: dict[str, TensorType]
    plan: Plan
    measured: Divergence | None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.text,
            "tensors": {name: kind.name for name, kind in self.types.items()},
            "total_bytes": self.plan.total_bytes,
            "file_bytes": self.plan.file_bytes,
            "bits_per_weight": self.plan.bits_per_weight,
            "types": {name: {"tensors": n, "nbytes": size} for name, (n, size) in self.plan.histogram().items()},
            "predicted_damage": self.found.predicted,
            "kld_mean": self.measured.mean if self.measured is not None else None,
            "kld_error": self.measured.error if self.measured is not None else None,
            "warnings": self.plan.warnings,
        }


def parse_types(text: str | None) -> tuple[TensorType, ...]:
    """'iq2_k,iq3_k,default': names of types, `default` for the usual set, which None stands for too. Raises RecipeError."""
    names = [part.strip() for part in (text or "default").split(",") if part.strip()]
    found: dict[str, TensorType] = {}
    for name in names:
        for one in USUAL if name.lower() == "default" else [name]:
            kind = parse_type(one, "--types")
            found[kind.name] = kind
    return tuple(found.values())


class State:
    """Measurements on disk, of one model with one imatrix: errors[tensor][type], divergences[text][types]."""

    def __init__(self, path: Path | None, key: str):
        self.path, self.key, self._saved = path, key, time.monotonic()
        self.errors: dict[str, dict[str, float]] = {}
        self.divergences: dict[str, dict[str, list[float]]] = {}
        if path is None or not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            same = found["key"] == key
            self.errors, self.divergences = (found["errors"], found["divergences"]) if same else ({}, {})
        except (ValueError, KeyError, TypeError, OSError):
            raise PlanError(f"{path} is not what a search keeps there; remove it, or give another output") from None
        if not same:
            click.echo(f"note: {path} is of another model, imatrix or seed: measured anew", err=True)

    def save(self, now: bool = False) -> None:
        if self.path is None or (not now and time.monotonic() - self._saved < SAVE_EVERY):
            return
        save_text(self.path, json.dumps({"key": self.key, "errors": self.errors, "divergences": self.divergences}))
        self._saved = time.monotonic()


class Job:
    """A search over one model. fixed: rules that are not to be touched; the tensors they take keep what they say.

    state: where measurements are kept; None: nowhere.
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
        quiet: bool = False,
    ):
        self.source, self.importance, self.wishes = source, importance, wishes
        self.fixed, self.fixed_text, self.quiet = list(fixed), fixed_text.strip(), quiet
        matcher = Matcher(self.fixed)
        self.tensors = {name: t for name, t in choosable(source).items() if matcher.first(name) is None}
        if not self.tensors:
            raise PlanError(f"{source.path}: there is no tensor left that a type could be chosen for")
        has = {name: importance is not None and importance.of(t) is not None for name, t in self.tensors.items()}
        self.options = {name: fitting(t, wishes.types, has[name]) for name, t in self.tensors.items()}
        self.state = State(state, _key(source, importance, wishes))

    # -- measuring

    @cached_property
    def search(self) -> Search:
        """With all errors and sensitivities known."""
        try:
            return self._measured()
        except KeyboardInterrupt:
            self.state.save(now=True)
            raise KeyboardInterrupt(TO_GO_ON) from None

    def _measured(self) -> Search:
        wishes = self.wishes
        with self._bar(len(self.tensors), "errors of types", "tensor") as bar:
            work = errors(self.tensors, self.options, self.importance, self.state.errors, rows=wishes.rows, seed=wishes.seed)
            for name, found in work:
                self.state.errors[name] = self.state.errors.get(name, {}) | found
                self.state.save()
                bar.update()
        self.state.save(now=True)
        search = Search(self.tensors, self.options, self.state.errors, grouped(list(self.tensors), wishes.measurements))
        if wishes.text is None:
            return search
        probes = search.probes(PROBES)
        with self._bar(len(probes), "sensitivity", "group") as bar:
            for group, types in probes:
                bar.set_postfix_str(group.name, refresh=False)
                search.learn(group, types, self.divergence(types)[0])
                bar.update()
        self.state.save(now=True)
        return search

    def divergence(self, types: Mapping[str, TensorType]) -> tuple[float, float]:
        """(mean, standard error) of the model with these tensors quantised, from the state if it was measured before."""
        known = self.state.divergences.setdefault(self._text_key, {})
        key = hashlib.sha256("\n".join(sorted(f"{n}={k.name}" for n, k in types.items())).encode()).hexdigest()[:24]
        if key not in known:
            found = self._reference.with_types(types, self.importance)
            known[key] = [found.mean, found.error]
            self.state.save()
        return known[key][0], known[key][1]

    @cached_property
    def _words(self) -> str:
        assert self.wishes.text is not None
        return self.wishes.text.read_text("utf-8", "replace")

    @cached_property
    def _text_key(self) -> str:
        return f"{hashlib.sha256(self._words.encode()).hexdigest()[:24]}, {self.wishes.n_ctx}, {self.wishes.chunks}"

    @cached_property
    def _reference(self) -> Reference:
        from ..runtime.sensitivity import Reference

        settings: dict[str, Any] = {"exact": True}
        if self.wishes.threads is not None:
            settings["threads"] = self.wishes.threads
        return Reference(self.source, self._words, self.wishes.n_ctx, self.wishes.chunks, **settings)

    def _bar(self, total: int, label: str, unit: str) -> tqdm:
        return tqdm(total=total, desc=label, unit=unit, disable=self.quiet, dynamic_ncols=True, file=sys.stderr)

    # -- choosing

    def find(self, target: Target, command: str = "") -> Result:
        """The recipe for a target. Raises PlanError when the types allowed cannot reach it."""
        found = self._solve(target)
        if self.wishes.text is not None and self.wishes.refine:
            found = self._refined(found, target)
        types = packed(found.types, self.tensors, target.gpu) if self.wishes.repacked else found.types
        measured = None
        if self.wishes.text is not None:
            from ..runtime.sensitivity import Divergence

            measured = Divergence(*self.divergence(found.types))
            self.state.save(now=True)
        text = self._text(types, found, target, measured, command)
        return Result(text, found, types, self.plan(text), measured)

    def _solve(self, target: Target) -> Found:
        return self._of_size(target) if target.divergence is None else self._of_divergence(target.divergence)

    def _refined(self, found: Found, target: Target) -> Found:
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

    def plan(self, text: str) -> Plan:
        """What `quantize` would make of a recipe."""
        return plan_quantize(
            self.source,
            "out.gguf",
            rules=parse_rules(text),
            recipe_text=text,
            importance=self.importance,
            ignore_imatrix_rules=True,
            allow_requantize=True,
            version=__version__,
        )

    def _of_size(self, target: Target) -> Found:
        search = self.search
        lowest = search.found({name: kinds[0] for name, kinds in self.options.items()})
        plan = self.plan(self._text(lowest.types, lowest, target, None, "") + "#" * RESERVE)
        if target.bits is not None:
            whole = int(target.bits * sum(t.n_elements for t in self.source.tensors.values()) / 8)
            beside = plan.total_bytes - lowest.nbytes
        else:
            assert target.size is not None
            whole, beside = target.size, plan.file_bytes - lowest.nbytes
        for _ in range(8):
            found = search.within(self._budgets(target, plan, whole - beside, whole))
            plan = self.plan(self._text(found.types, found, target, None, "") + "#" * RESERVE)
            over = (plan.total_bytes if target.bits is not None else plan.file_bytes) - whole
            if over <= 0:
                return found
            beside += over  # a longer recipe makes a longer header
        raise MillError(f"no recipe of at most {target.text} was found; ask for a little more")

    def _bend(self, found: Found) -> None:
        """Corrects the groups' sensitivities by what a step up and a step down from what was found do to the divergence."""
        search = self.search
        with self._bar(len(search.groups), "refining", "group") as bar:
            for group in search.groups:
                down, up = search.neighbours(found, group)
                low, high = (sum(self.state.errors[n][k.name] for n, k in types.items()) for types in (up, down))
                if high > low:
                    worse, better = (self.divergence({**found.types, **types})[0] for types in (down, up))
                    search.correct(group, found, (worse - better) / (high - low), TRUST)
                bar.update()

    def _budgets(self, target: Target, plan: Plan, room: int, whole: int) -> list[Budget]:
        """room: bytes for the tensors that types are chosen for; plan: says what the others take."""
        least = self.search.span()[0]
        if room < least:
            raise PlanError(
                f"{target.text} cannot be reached: with the smallest types allowed it takes {gib(least + whole - room)} "
                "(allow smaller ones with --types)"
            )
        if target.gpu is None or target.gpu_bytes is None:
            return [Budget(room)]
        others = sum(o.nbytes for o in plan.outputs if target.gpu.search(o.name) and o.name not in self.tensors)
        gpu = Budget(target.gpu_bytes - others, target.gpu)
        names = {name for name in self.tensors if target.gpu.search(name)}
        if not names:
            raise PlanError(f"--gpu {target.gpu.pattern!r} finds no tensor that a type could be chosen for")
        sizes = [[kind.nbytes(self.tensors[name].shape) for kind in self.options[name]] for name in names]
        if not sum(map(min, sizes)) <= gpu.nbytes:
            raise PlanError(f"--gpu-size {gib(target.gpu_bytes)}: with the smallest types allowed these tensors take more")
        taken = self.search.within([gpu]).nbytes
        return [gpu, Budget(room - taken)]

    def _of_divergence(self, wanted: float) -> Found:
        """Predictions add up, which is too much where much is damaged: they are scaled by what is measured, until it fits."""
        if self.wishes.text is None:
            raise PlanError("--max-kld needs a text to measure on (search: -f TEXT, quantize: --calibration TEXT)")
        search, allowed, best, got = self.search, wanted, None, 0.0
        for _ in range(8):
            try:
                found = search.below(allowed)
            except PlanError:
                found = search.found({name: self._finest(name) for name in self.tensors})
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
        self, types: Mapping[str, TensorType], found: Found, target: Target, measured: Divergence | None, command: str
    ) -> str:
        wishes, nbytes = self.wishes, found.nbytes
        name = self.source.metadata.get("general.name") or Path(self.source.path).name
        lines = [f"# {name}: found by ggufmill {__version__} for {target.text}"]
        elements = sum(self.tensors[n].n_elements for n in types)
        lines.append(f"# {len(types)} tensors in {nbytes:,} bytes, {8 * nbytes / elements:.3f} bits per weight of these")
        if wishes.text is not None:
            where = f"{wishes.text.name}, {wishes.chunks} windows of {wishes.n_ctx}"
            figure = f", measured {measured.mean:.4g} +/- {measured.error:.2g}" if measured is not None else ""
            lines.append(f"# KL divergence on {where}: predicted {found.predicted:.4g}{figure}")
        else:
            lines.append(f"# No text was given: relative errors of tensors count alike, in all {found.predicted:.4g}")
        importance = "with an imatrix" if self.importance is not None else "without an imatrix"
        lines.append(f"# Errors of {wishes.rows} rows per tensor, seed {wishes.seed}, {importance}")
        if command:
            lines.append(f"# {command}")
        others = [n for n in self.source.tensors if n not in types and n.startswith("blk.")]
        given = [self.fixed_text] if self.fixed_text else []
        return "\n".join([*lines, *given, rules_text(types, others)])


def _key(source: TensorSource, importance: Importance | None, wishes: Wishes) -> str:
    digest = hashlib.sha256(f"{source.identity}\0{wishes.rows}\0{wishes.seed}\0{__version__}".encode())
    for name, mean in sorted(importance.means.items()) if importance is not None else ():
        digest.update(name.encode() + mean.tobytes())
    return digest.hexdigest()[:32]


def recipe_target(recipe: Recipe, size: str | None, bits: float | None, divergence: float | None) -> Target | None:
    """What the command line asks for, else the recipe's [quantize] target_size or target_bpw; None if neither does."""
    if size is not None or bits is not None or divergence is not None:
        return Target(parse_size(size) if size is not None else None, bits, divergence)
    said = recipe.stages.get("quantize", {})
    if "target_size" not in said and "target_bpw" not in said:
        return None
    bytes_ = said.get("target_size")
    return Target(parse_size(bytes_) if isinstance(bytes_, str) else bytes_, said.get("target_bpw"))


def search_for(
    target: Target,
    source: TensorSource,
    importance: Importance | None,
    wishes: Wishes,
    rules: Sequence[Rule],
    rules_text: str,
    out: Path | None,
    *,
    quiet: bool,
) -> str:
    """The text of the recipe that is found. out: the model to be written; the recipe and what was measured are kept beside
    it as OUT.recipe.txt and OUT.state.json (None: nowhere)."""
    state = out.with_name(out.name + ".state.json") if out is not None else None
    job = Job(source, importance, wishes, fixed=rules, fixed_text=rules_text, state=state, quiet=quiet)
    result = job.find(target)
    if out is not None:
        save_text(out.with_name(out.name + ".recipe.txt"), result.text)
    return result.text


def save_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(path)


def command_line() -> str:
    """As it was typed, for the recipe's header."""
    return "ggufmill " + " ".join(shlex.quote(argument) for argument in sys.argv[1:])
