"""Looking at what was written: a sample of every tensor is read from the file, decoded, and compared with the source.

Two questions are asked of each run of rows. Are the file's bytes those that the plan makes of the source now (encoding is
deterministic: anything else is a damaged file or a source that has changed)? And is the error of the decoded weights what the
type is expected to have? The second finds what the first cannot: an encoder that is wrong every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from ..formats import TYPES, SourceTensor, TensorSource, TensorType, dims
from ..formats.file_range import read_span
from ..jobs.plan import Output, Place, Plan
from .codecs.registry import can_encode, decode, encode

RUNS = 4  # runs of rows of a tensor that are looked at
ELEMENTS = 1 << 14  # of a run; whole rows, and whole groups of interleaved ones
SLACK = 3.0  # times the error on the yardstick: importance and outliers raise it, faults raise it far more


@dataclass(frozen=True)
class Checked:
    """A tensor and its sample.

    kind      'copy' and 'repack': no weight may change; 'encode': the source's weights in another type
    rows      that were looked at
    same      whether the file's bytes are those that the plan makes of the source
    error     |file - source| / |source| of the decoded weights; None for a type that cannot be decoded
    expected  bound of the error; 0 for copies and repacks
    problem   '' if all is well
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
    tensors: list[Checked]

    @property
    def problems(self) -> list[str]:
        return [f"{t.name} ({t.type}): {t.problem}" for t in self.tensors if t.problem]

    def by_type(self) -> list[dict[str, Any]]:
        """For each type: tensors, rows looked at, mean and largest error, bound, tensors with a problem."""
        found = []
        for name in dict.fromkeys(t.type for t in self.tensors):
            of = [t for t in self.tensors if t.type == name]
            errors = [t.error for t in of if t.error is not None]
            found.append(
                {
                    "type": name,
                    "tensors": len(of),
                    "rows": sum(t.rows for t in of),
                    "error_mean": float(np.mean(errors)) if errors else None,
                    "error_max": max(errors, default=None),
                    "expected": max(t.expected for t in of),
                    "problems": sum(bool(t.problem) for t in of),
                }
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {"types": self.by_type(), "tensors": [asdict(t) for t in self.tensors], "problems": self.problems}


def verify(plan: Plan, source: TensorSource, progress: Callable[[int, str], None] | None = None) -> Verification:
    """Reads RUNS runs of rows of each tensor of the plan's files, the first and the last rows among them.

    source: what the plan was made from; a tensor that it has no rows of the same shape for (a computed one) is compared in its
    bytes only. progress is called with (bytes of the tensor, name) after each. Raises FormatError for a file that is gone, too
    short or cannot be read.
    """
    found = []
    for output, place in zip(plan.outputs, plan.places, strict=True):
        found.append(_checked(plan, output, place, source.tensors.get(output.name)))
        if progress is not None:
            progress(output.nbytes, output.name)
    return Verification(found)


def _checked(plan: Plan, output: Output, place: Place, tensor: SourceTensor | None) -> Checked:
    if tensor is not None and tensor.shape != output.shape:
        tensor = None
    kind = _kind(tensor, output.type) if tensor is not None else "encode"
    width = output.type.row_bytes(output.shape[0])
    decodes = tensor is not None and can_encode(output.type)
    apart = size = 0.0
    rows, same = 0, True
    for start, stop in _runs(output):
        there = read_span(plan.files[place.file].path, place.offset + start * width, (stop - start) * width)
        there = there.reshape(stop - start, width)
        made = np.ascontiguousarray(output.produce(start, stop))
        rows, same = rows + stop - start, same and np.array_equal(there, made)
        if tensor is not None and decodes:
            a, b = tensor.read(start, stop), decode(there, output.type.name, output.shape[0])
            known = np.isfinite(a)
            a, b = np.where(known, a, 0), np.where(known, b, 0)
            apart += float(np.square(b - a, dtype=np.float64).sum())
            size += float(np.square(a, dtype=np.float64).sum())
    error = (float(np.sqrt(apart / size)) if size else float(apart > 0)) if decodes else None
    expected = 0.0 if kind != "encode" else SLACK * yardstick(output.type.name)
    return Checked(output.name, output.type.name, kind, rows, same, error, expected, _problem(same, error, expected))


def _problem(same: bool, error: float | None, expected: float) -> str:
    if not same:
        return "the file's bytes are not those that the source gives: the file is damaged, or the source has changed"
    if error is not None and not error <= expected:
        return f"the error of its weights is {error:.3g}, at most {expected:.3g} is expected"
    return ""


def _kind(tensor: SourceTensor, target: TensorType) -> str:
    stored = tensor.stored
    if stored is None:
        return "encode"
    if stored is target:
        return "copy"
    return "repack" if (stored.base or stored.name) == (target.base or target.name) else "encode"


def _runs(output: Output) -> Iterator[tuple[int, int]]:
    """Runs of whole groups, none of which crosses from one matrix into the next, spread evenly over the tensor."""
    columns, rows, matrices = dims(output.shape)
    group = output.type.rows
    step = min(rows, max(group, ELEMENTS // columns // group * group))
    places = [(m, start) for m in range(matrices) for start in (range(0, rows, step) if matrices == 1 else (0,))]
    if matrices > 1:
        places = [(m, (m * 7919 * step) % rows // step * step) for m in range(matrices)]
    chosen = sorted({round(i * (len(places) - 1) / max(1, RUNS - 1)) for i in range(RUNS)})
    for matrix, start in (places[i] for i in chosen):
        yield matrix * rows + start, matrix * rows + min(start + step, rows)


@cache
def yardstick(name: str) -> float:
    """Error of the type on heavy-tailed random weights (Student's t with 5 degrees of freedom), 16 rows of 1024."""
    draw = np.random.default_rng(7).standard_t(5, (16, 1024)).astype(np.float32) * np.float32(0.02)
    kind = TYPES[name]
    wanted = kind.imatrix or (kind.base and TYPES[kind.base].imatrix)
    found = decode(encode(draw, name, np.ones(1024, np.float32) if wanted else None), name, 1024)
    return float(np.sqrt(np.square(found - draw).sum() / np.square(draw).sum()))
