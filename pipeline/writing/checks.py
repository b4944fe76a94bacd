"""Checks during and after a job: that its inputs stay as they were, and that what was written is what was meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MillError
from ...formats import TensorSource
from ...formats.gguf import open_shards
from ...formats.hashes import hash_file
from ...formats.source import files_stamp
from ...jobs.atomic_write import write_lines
from ...jobs.plan import Plan
from ...jobs.written_hashes import WrittenHashes
from ..common.progress import OnProgress, Stage

if TYPE_CHECKING:
    from ...quantize.verify import Verification


def watch_inputs(inputs: Sequence[Path]) -> Callable[[], None]:
    """A function to call when all is read: it raises MillError if one of the files has changed since now (size or time)."""
    before = {path: files_stamp([path]) for path in inputs}

    def check_unchanged() -> None:
        for path, known in before.items():
            if files_stamp([path]) != known:
                raise MillError(
                    f"{path} has changed while it was read, so the output would be neither of the two; --force starts over"
                )

    return check_unchanged


def write_manifest(files: Sequence[Path], report: OnProgress, threads: int, hashes: WrittenHashes | None = None) -> Path:
    """Writes OUT.manifest next to the first of the files: sha256 of each of their tensors in the lines of `hash`. threads: see
    `hash_file`; hashes: those taken when they were written; None: the files are read."""
    path = files[0].with_name(files[0].name + ".manifest")
    if hashes is not None:
        write_lines(path, (entry.line() for entry in hashes.each()))
        return path
    opened = open_shards(files)
    stage = Stage(report, "checksums", sum(info.nbytes for info in opened.tensors.values()))
    write_lines(path, (entry.line() for entry in hash_file(opened, ["sha256"], progress=stage.advance, threads=threads)))
    return path


def verify_written(plan: Plan, source: TensorSource, report: OnProgress) -> Verification:
    """As `verify`, with progress."""
    from ...quantize.verify import verify

    return verify(plan, source, Stage(report, "verify", plan.total_bytes).advance)


def problem_line(verification: Verification, path: Path) -> str:
    """The tensors that are not as they should be, as one line; '' if all are."""
    problems = verification.problems
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{path}: {problems[0]}{more}" if problems else ""
