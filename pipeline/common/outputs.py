"""Checks of small outputs before the work is done: never over an input, never over a file without force."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...errors import PlanError


def refuse_inputs(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Raises PlanError for an output that the call also reads, whatever `force` says."""
    read = {path.resolve() for path in inputs}
    for path in outputs:
        if path.resolve() in read:
            raise PlanError(f"{path} is an input of this job; choose another output")


def check_new(out: Path, force: bool) -> None:
    """Raises PlanError for an output that exists, without force, and as `check_folder` does."""
    if out.exists() and not force:
        raise PlanError(f"{out} exists; use --force to replace it")
    check_folder(out)


def check_folder(out: Path) -> None:
    """Raises PlanError if nothing can be written beside the output."""
    if not os.access(out.absolute().parent, os.W_OK):
        raise PlanError(f"{out.absolute().parent}: not a folder that can be written to")
