"""Loading an imatrix for a quantise job, saying what it covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from ..formats import PlanError, TensorSource
from ..imatrix import load
from ..imatrix.entries import coverage
from ..quantize.choosing import quantisable
from ..quantize.planning import Importance


def load_importance(
    path: Path, source: TensorSource, *, quiet: bool = False, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Importance:
    """Reads and fits the imatrix to the source, and prints to stderr how many tensors it covers.

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
    if not quiet:
        covered, without = coverage(imatrix, [t.name for t in source.tensors.values() if quantisable(t)])
        click.echo(f"imatrix {path.name}: data for {len(covered)} of {len(covered) + len(without)} weight tensors", err=True)
        starved = imatrix.starved()
        if starved:
            name, experts = next(iter(starved.items()))
            click.echo(
                f"imatrix {path.name}: {sum(map(len, starved.values()))} experts saw no token (first {name} #{experts[0]}); "
                "they take the mean of their tensor's other experts",
                err=True,
            )
    return Importance(imatrix.means(), imatrix.metadata(path.name))
