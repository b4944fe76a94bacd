"""The matrices of latent attention that make keys and values from latents: K [heads, nope, rank] and V [heads, v, rank].

GGUF holds them in up to two ways (see graph.ops.LatentAttention). For a few tokens the packed rows of k_b, and of v_b or V in
kv_b, multiply; where a file lacks k_b, it is made from kv_b and kept in memory (as q8_0, unless kv_b holds floats). Everything
else takes decoded matrices, those of kv_b where it is there.
"""

from __future__ import annotations

import numpy as np

from ....formats import TYPES, SourceTensor
from ....quantize import decode
from ....simd.workers import PARALLEL_THRESHOLD
from ...graph.ops import LatentAttention, Weight
from .kernels import gemv_plan
from .kernels.gemm import gemm
from .kv_cache import encoded
from .weights import HeadWeights, WeightMatrix, WeightStore


class LatentShape:
    """Sizes of an op: heads, elements of a head's key that are not rotated and that are, of its value, and of a latent."""

    def __init__(self, op: LatentAttention):
        self.heads, self.rank, self.rope = op.q.shape[0], op.latent.shape[0], op.k_pe.shape[0]
        self.nope, self.v = op.nope, op.v_width


class HeadMatrices:
    """K and V of a layer, whichever tensors hold them."""

    def __init__(self, store: WeightStore, op: LatentAttention, shape: LatentShape):
        self.store, self.shape = store, shape

        def matrix(weight: Weight | None) -> WeightMatrix | None:
            return None if weight is None else store.matrix(weight.name, *weight.shape)

        self.kv_b, self.k_b, self.v_b = matrix(op.kv_b), matrix(op.k_b), matrix(op.v_b)
        # What multiplies along the rows of a tensor can do so from its packed bytes; the first that can is taken.
        into_query = self.k_b if self.k_b is not None else self._transposed()
        self._into_query = [] if into_query is None else [HeadWeights(into_query, shape.heads)]
        self._into_output = [HeadWeights(self.v_b, shape.heads)] if self.v_b is not None else []
        if self.kv_b is not None:
            self._into_output.append(HeadWeights(self.kv_b, shape.heads, (shape.nope, shape.nope + shape.v)))

    @property
    def query_plan(self) -> np.ndarray | None:
        """Of products of each head's queries with K from packed rows (see kernels.gemv_plan)."""
        return next((each.gemv_plan for each in self._into_query if each.gemv_plan is not None), None)

    @property
    def output_plan(self) -> np.ndarray | None:
        """Of products of each head's weighted latents with V."""
        return next((each.gemv_plan for each in self._into_output if each.gemv_plan is not None), None)

    @property
    def query_block(self) -> int:
        """Numbers that share a scale in what the products of the plan take."""
        return _block(self.query_plan)

    @property
    def output_block(self) -> int:
        return _block(self.output_plan)

    def _transposed(self) -> WeightMatrix | None:
        """k_b as kv_b has it, to be made when it is first used, if there is room for it."""
        s, tensor = self.shape, self.kv_b.tensor if self.kv_b is not None else None
        if tensor is None or tensor.stored is None or (self.store.exact and not tensor.stored.is_float):
            return None
        kind = TYPES[tensor.stored.base or tensor.stored.name]
        kind = kind if kind.is_float else TYPES["q8_0"]
        if not kind.fits(s.nope):
            return None

        def raw(start: int, stop: int) -> np.ndarray:
            """Rows of one head."""
            head, first = divmod(start, s.rank)
            rows = tensor.read(head * (s.nope + s.v), (head + 1) * (s.nope + s.v))[: s.nope]
            return encoded(np.ascontiguousarray(rows.T[first : first + stop - start], np.float32), kind.name)

        def read(start: int, stop: int) -> np.ndarray:
            return decode(raw(start, stop), kind.name, s.nope)

        shape = (s.nope, s.rank, s.heads)
        return WeightMatrix(self.store, SourceTensor(f"{tensor.name} (K, transposed)", shape, kind.name, read, raw, kind))

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        """K, V as float32 views. kv_b wins where both are there."""
        heads = self.shape.heads
        if self.kv_b is not None:
            both = self.kv_b.heads(heads)
            return both[:, : self.shape.nope], both[:, self.shape.nope :]
        assert self.k_b is not None
        assert self.v_b is not None
        return self.k_b.heads(heads).transpose(0, 2, 1), self.v_b.heads(heads)

    def absorb(self, q: np.ndarray) -> np.ndarray:
        """Each head's queries times K: float32 [heads, n, nope] -> [heads, n, rank]."""
        ready = next((each for each in self._into_query if each.can_multiply(q.shape[1])), None)
        return ready.multiply(q) if ready is not None else self._with_all(q, self.load()[0])

    def finish(self, weighted: np.ndarray) -> np.ndarray:
        """V times each head's weighted latents: float32 [heads, n, rank] -> [heads, n, v]."""
        ready = next((each for each in self._into_output if each.can_multiply(weighted.shape[1])), None)
        return ready.multiply(weighted) if ready is not None else self._with_all(weighted, self.load()[1].transpose(0, 2, 1))

    def expand(self, latents: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Fills in every head's keys and values of latents [n, rank]: k [n, heads, nope], v [n, heads, v]."""
        keys, values = self.load()
        k[...] = self._with_all(latents, keys.transpose(0, 2, 1)).transpose(1, 0, 2)
        v[...] = self._with_all(latents, values.transpose(0, 2, 1)).transpose(1, 0, 2)

    def _with_all(self, x: np.ndarray, matrices: np.ndarray) -> np.ndarray:
        """x [heads, n, inner] or [n, inner] times matrices [heads, inner, outer] -> float32 [heads, n, outer]."""
        workers = self.store.workers
        team = workers.ready() if x.shape[-2] * matrices.size >= PARALLEL_THRESHOLD else 0
        return gemm.matmul(x, matrices, None, team, workers.count)

    @property
    def exact(self) -> bool:
        """Whether products with these are made in float32, of however many tokens."""
        return any(each.multiplies_float32 for each in (self.kv_b, self.v_b) if each is not None)


def _block(plan: np.ndarray | None) -> int:
    assert plan is not None
    return int(plan[gemv_plan.BLOCK])
