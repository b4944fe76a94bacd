"""Statistics of importance matrices: the distribution of a tensor's importance over its columns, the similarity of consecutive
layers, and the differences of two matrices. Field names are keys of the command line's JSON."""

from __future__ import annotations

import numpy as np

from ..data_classes import dataclass
from .coverage import layer_and_role
from .entries import MIN_TOKENS, Imatrix, entry_means, has_data
from .files import Entry

ACTIVE = 1e-5  # mean square above which a column counts as active, as in llama.cpp's statistics


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one entry.

    columns, matrices  its shape
    fewest, most       minimum and maximum of the tokens that a matrix (an expert) saw
    none, few          number of matrices that saw no token, or fewer than MIN_TOKENS (in a stack)
    sum                sum over all columns of the mean squared activation, averaged over the tokens of all matrices
    mean_square        the same per column
    active             fraction of the columns with a mean square above ACTIVE
    entropy            of the distribution over the columns, in bits; evenness: relative to a uniform distribution
    top                (column, fraction of the sum) of the largest columns, in descending order; top_share: of the ten largest
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
    """The statistics of all entries; top: how many of the largest columns are listed."""
    return [_statistics(name, sums, counts, top) for name, (sums, counts) in imatrix.entries.items()]


def _statistics(name: str, sums: np.ndarray, counts: np.ndarray, top: int) -> TensorStatistics:
    means = mean_squares((sums, counts))
    total = float(means.sum())
    shares = means / total if total else means
    order = np.argsort(-shares, kind="stable")
    positive = shares[shares > 0]
    entropy = max(float(-(positive * np.log2(positive)).sum()), 0.0)
    is_stack = len(counts) > 1
    return TensorStatistics(
        name=name,
        columns=sums.shape[1],
        matrices=sums.shape[0],
        fewest=int(counts.min()),
        most=int(counts.max()),
        none=int((counts == 0).sum()),
        few=int(((counts > 0) & (counts < MIN_TOKENS)).sum()) if is_stack else 0,
        sum=total,
        mean_square=total / len(means),
        active=float((means > ACTIVE).mean()),
        entropy=entropy,
        evenness=entropy / float(np.log2(len(means))) if len(means) > 1 else 1.0,
        top=[(int(column), float(shares[column])) for column in order[:top]],
        top_share=float(shares[order[:10]].sum()),
    )


def mean_squares(entry: Entry) -> np.ndarray:
    """Mean squared activation per column over the tokens of all matrices, float64 [columns]; zeros without data."""
    sums, counts = entry
    return sums.sum(axis=0, dtype=np.float64) / max(int(counts.sum()), 1)


def cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    """The cosine of two vectors; None if one is zero."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.sum(a * b)) / norms if norms else None


@dataclass(frozen=True)
class Similarity:
    """The cosine of a tensor's mean squares with those of the same tensor in the previous layer; kind: role of the tensor."""

    kind: str
    layer: int
    cosine: float | None


def layer_similarity(imatrix: Imatrix) -> list[Similarity]:
    """The similarities of all roles, by layer, where the previous layer has a tensor of the same role and width."""
    roles: dict[str, dict[int, np.ndarray]] = {}
    for name, entry in imatrix.entries.items():
        layer, role = layer_and_role(name)
        if layer is not None:
            roles.setdefault(role, {})[layer] = mean_squares(entry)
    similarities = []
    for role, layers in sorted(roles.items()):
        for layer in sorted(layers):
            previous = layers.get(layer - 1)
            if previous is not None and len(previous) == len(layers[layer]):
                similarities.append(Similarity(role, layer, cosine(previous, layers[layer])))
    return similarities


@dataclass(frozen=True)
class Difference:
    """The difference of an entry in two files.

    cosine    of the mean squares of all columns of all matrices, or of their means if the numbers of matrices differ
    ratio     sum of the mean squares in the second file over that in the first
    relative  norm of the difference over the norm in the first file
    """

    name: str
    cosine: float | None
    ratio: float | None
    relative: float | None


@dataclass(frozen=True)
class ImatrixComparison:
    """differences: of common entries, smallest cosine first; only_first, only_second, unlike (another width): names."""

    differences: list[Difference]
    only_first: list[str]
    only_second: list[str]
    unlike: list[str]


def compare_imatrices(first: Imatrix, second: Imatrix) -> ImatrixComparison:
    """Compares the mean squares of two files by entry, with undersampled experts filled up as for quantisation."""
    a, b = ([name for name, entry in each.entries.items() if has_data(*entry)] for each in (first, second))
    differences, unlike, there = [], [], set(b)
    for name in (name for name in a if name in there):
        x, y = (entry_means(*each.entries[name]).astype(np.float64) for each in (first, second))
        if x.shape != y.shape and x.size == y.size:  # a legacy file has a stack's experts in one row
            x, y = x.reshape(-1), y.reshape(-1)
        elif x.shape != y.shape and x.shape[1] == y.shape[1]:
            x, y = x.mean(axis=0), y.mean(axis=0)
        if x.shape != y.shape:
            unlike.append(name)
            continue
        x, y = x.reshape(-1), y.reshape(-1)
        total, norm = float(x.sum()), float(np.linalg.norm(x))
        distance = float(np.linalg.norm(y - x))
        ratio, relative = (float(y.sum()) / total, distance / norm) if total else (None, None)
        differences.append(Difference(name, cosine(x, y), ratio, relative))
    differences.sort(key=lambda d: d.cosine if d.cosine is not None else -1.0)
    return ImatrixComparison(differences, [n for n in a if n not in there], [n for n in b if n not in set(a)], unlike)
