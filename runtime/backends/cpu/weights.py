"""A model's tensors as the graphs use them: matrices that multiply, from their packed bytes or decoded as they are needed.

Products are made from the packed bytes where they lie, for a few tokens (GEMV, kernels.products) and for many (GEMM,
kernels.gemm), wherever there is a kernel for the type. What is left (types without a layout, types of checkpoints, quantised
types in `exact` mode) is decoded tile by tile, and multiplied by the same kernels as rows of float32.

Decoded float32 rows are kept until `cache_bytes` are used up, first come first kept: every token walks through all layers in
the same order, so dropping the oldest for the newest would always drop what is needed next. What is not kept is decoded
tile by tile at every use, and memory stays bounded whatever the model's size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from ....formats import TYPES, FormatError, MillError, SourceTensor, TensorSource
from ....quantize import decode
from ....simd.workers import PARALLEL_THRESHOLD, Workers
from .kernels import products
from .kernels.gemm import gemm
from .kernels.gemm.gemm import Tokens
from .kernels.gemm.parts import FLOAT32

Observer = Callable[[str, int, np.ndarray], None]

TILE_BYTES = 8 << 20  # decoded float32 of one tile
PACKED_SPEED = 4  # multiplications of packed weights in the time of one of decoded ones
GROUP = 16  # tiles begin at multiples of this many rows: the widest row interleave, so that no group is decoded twice


class WeightStore:
    """The tensors of one source, and what all uses of them share.

    workers   the threads that products are shared out to
    observer  called as observer(tensor name, matrix index, activations float32 [n, row length]) at every linear use; by one
              thread at a time, unless it has an attribute `concurrent` that is true: then by several, never for one matrix.
              One with methods squares(float32 [n, heads, columns]) and add_heads(name, their sums, n, pooled) is told of the
              inputs of heads that way (pooled: of one matrix), and may be given rows that lie apart; one with a method
              add_runs(tensor names, x, matrices, starts, counts, places) of those of all experts at once
    exact     weights multiply as float32, and activations are not rounded to fewer bits first
    watch     check every result and name the first tensor whose output is not finite (slow; for finding the cause of NaN)
    """

    def __init__(self, source: TensorSource, cache_bytes: int, threads: int = 1, exact: bool = False):
        self.source, self.workers, self.exact = source, Workers(threads), exact
        self.free = cache_bytes
        self.observer: Observer | None = None
        self.watch = False
        self.lock, self._holding = threading.Lock(), threading.Lock()
        self._held: dict[str, np.ndarray] = {}
        self._kept: dict[tuple[str, int, int], np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.source.tensors

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> SourceTensor:
        """Raises FormatError when there is no such tensor, or it has another shape."""
        tensor = self.source.tensors.get(name)
        if tensor is None:
            raise FormatError(f"{self.source.path}: tensor {name} is missing")
        if shape is not None and tensor.shape != shape:
            raise FormatError(f"{self.source.path}: tensor {name} has shape {tensor.shape}, expected is {shape}")
        return tensor

    def linear(self, name: str, *shape: int) -> Linear:
        """The matrix (or stack of matrices) `name`; shape in ne order, not checked when left out."""
        return Linear(self, self.tensor(name, shape or None))

    def vector(self, name: str, size: int) -> np.ndarray:
        """A one-dimensional tensor, float32 [size]."""
        return self.tensor(name, (size,)).read(0, 1)[0]

    def vectors(self, name: str, size: int, *stack: int) -> np.ndarray:
        """The vectors that go with a stack of matrices, float32 [matrices, size]; without a stack the one of a matrix."""
        tensor = self.tensor(name, (size, *stack))
        return np.ascontiguousarray(tensor.read(0, tensor.n_rows))

    def rows(self, tensor: SourceTensor, matrix: int, start: int, stop: int) -> np.ndarray:
        """Decoded rows [stop - start, row length] of one matrix, kept if there is room."""
        key = (tensor.name, matrix, start)
        kept = self._kept.get(key)
        if kept is not None and len(kept) == stop - start:
            return kept
        first = matrix * tensor.shape[1]
        decoded = np.ascontiguousarray(tensor.read(first + start, first + stop), np.float32)
        self._keep(key, decoded)
        return decoded

    def _keep(self, key: tuple[str, int, int], decoded: np.ndarray) -> None:
        with self.lock:
            if key not in self._kept and decoded.nbytes <= self.free:
                self.free -= decoded.nbytes
                self._kept[key] = decoded

    def held(self, tensor: SourceTensor) -> np.ndarray | None:
        """The stored bytes of a tensor that lies nowhere in memory, read or made once and kept; None if there is no room."""
        raw, stored = tensor.raw, tensor.stored
        if raw is None or stored is None:
            return None
        with self._holding:  # the threads that share out a product ask for it all at once, and have to get the same
            if tensor.name not in self._held:
                nbytes = stored.nbytes(tensor.shape)
                with self.lock:
                    if nbytes > self.free:
                        return None
                    self.free -= nbytes
                per_matrix = tensor.shape[1]
                runs = range(0, tensor.n_rows, per_matrix)
                self._held[tensor.name] = np.concatenate([raw(first, first + per_matrix) for first in runs])
            return self._held[tensor.name]

    def whole(self, tensor: SourceTensor) -> np.ndarray:
        """All rows of all matrices, float32 [rows in all, row length], kept if there is room."""
        per_matrix = tensor.shape[1]
        if tensor.n_rows == per_matrix:
            return self.rows(tensor, 0, 0, per_matrix)
        key = (tensor.name, -1, 0)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        decoded = np.empty((tensor.n_rows, tensor.shape[0]), np.float32)
        for first in range(0, tensor.n_rows, per_matrix):
            decoded[first : first + per_matrix] = tensor.read(first, first + per_matrix)
        self._keep(key, decoded)
        return decoded

    def tell(self, name: str, matrix: int, x: np.ndarray) -> None:
        """Tells the observer, if there is one, of activations float32 [n, columns]."""
        observer = self.observer
        if observer is None:
            return
        if getattr(observer, "concurrent", False):
            observer(name, matrix, x)
            return
        with self.lock:
            observer(name, matrix, x)

    def check(self, what: str, values: np.ndarray) -> None:
        """Raises MillError if `watch` is on and a value is NaN or infinite."""
        if self.watch and not np.isfinite(values).all():
            raise MillError(f"{self.source.path}: the first output that is not finite (NaN or infinity) is that of {what}")


class Linear:
    """A weight matrix [rows, columns], or a stack of them (one per expert or head), applied as x @ W.T."""

    def __init__(self, store: WeightStore, tensor: SourceTensor):
        if len(tensor.shape) < 2:
            raise FormatError(f"{store.source.path}: tensor {tensor.name} of shape {tensor.shape} is no matrix")
        self.store, self.tensor, self.name = store, tensor, tensor.name
        self.columns, self.rows = tensor.shape[:2]
        self.matrices = prod(tensor.shape[2:])
        self._tile = max(GROUP, TILE_BYTES // (4 * self.columns) // GROUP * GROUP)

    @cached_property
    def _packed(self) -> np.ndarray | None:
        """The rows of all matrices as they are stored, uint8 [rows of all, row bytes], if products may be made from them."""
        tensor, stored = self.tensor, self.tensor.stored
        if stored is None or tensor.raw is None or not stored.is_known or (self.store.exact and not stored.is_float):
            return None
        return tensor.mapped if tensor.mapped is not None else self.store.held(tensor)

    @cached_property
    def plan(self) -> np.ndarray | None:
        """What products of a few tokens straight from the packed rows need (see kernels.products), int64 [1, ...]; or None."""
        plan = self.plan_of(self.matrices)
        return None if plan is None else plan[None]

    @property
    def activation_block(self) -> int:
        """Activations that share a scale in products of a few tokens (see `plan`), 0: float32."""
        assert self.plan is not None
        return int(self.plan[0, products.BLOCK])

    def plan_of(self, matrices: int, part: tuple[int, int] | None = None) -> np.ndarray | None:
        """A plan for all rows as so many matrices, of each the rows from ... to (all if None), int64 [...]; or None."""
        packed, stored = self._packed, self.tensor.stored
        if packed is None or stored is None:
            return None
        threads = self.store.workers.count
        return products.plan(packed, stored, self.columns, matrices, part, threads)  # it has the address of the bytes

    @cached_property
    def many(self) -> gemm.Plan | None:
        """What products of many tokens straight from the packed rows need (see kernels.gemm), or None."""
        packed, stored = self._packed, self.tensor.stored
        if packed is None or stored is None:
            return None
        return gemm.plan(packed, stored, self.columns, self.matrices, self.store.exact)

    @property
    def multiplies_float32(self) -> bool:
        """Whether weights and activations of many tokens are multiplied as float32, not rounded to fewer bits."""
        way = self.many.way if self.many is not None else gemm.row_way(not self._rounds_decoded)
        return way[0] == FLOAT32

    @property
    def _rounds_decoded(self) -> bool:
        """Whether decoded rows may be rounded to bf16: those of quantised types, not in `exact` mode (which has no _packed)."""
        return self._packed is not None and self.tensor.stored is not None and not self.tensor.stored.is_float

    def matmul(self, x: np.ndarray | Tokens, matrix: int = 0) -> np.ndarray:
        """x float32 [n, columns] times one matrix -> float32 [n, rows]. Tells the observer.

        Several matrices that multiply the same x had better be given the same Tokens(x).
        """
        tokens = x if isinstance(x, Tokens) else Tokens(x)
        self.observe(tokens.x, matrix)
        return self.unobserved(tokens, matrix)

    def unobserved(self, x: np.ndarray | Tokens, matrix: int = 0, gemv: bool | None = None) -> np.ndarray:
        """As matmul, but tells nobody: for those who tell the observer of this tensor themselves. gemv: whether products are to
        be made as for a few tokens."""
        tokens = x if isinstance(x, Tokens) else Tokens(x)
        out = np.empty((len(tokens), self.rows), np.float32)
        if not out.size:
            return out
        # Whoever observes gets the same of a text whatever runs beside it: how many tokens an expert has must not matter.
        gemv = len(tokens) <= products.FEW and self.store.observer is None if gemv is None else gemv
        if gemv and self.plan is not None:
            out = _multiply(self.store.workers, self.plan, tokens.x, matrix, self.rows).reshape(len(tokens), self.rows)
        elif self.many is not None:
            (out,) = _multiply_many(self.store.workers, [self.many], tokens, matrix)
        else:
            self._multiply_decoded(tokens, matrix, out, gemv)
        return self._checked(out, matrix)

    def _multiply_decoded(self, tokens: Tokens, matrix: int, out: np.ndarray, gemv: bool) -> None:
        """Decodes tiles of rows and multiplies them: the threads share out the tiles, or the product of a single one."""
        packed, workers, exact, n = self._packed, self.store.workers, not self._rounds_decoded, len(tokens)
        worth = workers.ready() if n * self.rows * self.columns >= PARALLEL_THRESHOLD else 0
        step = self._tile
        if packed is not None:  # these are decoded at every use: as much as stays in the cache until it is multiplied
            share = -(-self.rows // (2 * workers.count * gemm.ROWS)) * gemm.ROWS
            step = gemm.rows_at_once(self.columns) if workers.count == 1 else min(gemm.rows_at_once(self.columns), share)

        def multiply(low: int, team: int = 0, threads: int = 1) -> None:
            rows = self._decoded(matrix, low, min(low + step, self.rows))
            if gemv:
                out[:, low : low + len(rows)] = _multiply_rows(tokens.x, rows, team, threads)
            else:
                gemm.multiply_rows(rows, exact, tokens, out, low, team, threads)

        if self.rows <= step:
            multiply(0, worth, workers.count)
            return
        if not gemv:
            gemm.make_inputs(gemm.row_way(exact), tokens, worth, workers.count)
        workers.map(multiply, range(0, self.rows, step), n * self.rows * self.columns)

    def _decoded(self, matrix: int, start: int, stop: int) -> np.ndarray:
        """Rows float32 [stop - start, columns] of a matrix."""
        packed, stored = self._packed, self.tensor.stored
        if packed is None or stored is None:
            return self.store.rows(self.tensor, matrix, start, stop)
        first = matrix * self.rows
        return np.ascontiguousarray(decode(packed[first + start : first + stop], stored.name, self.columns), np.float32)

    def _checked(self, out: np.ndarray, matrix: int = 0) -> np.ndarray:
        if self.store.watch:
            self.store.check(self.name + (f" (matrix {matrix})" if self.matrices > 1 else ""), out)
        return out

    def observe(self, x: np.ndarray, matrix: int = 0) -> None:
        if self.store.observer is not None:
            self.store.tell(self.name, matrix, np.ascontiguousarray(x, np.float32).reshape(-1, self.columns))

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """Rows by number, float32 [len(ids), columns]: what an embedding does."""
        if self.rows <= self._tile:
            return self.store.rows(self.tensor, 0, 0, self.rows)[ids]
        if len(ids) == 1:
            return np.array(self.tensor.read(int(ids[0]), int(ids[0]) + 1), np.float32)
        wanted, where = np.unique(ids, return_inverse=True)
        stored, mapped = self.tensor.stored, self.tensor.mapped
        if mapped is not None and stored is not None and stored.rows == 1:
            return decode(mapped[wanted], stored.name, self.columns)[where]
        found = np.empty((len(wanted), self.columns), np.float32)
        for i, row in enumerate(wanted.tolist()):
            found[i] = self.tensor.read(row, row + 1)[0]
        return found[where]

    def heads(self, n: int) -> np.ndarray:
        """The whole tensor decoded and cut into n equal runs of rows: float32 [n, rows of all / n, columns].

        For products along the rows instead of the columns. A 2D tensor and a 3D one with a matrix per head come out alike.
        """
        return self.store.whole(self.tensor).reshape(n, -1, self.columns)


class PerHead:
    """A matrix per head, each for its own head's tokens: products of a few, straight from the packed rows.

    linear  holds the rows of all heads, one head's after the other's, in one matrix or in one per head
    part    of each head's rows those that count, from ... to; all if None
    """

    def __init__(self, linear: Linear, heads: int, part: tuple[int, int] | None = None):
        self.linear, self.heads = linear, heads
        low, high = part or (0, linear.rows * linear.matrices // heads)
        self.part, self.rows = (low, high), high - low

    @cached_property
    def plan(self) -> np.ndarray | None:
        return self.linear.plan_of(self.heads, self.part)

    def takes(self, n: int) -> bool:
        """Whether `matmul` can multiply n tokens per head."""
        return n <= products.FEW and self.plan is not None

    def matmul(self, x: np.ndarray) -> np.ndarray:
        """x float32 [heads, n, columns] -> float32 [heads, n, rows]. Tells no observer."""
        heads, n, columns = x.shape
        plan, store = self.plan, self.linear.store
        assert plan is not None
        out = np.empty((heads * n, self.rows), np.float32)
        rows = np.ascontiguousarray(x, np.float32).reshape(heads * n, columns)
        products.multiply_each(store.workers.ready(), products.quantise_part.address, plan, _of_each(heads, n), rows, out)
        if store.watch:
            store.check(self.linear.name, out)
        return out.reshape(heads, n, self.rows)


@lru_cache(256)
def _of_each(heads: int, n: int) -> np.ndarray:
    """Jobs (see kernels.gemv): each head's n rows with its own matrix."""
    return np.array([(head, head * n, n, head * n) for head in range(heads)], np.int64)


class Together:
    """Matrices that multiply the same input: for a few tokens in one go."""

    def __init__(self, linears: Sequence[Linear]):
        self.linears = tuple(linears)

    @cached_property
    def _plans(self) -> np.ndarray | None:
        plans = [plan for linear in self.linears if (plan := linear.plan) is not None]
        return np.concatenate(plans) if len(plans) == len(self.linears) else None

    @cached_property
    def _many(self) -> list[gemm.Plan] | None:
        plans = [linear.many for linear in self.linears if linear.many is not None]
        return plans if len(plans) == len(self.linears) else None

    def matmul(self, x: np.ndarray) -> list[np.ndarray]:
        """x float32 [n, columns] -> each matrix's product, float32 [n, its rows]. Tells the observer."""
        n, plans, store = len(x), self._plans, self.linears[0].store
        many = self._many if n > products.FEW else None
        if store.watch or (many is None and (n > products.FEW or plans is None)):
            tokens = Tokens(x)
            return [linear.matmul(tokens) for linear in self.linears]
        if store.observer is not None:
            for linear in self.linears:
                linear.observe(x)
        if many is not None:
            return _multiply_many(store.workers, many, Tokens(x))
        assert plans is not None
        out, results, at = _multiply(store.workers, plans, x, 0, sum(linear.rows for linear in self.linears)), [], 0
        for linear in self.linears:
            end = at + n * linear.rows
            results.append(out[at:end].reshape(n, linear.rows))
            at = end
        return results


def _multiply(workers: Workers, plans: np.ndarray, x: np.ndarray, matrix: int, rows: int) -> np.ndarray:
    """All products, one plan's after the other's: float32 [n * rows], rows: of all plans."""
    out = np.empty(len(x) * rows, np.float32)
    x = np.ascontiguousarray(x, np.float32)
    products.multiply(workers.ready(), products.quantise_part.address, plans, matrix, x, out)
    return out


def _multiply_rows(x: np.ndarray, rows: np.ndarray, team: int, threads: int) -> np.ndarray:
    """x float32 [n, columns] times decoded rows [rows, columns], of a few tokens: float32 [n, rows]."""
    plan = products.plan(rows.view(np.uint8), TYPES["f32"], rows.shape[1], threads=threads)
    assert plan is not None
    out = np.empty((len(x), len(rows)), np.float32)
    products.multiply(team, products.quantise_part.address, plan[None], 0, x, out.reshape(-1))
    return out


def _multiply_many(workers: Workers, plans: list[gemm.Plan], tokens: Tokens, matrix: int = 0) -> list[np.ndarray]:
    """Each plan's product of many tokens, float32 [n, its rows]."""
    program, jobs = gemm.Program(workers.count), gemm.one_job(len(tokens), matrix)
    results = [np.empty((len(tokens), plan.rows), np.float32) for plan in plans]
    for plan, out in zip(plans, results, strict=True):
        program.product(1, plan, program.of(0, plan.way, tokens), out, jobs)
    work = len(tokens) * sum(plan.rows * plan.columns for plan in plans) // PACKED_SPEED
    program.run(workers.ready() if work >= PARALLEL_THRESHOLD else 0)
    return results
