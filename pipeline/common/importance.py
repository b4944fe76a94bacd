"""Loading an importance matrix for a model, with notes on what it covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...formats import PlanError, TensorSource
from ...imatrix import Imatrix, load
from ...imatrix.coverage import COLLECTED_ON_REQUEST, coverage, layer_and_role
from ...imatrix.entries import MIN_TOKENS
from ...quantize.importance import IMPORTANCE_SUBSTITUTES, Importance
from ...quantize.recipes.type_selection import is_quantizable
from .messages import note


def load_importance(
    path: Path, source: TensorSource, *, include: Sequence[str] = (), exclude: Sequence[str] = (), quiet: bool = False
) -> Importance:
    """Reads an importance matrix and fits it to the source; notes how many of its tensors have data, and which have none.

    include, exclude: only entries with, or without, one of these texts in their name. quiet: no notes. Raises FormatError and
    MillError as `load` and `Imatrix.fit`, PlanError when no entry is left.
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
    for line in () if quiet else _coverage_lines(imatrix, importance, source, path.name):
        note(line, detail=True)
    return importance


def _coverage_lines(imatrix: Imatrix, importance: Importance, source: TensorSource, name: str) -> list[str]:
    """Which weight tensors have data and which have none, substitutes counted (docs/formats/mixes.md, substitutes)."""
    wanted = [tensor for tensor in source.tensors.values() if is_quantizable(tensor)]
    own = {tensor.name for tensor in wanted if tensor.name in importance.means}
    without = [tensor.name for tensor in wanted if importance.for_tensor(tensor) is None]
    borrowed = len(wanted) - len(without) - len(own - set(without))
    lines = [
        f"imatrix {name}: data for {len(wanted) - len(without)} of {len(wanted)} weight tensors"
        + (f", {borrowed} of them from a tensor with the same input" if borrowed else "")
    ]
    without = [name for name in without if layer_and_role(name)[1] not in COLLECTED_ON_REQUEST]  # which is usual
    if without:
        roles: dict[str, list[int]] = {}
        for layer, role in map(layer_and_role, without):
            roles.setdefault(role, []).extend([layer] if layer is not None else [])
        lines.append(f"imatrix {name}: none for {', '.join(f'{role}{_layers(layers)}' for role, layers in roles.items())}")
    unknown = [entry for entry in imatrix.entries if entry not in source.tensors and entry not in _used_as_substitute(source)]
    if unknown:
        lines.append(f"imatrix {name}: {len(unknown)} entries name no tensor of this model (first {unknown[0]}): not used")
    rows = coverage(imatrix, [tensor.name for tensor in wanted])
    none, few = ([(row.layer, i) for row in rows for i in getattr(row, kind)] for kind in ("unseen", "undersampled"))
    if none or few:
        layer, expert = (none or few)[0]
        lines.append(
            f"imatrix {name}: {len(none)} of {sum(row.experts for row in rows)} experts saw no token, {len(few)} fewer than "
            f"{MIN_TOKENS} (the first: expert {expert} of layer {layer}); they are filled up with the mean of the others"
        )
    return lines


def _layers(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    return f" (layer {layers[0]})" if len(layers) == 1 else f" ({len(layers)} layers, {min(layers)} to {max(layers)})"


def _used_as_substitute(source: TensorSource) -> set[str]:
    """Names of entries whose data serves a tensor of another name, of latent attention in another layout too."""
    names = set()
    for name in source.tensors:
        for suffix, other in IMPORTANCE_SUBSTITUTES:
            if name.endswith(suffix):
                names.add(name.replace(suffix, other))
        if ".attn_kv_a_mqa." in name:
            names.update(name.replace("attn_kv_a_mqa", f"attn_{part}") for part in ("kv_b", "k_b", "v_b"))
    return names
