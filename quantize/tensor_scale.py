"""Factors of matrices, which GGUF files of llama.cpp keep as float32 tensors NAME.scale next to NAME.weight.

nvfp4 needs them: its scales of 16 weights lie between 2^-9 and 448, so that small weights would have coarse ones. A tensor
NAME.scale has one factor, of a stack of experts one each; products are multiplied with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from ..formats import TYPES, SourceTensor, TensorScale, TensorType
from ..jobs.outputs import Output, Outputs

# Matrices NAME.weight of a layer for which llama.cpp looks for a tensor NAME.scale (llama-model.cpp, load_tensors); a file with
# such a tensor for another matrix is not loaded. output.weight may have one too if it is nvfp4.
SCALED_MATRICES = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate"),
    *("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    *("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    *("ssm_in", "ssm_out", "ssm_alpha", "ssm_beta", "nextn.eh_proj", "nextn.shared_head_head"),
)
_ENDS = tuple(f".{name}.weight" for name in SCALED_MATRICES)
# Gemma 4's experts have ffn_down_exps.scale as a part of the architecture, whatever their type.
_OWN_SCALES = {"gemma4": (".ffn_down_exps.weight",)}

_READ_ELEMENTS = 1 << 22  # that are read at a time to find the largest
# The largest weight has a scale of 240 and a magnitude of 6: of larger scales llama.cpp's encoder only knows 448.
LARGEST_SCALED = np.float32(6 * 240)


def takes_scale(name: str) -> bool:
    """Whether the weight of this name may have factors in a file."""
    return name == "output.weight" or name.endswith(_ENDS)


def scale_name(name: str, kind: str = "scale") -> str:
    """NAME.weight -> NAME.scale or NAME.input_scale."""
    return f"{name.removesuffix('weight')}{kind}"


def apply_scales(tensors: Mapping[str, SourceTensor], architecture: str) -> Mapping[str, SourceTensor]:
    """The tensors of a GGUF with the factors of NAME.scale as parts of NAME.weight, which then reads as its true weights."""
    if not any(name.endswith(".scale") for name in tensors):
        return tensors
    out = dict(tensors)
    for name, tensor in tensors.items():
        if not takes_scale(name) or name.endswith(_OWN_SCALES.get(architecture, ())):
            continue
        matrices = (prod(tensor.shape[2:]),)
        found = {kind: tensors.get(scale_name(name, kind)) for kind in ("scale", "input_scale")}
        factors, inputs = (
            t if t is not None and t.shape == matrices and t.source_type == "f32" else None for t in found.values()
        )
        if factors is None:
            continue
        scale = TensorScale(_vector(factors), None if inputs is None else _vector(inputs))
        out[name] = replace(tensor, read=_scaled(tensor, scale), scale=scale, read_bf16=None)
        for part in (factors, inputs):
            if part is not None:
                del out[part.name]
    return out


def scaled_tensor(tensor: SourceTensor, scale: TensorScale | None) -> SourceTensor:
    """The tensor with each matrix times its factor, which its encoded rows do not contain."""
    return tensor if scale is None else replace(tensor, read=_scaled(tensor, scale), scale=scale)


def _vector(tensor: SourceTensor) -> Callable[[], np.ndarray]:
    return lambda: tensor.read(0, 1).reshape(-1)


def _scaled(tensor: SourceTensor, scale: TensorScale) -> Callable[[int, int], np.ndarray]:
    read, rows = tensor.read, tensor.shape[1]
    return lambda start, stop: read(start, stop) * scale.factors()[start // rows]


def scale_for(tensor: SourceTensor, name: str, target: TensorType) -> TensorScale | None:
    """The factors that a file stores apart from the rows of a tensor in the type `target`: the source's where its rows are
    copied, for other rows in nvfp4 such that each matrix uses the range of that type. None if there are none."""
    if tensor.stored is not None and tensor.raw is not None and tensor.stored.repacks_to(target):
        return tensor.scale
    return TensorScale(_MeasuredFactors(tensor)) if target is TYPES["nvfp4"] and takes_scale(name) else None


class _MeasuredFactors:
    """Factors that bring each matrix into the range of nvfp4: computed when they are first needed, by one thread."""

    def __init__(self, tensor: SourceTensor):
        self._tensor, self._lock = tensor, threading.Lock()
        self._factors: np.ndarray | None = None

    def __call__(self) -> np.ndarray:
        with self._lock:
            if self._factors is None:
                self._factors = self._measure()
            return self._factors

    def _measure(self) -> np.ndarray:
        columns, rows = self._tensor.shape[:2]
        factors = np.ones(prod(self._tensor.shape[2:]), np.float32)
        step = max(1, _READ_ELEMENTS // columns)
        for matrix in range(len(factors)):
            amax = np.float32(0)
            for start in range(0, rows, step):
                x = np.abs(self._tensor.read(matrix * rows + start, matrix * rows + min(rows, start + step)))
                amax = max(amax, x.max(initial=0, where=np.isfinite(x)))
            factor = amax / LARGEST_SCALED
            if factor >= np.finfo(np.float32).tiny:
                factors[matrix] = factor
        return factors


def scale_outputs(output: Output) -> list[Output]:
    """The tensors of an output's factors: NAME.scale and, if it has any, NAME.input_scale."""
    scale = output.scale
    if scale is None:
        return []
    parts = {"scale": scale.factors} | ({} if scale.inputs is None else {"input_scale": scale.inputs})
    shape = (prod(output.shape[2:]),)
    return [
        Output(scale_name(output.name, kind), shape, "f32", TYPES["f32"], f"{kind} of its weight", _bytes_of(values))
        for kind, values in parts.items()
    ]


def shards_with_scales(shards: Mapping[str, int], outputs: Outputs) -> dict[str, int]:
    """Tensor name -> number of its shard, for factors that of their weight."""
    return {**shards, **{part.name: shards[o.name] for o in outputs.with_own() for part in scale_outputs(o)}}


def missing_scales(outputs: Outputs) -> list[str]:
    """A warning if weights are encoded in nvfp4 that can have no factor."""
    scaled = {o.name for o in outputs.with_own() if o.scale is not None}
    encoded = outputs.of_kinds(lambda kind: kind.type is TYPES["nvfp4"] and kind.source_type != "nvfp4")
    names = [name for name, _ in encoded if name not in scaled]
    if not names:
        return []
    shown = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
    return [f"{shown} in nvfp4 without a factor, for which llama.cpp has no tensor: weights below 2^-7 become coarse"]


def _bytes_of(values: Callable[[], np.ndarray]) -> Callable[[int, int], np.ndarray]:
    return lambda start, stop: np.ascontiguousarray(values(), "<f4").view(np.uint8).reshape(1, -1)
