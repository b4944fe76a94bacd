"""Covariance files: reading one, part by part (docs/formats/covariance-files.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...data_classes import dataclass
from ...errors import FormatError, MillError
from ...formats import TensorInfo, TensorSource, dims, open_gguf
from ...formats.file_range import check_regular
from ...formats.metadata_values import text_of
from ...quantize.covariance.matrix.covariance_matrix import Covariance
from ...quantize.covariance.matrix.triangles import DTYPES, FoldedCovariance, triangle_size
from ...quantize.covariance.row_blocks import RowBlocks

FILE_TYPE, VERSION = "covariance", 1
OUTPUTS, OUTPUT_ROWS, OUTPUT_RUNS = "covariance.outputs", "covariance.output_rows", "covariance.output_runs"
OUTPUT_SUFFIX = ".outputs"  # behind the name of a tensor: the name of its outputs
# Suffixes of an input's tensors: correlations (or covariances), mean squares, tokens, checksums; one row for each matrix.
TRIANGLE, MEAN_SQUARES, TOKENS, CHECKSUMS = ".covariance", ".mean_squares", ".tokens", ".xxh3"
# Gate and up may be separate or fused, and both read the same: suffix of a tensor -> another's whose covariance it takes.
_SUBSTITUTES = {"ffn_gate_up_exps.weight": "ffn_up_exps.weight", "ffn_up_exps.weight": "ffn_gate_up_exps.weight"}


@dataclass(frozen=True)
class Origin:
    """What a covariance was collected from.

    architecture, model  general.architecture and general.name of the model
    datasets             names of the calibration texts
    chunk_count          windows read, each as often as its text counts; chunk_size: tokens per window
    """

    architecture: str
    model: str
    datasets: tuple[str, ...]
    chunk_count: int
    chunk_size: int


@dataclass(frozen=True)
class StoredInput:
    """An input in a file.

    tensors  the weights that are multiplied with it; the first names it
    columns  numbers of an input
    tokens   int64 [matrices], how many inputs each mean was taken of
    nbytes   of its parts in the file
    """

    tensors: tuple[str, ...]
    columns: int
    tokens: np.ndarray = field(repr=False)
    checksums: np.ndarray = field(repr=False)
    triangle: TensorInfo = field(repr=False)
    mean_squares: TensorInfo = field(repr=False)

    @property
    def name(self) -> str:
        """That of the first of the tensors that share the input."""
        return self.tensors[0]

    @property
    def matrices(self) -> int:
        """Covariances of the input: one, or one per expert or head."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.triangle.nbytes + self.mean_squares.nbytes + self.tokens.nbytes + self.checksums.nbytes


@dataclass(frozen=True)
class StoredOutput:
    """The outputs of a tensor in a file, whose gradients' second moments are those of an input: of the rows of a block, for
    every block of every matrix, matrix after matrix.

    parts   that input; blocks: how the rows of a matrix are divided
    """

    parts: StoredInput
    blocks: RowBlocks

    @property
    def name(self) -> str:
        """That of the tensor, and ".outputs"."""
        return self.parts.name

    @property
    def rows(self) -> int:
        """Rows of a matrix."""
        return self.blocks.rows

    @property
    def matrices(self) -> int:
        return self.parts.matrices // self.blocks.count

    @property
    def tokens(self) -> np.ndarray:
        """int64 [matrices, blocks]: how many tokens each mean was taken of."""
        return self.parts.tokens.reshape(self.matrices, self.blocks.count)

    def of_stack(self, matrices: int) -> StoredOutput | None:
        """The same for the other layout of a weight with a matrix per head, which has them as one matrix or as a stack of
        `matrices`: parts are numbered alike in both. None where the rows do not fit."""
        rows, rest = divmod(self.rows * self.matrices, matrices)
        if rest or rows % self.blocks.run:
            return None
        return StoredOutput(self.parts, RowBlocks(rows, self.blocks.run, self.blocks.size))


class CovarianceFile:
    """An open covariance file; its parts are read when they are asked for.

    path     the file
    inputs   name -> `StoredInput`, in the file's order
    outputs  name of a tensor -> `StoredOutput`, in the file's order
    model    what it was collected from
    """

    def __init__(
        self,
        path: Path,
        inputs: Sequence[StoredInput],
        model: Origin,
        outputs: Sequence[StoredOutput] = (),
    ):
        self.path, self.model = path, model
        self.inputs = {one.name: one for one in inputs}
        self.outputs = {one.name.removesuffix(OUTPUT_SUFFIX): one for one in outputs}
        self._by_tensor = {name: one for one in inputs for name in one.tensors}

    @property
    def entries(self) -> dict[str, tuple[StoredInput, RowBlocks | None]]:
        """All that has parts, by name: inputs, and outputs with their blocks."""
        inputs = {name: (one, None) for name, one in self.inputs.items()}
        return {**inputs, **{one.name: (one.parts, one.blocks) for one in self.outputs.values()}}

    @property
    def tensors(self) -> list[str]:
        """Names of all weights that have a covariance."""
        return list(self._by_tensor)

    def input_of(self, tensor: str) -> StoredInput | None:
        """The input that a weight is multiplied with; None if it was not collected."""
        stored = self._by_tensor.get(tensor)
        if stored is None:
            suffix = next((s for s in _SUBSTITUTES if tensor.endswith("." + s)), None)
            if suffix is not None:
                stored = self._by_tensor.get(tensor.removesuffix(suffix) + _SUBSTITUTES[suffix])
        return stored

    def covariance_of(self, tensor: str, matrix: int = 0) -> FoldedCovariance | None:
        """The covariance of the inputs of a weight, or of one matrix of a stack, read anew each time; None if it was not
        collected. Any thread may call it. Raises FormatError for a part that is damaged, or of which the file has been cut."""
        stored = self.input_of(tensor)
        return None if stored is None else self._part(stored, matrix if stored.matrices > 1 else 0)

    def key_of(self, tensor: str, matrix: int) -> tuple[str, int]:
        """The same for all weights whose matrices of these numbers have one covariance."""
        stored = self.input_of(tensor)
        return (tensor, 0) if stored is None else (stored.name, matrix if stored.matrices > 1 else 0)

    def output_of(self, tensor: str, matrices: int | None = None) -> StoredOutput | None:
        """The outputs of a weight; None if nothing was collected of them. matrices: of the weight, where the file may be of
        another layout of it (see `StoredOutput.of_stack`)."""
        stored = self.outputs.get(tensor)
        return stored if stored is None or matrices in (None, stored.matrices) else stored.of_stack(matrices)

    def gradient_of(self, tensor: str, matrix: int, block: int, matrices: int | None = None) -> Covariance | None:
        """The mean of g g^T over the gradients g at the outputs of one block of rows of a matrix: float32 [rows of the block,
        rows of the block]; None if it was not collected. matrices: as for `output_of`; threads and errors as for
        `covariance_of`."""
        stored = self.output_of(tensor, matrices)
        if stored is None:
            return None
        if not 0 <= block < stored.blocks.count:
            raise FormatError(f"{self.path}: {stored.name} has {stored.blocks.count} blocks, and no number {block}")
        covariance = self._part(stored.parts, matrix * stored.blocks.count + block)
        span = stored.blocks.span(block)
        rows = span.stop - span.start
        return Covariance(np.ascontiguousarray(covariance.matrix[:rows, :rows]), covariance.tokens)

    def _part(self, stored: StoredInput, number: int) -> FoldedCovariance:
        if number >= stored.matrices:
            raise FormatError(f"{self.path}: {stored.name} has {stored.matrices} matrices, and no number {number}")
        return read_part(self.path, stored, number)

    def check(self, source: TensorSource) -> None:
        """Raises MillError if it cannot be of this model: no common tensor, another number of columns, rows or matrices."""
        common = [(stored, source.tensors[name]) for name, stored in self._by_tensor.items() if name in source.tensors]
        if not common:
            raise MillError(
                f"{self.path}: none of its {len(self._by_tensor)} tensors ({next(iter(self._by_tensor), '')}, ...) is in "
                f"{source.path}: the covariance of another model"
            )
        for stored, tensor in common:
            columns, _, matrices = dims(tensor.shape)
            if stored.columns == columns and matrices == 1 and stored.matrices > 1:
                raise MillError(
                    f"{self.path} has inputs of {tensor.name} for each of {stored.matrices} heads, which {source.path} has in "
                    "one matrix: collect it from this layout of latent attention, whose data serve the other one too"
                )
            if stored.columns != columns or stored.matrices not in (1, matrices):
                raise MillError(
                    f"{self.path}: the input of {tensor.name} is {stored.columns} columns x {stored.matrices} matrices, the "
                    f"tensor in {source.path} is {columns} x {matrices}: the covariance of another model"
                )
        for name, output in self.outputs.items():
            _, rows, matrices = (
                dims(source.tensors[name].shape) if name in source.tensors else (0, output.rows, output.matrices)
            )
            fitted = output.of_stack(matrices)
            if fitted is None or fitted.rows != rows:
                raise MillError(
                    f"{self.path}: the outputs of {name} are {output.rows} rows x {output.matrices} matrices, the tensor in "
                    f"{source.path} has {rows} x {matrices}: the covariance of another model"
                )

    def metadata(self) -> dict[str, Any]:
        """The quantize.covariance.* metadata of a file that was encoded with it."""
        datasets = {"quantize.covariance.dataset": ", ".join(self.model.datasets)} if self.model.datasets else {}
        return {
            "quantize.covariance.file": self.path.name,
            **datasets,
            "quantize.covariance.entries_count": np.int32(len(self._by_tensor)),
            "quantize.covariance.chunks_count": np.int32(self.model.chunk_count),
        }


def read_part(path: Path, stored: StoredInput, matrix: int, is_mapped: bool = False) -> FoldedCovariance:
    """The covariance of one matrix's inputs. Raises FormatError if its bytes do not have the checksum of the file. is_mapped:
    the triangle stays in the file, which must not become shorter meanwhile."""
    triangle = stored.triangle.data[matrix] if is_mapped else stored.triangle.read(matrix, matrix + 1).reshape(-1)
    mean_squares = stored.mean_squares.read(matrix, matrix + 1).reshape(-1)
    tokens = stored.tokens[matrix : matrix + 1]
    if part_checksum(xxhash.xxh3_64(triangle.data), mean_squares, tokens) != stored.checksums[matrix]:
        which = f", matrix {matrix}" if stored.matrices > 1 else ""
        raise FormatError(f"{path}: the part of {stored.name}{which} is damaged (its checksum differs): collect it again")
    dtype = DTYPES[stored.triangle.type.name]
    return FoldedCovariance(triangle.view(dtype), mean_squares.view(np.float32), int(tokens[0]))


def part_checksum(digest: xxhash.xxh3_64, mean_squares: np.ndarray, tokens: np.ndarray) -> np.int64:
    """xxh3-64 of a part's bytes, as the file has it. digest: of its triangle; the rest is added to it."""
    for array in (mean_squares, tokens):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return np.uint64(digest.intdigest()).astype(np.int64)


def is_covariance(path: str | Path) -> bool:
    """Whether a file is a GGUF file that says it holds covariances."""
    check_regular(Path(path))
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF" and text_of(open_gguf(path).metadata, "general.type") == FILE_TYPE
    except (OSError, FormatError):
        return False


def open_covariance(path: str | Path) -> CovarianceFile:
    """Opens a covariance file; no part is read.

    Raises FormatError for a file that is none, or is truncated.
    """
    path = Path(path)
    file = open_gguf(path)
    if text_of(file.metadata, "general.type") != FILE_TYPE:
        kind = file.metadata.get("general.type")
        raise FormatError(f"{path}: a GGUF file, but no covariance (its general.type is {kind!r:.60})")
    try:
        version = int(file.metadata["covariance.version"])
        names, numbers = list(file.metadata["covariance.tensors"]), file.metadata["covariance.tensor_inputs"].tolist()
        inputs = list(file.metadata["covariance.inputs"])
        origin = Origin(
            str(file.metadata["covariance.architecture"]),
            str(file.metadata["covariance.model"]),
            tuple(map(str, file.metadata["covariance.datasets"])),
            int(file.metadata["covariance.chunk_count"]),
            int(file.metadata["covariance.chunk_size"]),
        )
        outputs = list(file.metadata.get(OUTPUTS, ()))
        rows, runs = (map(int, file.metadata.get(key, ())) for key in (OUTPUT_ROWS, OUTPUT_RUNS))
        shapes = list(zip(outputs, rows, runs, strict=True))
        groups = [tuple(n for n, i in zip(names, numbers, strict=True) if i == number) for number in range(len(inputs))]
        if any(not group or group[0] != name for group, name in zip(groups, inputs, strict=True)):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise FormatError(f"{path}: its covariance.* keys are missing, or are not what a covariance has") from None
    if version != VERSION:
        raise FormatError(f"{path}: version {version} of the format; this program reads version {VERSION}")
    stored = [_stored(path, file.tensors, group) for group in groups]
    return CovarianceFile(path, stored, origin, [_stored_output(path, file.tensors, *shape) for shape in shapes])


def _stored_output(path: Path, tensors: Mapping[str, TensorInfo], name: str, rows: int, run: int) -> StoredOutput:
    parts = _stored(path, tensors, (name,))
    fits = 0 < parts.columns <= run and rows % run == 0
    blocks = RowBlocks(rows, run, parts.columns) if fits else None
    if blocks is None or parts.matrices % blocks.count or not name.endswith(OUTPUT_SUFFIX):
        raise FormatError(f"{path}: the blocks of {name} do not fit its {rows} rows in runs of {run}")
    return StoredOutput(parts, blocks)


def _stored(path: Path, tensors: Mapping[str, TensorInfo], names: tuple[str, ...]) -> StoredInput:
    name = names[0]
    suffixes = (TRIANGLE, MEAN_SQUARES, TOKENS, CHECKSUMS)
    triangle, mean_squares, tokens, checksums = (tensors.get(name + suffix) for suffix in suffixes)
    if triangle is None or mean_squares is None or tokens is None or checksums is None:
        raise FormatError(f"{path}: {name} lacks one of its four tensors")
    columns, matrices = mean_squares.shape[0], mean_squares.n_rows
    types = [tensor.type.name for tensor in (mean_squares, tokens, checksums)]
    shapes = [(tensor.shape[0], tensor.n_rows) for tensor in (triangle, tokens, checksums)]
    expected = [(triangle_size(columns), matrices), (1, matrices), (1, matrices)]
    if triangle.type.name not in DTYPES or types != ["f32", "i64", "i64"] or shapes != expected:
        raise FormatError(f"{path}: the tensors of {name} are not of the types and shapes that a covariance has")
    counts, sums = (t.read(0, matrices).view(np.int64).reshape(-1) for t in (tokens, checksums))
    if (counts < 0).any():
        raise FormatError(f"{path}: {name} has a negative number of tokens")
    return StoredInput(names, columns, counts, sums, triangle, mean_squares)
