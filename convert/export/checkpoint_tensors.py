"""The tensors of a checkpoint from those of a GGUF: which there are, in which type, and their numbers.

Numbers that the conversion changed (norms plus 1, -e^x) are changed back so that converting again gives the same float32; those
that a GGUF has in float32 although the model is stored in 16 bits are written in these where that loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from math import prod

import numpy as np

from ...data_classes import dataclass
from ...errors import FormatError
from ...formats import SourceTensor, TensorSource
from ...formats.floats import bf16_to_f32, f16_to_f32, f32_to_bf16
from ...formats.safetensors_shards import ShardTensor
from ..model_spec import ModelSpec
from ..quantization.stored_weights import Rows, StoredWeight
from ..tensor_spec import TensorSpec
from ..tensor_transforms import Changed
from .inverse import place_weights, runs

DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_DISTANCES = tuple(sign * n for n in range(1, 17) for sign in (1, -1))  # of numbers tried
_SCALARS = (".beta", ".eps")  # numbers of metadata that checkpoints have without a dimension (xIELU)
_STEP = np.float32(2.0**-27)  # in steps of float32, or of this where theirs are less: e^x near x = 0
_SMALL = 1 << 22  # elements up to which numbers are tried until they give the same again


@dataclass
class CheckpointTensor:
    """A tensor of the checkpoint.

    parts  (tensor of the GGUF, its number among that tensor's sources): what it is made from
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "F32"
    parts: list[tuple[TensorSpec, int]] = field(default_factory=list)


def main_type(source: TensorSource) -> str:
    """f32, f16 or bf16, whichever the GGUF has most of its weights in; bf16 for one that is quantised."""
    sizes: dict[str, int] = {}
    for tensor in source.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.source_type] = sizes.get(tensor.source_type, 0) + tensor.n_elements
    name = max(sizes, key=lambda key: sizes[key], default="f32")
    return name if name in DTYPES else "bf16"


def checkpoint_tensors(
    source: TensorSource, model: ModelSpec, dtype: str
) -> tuple[list[CheckpointTensor], dict[str, np.ndarray]]:
    """(those that are made from tensors of the GGUF, in its order; name -> values of those that its metadata has).

    dtype: F32, F16 or BF16, of the weights. Raises FormatError where two tensors of the GGUF need one of different shapes.
    """
    found: dict[str, CheckpointTensor] = {}
    for spec in model.tensors:
        if spec.name not in source.tensors:
            continue
        for number, name in enumerate(spec.sources):
            shape = spec.source_shape(number)
            tensor = found.setdefault(name, CheckpointTensor(name, shape))
            if tensor.shape != shape:
                raise FormatError(f"{source.path}: {name} would have the shapes {list(tensor.shape)} and {list(shape)}")
            tensor.parts.append((spec, number))
    kept_f32 = main_type(source) != "f32"
    fits: dict[str, bool] = {}
    for tensor in found.values():
        types = {source.tensors[spec.name].source_type for spec, _ in tensor.parts}
        if types == {"i32"}:
            tensor.dtype = "I64"
        elif dtype == "F32" or (types != {"f32"} or not kept_f32):
            tensor.dtype = dtype
        else:
            for spec, _ in tensor.parts:
                if spec.name not in fits:
                    fits[spec.name] = _fits(source.tensors[spec.name], spec, dtype)
            tensor.dtype = dtype if all(fits[spec.name] for spec, _ in tensor.parts) else "F32"
    return [*found.values()], _from_metadata(source, model)


def _from_metadata(source: TensorSource, model: ModelSpec) -> dict[str, np.ndarray]:
    values: dict[str, np.ndarray] = {}
    for key, names in model.stored_values.items():
        for name, value in zip(names, np.atleast_1d(source.metadata[key]), strict=True):
            values[name] = np.asarray(value, np.float32).reshape(() if name.endswith(_SCALARS) else (1,))
    for key, name in model.stored_integers.items():
        values[name] = np.asarray(source.metadata[key]).astype(np.int64)
    return values


def narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> stored words of a dtype, rounded to nearest."""
    if dtype == "BF16":
        return f32_to_bf16(values)
    return values.astype({"F16": np.float16, "F32": np.float32, "I64": np.int64}[dtype])


def widened(words: np.ndarray, dtype: str) -> np.ndarray:
    """Stored words -> float32."""
    if dtype == "BF16":
        return bf16_to_f32(words)
    return f16_to_f32(words) if dtype == "F16" else words.astype(np.float32)


class _ValueWeight(StoredWeight):
    """A weight in memory."""

    __slots__ = ("values",)

    def __init__(self, values: np.ndarray, shape: tuple[int, ...]):
        self.values, self.shape, self.source_type = values, shape, "f32"
        self.rows, self.columns = prod(shape[:-1]), shape[-1] if shape else 1
        self.ggml_type, self._scale = None, None
        self.values = values.reshape(self.rows, self.columns)

    def read(self, rows: Rows) -> np.ndarray:
        return self.values[rows]

    @property
    def has_read_bf16(self) -> bool:
        return False


def _fits(tensor: SourceTensor, spec: TensorSpec, dtype: str) -> bool:
    """Whether numbers of this dtype give the tensor of the GGUF again."""
    if isinstance(spec.transform, Changed) and not spec.transform.ones:
        return tensor.n_elements <= _SMALL and _changed_back(tensor, spec, dtype)[1]
    for run in runs(spec):
        values = tensor.read(run.start, run.stop)
        if not np.array_equal(widened(narrowed(values, dtype), dtype), values):
            return False
    return True


def _changed_back(tensor: SourceTensor, spec: TensorSpec, dtype: str) -> tuple[np.ndarray, bool]:
    """(the source's numbers, float32 [elements], whether all of them are of the dtype) of a small tensor with one source.

    Rounding to float32 may have lost bits: of a number's neighbours, that which gives the same again is taken.
    """
    assert isinstance(spec.transform, Changed)
    values, places = [], []
    for run in runs(spec):
        part = tensor.read(run.start, run.stop)
        values.append(spec.transform.back(part, run.start).reshape(-1))
        places.append(_places(run, spec).reshape(-1))
    place = np.concatenate(places)
    start = np.zeros(prod(spec.shape), np.float32)
    start[place] = np.concatenate(values)
    target = tensor.read(0, tensor.n_rows).reshape(-1)

    def gives(numbers: np.ndarray) -> np.ndarray:
        made = spec.transform(spec.name, [_ValueWeight(numbers, spec.shape)])
        same = np.zeros(len(start), bool)
        same[place] = made.read(0, made.n_rows).reshape(-1) == target
        return same

    rounded = widened(narrowed(start, dtype), dtype)
    right = gives(rounded)
    right[np.setdiff1d(np.arange(len(start)), place)] = True
    if right.all():
        return rounded, True
    best, done = start.copy(), gives(start)
    own = np.abs(np.spacing(start))
    for step in (own, np.maximum(own, _STEP)):
        for distance in _DISTANCES if not done.all() else ():
            candidate = start + np.float32(distance) * step
            better = gives(candidate) & ~done
            best[better] = candidate[better]
            done |= better
    return best, False


def _places(run, spec: TensorSpec) -> np.ndarray:
    """Where the numbers of a run belong, among those of all sources."""
    if run.places is not None:
        return run.places
    weight = place_weights(spec)[run.source]
    return weight.read(run.rows)


def fill(
    tensor: SourceTensor,
    spec: TensorSpec,
    outputs: Mapping[int, tuple[ShardTensor, np.ndarray]],
    advance: Callable[[int], None],
) -> dict[int, int]:
    """Writes the numbers of a GGUF's tensor where they belong. Returns how many distinct numbers each source got.

    outputs: number of the source -> (tensor, its words as a matrix [rows, columns], to be written); advance: told how many
    elements were written
    """
    got: dict[int, np.ndarray] = {}
    weights = place_weights(spec)
    if isinstance(spec.transform, Changed) and tensor.n_elements <= _SMALL and len(weights) == 1:
        to, words = outputs[0]
        numbers, _ = _changed_back(tensor, spec, to.dtype)
        covered = np.zeros(words.size, bool)
        for run in runs(spec):
            covered[_places(run, spec).reshape(-1)] = True
        flat = words.reshape(-1)
        flat[covered] = narrowed(numbers, to.dtype)[covered]
        advance(tensor.n_elements)
        return {0: int(covered.sum())}
    for run in runs(spec):
        if tensor.source_type == "i32" and tensor.raw is not None:
            values = tensor.raw(run.start, run.stop).view(np.int32)
        else:
            values = tensor.read(run.start, run.stop)
        if isinstance(spec.transform, Changed):
            values = spec.transform.back(values, run.start)
        if run.source is not None and run.rows is not None:
            to, words = outputs[run.source]
            rows = _slice(run.rows)
            words[rows] = narrowed(values, to.dtype)
            got.setdefault(run.source, np.zeros(len(words), bool))[rows] = True
        else:
            _scatter(weights, run.places, values, outputs, got)
        advance(values.size)
    for number in spec.transform.ones if isinstance(spec.transform, Changed) else ():
        to, words = outputs[number]
        words[:] = narrowed(np.ones(words.shape, np.float32), to.dtype)
        got[number] = np.ones(len(words), bool)
    return {n: int(found.sum()) * (weights[n].columns if len(found) == weights[n].rows else 1) for n, found in got.items()}


def _slice(rows: np.ndarray) -> slice | np.ndarray:
    """Row numbers as a run, if they are one."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    return slice(first, last) if last - first == len(rows) and (np.diff(rows) == 1).all() else rows


def _scatter(weights, places, values, outputs, got) -> None:
    """Single numbers into the sources that they belong to."""
    for number, weight in enumerate(weights):
        size = weight.rows * weight.columns
        inside = slice(None) if len(weights) == 1 else (places >= weight.first) & (places < weight.first + size)
        at = (places[inside] - weight.first).reshape(-1)
        if not at.size:
            continue
        to, words = outputs[number]
        words.reshape(-1)[at] = narrowed(np.ascontiguousarray(values[inside]), to.dtype).reshape(-1)
        got.setdefault(number, np.zeros(size, bool))[at] = True
