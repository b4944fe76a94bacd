"""What the errors of a search are weighted by: the curvature of both sides of a tensor, the covariance of its inputs, its
diagonal, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...data_classes import dataclass
from ...errors import PlanError
from ...formats import SourceTensor
from ...quantize.importance import Importance
from ...quantize.plan_warnings import abridged
from ...quantize.recipes.type_selection import EMBEDDINGS, OUTPUT

if TYPE_CHECKING:
    from ...quantize.covariance.source import Covariances


@dataclass(frozen=True)
class ErrorWeighting:
    """By what the error of each tensor's rows is weighted.

    has_importance  tensor name -> whether there is importance for it, or a covariance, whose diagonal stands in
    diagonal        tensor name -> why its error is not weighted by a covariance (or curvature), for those where it is not;
                    without covariances empty
    covariance      name of the file of covariances; None: there are none. effort: of the encoder with them
    curvature       whether that of the outputs weighs errors too, which are then in nats
    """

    has_importance: dict[str, bool]
    diagonal: dict[str, str]
    with_imatrix: bool
    covariance: str | None = None
    effort: int = 1
    curvature: bool = False

    @classmethod
    def of(
        cls, tensors: Mapping[str, SourceTensor], importance: Importance | None, covariances: Covariances | None
    ) -> ErrorWeighting:
        """Raises PlanError for covariances of another number of columns or matrices than a tensor has."""
        covered = {name: importance is not None and importance.for_tensor(t) is not None for name, t in tensors.items()}
        if covariances is None:
            return cls(covered, {}, importance is not None)
        covered = {name: covered[name] or covariances.collected(tensor) is not None for name, tensor in tensors.items()}
        curvature = covariances.curvature is not None

        def reason(tensor: SourceTensor) -> str:
            alone = curvature and covariances.gradients(tensor) is None
            return "no gradients were collected" if alone else "" if curvature else covariances.reason_unusable(tensor)

        reasons = {name: reason(tensor) for name, tensor in tensors.items()}
        file = covariances.metadata.get("quantize.covariance.file", "")
        diagonal = {name: reason for name, reason in reasons.items() if reason}
        return cls(covered, diagonal, importance is not None, str(file), covariances.effort, curvature)

    @property
    def with_covariance(self) -> int:
        """How many tensors have errors that are weighted by a covariance."""
        return len(self.has_importance) - len(self.diagonal) if self.covariance is not None else 0

    @property
    def text(self) -> str:
        """'with an imatrix', 'without an imatrix', 'weighted by the covariances of model.cov at effort 1'."""
        if self.covariance is None:
            return f"{'with' if self.with_imatrix else 'without'} an imatrix"
        few = f" for {self.with_covariance} of {len(self.has_importance)} tensors" if self.diagonal else ""
        kind = "curvature" if self.curvature else "covariances"
        return f"weighted by the {kind} of {self.covariance} at effort {self.effort}{few}"

    @property
    def notes(self) -> list[str]:
        """What a user should know before errors are measured; nothing without covariances."""
        if self.covariance is None:
            return []
        return [f"errors of types are {self.text}", *self._fallbacks()]

    def _fallbacks(self) -> list[str]:
        names: dict[str, list[str]] = {}
        for name, reason in self.diagonal.items():
            if name not in (*EMBEDDINGS, OUTPUT):  # their inputs are collected on request only
                names.setdefault(reason, []).append(name)
        how = "as others are on average" if self.curvature else "by importance only"
        return [f"{how} for {abridged(several)}: {reason}" for reason, several in names.items()]

    def refuse_diagonal(self) -> None:
        """Raises PlanError if errors of a tensor could not be weighted by a covariance; embeddings and output are exempt."""
        fallbacks = self._fallbacks()
        if fallbacks:
            raise PlanError(f"--strict: errors can be weighted {'; '.join(fallbacks)}")

    def as_json(self) -> dict[str, Any]:
        """What results of a search say of it: covariance (the file, or null), curvature (whether its is used), effort, tensors
        that are weighted by it, and those that are not with the reason."""
        return {
            "covariance": self.covariance,
            "curvature": self.curvature,
            "effort": self.effort if self.covariance is not None else None,
            "tensors": self.with_covariance,
            "by_importance": self.diagonal,
        }
