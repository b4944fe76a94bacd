"""A recipe that was found: its text, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..formats import TensorSource, TensorType
from ..jobs.plan import Plan
from ..quantize.search.type_search import TypeAssignment
from .search_options import Target, Wishes

if TYPE_CHECKING:
    from ..runtime.evaluate.sensitivity import Divergence


@dataclass
class Result:
    """A recipe and what is known of it. measured: on the calibration text, which the search has seen."""

    text: str
    found: TypeAssignment
    types: dict[str, TensorType]
    plan: Plan
    measured: Divergence | None

    def figures(self) -> dict[str, Any]:
        """Sizes, and the divergence as it was predicted and as it was measured, as JSON."""
        return {
            "total_bytes": self.plan.total_bytes,
            "file_bytes": self.plan.file_bytes,
            "bits_per_weight": self.plan.bits_per_weight,
            "predicted_damage": self.found.predicted,
            "kld_mean": self.measured.mean if self.measured is not None else None,
            "kld_error": self.measured.error if self.measured is not None else None,
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.text,
            "tensors": {name: kind.name for name, kind in self.types.items()},
            "types": {name: {"tensors": n, "nbytes": size} for name, (n, size) in self.plan.histogram().items()},
            **self.figures(),
            "warnings": self.plan.warnings,
        }


def name_lines(plan: Plan) -> None:
    """Says of the warnings of a plan by a found recipe that their lines are of that one, not of what the user wrote."""
    plan.warnings[:] = [f"the recipe found, {w}" if w.startswith("line ") else w for w in plan.warnings]


def described(
    source: TensorSource,
    found: TypeAssignment,
    target: Target,
    wishes: Wishes,
    *,
    with_imatrix: bool,
    measured: Divergence | None = None,
    command: str = "",
) -> list[str]:
    """The comments that a recipe begins with: of which model it is, what for, and how it came about."""
    name = source.metadata.get("general.name") or Path(source.path).name
    elements = sum(source.tensors[n].n_elements for n in found.types)
    lines = [f"{name}: found by ggufmill {__version__} for {target.text}"]
    lines.append(
        f"{len(found.types)} tensors in {found.nbytes:,} bytes, {8 * found.nbytes / elements:.3f} bits per weight of these"
    )
    if wishes.text is not None:
        where = f"{wishes.text.name}, {wishes.chunks} windows of {wishes.n_ctx}"
        figure = f", measured {measured.mean:.4g} +/- {measured.error:.2g}" if measured is not None else ""
        lines.append(f"KL divergence on {where}: predicted {found.predicted:.4g}{figure}")
    else:
        lines.append(f"No text was given: relative errors of tensors count alike, in all {found.predicted:.4g}")
    importance = "with an imatrix" if with_imatrix else "without an imatrix"
    lines.append(f"Errors of {wishes.rows} rows per tensor, seed {wishes.seed}, {importance}")
    whole = [" ".join(line.splitlines()).encode("utf-8", "backslashreplace").decode() for line in [*lines, command] if line]
    return [f"# {line}" for line in whole]
