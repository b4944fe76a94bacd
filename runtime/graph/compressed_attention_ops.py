"""Attention to compressed entries, and what makes these: entries of runs of tokens (DeepSeek-V4), means of runs."""

from __future__ import annotations

from ...data_classes import dataclass
from .op import Op
from .values import Value, Weight


@dataclass(frozen=True)
class Compress(Op):
    """The entry that stands for a run of `every` tokens, for the token that completes it; others get zeros.

    Element by element, the sum of the tokens' numbers weighted by the softmax, over these tokens, of gate + bias. Runs begin at
    multiples of `every`. With two series, x and gate have twice the width of an entry: a token's second half counts for its own
    run, its first half for the run after it.

    x, gate (series * width,) -> (width,); the state of this name of `layer` has the tokens that are still needed.

    bias  (series * width, every): a row for each place in a run
    """

    x: Value
    gate: Value
    bias: Weight
    layer: int
    state: str
    every: int

    @property
    def series(self) -> int:
        return self.x.shape[0] // self.out.shape[0]


@dataclass(frozen=True)
class AverageRun(Op):
    """The mean of x (width,) over a run of `every` tokens, for the token that completes it; others get zeros. Runs begin at
    multiples of `every`; the state of this name of `layer` has the tokens of the run that is not complete."""

    x: Value
    layer: int
    state: str
    every: int


@dataclass(frozen=True)
class WindowAttention(Op):
    """Attention to the tokens of a window and to compressed entries, which are keys and values at once.

    q (heads, width), kv (width,) -> (heads, width). The last `window` tokens' kv are the state 'window' of `layer`.

    window     positions that a query sees, its own included
    sinks      a logit per head that takes part in the softmax and has no value
    entries    (width,), of `Compress`: a query sees those of completed runs; None: there are none
    every      tokens of such a run
    selection  which entries each query sees, of `SelectKeys`; None: all
    """

    q: Value
    kv: Value
    layer: int
    scale: float
    window: int
    sinks: Weight
    entries: Value | None = None
    every: int = 0
    selection: Value | None = None
