"""Ops of DeepSeek-V4: attention to compressed entries, matrices of groups of heads, and residual streams whose mixing depends
on the token (manifold-constrained hyper-connections, arXiv:2512.24880)."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class GroupedLinear(Op):
    """Each group's product with its own matrix: x (groups, columns) -> (groups * rows,).

    weight (columns, groups * rows): the groups' matrices, one after the other
    """

    x: Value
    weight: Weight


@dataclass(frozen=True)
class RepeatStreams(Op):
    """x (width,) -> (streams, width): every stream is x."""

    x: Value


@dataclass(frozen=True)
class StreamWeights(Op):
    """From the numbers of a token, in runs of s, s and s * s (or the first run alone), each times its scale plus its base: the
    factors of streams before a block, sigmoid + epsilon; those of the block's result for each stream, 2 * sigmoid; and the
    matrix that mixes the streams behind the block, a row for each result.

    The matrix is the transpose of what softmax of each row makes, plus epsilon, whose columns and rows are divided by their
    sums plus epsilon: columns first, and `iterations` times in all (Sinkhorn-Knopp).

    scale (3,), or (1,) for the first run alone; base: of x's size
    """

    x: Value
    scale: Weight
    base: Weight
    streams: int
    iterations: int
    epsilon: float


@dataclass(frozen=True)
class CollapseStreams(Op):
    """x (streams, width), factors (streams,) -> (width,): the sum of the streams, each times its factor."""

    x: Value
    factors: Value
