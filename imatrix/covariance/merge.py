"""Covariance files of parts of a text, merged into one: means, weighed by the tokens that they were taken of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...errors import MillError
from ...quantize.covariance.matrix.triangles import folded_blocks
from ...quantize.covariance.row_blocks import RowBlocks
from ...simd.memory import scratch
from ...simd.workers import ALONE, Workers
from .files import OUTPUT_SUFFIX, CovarianceFile, Origin, StoredInput, read_part
from .writer import CovarianceWriter, PlannedInput

BLOCK_BYTES = 64 << 20  # of a merged triangle in memory


def merge_files(
    files: Sequence[CovarianceFile],
    out: Path,
    on_part: Callable[[int, int, str], None] = lambda done, total, name: None,
    nbytes: int = BLOCK_BYTES,
    workers: Workers = ALONE,
) -> CovarianceWriter:
    """Writes the merged file, part by part; returns its writer. The parts of `out` have 32 bits if those of any file have.

    on_part: called with the bytes that are written, those of the whole file, and the name of the last part. nbytes: of a part
    that are in memory, at the most, but some rows at the least.

    An input that only some files have is merged from those. Raises MillError for files of different models.
    """
    planned = _common(files)
    first = files[0].model
    datasets = tuple(dict.fromkeys(name for file in files for name in file.model.datasets))
    chunks = sum(file.model.chunk_count for file in files)
    origin = Origin(first.architecture, first.model, datasets, chunks, first.chunk_size)
    types = {one.triangle.type.name for file in files for one, _ in file.entries.values()}
    writer = CovarianceWriter(out, list(planned.values()), origin, "f32" if "f32" in types else "i16")
    writer.check_space()
    writer.begin()
    entries = [(file, file.entries) for file in files]
    done = 0
    for name, one in planned.items():
        for matrix in range(one.matrices):
            parts = [(file, own[name][0]) for file, own in entries if name in own]

            def on_block(block: int, name: str = name) -> None:
                nonlocal done
                on_part(done := done + block, writer.nbytes, name)

            _write_mean(writer, name, parts, matrix, nbytes, workers, on_block)
    writer.finish()
    on_part(writer.nbytes, writer.nbytes, "")  # with the header, and what aligns parts
    return writer


def _common(files: Sequence[CovarianceFile]) -> dict[str, PlannedInput]:
    """The inputs and outputs of all files. Raises MillError if two have a different one, or none in common."""
    first, *others = ({name: _planned(*one) for name, one in file.entries.items()} for file in files)
    found = dict(first)
    for file, own in zip(files[1:], others, strict=True):
        if not first.keys() & own.keys() or file.model.architecture != files[0].model.architecture:
            raise MillError(f"{files[0].path} and {file.path} have no input in common: not of one model")
        for name, one in own.items():
            other = found.setdefault(name, one)
            if one != other and one.blocks is not None:
                raise MillError(
                    f"{name.removesuffix(OUTPUT_SUFFIX)} has other blocks of rows in {file.path} than in another file: not of "
                    "one model, or collected with another --curvature-rows"
                )
            if one != other:
                raise MillError(
                    f"the input of {name} has {other.columns} columns in one file and {one.columns} in {file.path}, or is "
                    "shared by other tensors: not of one model"
                )
    return dict(sorted(found.items(), key=lambda one: one[1].blocks is not None))  # inputs come first, in their order


def _planned(stored: StoredInput, blocks: RowBlocks | None) -> PlannedInput:
    return PlannedInput(stored.tensors, stored.columns, stored.matrices, blocks)


def _write_mean(
    writer: CovarianceWriter,
    name: str,
    parts: Sequence[tuple[CovarianceFile, StoredInput]],
    matrix: int,
    nbytes: int,
    workers: Workers,
    on_block: Callable[[int], None],
) -> None:
    """Writes the mean over all tokens, block by block, and tells of the bytes of each; all parts stay in their files."""
    total = sum(int(stored.tokens[matrix]) for _, stored in parts)
    read = [read_part(file.path, stored, matrix, is_mapped=True) for file, stored in parts]
    shares = [np.float32(part.tokens / max(1, total)) for part in read]
    mean_squares = np.zeros(read[0].columns, np.float32)
    for part, share in zip(read, shares, strict=True):
        mean_squares += share * part.mean_squares

    def rows(first: int, stop: int, out: np.ndarray) -> None:
        values = scratch("rows of a part", out.shape, np.float32)
        out[:] = 0
        for part, share in zip(read, shares, strict=True):
            part.rows(first, stop, values)
            values *= share
            out += values

    def blocks() -> Iterator[np.ndarray]:
        for block in folded_blocks(mean_squares, writer.dtype, rows, nbytes, workers):
            yield block
            on_block(block.nbytes)

    writer.write_blocks(name, matrix, blocks(), mean_squares, total)
