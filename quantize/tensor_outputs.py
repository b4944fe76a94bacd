"""The outputs of a job that encodes tensors, and the functions that make their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from ..data_classes import dataclass
from ..formats import SourceTensor, TensorScale, TensorType
from ..jobs.outputs import Output, OutputKind, Outputs
from .importance import Importance
from .plain_rows import GPU_ELEMENTS, is_gpu
from .recipes.type_selection import Selection
from .row_producer import UNWEIGHTED, ErrorWeights, RowProducer
from .tensor_scale import scale_for, scale_outputs

if TYPE_CHECKING:
    from ..repack.interleave import ReadRows
    from .covariance.matrix.prepared import PreparedCovariance
    from .covariance.source import Covariances

TUNED = "tuned"  # the rule of a copy some of whose numbers may be others


@dataclass(frozen=True)
class TensorOutputs:
    """The tensors of a job and what it encodes their rows with; replaced: of the plan."""

    tensors: Mapping[str, SourceTensor]
    importance: Importance | None
    covariances: Covariances | None
    replaced: list[tuple[str, int]] | None
    device: str | None
    producers: dict[str, ReadRows] = field(default_factory=dict)  # of outputs, by name
    lock: Lock = field(default_factory=Lock)

    def has_importance(self, tensor: SourceTensor) -> bool:
        """Whether there is importance for a tensor, or a covariance, whose diagonal is taken for it."""
        has_covariance = self.covariances is not None and self.covariances.collected(tensor) is not None
        return has_covariance or (self.importance is not None and self.importance.for_tensor(tensor) is not None)

    def add_to(self, outputs: Outputs, tensor: SourceTensor, selection: Selection) -> None:
        """Adds what becomes of a tensor, and its factors if it has any."""
        if not self.is_own(tensor, selection.type):
            outputs.add(tensor.name, kind_of(tensor, selection))
            return
        output = self.output(tensor, tensor.name, selection)
        for each in (output, *scale_outputs(output)):
            outputs.append(each)

    def is_own(self, tensor: SourceTensor, target: TensorType) -> bool:
        """Whether a tensor has factors, or blocks of rows that are encoded together: other than `produce` makes it."""
        return bool(self.cuts(tensor, target)) or scale_for(tensor, tensor.name, target) is not None

    def produce(self, name: str, kind: OutputKind) -> ReadRows:
        """What makes the rows of an output without factors that has its tensor's name."""
        return TensorRows(self, name, name, kind.type, None, False)

    def output(self, tensor: SourceTensor, name: str, selection: Selection) -> Output:
        """What becomes of a tensor, under this name."""
        cuts = self.cuts(tensor, selection.type)
        scale = scale_for(tensor, name, selection.type)
        produce = TensorRows(self, tensor.name, name, selection.type, scale, bool(cuts))
        source_type, kind = tensor.source_type, selection.type
        return Output(name, tensor.shape, source_type, kind, selection.rule, produce, selection.note, scale, cuts)

    def cuts(self, tensor: SourceTensor, target: TensorType) -> tuple[int, ...]:
        """Where the blocks of a matrix's rows begin that are encoded together; (): rows are encoded by themselves."""
        if self.covariances is None or self.covariances.curvature is None or not uses_importance(tensor, target):
            return ()
        from .covariance.refine import takes_covariance

        coupling = self.covariances.row_coupling(tensor) if takes_covariance(target) else None
        if coupling is None or coupling.blocks.cuts_groups(target.rows):
            return ()
        return tuple(coupling.blocks.span(block).start for block in range(coupling.blocks.count))

    def producer(self, tensor: SourceTensor, target: TensorType, scale: TensorScale | None, together: bool) -> RowProducer:
        """What makes the rows of an output; together: in blocks, of those that `cuts` divides."""
        weighted = uses_importance(tensor, target)
        weights = ErrorWeights.of(tensor, self.importance, self.covariances) if weighted else UNWEIGHTED
        if not together:
            weights = weights._replace(coupling=None)
        return RowProducer(tensor, target, weights, scale, self.device, self.replaced)


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """(start, stop) -> encoded rows. What makes them is set up when the first ones are asked for: a plan may have a million."""

    outputs: TensorOutputs
    source_name: str
    name: str
    target: TensorType
    scale: TensorScale | None
    together: bool

    def __call__(self, start: int, stop: int) -> np.ndarray:
        outputs = self.outputs
        with outputs.lock:
            produce = outputs.producers.get(self.name)
            if produce is None:
                produce = outputs.producer(outputs.tensors[self.source_name], self.target, self.scale, self.together)
                outputs.producers[self.name] = produce
        return produce(start, stop)

    @property
    def elements_at_once(self) -> int | None:
        """About how many are made best by one call; None: as many as others."""
        return GPU_ELEMENTS if is_gpu(self.outputs.device) else None

    @property
    def tensor(self) -> SourceTensor:
        """What is encoded."""
        return self.outputs.tensors[self.source_name]

    @property
    def is_weighted(self) -> bool:
        """Whether its rows are encoded with importance."""
        return uses_importance(self.tensor, self.target) and self.outputs.has_importance(self.tensor)

    @property
    def alone(self) -> RowProducer:
        """What makes rows without covariances, each by itself, and tells nobody of coarse ones: for timing."""
        produce = self.outputs.producer(self.tensor, self.target, self.scale, False)
        return replace(produce, weights=ErrorWeights(produce.weights.importance), replaced=[], warn_on_range=False)

    @property
    def may_follow(self) -> bool:
        """Whether other weights may be encoded, which follow what was quantised before (see `covariance.drift`)."""
        covariances = self.outputs.covariances
        if covariances is None or not covariances.follows or self.name != self.source_name:
            return False
        from .covariance.refine import takes_covariance

        return takes_covariance(self.target) and uses_importance(self.tensor, self.target)

    @property
    def may_be_tuned(self) -> bool:
        """Whether numbers of it may be others than those that are encoded, or copied."""
        return self.outputs.covariances is not None and self.outputs.covariances.tunes

    def collected_tokens(self, matrix: int) -> int:
        """Of how many inputs the covariance of a matrix is that rows are encoded with as a rule."""
        covariances = self.outputs.covariances
        collected = covariances.collected(self.tensor) if covariances is not None else None
        return 0 if collected is None else int(collected.tokens[matrix if len(collected.tokens) > 1 else 0])

    def of_targets(self, read: ReadRows, covariance_of: Callable[[int], PreparedCovariance | None]) -> ReadRows:
        """The same of other weights: read(start, stop) -> float32 [stop - start, columns]. covariance_of: number of a matrix ->
        what takes the place of its covariance; None: nothing."""
        targets = replace(self.tensor, read=read, raw=None, stored=None, mapped=None, read_bf16=None)
        producer = self.outputs.producer(targets, self.target, self.scale, self.together)
        usual = producer.weights.covariance_of
        assert usual is not None  # of what `may_follow`
        producer.weights = producer.weights._replace(covariance_of=lambda matrix: covariance_of(matrix) or usual(matrix))
        return producer


def kind_of(tensor: SourceTensor, selection: Selection) -> OutputKind:
    """What a tensor becomes, but for its name."""
    return OutputKind(tensor.shape, tensor.source_type, selection.type, selection.rule, selection.note)


def repacks(tensor: SourceTensor, target: TensorType) -> bool:
    """Whether the tensor becomes `target` by copying or repacking its stored bytes."""
    return tensor.raw is not None and tensor.stored is not None and tensor.stored.repacks_to(target)


def uses_importance(tensor: SourceTensor, target: TensorType) -> bool:
    return not target.is_float and not repacks(tensor, target)
