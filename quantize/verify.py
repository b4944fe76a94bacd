"""Checking written files: a sample of every tensor's rows is read back, decoded, and compared with the source.

Two checks are made on each run of rows. Are the file's bytes those that the plan produces from the source now? Encoding is
deterministic, so a difference means a damaged file or a changed source. And is the error of the decoded weights within what
the type is expected to have? That finds what the first check cannot: an encoder that is wrong every time. Zeros
and shuffled weights are never within it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np

from ..data_classes import dataclass
from ..formats import TYPES, SourceTensor, TensorSource, TensorType, dims
from ..formats.file_range import read_range
from ..jobs.outputs import Location, Output
from ..jobs.plan import Plan
from .encode import can_encode, decode, encode
from .tensor_outputs import TUNED, TensorRows
from .timing import is_copied

RUNS_PER_TENSOR = 4
RUN_ELEMENTS = 1 << 14  # weights per run, rounded to complete rows and groups of interleaved rows
CLEARLY_BETTER = 0.8  # of the way from the reference error to that of zeros, or of rows that are shifted
ERROR_MARGIN = 3.0  # times the reference error: importance and outliers raise the error, faults raise it far more
_ROUNDING = 1e-6  # of weights that are products with a factor
_TUNED = 0.3  # of norms, and scales of copies, that were tuned


@dataclass(frozen=True)
class TensorCheck:
    """The result of checking one tensor.

    kind      'copy' or 'repack': no weight may differ; 'encode': the source's weights in another type
    rows      number of rows compared
    same      whether the file's bytes are those that the plan produces from the source; of tensors that are encoded for what
              others before them made of a text, or tuned, only the weights are compared
    error     |file - source| / |source| of the decoded weights; None for a type that cannot be decoded
    expected  upper bound for the error; 0 for copies and repacks
    problem   one line; '' if there is none
    """

    name: str
    type: str
    kind: str
    rows: int
    same: bool
    error: float | None
    expected: float
    problem: str = ""


@dataclass(frozen=True)
class Verification:
    """The checks of all tensors of a plan."""

    tensors: list[TensorCheck]

    @property
    def problems(self) -> list[str]:
        return [f"{t.name} ({t.type}): {t.problem}" for t in self.tensors if t.problem]

    def by_type(self) -> list[dict[str, Any]]:
        """For each type: tensors, rows compared, mean and largest error, error bound, tensors with a problem."""
        summary = []
        for name in dict.fromkeys(t.type for t in self.tensors):
            checks = [t for t in self.tensors if t.type == name]
            errors = [t.error for t in checks if t.error is not None]
            summary.append(
                {
                    "type": name,
                    "tensors": len(checks),
                    "rows": sum(t.rows for t in checks),
                    "error_mean": float(np.mean(errors)) if errors else None,
                    "error_max": max(errors, default=None),
                    "expected": max(t.expected for t in checks),
                    "problems": sum(bool(t.problem) for t in checks),
                }
            )
        return summary

    def as_json(self) -> dict[str, Any]:
        return {"types": self.by_type(), "tensors": [asdict(t) for t in self.tensors], "problems": self.problems}


def verify(plan: Plan, source: TensorSource, progress: Callable[[int, str], None] | None = None) -> Verification:
    """Compares RUNS_PER_TENSOR runs of rows of each tensor in the plan's files with the source, first and last rows included.

    source: what the plan was made from. A tensor without a counterpart of the same shape in it (one that was computed) is only
    compared byte by byte. progress is called after each tensor with (bytes of the tensor, name). Raises FormatError for a file
    that is missing, too short or unreadable.
    """
    checks = []
    for output, location in zip(plan.outputs, plan.locations, strict=True):
        checks.append(_check_tensor(plan, output, location, source.tensors.get(output.name)))
        if progress is not None:
            progress(output.nbytes, output.name)
    return Verification(checks)


def sampled_weights(plan: Plan) -> tuple[int, Counter[str]]:
    """How many are compared; type name -> how many are encoded for that, with those of rows that are encoded together."""
    compared, encoded = 0, Counter[str]()
    for output in plan.outputs:
        columns, rows, _ = dims(output.shape)
        cuts = [*output.cuts, rows]
        is_encoded = not is_copied(output) and not output.type.is_float and not _differs(output)
        for start, stop in _runs(output):
            compared += columns * (stop - start)
            if is_encoded and output.cuts:
                first, last = start % rows, (stop - 1) % rows + 1
                start, stop = cuts[bisect_right(cuts, first) - 1], cuts[bisect_left(cuts, last)]
            if is_encoded:
                encoded[output.type.name] += columns * (stop - start)
    return compared, encoded


def _is_tuned(output: Output) -> bool:
    return output.rule == TUNED or (isinstance(output.produce, TensorRows) and output.produce.may_be_tuned)


def _differs(output: Output) -> bool:
    """Whether the file may have other bytes than those that the plan gives for rows by themselves."""
    return _is_tuned(output) or (isinstance(output.produce, TensorRows) and output.produce.may_follow)


def _check_tensor(plan: Plan, output: Output, location: Location, tensor: SourceTensor | None) -> TensorCheck:
    if tensor is not None and tensor.shape != output.shape:
        tensor = None
    kind = _kind(tensor, output.type) if tensor is not None else "encode"
    row_bytes = output.type.row_bytes(output.shape[0])
    compares_weights = tensor is not None and can_encode(output.type)
    error_squares = weight_squares = shuffled_squares = 0.0
    rows, same = 0, True
    tuned, follows = _is_tuned(output), _differs(output)
    for start, stop in _runs(output):
        span = read_range(plan.files[location.file].path, location.offset + start * row_bytes, (stop - start) * row_bytes)
        written = span.reshape(stop - start, row_bytes)
        same = same and (follows or np.array_equal(written, np.ascontiguousarray(output.produce(start, stop))))
        rows += stop - start
        if tensor is not None and compares_weights:
            a, b = tensor.read(start, stop), decode(written, output.type.name, output.shape[0])
            if output.scale is not None:
                b = b * output.scale.factors()[start // output.shape[1]]
            finite = np.isfinite(a)
            a, b = np.where(finite, a, 0), np.where(finite, b, 0)
            error_squares += float(np.square(b - a, dtype=np.float64).sum())
            weight_squares += float(np.square(a, dtype=np.float64).sum())
            shuffled_squares += float(np.square(np.roll(b, b.shape[1] // 2 + 1, 1) - a, dtype=np.float64).sum())
    error = None
    if compares_weights:
        error = float(np.sqrt(error_squares / weight_squares)) if weight_squares else float(error_squares > 0)
    copied = _TUNED if tuned else 0.0 if output.scale is None else _ROUNDING
    shuffled = float(np.sqrt(shuffled_squares / weight_squares)) if weight_squares else 1.0
    bound = copied if kind != "encode" else _error_bound(output.type.name, shuffled, follows)
    return TensorCheck(output.name, output.type.name, kind, rows, same, error, bound, _problem(same, error, bound))


def _problem(same: bool, error: float | None, bound: float) -> str:
    if not same:
        return "the file's bytes are not those that the source gives: the file is damaged, or the source has changed"
    if error is not None and not error <= bound:
        return f"the error of its weights is {error:.3g}, at most {bound:.3g} is expected"
    return ""


def _error_bound(name: str, shuffled: float, follows: bool = False) -> float:
    """What the error of encoded weights may be; shuffled: the error of the decoded weights in other columns; follows: other
    weights were encoded, which need not be near these as far as the type goes.

    Zeros have an error of 1; weights of few bits that follow others may have more, and zeros are then found as what is the same
    in other columns. The reference errors of types of few bits are so large that their multiple would admit zeros and
    shuffled weights. Weights that are all alike have hardly an error in other columns: a shuffle is not detected then.
    """
    reference = reference_error(name)
    worse = [1.0] if reference < 1 and not (follows and shuffled > 2 * reference) else []
    worse += [shuffled] if shuffled > 2 * reference else []
    nearest = [] if follows and worse else [ERROR_MARGIN * reference]
    return min([*nearest, *(reference + CLEARLY_BETTER * (error - reference) for error in worse)])


def _kind(tensor: SourceTensor, target: TensorType) -> str:
    stored = tensor.stored
    if stored is None:
        return "encode"
    if stored is target:
        return "copy"
    return "repack" if stored.repacks_to(target) else "encode"


def _runs(output: Output) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs spread evenly over the tensor; each holds complete row groups and stays within one matrix."""
    columns, rows, matrices = dims(output.shape)
    group = output.type.rows
    if not output.n_elements:
        return
    step = min(rows, max(group, RUN_ELEMENTS // columns // group * group))
    if matrices == 1:
        candidates = [(0, start) for start in range(0, rows, step)]
    else:
        candidates = [(matrix, (matrix * 7919 * step) % rows // step * step) for matrix in range(matrices)]
    indices = sorted({round(i * (len(candidates) - 1) / max(1, RUNS_PER_TENSOR - 1)) for i in range(RUNS_PER_TENSOR)})
    for matrix, start in (candidates[i] for i in indices):
        yield matrix * rows + start, matrix * rows + min(start + step, rows)


@cache
def reference_error(name: str) -> float:
    """The type's relative error on heavy-tailed random weights (Student's t, 5 degrees of freedom), 16 rows of 1024."""
    x = np.random.default_rng(7).standard_t(5, (16, 1024)).astype(np.float32) * np.float32(0.02)
    importance = np.ones(1024, np.float32) if TYPES.imatrix_need(TYPES[name]) else None
    decoded = decode(encode(x, name, importance, report=False), name, 1024)
    return float(np.sqrt(np.square(decoded - x).sum() / np.square(x).sum()))
