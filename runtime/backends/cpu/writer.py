"""Writing programs for the team of threads: tasks for one token, with their tables and the memory that these refer to.

The parts are those of kernels.small, kernels.single and kernels.products, which say what their tables hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .kernels import elementwise as small
from .kernels import products
from .kernels.single import in_turn as in_turn_part
from .kernels.single import move

_LINE = 64  # bytes
Task = tuple[int, int, int]  # the address of a part, its argument, how many of it


class Writer:
    """Makes tasks. Arguments called x, at, to and out are addresses of float32, unless they are arrays."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.one = self.hold(np.ones(1, np.float32))

    def hold(self, array: np.ndarray) -> np.ndarray:
        """Keeps an array for as long as this lives."""
        self.held.append(array)
        return array

    def room(self, size: int, kind: type = np.float32) -> np.ndarray:
        """Zeros from the start of a cache line on."""
        nbytes = size * np.dtype(kind).itemsize
        whole = self.hold(np.zeros(nbytes + _LINE, np.uint8))
        start = -whole.ctypes.data % _LINE
        return whole[start : start + nbytes].view(kind)

    def table(self, *words: int, **real: float) -> int:
        """The address of a table of int64; real: float64 at a place, as _7=1.5."""
        table = self.hold(np.array(words, np.int64))
        for place, value in real.items():
            table.view(np.float64)[int(place[1:])] = value
        return table.ctypes.data

    def in_turn(self, tasks: Iterable[Task]) -> Task:
        """Tasks that one thread runs one after the other."""
        rows = [(0, *task) for task in tasks]
        return in_turn_part.address, self.table(len(rows), *(word for row in rows for word in row)), 1

    def add(self, values: np.ndarray, to: int, size: int, factors: np.ndarray | None = None) -> Task:
        """Adds the rows of values, times factors, to `size` numbers at an address."""
        held = self.hold(np.ascontiguousarray(values, np.float32))
        factors = self.one if factors is None else factors
        places = self.hold(np.zeros(len(factors), np.int64))
        table = self.table(held.ctypes.data, factors.ctypes.data, places.ctypes.data, to, len(factors), size)
        return small.add_part.address, table, -(-size // small.WIDTH)

    def move(self, x: int, step: int, to: int, to_step: int, count: int, width: int) -> Task:
        """Copies `count` runs of `width` numbers, from and to addresses so many bytes apart."""
        return move.address, self.table(x, step, to, to_step, count, width, 0, 0), 1

    def add_each(self, values: np.ndarray, places: np.ndarray, to: int) -> Task:
        """Adds the rows of values [.., size] at places int64 [n] to n rows at an address."""
        held, size = self.hold(np.ascontiguousarray(values, np.float32)), values.shape[1]
        return move.address, self.table(held.ctypes.data, 4 * size, to, 4 * size, len(places), size, places.ctypes.data, 1), 1

    def centre(self, x: int, out: int, rows: int, size: int) -> Task:
        return small.centre_part.address, self.table(x, out, rows, size), 1

    def share(self, x: int, gate: np.ndarray, out: int) -> Task:
        """Multiplies what is at out by sigmoid(x . gate)."""
        return small.share_part.address, self.table(x, self.hold(gate).ctypes.data, out, len(gate)), 1

    def normalise(self, x: int, weight: np.ndarray, epsilon: float, out: int, rows: int, size: int) -> Task:
        """`rows` rows at the address x to those at out, which may be x."""
        weight = self.hold(np.ascontiguousarray(weight, np.float32))
        table = self.table(x, weight.ctypes.data, out, rows, size, 0, rows, _5=epsilon)
        return small.normalise_part.address, table, 1

    def rotate(self, at: int, heads: int, width: int, turns: np.ndarray, interleaved: bool) -> Task:
        table = self.table(at, 0, 4 * width, 1, heads, turns.ctypes.data, len(turns), interleaved, 1)
        return small.rotate_part.address, table, 1

    def quantised(self, x: np.ndarray, plans: Iterable[np.ndarray], runs: int = 1) -> tuple[dict[int, tuple], list[Task]]:
        """What products take as input, by the kind of activations, and the tasks that make it from x: of each kind that needs
        any, one for each of so many equal runs of x."""
        inputs, tasks = {}, []
        for block in sorted({int(plan[products.BLOCK]) for plan in plans}):
            if not block:
                inputs[block] = x.ctypes.data, 0, 0
                continue
            rooms = ((1, np.uint8), (block, np.float32), (products.RUN, np.int16))
            codes, scales, sums = inputs[block] = tuple(self.room(x.size // share, kind).ctypes.data for share, kind in rooms)
            size = x.size // runs
            for at in range(0, x.size, size):
                places = x.ctypes.data + 4 * at, codes + at, scales + 4 * (at // block), sums + 2 * (at // products.RUN)
                tasks.append((products.quantise_part.address, self.table(*places, block, size), -(-size // products.CHUNK)))
        return inputs, tasks

    def product(
        self, plan: np.ndarray, inputs: dict[int, tuple], out: int, jobs: np.ndarray | None = None, stride: int = 0
    ) -> Task:
        """plan and jobs: as for kernels.products; without jobs one token's with the only matrix. inputs: of `quantised`;
        stride: numbers from one result's row to the next, if there is something between them."""
        jobs = self.hold(np.array([[0, 0, 1, 0]], np.int64)) if jobs is None else jobs
        p = plan.tolist()
        weights = p[products.WEIGHTS], p[products.MATRIX_BYTES], p[products.ROW_BYTES]
        sizes = p[products.ROWS], p[products.COLUMNS], p[products.SLICES]
        where = out, stride or p[products.ROWS], jobs.ctypes.data
        table = self.table(*weights, *sizes, *inputs[p[products.BLOCK]], *where, p[products.ABREAST])
        return p[products.FUNCTION], table, len(jobs) * p[products.SLICES]
