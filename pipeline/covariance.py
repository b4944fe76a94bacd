"""`ggufmill imatrix show` and `merge` of covariances of the inputs of a model's matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..data_classes import dataclass
from ..imatrix.covariance.files import Origin, open_covariance
from ..imatrix.covariance.merge import BLOCK_BYTES, merge_files
from ..imatrix.covariance.statistics import InputStatistics, statistics
from ..operating_system.processors import available_cpus
from ..quantize.covariance.matrix.triangles import RUN_BYTES
from ..simd.workers import Workers
from .common.arguments import Size, as_paths, check_new, refuse_inputs
from .common.memory import PROGRAM, memory_budget, warn_over
from .common.progress import OnProgress, Stage, reporting
from .common.shown import shown


@shown
@dataclass(frozen=True)
class MergedCovariance:
    """A covariance file that was made of others. path: where it is; inputs: how many it has; chunks: windows of all texts;
    outputs: tensors with second moments of gradients."""

    path: Path
    inputs: int
    chunks: int
    outputs: int = 0

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the fields."""
        return {"path": str(self.path), "inputs": self.inputs, "outputs": self.outputs, "chunks": self.chunks}


def merge_covariance(
    files: Sequence[str | Path],
    out: str | Path,
    *,
    force: bool = False,
    memory: Size | None = None,
    progress: OnProgress | bool | None = None,
) -> MergedCovariance:
    """Merges covariances that were collected from parts of a text, or from several texts, each weighed by its tokens.

    files  what `compute_imatrix` wrote to `covariance`; out: the file to write; force: an existing one is replaced
    memory    bytes, or a size such as '1G', that it may take beside the files; a warning says where that cannot be
    progress  called with `Progress` reports, stage 'covariances' in bytes

    Returns a `MergedCovariance`. Raises FormatError for a file that is none or is damaged, MillError for files of different
    models.

    Example:
        >>> from ggufmill import compute_imatrix, merge_covariance
        >>> from ggufmill.recipes import FOLDER
        >>> demo, text = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"
        >>> _ = compute_imatrix(demo, text, "1.imatrix", covariance="1.cov", n_ctx=64, chunks=1, force=True)
        >>> _ = compute_imatrix(demo, text, "2.imatrix", covariance="2.cov", n_ctx=64, chunks=1, from_chunk=1, force=True)
        >>> merge_covariance(["1.cov", "2.cov"], "both.cov", force=True).chunks
        2
    """
    out = Path(out)
    opened = [open_covariance(path) for path in files]
    refuse_inputs([out], as_paths(files))
    check_new(out, force)
    workers, left = _team(memory, 2)
    with reporting(progress) as report:
        stage = Stage(report, "covariances")
        writer = merge_files(opened, out, lambda done, total, name: stage.reach(done, total, name), left, workers)
    merged = open_covariance(writer.path)
    return MergedCovariance(out, len(merged.inputs), merged.model.chunk_count, len(merged.outputs))


def _team(memory: Size | None, runs: int) -> tuple[Workers, int]:
    """As many threads as there is memory for, each with so many runs of rows; and the bytes that are left, of what merging
    needs."""
    budget, each = memory_budget(memory) - PROGRAM - RUN_BYTES, runs * RUN_BYTES
    warn_over(PROGRAM + RUN_BYTES + each, memory_budget(memory), "one thread", "there is no way to take less")
    threads = max(1, min(available_cpus(), budget // each))
    return Workers(threads), min(BLOCK_BYTES, max(RUN_BYTES, budget - threads * each))


@shown
@dataclass(frozen=True)
class CovarianceStatistics:
    """Statistics of a covariance file.

    path, nbytes  the file and its size
    model         what it was collected from
    inputs        an `InputStatistics` for each
    """

    path: Path
    nbytes: int
    model: Origin
    inputs: list[InputStatistics]

    def as_json(self) -> dict[str, Any]:
        """What --json prints: path, nbytes, architecture, model, datasets, chunk_count, chunk_size, inputs."""
        origin = {**asdict(self.model), "datasets": list(self.model.datasets)}
        return {"path": str(self.path), "nbytes": self.nbytes, **origin, "inputs": [asdict(one) for one in self.inputs]}


def show_covariance(
    file: str | Path, *, memory: Size | None = None, progress: OnProgress | bool | None = None
) -> CovarianceStatistics:
    """Reads a covariance file: of every input its size, the tokens seen, and how correlated its columns are.

    memory: as of `merge_covariance`; progress: called with `Progress` reports, stage 'covariances' in bytes

    Returns a `CovarianceStatistics`. Raises FormatError for a file that is none, or is damaged.

    Example:
        >>> from ggufmill import compute_imatrix, show_covariance
        >>> from ggufmill.recipes import FOLDER
        >>> demo, text = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"
        >>> _ = compute_imatrix(demo, text, "demo.imatrix", covariance="demo.cov", n_ctx=64, chunks=1, force=True)
        >>> first = show_covariance("demo.cov").inputs[0]
        >>> first.name, first.columns
        ('output.weight', 256)
    """
    opened = open_covariance(file)
    workers, _ = _team(memory, 1)
    with reporting(progress) as report:
        stage = Stage(report, "covariances", sum(stored.nbytes for stored, _ in opened.entries.values()))
        return CovarianceStatistics(
            opened.path, opened.path.stat().st_size, opened.model, list(statistics(opened, workers, stage.advance))
        )
