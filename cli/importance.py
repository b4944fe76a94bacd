"""Loading an imatrix for a quantise job, saying what it covers."""

from __future__ import annotations

from pathlib import Path

import click

from ..formats import TensorSource
from ..imatrix import load
from ..imatrix.entries import coverage
from ..quantize.planning import Importance, quantisable


def load_importance(path: Path, source: TensorSource, *, quiet: bool = False) -> Importance:
    """Reads and fits the imatrix to the source, and prints to stderr how many tensors it covers."""
    imatrix = load(path).fit(source, str(path))
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
