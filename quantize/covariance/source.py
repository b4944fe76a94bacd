"""`Covariances`: what planning and encoding get of a model's covariances, prepared once per matrix while threads wait."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...errors import PlanError
from ...formats import SourceTensor, TensorType, dims
from ...jobs.steps import begin_step
from ...simd.workers import Workers
from .coupling import CoupledRows, couple
from .matrix.covariance_matrix import Covariance, CovarianceOf, SecondMoments, wanted_tokens
from .matrix.prepared import KEPT, PreparedCovariance, prepare, prepared_bytes
from .refine import takes_covariance, triangles_of
from .row_blocks import RowBlocks

DEFAULT_MEMORY = 4 << 30  # of prepared covariances, where nothing is said
_LOOK_AGAIN = 0.02  # seconds between two looks at what others still have


@dataclass(frozen=True)
class CollectedInput:
    """What a file says of the covariance of a tensor's inputs before it is read.

    columns  numbers of an input
    tokens   int64 [1 or matrices]: how many inputs each covariance was taken of
    nbytes   of memory that reading one takes
    """

    columns: int
    tokens: np.ndarray
    nbytes: int = 0

    @property
    def has_enough_tokens(self) -> np.ndarray:
        """bool [1 or matrices]: whether more than the diagonal of each is used."""
        return self.tokens >= wanted_tokens(self.columns)


@dataclass(frozen=True)
class CollectedOutput:
    """What a file says of the gradients at a tensor's outputs before it is read.

    blocks  of rows of a matrix that have second moments with each other
    tokens  int64 [matrices, blocks]: how many gradients these were taken of
    """

    blocks: RowBlocks
    tokens: np.ndarray

    @property
    def has_enough_tokens(self) -> np.ndarray:
        """bool [matrices, blocks]: whether each couples its rows."""
        spans = [self.blocks.span(block) for block in range(self.blocks.count)]
        return self.tokens >= [wanted_tokens(span.stop - span.start) for span in spans]


@dataclass(frozen=True)
class Curvature:
    """Second moments of the gradients at the outputs of a model's matrices.

    output_of    name of a tensor -> what was collected; None: nothing
    gradient_of  (name, matrix, block of rows) -> the second moments of the gradients at these rows' outputs
    tokens       of the text that these were collected from
    """

    output_of: Callable[[str], CollectedOutput | None] = field(repr=False)
    gradient_of: Callable[[str, int, int], Covariance] = field(repr=False)
    tokens: int

    def reason_alone(self, name: str) -> str:
        """Why rows of a tensor, or some of them, are encoded by themselves; '' if none are."""
        collected = self.output_of(name)
        if collected is None:
            return "none was collected"
        few = int((~collected.has_enough_tokens).sum())
        return "too few tokens were seen" + f" by {few} of {collected.tokens.size} blocks of rows" if few else ""


@dataclass(frozen=True)
class RowCoupling:
    """The rows of a tensor whose errors are weighed together.

    blocks       of each matrix
    tokens       int64 [matrices, blocks]: how many tokens of the text's `text_tokens` each matrix saw
    gradient_of  (matrix, block) -> the second moments of the gradients at the outputs of these rows
    is_coupled   bool [matrices, blocks]: whether rows are encoded together: their gradients and their inputs saw enough tokens
    """

    blocks: RowBlocks
    tokens: np.ndarray = field(repr=False)
    text_tokens: int
    gradient_of: Callable[[int, int], Covariance] = field(repr=False)
    is_coupled: np.ndarray = field(repr=False)

    def couple(self, matrix: int, block: int) -> CoupledRows | None:
        """What couples the rows of a block; None: nothing."""
        return couple(self.gradient_of(matrix, block)) if self.is_coupled[matrix, block] else None


class PreparedCache:
    """Prepares covariances when they are first asked for, one at a time with all threads; other threads that ask for the
    same one wait for it.

    memory: bytes that all may take that are in use or kept. Another one waits until those in use leave it room, so that a
    thread must not hold one while it asks for the next. One that alone takes more is prepared by itself.
    """

    def __init__(
        self,
        covariance_of: CovarianceOf,
        memory: int = DEFAULT_MEMORY,
        threads: int = 1,
        key_of: Callable[[str, int], Hashable] = lambda name, matrix: (name, matrix),
        kept: int = KEPT,
        *,
        retains: bool = False,
    ):
        """key_of: (name of a tensor, matrix) -> the same for all that have one covariance; kept: see `prepare`.

        retains: all are kept that there is memory for, since they are asked for again in another order; False: only what
        someone has, and the last one.
        """
        self._covariance_of, self._key_of, self.memory, self.threads, self._kept = covariance_of, key_of, memory, threads, kept
        self._retains = retains
        self._lock, self._preparing = threading.Lock(), threading.Lock()
        self._futures: OrderedDict[Hashable, Future[PreparedCovariance | None]] = OrderedDict()
        self._alive: dict[Hashable, weakref.ref[PreparedCovariance]] = {}  # also those that are not kept, but used

    @cached_property
    def _workers(self) -> Workers:
        return Workers(self.threads)

    def key_of(self, name: str, matrix: int) -> Hashable:
        """The same for all matrices of tensors that have one covariance."""
        return self._key_of(name, matrix)

    def read(self, name: str, matrix: int) -> SecondMoments | None:
        """That of a matrix of a tensor as it was collected; None: it was not."""
        return self._covariance_of(name, matrix)

    def get(self, name: str, matrix: int) -> PreparedCovariance | None:
        """That of a matrix of a tensor; None if it was not collected. Raises what `prepare` and reading raise."""
        key = self.key_of(name, matrix)
        with self._lock:
            future, reference = self._futures.get(key), self._alive.get(key)
            prepared = reference() if future is None and reference is not None else None
            is_mine = future is None
            if future is None:
                future = self._futures[key] = Future()
            self._futures.move_to_end(key)
        if prepared is not None:
            future.set_result(prepared)
        elif is_mine:
            try:
                with self._preparing:
                    future.set_result(self._prepare(key, name, matrix))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _prepare(self, key: Hashable, name: str, matrix: int) -> PreparedCovariance | None:
        covariance = self._covariance_of(name, matrix)
        if covariance is None:
            return None
        while not self._has_room(prepared_bytes(covariance.columns, self._kept)):
            time.sleep(_LOOK_AGAIN)
        begin_step(f"covariance of {covariance.columns:,} columns")
        prepared = prepare(covariance, self._workers, self._kept)
        if prepared.damped is not None:
            with self._lock:
                self._alive[key] = weakref.ref(prepared)
        return prepared

    def _has_room(self, needed: int) -> bool:
        """Whether another one fits, or nobody has one, after those were let go that were asked for longest ago."""
        with self._lock:
            used = self._used()
            for key in list(self._futures):
                if (used + needed > self.memory or not self._retains) and self._futures[key].done():
                    del self._futures[key]
                    used = self._used()
            return not used or used + needed <= self.memory

    def _used(self) -> int:
        """Bytes that those take, at most, that someone has."""
        found = {key: prepared for key, reference in self._alive.items() if (prepared := reference()) is not None}
        self._alive = {key: self._alive[key] for key in found}
        return sum(prepared_bytes(prepared.columns, self._kept) for prepared in found.values())


@dataclass(frozen=True)
class Covariances:
    """Covariances of a model's inputs, collected before, and how they are to be used.

    input_of   name of a tensor -> what was collected of its inputs; None: nothing
    cache      gives prepared covariances
    identity   what decides the encoded bytes: a digest of the data
    metadata   quantize.covariance.* keys for the file
    effort     0 to 3, see `encode`
    curvature  of the outputs, which weighs the errors of rows together; None: they are weighed alike
    follows    matrices are encoded for what those before them make of a text, see `drift`
    tunes      norms and scales are tuned when all are encoded
    """

    input_of: Callable[[str], CollectedInput | None] = field(repr=False)
    cache: PreparedCache = field(repr=False)
    identity: str
    metadata: Mapping[str, Any]
    effort: int = 1
    former_names: Mapping[str, str] | None = None
    curvature: Curvature | None = None
    follows: bool = False
    tunes: bool = False

    def renamed(self, former_names: Mapping[str, str]) -> Covariances:
        """The same data for a model whose layers were renumbered; former_names: new name -> name in this data."""
        return replace(self, former_names=former_names)

    def following(self, text: str, identity: str, *, tunes: bool = False) -> Covariances:
        """The same data for matrices that follow what those before them make of a text: its name, and what identifies it.
        tunes: what is continuous is tuned on it at last."""
        metadata = {**self.metadata, "quantize.covariance.sequential": text} | (
            {"quantize.tuning.dataset": text} if tunes else {}
        )
        identity = f"{self.identity} {identity}{' tuned' if tunes else ''}"
        return replace(self, identity=identity, metadata=metadata, follows=True, tunes=tunes)

    def _name(self, tensor: SourceTensor) -> str:
        return self.former_names.get(tensor.name, tensor.name) if self.former_names is not None else tensor.name

    def collected(self, tensor: SourceTensor) -> CollectedInput | None:
        """What was collected of a tensor's inputs."""
        return self.input_of(self._name(tensor))

    def provenance(self, tensors: int) -> dict[str, Any]:
        """The metadata of a file in which this number of tensors was encoded with more than the diagonals."""
        used: dict[str, Any] = {"effort": np.int32(self.effort), "tensors_count": np.int32(tensors)}
        used |= {"curvature": True} if self.curvature is not None else {}
        return dict(self.metadata) | {f"quantize.covariance.{key}": value for key, value in used.items()}

    def reason_for_diagonal(self, tensor: SourceTensor, target: TensorType) -> str:
        """Why a tensor of this type will be encoded without more than the diagonal; '' if it will not.

        Raises PlanError for a covariance of another number of columns or matrices.
        """
        return self.reason_unusable(tensor) if takes_covariance(target) else f"{target.name} is encoded without"

    def reason_unusable(self, tensor: SourceTensor) -> str:
        """Why no more than the diagonal is known of a tensor, or of some of its matrices; '' if more is.

        Raises PlanError for a covariance of another number of columns or matrices.
        """
        columns, _, matrices = dims(tensor.shape)
        collected = self.collected(tensor)
        if collected is None:
            how = " (of experts: imatrix --covariance-experts, in a recipe [imatrix] covariance_experts = true)"
            hint = how if "ffn_down_exps" in tensor.name else ""
            return f"none was collected{hint}"
        if collected.columns != columns or len(collected.tokens) not in (1, matrices):
            raise PlanError(
                f"the covariance of {tensor.name} is of {collected.columns} columns and {len(collected.tokens)} matrices, the "
                f"tensor has {columns} and {matrices}: this covariance was collected from another model"
            )
        few = int((~collected.has_enough_tokens).sum())
        if few:
            return "too few tokens were seen" + (f" by {few} of {matrices} matrices" if few < len(collected.tokens) else "")
        return ""

    def row_coupling(self, tensor: SourceTensor) -> RowCoupling | None:
        """The rows that are encoded together, and what couples them; None: every row is encoded by itself.

        Raises PlanError for the curvature of another number of rows or matrices.
        """
        gradients = self.gradients(tensor)
        return gradients if gradients is not None and gradients.is_coupled.any() else None

    def gradients(self, tensor: SourceTensor) -> RowCoupling | None:
        """What weighs the errors of a tensor's rows, though too few tokens may have been seen for encoding any together; None:
        nothing was collected of its inputs or its outputs. Raises as `row_coupling`."""
        inputs = self.collected(tensor)
        if self.curvature is None or inputs is None:
            return None
        curvature, name = self.curvature, self._name(tensor)
        collected, (_, rows, matrices) = curvature.output_of(name), dims(tensor.shape)
        if collected is None:
            return None
        blocks = collected.blocks
        if blocks.rows != rows or collected.tokens.shape not in ((matrices, blocks.count), (1, blocks.count)):
            raise PlanError(
                f"the curvature of {tensor.name} is of {blocks.rows} rows and {len(collected.tokens)} matrices, the tensor "
                f"has {rows} and {matrices}: it was collected from another model"
            )

        def gradient_of(matrix: int, block: int) -> Covariance:
            return curvature.gradient_of(name, matrix if len(collected.tokens) > 1 else 0, block)

        # What a matrix follows may take the place of a covariance of too few tokens.
        is_coupled = collected.has_enough_tokens & (inputs.has_enough_tokens[:, None] | self.follows)
        tokens, is_coupled = (np.broadcast_to(each, (matrices, blocks.count)) for each in (collected.tokens, is_coupled))
        return RowCoupling(blocks, tokens, curvature.tokens, gradient_of, is_coupled)

    def reason_alone(self, tensor: SourceTensor) -> str:
        """Why rows of a tensor, or some of them, are encoded by themselves although there is curvature; '' if none are."""
        return "" if self.curvature is None else self.curvature.reason_alone(self._name(tensor))

    def memory_of(self, tensor: SourceTensor, target: TensorType) -> tuple[Hashable, int]:
        """(what tells the covariance of a tensor from others, bytes of memory that encoding to this type prepares it in, or
        reads it in where its diagonal is all that is used)."""
        collected = self.collected(tensor)
        if collected is None or not takes_covariance(target):
            return None, 0
        usable = int(collected.has_enough_tokens.sum())
        each = prepared_bytes(collected.columns, triangles_of(target)) if usable else collected.nbytes
        return self.key_of(tensor, 0), min(usable or len(collected.tokens), self.cache.threads) * each

    def of(self, tensor: SourceTensor) -> Callable[[int], PreparedCovariance | None]:
        """matrix of a tensor -> its prepared covariance; None: not collected."""
        name = self._name(tensor)
        return lambda matrix: self.cache.get(name, matrix)

    def moments_of(self, tensor: SourceTensor, matrix: int) -> SecondMoments | None:
        """What was collected of the inputs of a tensor's matrix, read anew each time; None: nothing."""
        return self.cache.read(self._name(tensor), matrix)

    def key_of(self, tensor: SourceTensor, matrix: int) -> Hashable:
        """The same for all matrices of tensors that have one covariance."""
        return self.cache.key_of(self._name(tensor), matrix)
