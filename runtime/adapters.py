"""LoRA adapters of a running model (arXiv:2106.09685, section 4.1): two more products for each matrix that one changes.

The factors become tensors of the model's source, `NAME.lora_a` and `NAME.lora_b`; where `GraphBuilder` finds them it adds the
products b (a x) to that of the matrix, whatever type this has. What is not multiplied with a value (embeddings, the matrices of
latent attention that are absorbed) gets the change added to its weights instead, which are then decoded as they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..convert.checkpoint_source import describe
from ..convert.lora import load_adapters, merge_adapters
from ..convert.lora.load import with_notes
from ..convert.lora.merge import identity_with, sum_of_changes
from ..convert.model_spec import ModelSpec
from ..formats import SourceTensor, TensorSource
from ..formats.loaders import MLA_LAYOUTS
from ..formats.source import LORA_A, LORA_B
from .graph.ops import ExpertLinear, Linear
from .models.architectures import build_graph


def with_adapters(source: TensorSource, lora: Sequence[str]) -> TensorSource:
    """The source with the factors of adapters, FILE or FILE=SCALE each, as tensors.

    Raises FormatError for adapters that are damaged or of another model, PlanError for a folder of peft with a GGUF.
    """
    if not lora:
        return source
    adapters = load_adapters(lora, source, _model_spec(source))
    changes, graph = sum_of_changes(adapters), build_graph(source)
    multiplied = {op.weight.name for op in (*graph.ops, *graph.head) if isinstance(op, Linear | ExpertLinear)}
    tensors = dict(merge_adapters(source, adapters, only=changes.keys() - multiplied).tensors)
    for name in changes.keys() & multiplied:
        change = changes[name].with_scale(1.0)
        stack = source.tensors[name].shape[2:]
        tensors |= {name + part: _tensor(name + part, x, stack) for part, x in ((LORA_A, change.a), (LORA_B, change.b))}
    return with_notes(replace(source, tensors=tensors), adapters, identity_with(source, adapters))


def _model_spec(source: TensorSource) -> ModelSpec | None:
    """What a checkpoint was converted by: of the layouts of latent attention that whose tensors it has. None for a GGUF."""
    folder = next((path.parent for path in source.files if path.name == "config.json"), None)
    if folder is None:
        return None
    specs = [describe(folder, layout, source.read_as) for layout in MLA_LAYOUTS]
    return next((spec for spec in specs if {t.name for t in spec.tensors} == source.tensors.keys()), specs[0])


def _tensor(name: str, values: np.ndarray, stack: tuple[int, ...]) -> SourceTensor:
    """values: float32 [matrices, rows, columns]; stack: (matrices,), or () for one matrix."""
    _, rows, columns = values.shape
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, columns)
    return SourceTensor(name, (columns, rows, *stack), "f32", lambda start, stop: flat[start:stop])
