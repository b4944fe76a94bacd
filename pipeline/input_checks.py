"""What is checked beside and after a job: that its inputs stay as they were, and that what was written is what was meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..formats import MillError, TensorSource, open_gguf
from ..formats.hashes import hash_file
from ..formats.source import files_stamp
from ..jobs.atomic_write import write_text
from ..jobs.plan import Plan
from .console import byte_progress, table

if TYPE_CHECKING:
    from ..quantize.verify import Verification


def watch(inputs: Sequence[Path]) -> Callable[[], None]:
    """To be called when all is read: raises MillError if one of the files has another size or time of change than now."""
    before = {path: files_stamp([path]) for path in inputs}

    def unchanged() -> None:
        for path, known in before.items():
            if files_stamp([path]) != known:
                raise MillError(
                    f"{path} has changed while it was read, so the output would be neither of the two; --force starts afresh"
                )

    return unchanged


def write_manifest(first: Path) -> Path:
    """Writes OUT.manifest beside the model whose first file this is: sha256 in the lines of `hash`."""
    path = first.with_name(first.name + ".manifest")
    opened = open_gguf(first)
    total = sum(info.nbytes for info in opened.tensors.values())
    with byte_progress(total, "checksums", quiet=total < 1 << 30) as progress:
        lines = [f"{entry.line()}\n" for entry in hash_file(opened, ["sha256"], progress=progress)]
    write_text(path, "".join(lines))
    return path


def verified(plan: Plan, source: TensorSource) -> Verification:
    from ..quantize.verify import verify

    with byte_progress(plan.total_bytes, "verify", quiet=plan.total_bytes < 1 << 30) as progress:
        return verify(plan, source, progress)


def verification_text(found: Verification) -> str:
    """A row per type."""
    rows = [
        (
            t["type"],
            t["tensors"],
            t["rows"],
            *("-" if t[key] is None else f"{t[key]:.6f}" for key in ("error_mean", "error_max", "expected")),
            t["problems"] or "-",
        )
        for t in found.by_type()
    ]
    return table(("type", "tensors", "rows read", "mean error", "largest", "expected below", "problems"), rows)


def refuse_problems(found: Verification, path: Path) -> None:
    """Raises MillError if a tensor is not as it should be."""
    problems = found.problems
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise MillError(f"{path}: {problems[0]}{more}")
