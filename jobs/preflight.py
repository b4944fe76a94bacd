"""Checks before a job writes anything: what could only fail, or destroy something, later; what is complete already."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from ..errors import PlanError
from ..operating_system.files import allocated_bytes
from .journal import is_complete_but_for_names, is_locked, journal_path
from .plan import Plan, PlannedFile


def preflight(
    plan: Plan,
    *,
    force: bool = False,
    resume: bool = False,
    inputs: list[Path] | None = None,
    existing: Collection[int] = (),
    needed: int | None = None,
) -> None:
    """Refuses, before anything is written, what could only fail or destroy something later. Raises PlanError.

    Refused: an output (or its .part or journal) that is an input, an output that exists (unless force) or is not a regular
    file, left-overs of another job (unless resume or force), a folder that cannot be written, and less free disk space than
    the exact size of the plan.

    existing: indexes of the plan's files that are complete already and stay (`complete_files`). needed: bytes of disk space,
    if not the size of the plan, for a job that frees space as it proceeds.
    """
    journal, parts = journal_path(plan), [f.part for f in plan.files]
    input_paths = {p.resolve() for p in inputs or []}
    for path in [f.path for f in plan.files] + [*parts, journal]:
        if path.is_dir():
            raise PlanError(f"{path} is a folder; choose another output")
        if path.resolve() in input_paths:
            raise PlanError(f"{path} is an input of this job; choose another output")
        if path.exists() and not path.is_file():
            raise PlanError(f"{path} is a device or pipe; give the name of a file")
    for path in (*parts, journal):
        if path.is_symlink():
            raise PlanError(f"{path} is a link; this job would write through it: remove it, or choose another output")
    for part in parts:
        if resume and not force and part.exists() and part.stat().st_nlink > 1:
            raise PlanError(f"{part} has another name too (a hard link), through which its bytes may have changed: remove it")
    can_resume = resume and journal.exists()
    present = [f.path for i, f in enumerate(plan.files) if i not in existing and f.path.exists()]
    if present and not force and not can_resume:
        raise PlanError(f"{present[0]} exists; use --force to replace it")
    if journal.exists() and is_locked(journal):
        raise PlanError(f"another job is writing {plan.files[0].path} at the moment (it holds {journal})")
    if journal.exists() and not (resume or force):
        raise PlanError(f"{journal} is left from an unfinished job; --resume continues it, --force starts over")
    parent = _existing_folder(plan.files[0].path.resolve().parent)
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise PlanError(f"the folder {parent} cannot be written to")
    if can_resume and not force and is_complete_but_for_names(journal):
        return
    if needed is None:
        needed = plan.missing_bytes(existing)
    check_space(parent, needed, parts)


def check_space(folder: Path, needed: int, parts: Collection[Path] = ()) -> None:
    """Raises PlanError when that many bytes are not free for files in a folder; what their .part files take counts as free."""
    parent = _existing_folder(folder.resolve())
    allocated = sum(allocated_bytes(part) for part in parts if part.exists())
    missing = needed - allocated - shutil.disk_usage(parent).free
    if missing > 0:
        raise PlanError(f"the output takes {needed:,} bytes, and {parent} has {missing:,} bytes too few free for it")


def _existing_folder(folder: Path) -> Path:
    """The folder, or the first above it that exists: `execute` creates those below."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def complete_files(plan: Plan) -> set[int]:
    """Indexes of the plan's files that exist already with exactly the planned header and size.

    Raises PlanError for a file that exists but has other tensors, types or metadata.
    """
    complete = set()
    for index, file in enumerate(plan.files):
        same = is_as_planned(file)
        if same is False:
            raise PlanError(f"{file.path} exists, but is not what this job would write; remove it, or choose another output")
        if same:
            complete.add(index)
    return complete


def is_complete(plan: Plan, inputs: Collection[Path] = ()) -> bool:
    """Whether the plan has been executed: its files exist with exactly the planned headers and sizes, no .part or journal is
    left, and no input that still exists is newer. Tensor data is not read."""
    leftovers = [journal_path(plan), *(f.part for f in plan.files)]
    if any(path.exists() for path in leftovers) or not all(is_as_planned(file) for file in plan.files):
        return False
    oldest, now = min(file.path.stat().st_mtime_ns for file in plan.files), time.time_ns()
    times = [path.stat().st_mtime_ns for path in inputs if path.exists()]
    return all(changed <= oldest or changed > now for changed in times)  # a time in the future says nothing


def is_as_planned(file: PlannedFile, path: Path | None = None) -> bool | None:
    """Whether an existing file has the planned size and header; None if there is no file. path: where, if not at its place."""
    path = path or file.path
    if not path.is_file():
        return None
    with path.open("rb") as existing:
        if os.fstat(existing.fileno()).st_size != file.nbytes:
            return False
        header = file.header
        return existing.read(len(header)) == header
