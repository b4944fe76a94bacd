"""The result of a search: the recipe's text, its plan, predicted and measured errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data_classes import dataclass
from ...formats import TensorSource, TensorType
from ...formats.metadata_values import text_of
from ...jobs.plan import Plan
from ...quantize.search.type_search import TypeAssignment
from ...version import __version__
from ..common.figures import DIVERGENCE_DIGITS, bits_per_weight_text, error_text
from ..common.shown import shown
from .options import SearchOptions, SearchTarget
from .weighting import ErrorWeighting

if TYPE_CHECKING:
    from ...runtime.evaluate.sensitivity import Divergence


@shown
@dataclass
class SearchResult:
    """A recipe and what is known of it.

    target       what was to be reached
    text         the recipe
    assignment   the types before they were interleaved, with the divergence predicted for them
    types        tensor name -> type, as the recipe says
    plan         what `quantize_model` makes of the recipe
    measured     the divergence on the calibration text, which the search has seen; None without a text
    requantizes  whether `quantize_model` takes the recipe only with allow_requantize
    weighting    what the errors of types were weighted by
    out          the file that the recipe was written to, if it was
    """

    target: SearchTarget
    text: str
    assignment: TypeAssignment
    types: dict[str, TensorType]
    plan: Plan
    measured: Divergence | None
    requantizes: bool
    weighting: ErrorWeighting
    out: Path | None = None

    def figures(self) -> dict[str, Any]:
        """Sizes, and the divergence as it was predicted and as it was measured, as JSON."""
        return {
            "total_bytes": self.plan.total_bytes,
            "file_bytes": self.plan.file_bytes,
            "bits_per_weight": self.plan.bits_per_weight,
            "predicted_damage": self.assignment.predicted,
            "kld_mean": self.measured.mean if self.measured is not None else None,
            "kld_error": self.measured.error if self.measured is not None else None,
        }

    def as_json(self) -> dict[str, Any]:
        """What --json prints: out, target, recipe (its text), tensors and types, the figures, errors_weighted_by, warnings."""
        return {
            "out": str(self.out) if self.out is not None else None,
            "target": self.target.text,
            "recipe": self.text,
            "tensors": {name: type.name for name, type in self.types.items()},
            "types": {name: {"tensors": n, "nbytes": size} for name, (n, size) in self.plan.histogram().items()},
            **self.figures(),
            "errors_weighted_by": self.weighting.as_json(),
            "warnings": self.plan.warnings,
        }


def name_recipe_in_warnings(plan: Plan) -> None:
    """Rewrites warnings about lines of the search's recipe, so that nobody looks for these lines in their own."""
    plan.warnings[:] = [f"the recipe found, {w}" if w.startswith("line ") else w for w in plan.warnings]


def header_lines(
    source: TensorSource,
    assignment: TypeAssignment,
    target: SearchTarget,
    options: SearchOptions,
    weighting: ErrorWeighting,
    *,
    measured: Divergence | None = None,
    command: str = "",
) -> list[str]:
    """The comments at the head of a recipe: the model, the target, the figures, how it was searched for, and the command."""
    name = text_of(source.metadata, "general.name") or Path(source.path).name
    elements = sum(source.tensors[n].n_elements for n in assignment.types)
    lines = [f"{name}: found by ggufmill {__version__} for {target.text}"]
    lines.append(
        f"{len(assignment.types)} tensors in {assignment.nbytes:,} bytes, "
        f"{bits_per_weight_text(8 * assignment.nbytes / elements)} of these"
    )
    if options.text is not None:
        where = f"{options.text.name}, {options.chunks} windows of {options.n_ctx}"
        figure = f", measured {error_text(measured.mean, measured.error, DIVERGENCE_DIGITS)}" if measured is not None else ""
        lines.append(f"KL divergence on {where}: predicted {assignment.predicted:.4g}{figure}")
    elif weighting.curvature:
        lines.append(f"No text was given: KL divergence predicted from curvature {assignment.predicted:.4g}")
    else:
        lines.append(f"No text was given: relative errors of tensors count alike, in all {assignment.predicted:.4g}")
    lines.append(f"Errors of {options.rows} rows per tensor, seed {options.seed}, {weighting.text}")
    texts = [" ".join(line.splitlines()).encode("utf-8", "backslashreplace").decode() for line in [*lines, command] if line]
    return [f"# {text}" for text in texts]
