"""Loading an imatrix for a quantise job, saying what it covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from ..formats import PlanError, TensorSource
from ..imatrix import Imatrix, load
from ..imatrix.coverage import place
from ..imatrix.entries import FEW
from ..quantize.planning import IMPORTANCE_SUBSTITUTES, Importance
from ..quantize.recipes.type_selection import is_quantizable


def load_importance(
    path: Path, source: TensorSource, *, quiet: bool = False, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Importance:
    """Reads and fits the imatrix to the source, and prints to stderr how many tensors it covers, and which not.

    include, exclude: only entries with, or without, one of these texts in their name.
    """
    imatrix = load(path)
    if include or exclude:
        entries = {
            name: entry
            for name, entry in imatrix.entries.items()
            if (not include or any(part in name for part in include)) and not any(part in name for part in exclude)
        }
        if not entries:
            raise PlanError(f"{path}: no entry is left after --include-weights/--exclude-weights")
        imatrix = replace(imatrix, entries=entries)
    imatrix = imatrix.fit(source, str(path))
    importance = Importance(imatrix.means(), imatrix.metadata(path.name))
    if not quiet:
        for line in _covered(imatrix, importance, source, path.name):
            click.echo(line, err=True)
    return importance


def _covered(imatrix: Imatrix, importance: Importance, source: TensorSource, name: str) -> list[str]:
    """What there is data for and what not, a tensor's substitutes (FORMATS E.5) counted."""
    wanted = [tensor for tensor in source.tensors.values() if is_quantizable(tensor)]
    own = {tensor.name for tensor in wanted if tensor.name in importance.means}
    without = [tensor.name for tensor in wanted if importance.for_tensor(tensor) is None]
    borrowed = len(wanted) - len(without) - len(own - set(without))
    lines = [
        f"imatrix {name}: data for {len(wanted) - len(without)} of {len(wanted)} weight tensors"
        + (f", {borrowed} of them from a tensor with the same input" if borrowed else "")
    ]
    if without:
        kinds: dict[str, list[int]] = {}
        for layer, kind in map(place, without):
            kinds.setdefault(kind, []).extend([layer] if layer is not None else [])
        lines.append(f"imatrix {name}: none for {', '.join(f'{k}{_layers(v)}' for k, v in kinds.items())}")
    strange = [entry for entry in imatrix.entries if entry not in source.tensors and entry not in _used_as_substitute(source)]
    if strange:
        lines.append(f"imatrix {name}: {len(strange)} entries name no tensor of this model (first {strange[0]}): not used")
    none, few = imatrix.starved(), imatrix.sparse()
    if none or few:
        first, experts = next(iter((none or few).items()))
        lines.append(
            f"imatrix {name}: {sum(map(len, none.values()))} experts saw no token, {sum(map(len, few.values()))} fewer than "
            f"{FEW} (first {first} #{experts[0]}); they are filled up with the mean of their tensor's other experts"
        )
    return lines


def _layers(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    return f" (layer {layers[0]})" if len(layers) == 1 else f" ({len(layers)} layers, {min(layers)} to {max(layers)})"


def _used_as_substitute(source: TensorSource) -> set[str]:
    """Names whose data serves a tensor of the model, and of latent attention those of other layouts."""
    names = set()
    for name in source.tensors:
        for part in IMPORTANCE_SUBSTITUTES:
            if name.endswith(part[0]):
                names.add(name.replace(*part))
        if ".attn_kv_a_mqa." in name:
            names.update(name.replace("attn_kv_a_mqa", f"attn_{kind}") for kind in ("kv_b", "k_b", "v_b"))
    return names
