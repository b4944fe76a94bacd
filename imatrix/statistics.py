"""What an importance matrix looks like: how a tensor's importance is spread over its columns, how like each other layers are,
and how two matrices differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .coverage import place
from .entries import FEW, Entry, Imatrix

ACTIVE = 1e-5  # mean square above which a column counts as active, as in llama.cpp's statistics


@dataclass(frozen=True)
class TensorStatistics:
    """One entry.

    columns, matrices  its shape
    fewest, most       tokens that a matrix (an expert) saw
    none, few          matrices that saw no token, or less than FEW (of a stack of several)
    sum                of the mean squares over all columns, averaged over the tokens of all matrices
    mean_square        that per column
    active             share of the columns with a mean square above ACTIVE
    entropy            of the distribution over the columns, in bits; evenness: as a share of what it would be if all were equal
    top                (column, share of the sum) of the largest, best first; top_share: of the ten largest together
    """

    name: str
    columns: int
    matrices: int
    fewest: int
    most: int
    none: int
    few: int
    sum: float
    mean_square: float
    active: float
    entropy: float
    evenness: float
    top: list[tuple[int, float]]
    top_share: float


def statistics(imatrix: Imatrix, top: int = 5) -> list[TensorStatistics]:
    """Of all entries; top: how many of the largest columns are named."""
    return [_statistics(name, sums, counts, top) for name, (sums, counts) in imatrix.entries.items()]


def _statistics(name: str, sums: np.ndarray, counts: np.ndarray, top: int) -> TensorStatistics:
    means = pooled((sums, counts))
    total = float(means.sum())
    shares = means / total if total else means
    order = np.argsort(-shares, kind="stable")
    some = shares[shares > 0]
    entropy = max(float(-(some * np.log2(some)).sum()), 0.0)
    several = len(counts) > 1
    return TensorStatistics(
        name=name,
        columns=sums.shape[1],
        matrices=sums.shape[0],
        fewest=int(counts.min()),
        most=int(counts.max()),
        none=int((counts == 0).sum()),
        few=int(((counts > 0) & (counts < FEW)).sum()) if several else 0,
        sum=total,
        mean_square=total / len(means),
        active=float((means > ACTIVE).mean()),
        entropy=entropy,
        evenness=entropy / float(np.log2(len(means))) if len(means) > 1 else 1.0,
        top=[(int(column), float(shares[column])) for column in order[:top]],
        top_share=float(shares[order[:10]].sum()),
    )


def pooled(entry: Entry) -> np.ndarray:
    """Mean squares over the tokens of all matrices, float64 [n]; zeros for an entry without data."""
    sums, counts = entry
    return sums.sum(axis=0, dtype=np.float64) / max(int(counts.sum()), 1)


def cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    """Of two vectors; None where one is zero."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.sum(a * b)) / size if size else None


@dataclass(frozen=True)
class Similarity:
    """Cosine of a tensor's mean squares with those of the same tensor in the layer before."""

    kind: str
    layer: int
    cosine: float | None


def layer_similarity(imatrix: Imatrix) -> list[Similarity]:
    """Of all kinds of tensors, layer by layer, where the layer before has one of the same width."""
    kinds: dict[str, dict[int, np.ndarray]] = {}
    for name, entry in imatrix.entries.items():
        layer, kind = place(name)
        if layer is not None:
            kinds.setdefault(kind, {})[layer] = pooled(entry)
    found = []
    for kind, layers in sorted(kinds.items()):
        for layer in sorted(layers):
            before = layers.get(layer - 1)
            if before is not None and len(before) == len(layers[layer]):
                found.append(Similarity(kind, layer, cosine(before, layers[layer])))
    return found


@dataclass(frozen=True)
class Difference:
    """An entry that two files have.

    cosine    of the mean squares of all columns of all matrices, or of the pooled ones where the number of matrices differs
    ratio     of the sums of the mean squares, second to first
    relative  norm of the difference over the norm of the first
    """

    name: str
    cosine: float | None
    ratio: float | None
    relative: float | None


@dataclass(frozen=True)
class Comparison:
    """differences: of what both have, least alike first; only_first, only_second: names; unlike: names with other widths."""

    differences: list[Difference]
    only_first: list[str]
    only_second: list[str]
    unlike: list[str]


def compare(first: Imatrix, second: Imatrix) -> Comparison:
    """Mean squares of two files, entry by entry; experts that saw few tokens are taken as quantisation takes them."""
    a, b = first.means(), second.means()
    differences, unlike = [], []
    for name in (name for name in a if name in b):
        x, y = a[name].astype(np.float64), b[name].astype(np.float64)
        if x.shape != y.shape and x.size == y.size:  # a legacy file has all experts in one row
            x, y = x.reshape(-1), y.reshape(-1)
        elif x.shape != y.shape and x.shape[1] == y.shape[1]:
            x, y = x.mean(axis=0), y.mean(axis=0)
        if x.shape != y.shape:
            unlike.append(name)
            continue
        x, y = x.reshape(-1), y.reshape(-1)
        total, size = float(x.sum()), float(np.linalg.norm(x))
        apart = float(np.linalg.norm(y - x))
        ratio, relative = (float(y.sum()) / total, apart / size) if total else (None, None)
        differences.append(Difference(name, cosine(x, y), ratio, relative))
    differences.sort(key=lambda d: d.cosine if d.cosine is not None else -1.0)
    return Comparison(differences, [n for n in a if n not in b], [n for n in b if n not in a], unlike)
