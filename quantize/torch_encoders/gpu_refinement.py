"""Rows refined under a covariance on a GPU of NVIDIA, with the codes that the processor would choose.

Values, gradients and matrices stay there until the processor asks for them, which searches scales; codes come back after each
step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...formats import TYPES
from ...jobs.steps import begin_step
from ...simd.lanes import LANES
from ..covariance.coupling import ALONE
from ..covariance.descent.parity import FOURS, sweep_fours
from ..covariance.descent.scalar_descent import MAX_SWEEPS, feed_back, sweep
from ..covariance.descent.vector_descent import SWEEPS, invert_diagonal_blocks, squares_of
from ..covariance.matrix.panels import WIDTH
from ..covariance.matrix.prepared import DampedCovariance, FeedbackMatrix, PreparedCovariance
from ..covariance.refine import rows_of, taken_apart, takes_covariance
from ..covariance.refinement import Refinement
from ..covariance.scalar_refinement import ScalarRefinement
from ..covariance.vector_refinement import LEAST_CHANGES, SWEEPS_BY_EFFORT, VectorRefinement
from ..covariance.vectors import VectorRows, trellis_tree
from .decoder import decoder_of
from .gpu_arrays import table_on
from .gpu_sweeps import GpuSweeps, Owner, forget_matrices
from .threads import on_stream, share_rows, stream_of

PIECE = 1 << 23  # weights that a thread has refined at once


def refine_on_gpu(
    x: np.ndarray, q: np.ndarray, type_name: str, prepared: PreparedCovariance, effort: int, device: str
) -> np.ndarray:
    """As `covariance.refine.refine`, with the same bytes. Trellis types cannot be refined here.

    Raises MillError when the device's memory does not suffice.
    """
    damped = prepared.damped
    if damped is None or not takes_covariance(TYPES[type_name]):
        return q

    out = np.empty_like(q)

    def refine_piece(first: int, stop: int, _: int) -> None:
        part = slice(first, stop)
        rows = taken_apart(q[part], type_name)
        made: Any = GpuVectorRefinement if isinstance(rows, VectorRows) else GpuScalarRefinement
        with on_stream(stream_of(torch.device(device))):
            out[part] = rows_of(made(x[part], q[part], rows, damped, effort, device), q[part])

    what = f"refine {type_name} under a covariance of {x.shape[1]} columns"
    share_rows(
        refine_piece, len(x), PIECE // x.shape[1], what, device, group=TYPES[type_name].rows, free=forget_matrices
    )  # fmt: skip
    return out


def _mirrored(name: str) -> Any:
    """An array of a refinement that lies on the device while kernels use it, and here when it is asked for."""

    def get(self: OnGpu) -> np.ndarray:
        if name not in self._host:
            shape = len(self.x), self.damped.size if name == "gradient" else self.x.shape[1]
            self._host[name] = np.empty(shape, np.float32)
            self._gpu.received(self._tensors[name], self._host[name])
        self._tensors.pop(name, None)  # whoever has the array may change it
        return self._host[name].reshape(-1) if name == "gradient" else self._host[name]

    return property(get)


class OnGpu(Refinement):
    """A `Refinement` on a GPU. To be inherited from before the class for the processor."""

    values, gradient = _mirrored("values"), _mirrored("gradient")

    def __init__(
        self, x: np.ndarray, q: np.ndarray, rows: Any, damped: DampedCovariance, effort: int, device: str
    ):  # fmt: skip
        """q: the bytes of the rows."""
        self._gpu, self._q = GpuSweeps(device, len(x), damped.size), q
        self._tensors, self._host = dict[str, Tensor](), dict[str, np.ndarray]()
        super().__init__(x, rows, damped, effort)

    def _decode(self) -> None:
        gpu, kind = self._gpu, self.rows.fields.type
        q = torch.from_numpy(self._q.reshape(len(self._q) // kind.rows, -1).copy()).to(gpu.device)
        values = gpu.in_blocks(decoder_of(kind.name, gpu.device)(q, self.x.shape[1]))
        x, gradient = gpu.sent(self.x), gpu.zeros()
        gpu.multiply(x - values, self._tiles(self.damped), gradient)
        self._x, self._tensors = x, {"values": values, "gradient": gradient}

    def _on_device(self, name: str) -> Tensor:
        """For kernels, which may change it."""
        if name not in self._tensors:
            self._tensors[name] = self._gpu.sent(self._host[name])
        self._host.pop(name, None)
        return self._tensors[name]

    def errors(self) -> np.ndarray:
        return self._gpu.row_errors(self._x, self._on_device("values"), self._on_device("gradient"))

    def _sums_for(self, owner: Owner) -> Tensor:
        """(x - values) times a matrix."""
        if owner is self.damped:
            return self._on_device("gradient")
        sums = self._gpu.zeros()
        self._gpu.multiply(self._x - self._on_device("values"), self._tiles(owner), sums)
        return sums

    def _tiles(self, owner: Owner) -> Tensor:
        return self._gpu.tiles(owner, "matrix", lambda: owner.panels)

    def feed_back(self) -> None:
        begin_step("error feedback")
        before = self._on_device("values").clone()
        self.round_in_order()
        change = before - self._on_device("values")
        self._gpu.multiply(change, self._tiles(self.damped), self._on_device("gradient"))


class GpuScalarRefinement(OnGpu, ScalarRefinement):
    """Refinement of types with a code for each weight, iq4_kss included."""

    def round_in_order(self) -> None:
        if self._in_fours:
            self._sweeps(1, self.damped.feedback(4, FOURS))
            return
        gpu, damped = self._gpu, self.damped
        tiles = gpu.tiles(damped, "triangle", lambda: damped.triangle)
        blocks = self._blocks() | {"x": self._x}
        arguments = (ALONE, "x", *self._of_groups(), "tile", WIDTH, "gradient", "values", "codes")
        gpu.sweep(feed_back, arguments, blocks, {}, tiles, gpu.zeros(), True, self._x).run()
        gpu.received(blocks["codes"], self.rows.codes)

    def choose_codes(self) -> None:
        sweeps = MAX_SWEEPS if self.effort > 0 else 2
        self._sweeps(-(-sweeps // 2) if self._in_fours else sweeps, self.damped)

    def _sweeps(self, count: int, owner: Owner) -> None:
        gpu, is_feedback = self._gpu, isinstance(owner, FeedbackMatrix)
        changed = torch.zeros(gpu.blocks, gpu.height, dtype=torch.int64, device=gpu.device)
        diagonal = gpu.kept(owner, "diagonal", lambda: owner.diagonal.reshape(-1, WIDTH))
        blocks = self._blocks() | {"diagonal": diagonal, "changed": changed}
        whole = {"active": torch.ones(gpu.height, dtype=torch.bool, device=gpu.device)}
        sums, tiles = self._sums_for(owner), self._tiles(owner)
        given = "active", *self._of_groups(), "tile", "diagonal", WIDTH, "gradient", "values", "codes", "changed"
        fours = (sweep_fours, (ALONE, FOURS, *given, is_feedback))
        kernel, arguments = fours if self._in_fours else (sweep, (ALONE, *given))
        sweeping = gpu.sweep(kernel, arguments, blocks, whole, tiles, sums, is_feedback)
        for number in range(count):
            begin_step(f"sweep {number + 1}")
            sweeping.run()
            whole["active"] &= changed.sum(0) > self._least_changes()
            if not whole["active"].any():
                break
        gpu.received(blocks["codes"], self.rows.codes)

    def _of_groups(self) -> tuple[Any, ...]:
        return "factor", "offset", "flag", min(self.rows.table.group, WIDTH), self._table

    def _blocks(self) -> dict[str, Tensor]:
        group = self.rows.table.group
        of_groups = (self._gpu.sent(array, group) for array in self.rows.parameters())
        return dict(zip(("factor", "offset", "flag"), of_groups, strict=True)) | {
            "values": self._on_device("values"), "codes": self._gpu.sent(self.rows.codes)
        }  # fmt: skip


class GpuVectorRefinement(OnGpu, VectorRefinement):
    """Refinement of codebook types."""

    def choose_codes(self) -> None:
        self._sweeps(SWEEPS_BY_EFFORT[self.effort], self.damped)

    def round_in_order(self) -> None:
        self._sweeps(1, self.damped.feedback(self.rows.table.size))

    def _sweeps(self, count: int, matrix: Owner) -> None:
        gpu, rows, table, size = self._gpu, self.rows, self.rows.table, self.rows.table.size
        is_feedback, tree = isinstance(matrix, FeedbackMatrix), trellis_tree(rows.fields.type.name)

        def inverses() -> np.ndarray:
            out = np.empty((self.damped.size // size, size * size), np.float32)
            invert_diagonal_blocks(matrix.panels, self.damped.size, size, out)
            return out.reshape(gpu.blocks, WIDTH // size, -1)

        def squares() -> np.ndarray:
            out = squares_of(matrix.panels, self.damped.size, self.damped.size, table, tree.boxes.size > 0)
            return out.reshape(gpu.blocks, -1)

        changed = torch.zeros(gpu.blocks, gpu.height, dtype=torch.int64, device=gpu.device)
        blocks = {
            "factor": gpu.sent(rows.parameters()[0], size), "values": self._on_device("values"),
            "entries": gpu.sent(rows.entries, size), "signs": gpu.sent(rows.weight_signs), "changed": changed,
            "inverses": gpu.kept(matrix, f"inverses of {size}", inverses),
            "squares": gpu.kept(matrix, f"squares of {rows.fields.type.name}", squares),
        }  # fmt: skip
        runs = table.entries * (table.books if table.flagged else 1) // LANES
        active = torch.nn.functional.pad(torch.from_numpy(self._finite).to(gpu.device), (0, gpu.height - gpu.rows))
        arguments = (
            ALONE, "active", "factor", table.signs, "lanes", runs, tree, "tile", "inverses", "squares", WIDTH,
            "gradient", "values", "entries", "signs", "changed", is_feedback,
        )  # fmt: skip
        whole = {"active": active, "lanes": table_on(table.lanes, gpu.device)}
        tiles, sums = self._tiles(matrix), self._sums_for(matrix)
        sweeping = gpu.sweep(SWEEPS[size], arguments, blocks, whole, tiles, sums, is_feedback)
        for number in range(count):
            if not is_feedback:
                begin_step(f"sweep {number + 1}")
            sweeping.run()
            active &= changed.sum(0) > LEAST_CHANGES * rows.groups
            if not active.any():
                break
        gpu.received(blocks["entries"], rows.entries)
        gpu.received(blocks["signs"], rows.weight_signs)
