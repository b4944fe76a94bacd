"""The matrices of latent attention that make keys and values from latents: K [heads, nope, rank] and V [heads, v, rank].

A GGUF file has them in one or two layouts (see graph.ops.LatentAttention). GEMV takes the packed rows of k_b, and of v_b or of
V in kv_b; where a file lacks k_b, it is made from kv_b in memory (as q8_0, unless kv_b is of floats). All other products take
decoded matrices, those of kv_b if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ....data_classes import dataclass
from ....formats import TYPES, SourceTensor
from ....quantize import decode
from ....simd.workers import PARALLEL_THRESHOLD
from ...cache_layout import CachePart
from ...graph.ops import LatentAttention
from ...graph.values import Weight
from .attention import AttentionParams
from .kernels.gemm import gemm
from .kernels.gemm.gemm_kernels import BF16
from .kernels.gemv_plan import GemvPlan
from .kv_cache import encode_with_nan, rotate
from .weights import HeadWeights, WeightMatrix, WeightStore, multiplies_as_stored


class LatentShape:
    """Sizes of an op: heads, elements of a head's key that are not rotated and that are, of its value, and of a latent."""

    def __init__(self, op: LatentAttention):
        self.heads, self.rank, self.rope = op.q.shape[0], op.latent.shape[0], op.k_pe.shape[0]
        self.nope, self.v = op.nope, op.v_width


def rounds_latents(store: WeightStore, op: LatentAttention) -> bool:
    """Whether products with K and V are those of quantised weights, with activations of eight bits. Reads no tensor."""
    weights = (op.k_b if op.kv_b is None else op.kv_b), op.v_b
    tensors = [store.source.tensors[weight.name] for weight in weights if weight is not None]
    return all(t.stored and not t.stored.is_float and multiplies_as_stored(t, store.exact) for t in tensors)


def takes_bytes(store: WeightStore, op: LatentAttention, part: CachePart) -> bool:
    """Whether keys that are made of cached latents, and scores that select some, may be products of bytes: latents are cached
    in blocks, and what multiplies them rounds as much. part: latents as they are cached."""
    return part.suits_bytes and rounds_latents(store, op)


class HeadMatrices:
    """K and V of a layer, whichever tensors hold them."""

    def __init__(self, store: WeightStore, op: LatentAttention, shape: LatentShape):
        self.store, self.op, self.shape = store, op, shape

        def matrix(weight: Weight | None) -> WeightMatrix | None:
            return None if weight is None else store.matrix(weight.name, *weight.shape)

        self.kv_b, self.k_b, self.v_b = matrix(op.kv_b), matrix(op.k_b), matrix(op.v_b)
        decoded = self.k_b if self.kv_b is None else self.kv_b, self.v_b
        self._decoded = [weights for weights in decoded if weights is not None]
        # Tensors whose packed rows can be multiplied, if their type allows it: the first one that can is used.
        into_query = self.k_b if self.k_b is not None else self._transposed()
        self._into_query = [] if into_query is None else [HeadWeights(into_query, shape.heads)]
        self._into_output = [HeadWeights(self.v_b, shape.heads)] if self.v_b is not None else []
        if self.kv_b is not None:
            self._into_output.append(HeadWeights(self.kv_b, shape.heads, (shape.nope, shape.nope + shape.v)))

    @property
    def query_plan(self) -> GemvPlan | None:
        """The GEMV plan of products of each head's queries with K; None if its packed rows cannot be multiplied."""
        return next((weights.gemv_plan for weights in self._into_query if weights.gemv_plan is not None), None)

    @property
    def output_plan(self) -> GemvPlan | None:
        """The GEMV plan of products of each head's weighted latents with V, or None."""
        return next((weights.gemv_plan for weights in self._into_output if weights.gemv_plan is not None), None)

    def _transposed(self) -> WeightMatrix | None:
        """k_b made from kv_b, when it is first used and if `cache_bytes` allow it; None where it cannot be made."""
        s, tensor = self.shape, self.kv_b.tensor if self.kv_b is not None else None
        if tensor is None or tensor.stored is None or (self.store.exact and not tensor.stored.is_float):
            return None
        tensor_type = TYPES[tensor.stored.base or tensor.stored.name]
        tensor_type = tensor_type if tensor_type.is_float else TYPES["q8_0"]
        if not tensor_type.fits(s.nope):
            return None

        def raw(start: int, stop: int) -> np.ndarray:
            """Rows of one head."""
            head, first = divmod(start, s.rank)
            rows = tensor.read(head * (s.nope + s.v), (head + 1) * (s.nope + s.v))[: s.nope]
            return encode_with_nan(np.ascontiguousarray(rows.T[first : first + stop - start], np.float32), tensor_type.name)

        def read(start: int, stop: int) -> np.ndarray:
            return decode(raw(start, stop), tensor_type.name, s.nope)

        shape = (s.nope, s.rank, s.heads)
        name = f"{tensor.name} (K, transposed)"
        return WeightMatrix(self.store, SourceTensor(name, shape, tensor_type.name, read, raw, tensor_type))

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        """K [heads, nope, rank] and V [heads, v, rank] decoded, float32 views: from kv_b if there is one."""
        heads = self.shape.heads
        if self.kv_b is not None:
            k_and_v = self.kv_b.heads(heads)
            return k_and_v[:, : self.shape.nope], k_and_v[:, self.shape.nope :]
        assert self.k_b is not None
        assert self.v_b is not None
        return self.k_b.heads(heads).transpose(0, 2, 1), self.v_b.heads(heads)

    def absorb(self, q: np.ndarray, use_gemv: bool) -> np.ndarray:
        """Each head's queries times K: float32 [heads, n, nope] -> [heads, n, rank]. use_gemv: for few of them."""
        packed = _packed_weights(self._into_query, use_gemv)
        return packed.multiply(q) if packed is not None else self._matmul(q, self.load()[0])

    def finish(self, weighted: np.ndarray, use_gemv: bool) -> np.ndarray:
        """V times each head's weighted latents: float32 [heads, n, rank] -> [heads, n, v]. use_gemv: for few of them."""
        packed = _packed_weights(self._into_output, use_gemv)
        return packed.multiply(weighted) if packed is not None else self._matmul(weighted, self.load()[1].transpose(0, 2, 1))

    def expand(self, latents: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Fills in every head's keys and values of latents [n, rank]: k [n, heads, nope], v [n, heads, v]."""
        keys, values = self.load()
        k[...] = self._matmul(latents, keys.transpose(0, 2, 1)).transpose(1, 0, 2)
        v[...] = self._matmul(latents, values.transpose(0, 2, 1)).transpose(1, 0, 2)

    def expander(self, part: CachePart) -> Expander | PackedExpander:
        """What makes all heads' keys and values. part: latents as they are cached."""
        if self.packs(part):
            rows = self._packed(0, part), self._packed(1, part)
            keys, values = (gemm.plan_gemm(packed, TYPES["q8_0"], self.shape.rank, self.shape.heads) for packed in rows)
            if keys is not None and values is not None:
                return PackedExpander(keys, values, rows, part)
        return Expander(*self.load(), self.form)

    def packs(self, part: CachePart) -> bool:
        """Whether prompts multiply K and V as q8_0. part: latents as they are cached."""
        has_whole_panels = not (self.shape.nope % gemm.ROWS or self.shape.v % gemm.ROWS)
        return has_whole_panels and TYPES["q8_0"].fits(self.shape.rank) and takes_bytes(self.store, self.op, part)

    @property
    def packed_bytes(self) -> int:
        """That these take."""
        s = self.shape
        return s.heads * (s.nope + s.v) * TYPES["q8_0"].row_bytes(s.rank)

    def _packed(self, number: int, part: CachePart) -> np.ndarray:
        """K or V as q8_0, uint8 [heads * nope or v, row bytes], rotated as latents are."""

        def make_head(head: int) -> np.ndarray:
            rows = np.array(self._rows_of(number, head), np.float32, order="C")
            rotate(rows, part)
            return encode_with_nan(rows, "q8_0")

        def make() -> np.ndarray:
            return np.concatenate(self.store.workers.map(make_head, range(self.shape.heads)))

        return self.store.made_rows(f"{self._decoded[0].name} ({'KV'[number]}, q8_0)", make)

    def _rows_of(self, number: int, head: int) -> np.ndarray:
        """K (0) or V (1) of a head, float32 [nope or v, rank], decoded for this once."""
        s = self.shape
        if self.kv_b is not None:
            first = head * (s.nope + s.v) + number * s.nope
            return self.kv_b.tensor.read(first, first + (s.v if number else s.nope))
        if number:
            assert self.v_b is not None
            return self.v_b.tensor.read(head * s.v, (head + 1) * s.v)
        assert self.k_b is not None
        return self.k_b.tensor.read(head * s.rank, (head + 1) * s.rank).T

    def _matmul(self, x: np.ndarray, matrices: np.ndarray) -> np.ndarray:
        """x [heads, n, inner] or [n, inner] times matrices [heads, inner, outer] -> float32 [heads, n, outer]."""
        workers = self.store.workers
        team = workers.ready() if x.shape[-2] * matrices.size >= PARALLEL_THRESHOLD else 0
        return gemm.matmul(x, matrices, None, team, workers.count, self.form)

    @property
    def exact(self) -> bool:
        """Whether products with these matrices are made in float32, whatever the number of tokens."""
        return any(weights.multiplies_float32 for weights in self._decoded)

    @property
    def rounds(self) -> bool:
        """Whether the decoded matrices and what they multiply are rounded to one number of bf16."""
        return self.form.kind == BF16 and self.form.parameters[0] == 1

    @cached_property
    def form(self) -> gemm.InputForm:
        """How products with the decoded matrices take latents and queries: the finest of theirs."""
        forms = [weights.decoded_form for weights in self._decoded]
        return gemm.FLOAT32_FORM if self.exact else max(forms, key=lambda form: form.parameters)


def _packed_weights(candidates: Sequence[HeadWeights], use_gemv: bool) -> HeadWeights | None:
    """The first whose packed rows are multiplied; None: none."""
    return next((weights for weights in candidates if use_gemv and weights.gemv_plan is not None), None)


@dataclass(frozen=True, eq=False)
class Expander:
    """K [heads, nope, rank] and V [heads, v, rank] in float32, and how products take latents."""

    keys: np.ndarray
    values: np.ndarray
    form: gemm.InputForm

    def inputs(self, latents: np.ndarray, team: int, threads: int) -> gemm.InputBlocks:
        """Latents float32 [n, rank] as products take them."""
        return gemm.filled(latents, self.form, team, threads)

    def expand(self, program: gemm.ProductList, latents: gemm.InputBlocks, first: int, k: np.ndarray, v: np.ndarray) -> None:
        """Enters the products that make keys k [heads, n, nope] and values v [heads, n, v] of as many heads from `first` on."""
        stop = first + len(k)
        program.matmul(0, latents, self.keys[first:stop].transpose(0, 2, 1), k)
        program.matmul(0, latents, self.values[first:stop].transpose(0, 2, 1), v)


@dataclass(frozen=True, eq=False)
class PackedExpander:
    """As `Expander`, with plans of the packed rows. Latents are rounded with the rotation that they are cached with: those of
    q8_0 to what they are."""

    keys: gemm.GemmPlan
    values: gemm.GemmPlan
    rows: tuple[np.ndarray, np.ndarray]  # that the plans refer to by address
    part: CachePart

    def inputs(self, latents: np.ndarray, team: int, threads: int) -> gemm.InputBlocks:
        rows = latents.copy()
        rotate(rows, self.part)
        return gemm.filled(rows, self.keys.form, team, threads)

    def expand(self, program: gemm.ProductList, latents: gemm.InputBlocks, first: int, k: np.ndarray, v: np.ndarray) -> None:
        program.matmul_packed(0, latents, self.keys, first, k)
        program.matmul_packed(0, latents, self.values, first, v)


@dataclass(frozen=True, eq=False)
class LatentLayer:
    """A latent attention op as it is computed. mode: Settings.mla; until: see `CachedAttention`; sparse_from: the position from
    which on tokens of prompts whose keys are expanded attend to selected latents alone, which multiplies less then; before, to
    all keys, of which those that are not selected do not count."""

    op: LatentAttention
    shape: LatentShape
    matrices: HeadMatrices
    params: AttentionParams
    mode: int
    until: int = 0
    sparse_from: int = 0

    def absorbed(self, q: np.ndarray, use_gemv: bool) -> np.ndarray:
        """Queries over the latents: float32 [n, heads, nope + rope] -> [n, heads, rank + rope]."""
        s = self.shape
        wide = np.empty((len(q), s.heads, s.rank + s.rope), np.float32)
        wide[..., s.rank :] = q[..., s.nope :]
        wide[..., : s.rank] = self.matrices.absorb(q[..., : s.nope].transpose(1, 0, 2), use_gemv).transpose(1, 0, 2)
        return wide
