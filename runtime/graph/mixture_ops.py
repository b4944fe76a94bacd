"""The ops of mixtures of experts."""

from __future__ import annotations

from ...data_classes import dataclass
from .op import Op
from .values import RoutingValue, Value, Weight


@dataclass(frozen=True)
class Route(Op):
    """Chooses each token's experts from the router's logits, best first; of equals the lower number.

    gating               'softmax', 'sigmoid' or 'sqrt_softplus' of the logits are the scores; 'sparse_mixer'
                         (arXiv:2409.12136): of two experts, a weight is the softmax over the logits, of those not chosen
                         before, that are at most 2 * jitter below the largest, relative to the larger of this and their
                         magnitude
    bias                 added to the scores for the choice only (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
    groups, groups_used  experts come in `groups` equal runs; only those of the best `groups_used` can be chosen. A group counts
                         by its best score (softmax) or by the sum of its best two (sigmoid)
    normalise, scale     weights are divided by their sum, then multiplied by scale
    factors              of each expert, which its weight is multiplied with at the end (Gemma 4)
    zeros                of the last so many experts, which have no matrices, a chosen one counts as none (-1) with its weight:
                         see IdentityExperts
    by_token             (used, tokens of the vocabulary): the experts of each token id, whatever the scores (DeepSeek-V4)
    """

    out: RoutingValue
    logits: Value
    used: int
    gating: str = "softmax"
    bias: Weight | None = None
    groups: int = 1
    groups_used: int = 1
    normalise: bool = False
    scale: float = 1.0
    jitter: float = 0.0
    factors: Weight | None = None
    zeros: int = 0
    by_token: Weight | None = None


@dataclass(frozen=True)
class ScaleByRouting(Op):
    """x (columns,) -> (used, columns): x times the weight of each of a token's experts (Llama 4 weighs experts' inputs)."""

    x: Value
    routing: RoutingValue


@dataclass(frozen=True)
class ExpertLinear(Op):
    """The product with the matrix of each of a token's experts: x (columns,) or (used, columns) -> (used, rows).

    weight (columns, rows, experts); bias (rows, experts)
    """

    x: Value
    routing: RoutingValue
    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True)
class CombineExperts(Op):
    """The sum of the experts' results (used, size), each times its weight -> (size,). weighted: else all weights count as 1."""

    x: Value
    routing: RoutingValue
    weighted: bool = True


@dataclass(frozen=True)
class IdentityExperts(Op):
    """x times the sum of the weights of a token's experts without matrices, which return their input (LongCat-Flash,
    arXiv:2509.01322, section 2.1)."""

    x: Value
    routing: RoutingValue


@dataclass(frozen=True)
class SigmoidGate(Op):
    """y * sigmoid(x . gate): one factor per token (the shared expert of Qwen 2 MoE). gate (columns,)."""

    x: Value
    y: Value
    gate: Weight
