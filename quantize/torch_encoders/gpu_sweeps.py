"""The processor's kernels of error feedback and descent on a GPU of NVIDIA: a thread for each row, 64 columns at a time.

What a block of columns changes is then added to the other columns, by a thread for each row and 64 of them. Every sum has the
order that it has on the processor, so codes are the same. Rows lie on the device as [blocks, rows, columns of a block].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...simd.compile.kernels import Kernel
from ...simd.cuda.launch import CallList, Program
from ..covariance.descent.scalar_descent import add_row_errors
from ..covariance.matrix.panels import WIDTH, add_tile_products
from ..covariance.matrix.prepared import DampedCovariance, FeedbackMatrix
from .elements import RUN, subtract

Owner = DampedCovariance | FeedbackMatrix

_kept: weakref.WeakKeyDictionary[Owner, dict[tuple[torch.device, str], Tensor]] = weakref.WeakKeyDictionary()
_sending = Lock()


def forget_matrices() -> None:
    """Frees what `GpuSweeps.kept` has sent."""
    _kept.clear()


class GpuSweeps:
    """rows: how many, on the device one more if that is odd; size: their columns, with those that fill the last block."""

    def __init__(self, device: str, rows: int, size: int):
        self.device, self.rows, self.size, self.blocks = torch.device(device), rows, size, size // WIDTH
        self.height = rows + rows % 2
        tiles, factors = np.empty((self.blocks, WIDTH * WIDTH), np.float32), np.empty((1, self.height * WIDTH), np.float32)
        pairs = np.empty((self.blocks * self.height // 2, 2 * WIDTH), np.float32)
        self._add = self._program(add_tile_products, (factors, tiles, pairs))

    def sent(self, array: np.ndarray, group: int = 1) -> Tensor:
        """An array [rows, groups of columns] -> [blocks, rows, groups of a block], 0 where there are none."""
        return self.in_blocks(torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device), group)

    def in_blocks(self, tensor: Tensor, group: int = 1) -> Tensor:
        """As `sent`, of a tensor that is on the device."""
        if group > WIDTH:
            tensor, per_block = tensor[:, torch.arange(self.blocks, device=self.device) * WIDTH // group], 1
        else:
            per_block = WIDTH // group
        missing = self.blocks * per_block - tensor.shape[1], self.height - self.rows
        tensor = torch.nn.functional.pad(tensor, (0, missing[0], 0, missing[1]))
        return tensor.view(self.height, self.blocks, per_block).transpose(0, 1).contiguous()

    def zeros(self) -> Tensor:
        return torch.zeros(self.blocks, self.height, WIDTH, device=self.device)

    def received(self, tensor: Tensor, array: np.ndarray) -> None:
        """Fills an array [rows, columns] with what `sent` makes of it, changed."""
        rows = tensor.transpose(0, 1).reshape(self.height, -1)[: self.rows, : array.shape[1]]
        pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        array[:] = pinned.copy_(rows).numpy()

    def row_errors(self, x: Tensor, values: Tensor, gradient: Tensor) -> np.ndarray:
        """As `scalar_descent.row_errors`: float64 [rows]."""
        errors = torch.zeros(self.height, dtype=torch.float64, device=self.device)
        run = np.empty((self.height, WIDTH), np.float32)
        program = self._program(add_row_errors, (run, run.copy(), run.copy(), np.empty(self.height)))
        calls = self._calls()
        for block in range(self.blocks):
            calls.launch(program, [t[block].data_ptr() for t in (x, values, gradient)] + [errors.data_ptr()])
        calls.made().run()
        return errors.cpu().numpy()[: self.rows]

    def kept(self, owner: Owner, name: str, make: Callable[[], np.ndarray]) -> Tensor:
        """An array that belongs to a matrix, by blocks; it is sent once and stays there as long as the matrix does."""
        with _sending:
            tensors = _kept.setdefault(owner, {})
            if (self.device, name) not in tensors:
                tensors[self.device, name] = torch.from_numpy(make().copy()).to(self.device)
            tensor = tensors[self.device, name]
            if tensor.is_cuda:  # `forget_matrices` may free it while what this thread launches still reads it
                tensor.record_stream(torch.cuda.current_stream(self.device))
            return tensor

    def tiles(self, owner: Owner, name: str, panels: Callable[[], np.ndarray]) -> Tensor:
        """float32 [blocks, panels, 64 * 64] of a panel matrix, by blocks of its rows."""
        shape = self.blocks, self.blocks, WIDTH * WIDTH
        return self.kept(owner, f"tiles of {name}", lambda: np.ascontiguousarray(panels().reshape(shape).transpose(1, 0, 2)))

    def multiply(self, x: Tensor, tiles: Tensor, out: Tensor) -> None:
        """Adds x times a matrix to out."""
        x, calls = x.contiguous(), self._calls()
        for block in range(self.blocks):
            self._add_products(calls, block, x[block], tiles, out, 0)
        calls.made().run()

    def sweep(
        self, kernel: Kernel, arguments: Sequence[Any], blocks: Mapping[str, Tensor], whole: Mapping[str, Tensor],
        tiles: Tensor, gradient: Tensor, onwards: bool, origin: Tensor | None = None,
    ) -> CallList:  # fmt: skip
        """What has a kernel take the blocks of all rows one after the other, each time it is run.

        arguments  of the kernel; in place of an array its name among `blocks`, of which it gets a block's, or `whole`; "tile":
                   that of the block on the diagonal, "gradient": what was added up for it
        gradient   as `sent`, updated
        onwards    whether what values lose goes, times the matrix, only into later columns
        origin     what values lose it from, as `sent`; None: from what they were
        """
        buffer, before, factors = (torch.empty(self.height, WIDTH, device=self.device) for _ in range(3))
        blocks = {**blocks, "tile": tiles.diagonal().T}
        whole = {**whole, "gradient": buffer.view(-1)}
        stand_ins = {name: _stand_in(t.shape[1:], t) for name, t in blocks.items()}
        stand_ins |= {name: _stand_in(t.shape, t) for name, t in whole.items()}
        program = self._program(kernel, [stand_ins[a] if isinstance(a, str) else a for a in arguments])
        names = {id(array): name for name, array in stand_ins.items()}
        known = [names[id(array.values)] for array in program.work.arrays]
        starts = [(blocks | whole)[name].data_ptr() for name in known]
        steps = [blocks[name].stride(0) * blocks[name].element_size() if name in blocks else 0 for name in known]
        calls, size = self._calls(), buffer.nbytes
        runs = np.empty((buffer.numel() // RUN, RUN), np.float32)
        difference = self._program(subtract, (runs, runs.copy(), runs.copy()))
        for block in range(self.blocks):
            values, earlier = blocks["values"][block].data_ptr(), before if origin is None else origin[block]
            calls.move(buffer.data_ptr(), gradient[block].data_ptr(), size)
            if origin is None:
                calls.move(before.data_ptr(), values, size)
            calls.launch(program, [start + block * step for start, step in zip(starts, steps, strict=True)])
            calls.launch(difference, [earlier.data_ptr(), values, factors.data_ptr()])
            self._add_products(calls, block, factors, tiles, gradient, block + 1 if onwards else 0)
        calls.keep(before, factors, gradient, tiles, origin, *blocks.values(), *whole.values())
        return calls.made()

    def _add_products(self, calls: CallList, block: int, factors: Tensor, tiles: Tensor, to: Tensor, first: int) -> None:
        """Adds factors times the tiles of a block to the panels from the first on."""
        if first < self.blocks:
            addresses = [factors.data_ptr(), tiles[block, first].data_ptr(), to[first].data_ptr()]
            calls.launch(self._add, addresses, (self.blocks - first) * self.height // 2)

    def _calls(self) -> CallList:
        return CallList(self.device.index or 0, torch.cuda.current_stream(self.device).cuda_stream)

    def _program(self, kernel: Kernel, arguments: Sequence[Any]) -> Program:
        return Program(self.device.index or 0, kernel, kernel.items, arguments)


def _stand_in(shape: Sequence[int], tensor: Tensor) -> np.ndarray:
    """An array like a kernel's, whose memory is never touched."""
    return np.empty(tuple(shape), torch.empty(0, dtype=tensor.dtype).numpy().dtype)
