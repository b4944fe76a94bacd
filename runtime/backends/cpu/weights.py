"""A model's tensors as the graphs use them: matrices that multiply, from their packed bytes or decoded as they are needed.

Products are made from the packed bytes in place, by GEMV (kernels.gemv_plan) or GEMM (kernels.gemm), wherever there is a kernel
for the type. Other weights (types without a layout, types of checkpoints, quantised types in `exact` mode) are decoded tile by
tile, and multiplied by the same kernels as rows of float32.

Decoded float32 rows are cached until `cache_bytes` are used up, and never replaced: every token uses all layers in the same
order, so replacing the oldest would always drop what is needed next. Rows that are not cached are decoded tile by tile at every
use, so that memory stays bounded whatever the model's size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from ....formats import TYPES, FormatError, SourceTensor, TensorSource
from ....quantize import decode
from ....simd.workers import PARALLEL_THRESHOLD, Workers
from .kernels.gemm import gemm
from .kernels.gemm.gemm import Activations
from .kernels.gemm.gemm_kernels import BYTES, FLOAT32
from .kernels.gemv_plan import GEMV_TOKENS, GemvPlan, multiply_jobs, plan_gemv

TILE_BYTES = 8 << 20  # decoded float32 of one tile
PACKED_SPEED = 4  # multiplications of packed weights in the time of one of decoded ones
GROUP = 16  # tiles begin at multiples of this many rows: the widest row interleave, so that no group is decoded twice


class WeightStore:
    """The tensors of one source, and what all uses of them share.

    workers     the threads that products are shared out to, by default `threads` of them
    exact       weights multiply as float32, and activations are not rounded to fewer bits first
    fast        products of prompts may round more than those of perplexities do (see `Settings.fast`)
    free        bytes that decoded rows, and stored bytes that had to be read, may still take
    """

    def __init__(
        self,
        source: TensorSource,
        cache_bytes: int,
        threads: int = 1,
        exact: bool = False,
        workers: Workers | None = None,
        fast: bool = False,
    ):
        self.source, self.workers, self.exact, self.fast = source, workers or Workers(threads), exact, fast
        self.free = cache_bytes
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._bytes: dict[str, np.ndarray] = {}
        self._rows: dict[tuple[str, int, int], np.ndarray] = {}

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

    def matrix(self, name: str, *shape: int) -> WeightMatrix:
        """The matrix, or stack of matrices, of a tensor; shape in ne order, not checked when left out."""
        return WeightMatrix(self, self.tensor(name, shape or None))

    def rows(self, tensor: SourceTensor, matrix: int, start: int, stop: int) -> np.ndarray:
        """Decoded rows float32 [stop - start, columns] of one matrix, cached if there is memory for them."""
        key = (tensor.name, matrix, start)
        cached = self._rows.get(key)
        if cached is not None and len(cached) == stop - start:
            return cached
        first = matrix * tensor.shape[1]
        decoded = np.ascontiguousarray(tensor.read(first + start, first + stop), np.float32)
        self._keep(key, decoded)
        return decoded

    def _keep(self, key: tuple[str, int, int], decoded: np.ndarray) -> None:
        with self._lock:
            if key not in self._rows and decoded.nbytes <= self.free:
                self.free -= decoded.nbytes
                self._rows[key] = decoded

    def stored_bytes(self, tensor: SourceTensor) -> np.ndarray | None:
        """The stored bytes of a tensor that is not mapped, read once and cached: uint8 [rows of all matrices, row bytes].

        None if there is no memory for them."""
        raw, stored = tensor.raw, tensor.stored
        if raw is None or stored is None:
            return None
        with self._reading:  # the threads of a product ask for it at the same time, and have to get the same array
            if tensor.name not in self._bytes:
                nbytes = stored.nbytes(tensor.shape)
                with self._lock:
                    if nbytes > self.free:
                        return None
                    self.free -= nbytes
                per_matrix = tensor.shape[1]
                runs = range(0, tensor.n_rows, per_matrix)
                self._bytes[tensor.name] = np.concatenate([raw(first, first + per_matrix) for first in runs])
            return self._bytes[tensor.name]

    def made_rows(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """What `make` makes of tensors, under a name of its own: once, if there is memory for it."""
        key = (name, -1, -1)
        made = self._rows.get(key)
        if made is None:
            made = make()
            self._keep(key, made)
        return made

    def release(self) -> None:
        """Frees decoded rows; those that products are using are freed after them."""
        with self._lock:
            self.free += sum(rows.nbytes for rows in self._rows.values())
            self._rows = {}

    def kept_bytes(self, names: Iterable[str], decoded: Collection[str] = (), made: int = 0) -> int:
        """Bytes of memory that the weights of these tensors will take when all have been used: those that are decoded, or had
        to be read, as far as there is room for them. decoded: names of those that are, whatever they are stored as, and all of
        a tensor at once: one that finds no room is there while it is used; made: bytes of `made_rows`."""
        needed, largest = made, 0
        for tensor in (self.source.tensors[name] for name in names if name in self):
            if tensor.name in decoded:
                largest = max(largest, 4 * prod(tensor.shape))
            if tensor.name in decoded or not multiplies_as_stored(tensor, self.exact):
                needed += 4 * prod(tensor.shape)
            elif tensor.mapped is None and tensor.stored is not None:
                needed += tensor.stored.nbytes(tensor.shape)
        return needed if needed <= self.free else self.free + largest

    def all_rows(self, tensor: SourceTensor) -> np.ndarray:
        """All rows of all matrices decoded, float32 [rows in all, columns], cached if there is memory for them."""
        per_matrix = tensor.shape[1]
        if tensor.n_rows == per_matrix:
            return self.rows(tensor, 0, 0, per_matrix)
        key = (tensor.name, -1, 0)
        cached = self._rows.get(key)
        if cached is not None:
            return cached
        decoded = np.empty((tensor.n_rows, tensor.shape[0]), np.float32)
        for first in range(0, tensor.n_rows, per_matrix):
            decoded[first : first + per_matrix] = tensor.read(first, first + per_matrix)
        self._keep(key, decoded)
        return decoded


def multiplies_as_stored(tensor: SourceTensor, exact: bool) -> bool:
    """Whether products are made from a tensor's stored rows; False: its rows are decoded first."""
    stored = tensor.stored
    return stored is not None and tensor.raw is not None and stored.is_known and not (exact and not stored.is_float)


class WeightMatrix:
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
        tensor = self.tensor
        if not multiplies_as_stored(tensor, self.store.exact):
            return None
        return tensor.mapped if tensor.mapped is not None else self.store.stored_bytes(tensor)

    @cached_property
    def factors(self) -> np.ndarray | None:
        """float32 [matrices] with which products have to be multiplied, because packed rows do not contain them; or None."""
        return None if self._packed is None or self.tensor.scale is None else np.ascontiguousarray(self.tensor.scale.factors())

    @cached_property
    def gemv_plan(self) -> GemvPlan | None:
        """The plan of GEMV products with the packed rows; None if there is no GEMV."""
        return self.head_plan(self.matrices)

    @property
    def gemv_block(self) -> int:
        """Activations that share a scale in products by `gemv_plan`; 0: they are float32."""
        assert self.gemv_plan is not None
        return self.gemv_plan.product.activations

    def head_plan(self, heads: int, part: tuple[int, int] | None = None) -> GemvPlan | None:
        """A GEMV plan, or None. The rows are `heads` equal matrices, of each the rows part[0] to part[1] - 1 (None: all)."""
        packed, stored = self._packed, self.tensor.stored
        if packed is None or stored is None:
            return None
        threads = self.store.workers.count
        return plan_gemv(packed, stored, self.columns, heads, part, threads)  # it has the address of the bytes

    @cached_property
    def gemm_plan(self) -> gemm.GemmPlan | None:
        """The plan of GEMM products with the packed rows; None if the weights have to be decoded first."""
        packed, stored = self._packed, self.tensor.stored
        if packed is None or stored is None:
            return None
        return gemm.plan_gemm(packed, stored, self.columns, self.matrices, self.store.exact, self.store.fast)

    @property
    def multiplies_float32(self) -> bool:
        """Whether GEMM multiplies weights and activations as float32, not rounded to fewer bits."""
        return self._form.kind == FLOAT32

    @property
    def decoded_form(self) -> gemm.InputForm:
        """How GEMM takes activations where the rows are decoded for it: no coarser than where they are not, as far as the
        processor can."""
        return gemm.decoded_form(False) if self._form.kind == BYTES else self._form

    @property
    def _form(self) -> gemm.InputForm:
        return self.gemm_plan.form if self.gemm_plan is not None else gemm.decoded_form(not self._rounds_decoded)

    @property
    def _rounds_decoded(self) -> bool:
        """Whether decoded rows may be rounded to bf16: those of quantised types, not in `exact` mode (which has no _packed)."""
        return self._packed is not None and self.tensor.stored is not None and not self.tensor.stored.is_float

    def multiply(
        self, x: np.ndarray, matrix: int = 0, use_gemv: bool | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """x float32 [n, columns] times one matrix, without its factor (see `factors`) -> float32 [n, rows], C-contiguous;
        written to `out` if that is given.

        use_gemv: by GEMV, else by GEMM, whose sums have another order; None: by GEMV for GEMV_TOKENS tokens at most.
        """
        activations, workers, n = Activations(x), self.store.workers, len(x)
        use_gemv = n <= GEMV_TOKENS if use_gemv is None else use_gemv
        out = np.empty((n, self.rows), np.float32) if out is None else out
        if not out.size:
            return out
        if use_gemv and self.gemv_plan is not None:
            multiply_jobs(workers.ready(), self.gemv_plan, gemm.one_job(n, matrix), activations.x, out)
        elif self.gemm_plan is not None:
            program, plan = gemm.ProductList(workers.count), self.gemm_plan
            program.product(1, plan, program.blocks_of(0, plan.form, activations), out, gemm.one_job(n, matrix))
            work = n * plan.rows * plan.columns // PACKED_SPEED
            program.run(workers.ready() if work >= PARALLEL_THRESHOLD else 0)
        else:
            self._multiply_decoded(activations, matrix, out, use_gemv)
        return out

    def _multiply_decoded(self, activations: Activations, matrix: int, out: np.ndarray, use_gemv: bool) -> None:
        """Decodes tiles of rows and multiplies them: the threads share out the tiles, or the product of a single one."""
        packed, workers, exact, n = self._packed, self.store.workers, not self._rounds_decoded, len(activations)
        worth = workers.ready() if n * self.rows * self.columns >= PARALLEL_THRESHOLD else 0
        step = self._tile
        if packed is not None:  # these are decoded at every use: as much as stays in the cache until it is multiplied
            share = -(-self.rows // (2 * workers.count * gemm.ROWS)) * gemm.ROWS
            step = gemm.decoded_tile_rows(self.columns)
            step = step if workers.count == 1 else min(step, share)

        def multiply(low: int, team: int = 0, threads: int = 1) -> None:
            rows = self._decoded(matrix, low, min(low + step, self.rows))
            if use_gemv:
                out[:, low : low + len(rows)] = _multiply_rows(activations.x, rows, team, threads)
            else:
                gemm.multiply_rows(rows, exact, activations, out, low, team, threads)

        if self.rows <= step:
            multiply(0, worth, workers.count)
            return
        if not use_gemv:
            gemm.fill_blocks(gemm.decoded_form(exact), activations, worth, workers.count)
        workers.map(multiply, range(0, self.rows, step), n * self.rows * self.columns)

    def _decoded(self, matrix: int, start: int, stop: int) -> np.ndarray:
        """Rows float32 [stop - start, columns] of a matrix."""
        packed, stored = self._packed, self.tensor.stored
        if packed is None or stored is None:
            return self.store.rows(self.tensor, matrix, start, stop)
        first = matrix * self.rows
        return np.ascontiguousarray(decode(packed[first + start : first + stop], stored.name, self.columns), np.float32)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Rows of a table: int [...] -> float32 [..., columns]."""
        return self.lookup(rows.reshape(-1)).reshape(*rows.shape, -1)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """Rows by number decoded, float32 [len(ids), columns]: what an embedding does."""
        if self.rows <= self._tile:
            return self.store.rows(self.tensor, 0, 0, self.rows)[ids]
        unique, index = np.unique(ids, return_inverse=True) if len(ids) > 1 else (ids, slice(None))
        stored, mapped = self.tensor.stored, self.tensor.mapped
        if mapped is not None and stored is not None and stored.rows == 1 and self.tensor.scale is None:
            return decode(mapped[unique], stored.name, self.columns)[index]
        rows = np.empty((len(unique), self.columns), np.float32)
        for i, row in enumerate(unique.tolist()):
            rows[i] = self.tensor.read(row, row + 1)[0]
        return rows[index]

    def heads(self, n: int) -> np.ndarray:
        """All of the tensor decoded and cut into n equal runs of rows: float32 [n, rows of all / n, columns].

        For products along the rows instead of the columns. 2D tensors, and 3D ones with a matrix per head, give the same.
        """
        return self.store.all_rows(self.tensor).reshape(n, -1, self.columns)


class HeadWeights:
    """A matrix per head, each for its own head's tokens: GEMV products with the packed rows.

    weights  holds the rows of all heads, one head's after the other's, in one matrix or in one per head
    part     (first row, row after the last) of each head that is used; all if None
    """

    def __init__(self, weights: WeightMatrix, heads: int, part: tuple[int, int] | None = None):
        self.weights, self.heads = weights, heads
        first, stop = part or (0, weights.rows * weights.matrices // heads)
        self.part, self.rows = (first, stop), stop - first

    @cached_property
    def gemv_plan(self) -> GemvPlan | None:
        return self.weights.head_plan(self.heads, self.part)

    def multiply(self, x: np.ndarray) -> np.ndarray:
        """x float32 [heads, n, columns] -> float32 [heads, n, rows]."""
        heads, n, columns = x.shape
        assert self.gemv_plan is not None
        out = np.empty((heads * n, self.rows), np.float32)
        rows = np.ascontiguousarray(x, np.float32).reshape(heads * n, columns)
        team = self.weights.store.workers.ready()
        multiply_jobs(team, self.gemv_plan, _head_jobs(heads, n), rows, out)
        return out.reshape(heads, n, self.rows)


@lru_cache(256)
def _head_jobs(heads: int, n: int) -> np.ndarray:
    """Jobs (see kernels.gemv): each head's n rows with its own matrix."""
    return np.array([(head, head * n, n, head * n) for head in range(heads)], np.int64)


def _multiply_rows(x: np.ndarray, rows: np.ndarray, team: int, threads: int) -> np.ndarray:
    """x float32 [n, columns] times decoded rows [rows, columns] by GEMV: float32 [n, rows]."""
    plan = plan_gemv(rows.view(np.uint8), TYPES["f32"], rows.shape[1], threads=threads)
    assert plan is not None
    out = np.empty((len(x), len(rows)), np.float32)
    multiply_jobs(team, plan, gemm.one_job(len(x)), x, out)
    return out
