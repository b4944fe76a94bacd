"""Covariance files: writing one, part by part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...data_classes import dataclass
from ...errors import MillError, PlanError
from ...formats import TYPES
from ...formats.gguf_header import header_bytes
from ...operating_system.files import sync_folder
from ...quantize.covariance.matrix.covariance_matrix import Covariance
from ...quantize.covariance.matrix.triangles import DTYPES, FoldedCovariance, fold, triangle_size
from ...quantize.covariance.row_blocks import RowBlocks
from .files import (
    CHECKSUMS,
    FILE_TYPE,
    MEAN_SQUARES,
    OUTPUT_ROWS,
    OUTPUT_RUNS,
    OUTPUTS,
    TOKENS,
    TRIANGLE,
    VERSION,
    Origin,
    part_checksum,
)
from .inputs import Input
from .outputs import MatrixOutput

_ALIGNMENT = 64


@dataclass(frozen=True)
class PlannedInput:
    """An input that a file will have: the tensors that share it, its columns, and how many matrices have their own. Or the
    outputs of a tensor (see `outputs`), with how its rows are divided into blocks, which are columns and matrices."""

    tensors: tuple[str, ...]
    columns: int
    matrices: int
    blocks: RowBlocks | None = None

    @property
    def name(self) -> str:
        """That of the first of the tensors that share the input."""
        return self.tensors[0]


class CovarianceWriter:
    """Writes a covariance file; parts may come in any order, and it gets its name when `finish` is called.

    path    of the complete file; part: its name until then
    nbytes  of the complete file
    """

    def __init__(self, path: Path, inputs: Sequence[PlannedInput], origin: Origin, type_name: str = "i16"):
        self.path, self.part, self.dtype = path, path.with_name(path.name + ".part"), DTYPES[type_name]
        tensors = []
        for one in inputs:
            name, matrices = one.name, one.matrices
            tensors += [
                (name + TRIANGLE, (triangle_size(one.columns), matrices), TYPES[type_name]),
                (name + MEAN_SQUARES, (one.columns, matrices), TYPES["f32"]),
                (name + TOKENS, (1, matrices), TYPES["i64"]),
                (name + CHECKSUMS, (1, matrices), TYPES["i64"]),
            ]
        self._header, offsets, self.nbytes = header_bytes(_metadata(inputs, origin), tensors, _ALIGNMENT)
        self._offsets = {name: offset for (name, _, _), offset in zip(tensors, offsets, strict=True)}

    def check_space(self, beside: int = 0) -> None:
        """Raises PlanError if the folder has too little free space for the file and `beside` bytes more."""
        folder = self.path.resolve().parent
        there = self.part.stat().st_size if self.part.exists() else 0
        missing = self.nbytes + beside - there - shutil.disk_usage(folder).free
        if missing > 0:
            state = f", and {beside:,} for the state that --resume needs" if beside else ""
            raise PlanError(f"{self.path} takes {self.nbytes:,} bytes{state}, and {folder} has {missing:,} bytes too few free")

    def begin(self) -> None:
        """Makes the unfinished file, with its header, unless an interrupted run has left it. Raises MillError as `write`."""
        try:
            if not self.is_begun:
                with self.part.open("wb") as file:
                    file.write(self._header)
                    file.truncate(self.nbytes)
        except OSError as error:
            raise self._error(error) from error

    @property
    def is_begun(self) -> bool:
        """Whether an unfinished file with this header is there."""
        return self._has_header(self.part)

    def reopen(self) -> bool:
        """Makes a file that has its name already an unfinished one again. Returns whether there is an unfinished one."""
        if not self.is_begun and self._has_header(self.path):
            self.path.replace(self.part)
        return self.is_begun

    def _has_header(self, path: Path) -> bool:
        if not path.is_file() or path.stat().st_size != self.nbytes:
            return False
        with path.open("rb") as file:
            return file.read(len(self._header)) == self._header

    def write(self, name: str, matrix: int, covariance: Covariance | FoldedCovariance) -> None:
        """Writes a part, which may be folded with this writer's dtype. Raises MillError if it cannot be written."""
        if isinstance(covariance, FoldedCovariance):
            triangle, mean_squares = covariance.triangle, covariance.mean_squares
        else:
            triangle, mean_squares = fold(covariance.matrix, self.dtype)
        self.write_folded(name, matrix, triangle, mean_squares, covariance.tokens)

    def write_folded(self, name: str, matrix: int, triangle: np.ndarray, mean_squares: np.ndarray, n_tokens: int) -> None:
        """As `write`, for what `fold` gave with this writer's dtype."""
        self.write_blocks(name, matrix, [triangle], mean_squares, n_tokens)

    def write_blocks(
        self, name: str, matrix: int, blocks: Iterable[np.ndarray], mean_squares: np.ndarray, n_tokens: int
    ) -> None:
        """As `write_folded`, for a triangle that comes in consecutive blocks."""
        tokens, digest = np.array([n_tokens], np.int64), xxhash.xxh3_64()
        nbytes = triangle_size(len(mean_squares)) * self.dtype.itemsize
        try:
            with self.part.open("r+b") as file:
                file.seek(self._offsets[name + TRIANGLE] + matrix * nbytes)
                for block in blocks:
                    digest.update(block.data)
                    file.write(block.data)
                checksum = np.array([part_checksum(digest, mean_squares, tokens)])
                for suffix, array in {MEAN_SQUARES: mean_squares, TOKENS: tokens, CHECKSUMS: checksum}.items():
                    file.seek(self._offsets[name + suffix] + matrix * array.nbytes)
                    file.write(array.data)
        except OSError as error:
            raise self._error(error) from error

    def sync(self) -> None:
        """Waits until all that was written is on the disk. Raises MillError as `write`."""
        try:
            with self.part.open("r+b") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise self._error(error) from error

    def finish(self) -> None:
        """Gives the complete file its name. Raises MillError as `write`."""
        self.sync()
        try:
            self.part.replace(self.path)
            sync_folder(self.path.resolve().parent)
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> MillError:
        return MillError(f"{self.path} cannot be written: {error.strerror or error}")


def planned(one: Input) -> PlannedInput:
    """What a file has for an input or the outputs of a tensor."""
    return PlannedInput(one.tensors, one.columns, one.matrices, one.blocks if isinstance(one, MatrixOutput) else None)


def _metadata(planned: Sequence[PlannedInput], origin: Origin) -> dict[str, Any]:
    inputs = [one for one in planned if one.blocks is None]
    return {
        "general.type": FILE_TYPE,
        "general.alignment": np.uint32(_ALIGNMENT),
        "covariance.version": np.uint32(VERSION),
        "covariance.architecture": origin.architecture,
        "covariance.model": origin.model,
        "covariance.datasets": list(origin.datasets),
        "covariance.chunk_count": np.uint32(origin.chunk_count),
        "covariance.chunk_size": np.uint32(origin.chunk_size),
        "covariance.inputs": [one.name for one in inputs],
        "covariance.tensors": [name for one in inputs for name in one.tensors],
        "covariance.tensor_inputs": np.array([i for i, one in enumerate(inputs) for _ in one.tensors], np.uint32),
        **_outputs_metadata([(one.name, one.blocks) for one in planned if one.blocks is not None]),
    }


def _outputs_metadata(outputs: Sequence[tuple[str, RowBlocks]]) -> dict[str, Any]:
    if not outputs:
        return {}
    return {
        OUTPUTS: [name for name, _ in outputs],
        OUTPUT_ROWS: np.array([blocks.rows for _, blocks in outputs], np.uint32),
        OUTPUT_RUNS: np.array([blocks.run for _, blocks in outputs], np.uint32),
    }
