"""Opening adapters for a model: GGUFs, and folders of peft, whose names and rows the model's config.json explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import FormatError, PlanError
from ...formats import TensorSource
from ...formats.source import LORA_A, LORA_B
from ...quantize import gguf_source
from ..model_spec import ModelSpec
from .adapter import Adapter, AdapterFile, parse_adapter
from .low_rank import LowRank
from .naming import EMBEDDING, adapter_of_folder, check_tied
from .peft_folder import is_peft_folder, read_peft_folder

KEYS = "general.type", "adapter.type", "adapter.lora.alpha"
_INVOCATION = "adapter.alora.invocation_tokens"


def load_adapters(files: Sequence[str | Path | AdapterFile], source: TensorSource, model: ModelSpec | None) -> list[Adapter]:
    """The adapters of a model, checked against its tensors.

    files  FILE or FILE=SCALE each
    model  what the source was converted by; None for a GGUF, for which only adapters in GGUF can be opened

    Raises FormatError for adapters that are damaged or of another model, PlanError for a folder and a GGUF.
    """
    adapters = []
    for file in map(parse_adapter, files):
        if is_peft_folder(file.path):
            if model is None:
                raise PlanError(
                    f"{file.path} is a folder that peft wrote and {source.path} a GGUF; `ggufmill convert {file.path} OUT.gguf "
                    "--base CHECKPOINT` makes a GGUF of the adapter first"
                )
            adapter = adapter_of_folder(read_peft_folder(file.path), model, file.scale)
        elif file.path.is_dir():
            raise FormatError(f"{file.path} is no adapter: it has no adapter_config.json")
        else:
            adapter = read_gguf_adapter(file.path, file.scale)
        _check(adapter, source)
        adapters.append(adapter)
    return adapters


def read_gguf_adapter(path: Path, scale: float = 1.0) -> Adapter:
    """An adapter in GGUF, its changes times `scale`. Raises FormatError for another file."""
    opened = gguf_source(path)
    general, kind, alpha = (opened.metadata.get(key) for key in KEYS)
    if (str(general), str(kind)) != ("adapter", "lora"):
        raise FormatError(f"{path} is no LoRA adapter: its {KEYS[0]} is {general!r:.40}, {KEYS[1]} {kind!r:.40}")
    if _INVOCATION in opened.metadata:
        raise FormatError(f"{path}: an adapter that tokens switch on ({_INVOCATION}) is not supported")
    alpha = float(alpha) if isinstance(alpha, int | float | np.number) else 0.0
    changes: dict[str, LowRank] = {}
    for name in opened.tensors:
        stem = name.removesuffix(LORA_A).removesuffix(LORA_B)
        if stem == name:
            raise FormatError(f"{path}: tensor {name} is neither {LORA_A} nor {LORA_B}")
        if stem in changes:
            continue
        a, b = (_factor(opened, stem + part) for part in (LORA_A, LORA_B))
        if stem == EMBEDDING:  # a is stored transposed, to look up its rows; the product is that of the transposed table
            a, b = b.transpose(0, 2, 1), a
        if len(a) != len(b) or a.shape[1] != b.shape[2]:
            raise FormatError(f"{path}: {stem}{LORA_A} and {LORA_B} do not fit together")
        changes[stem] = LowRank(np.ascontiguousarray(a), b, scale * (alpha / a.shape[1] if alpha else 1.0))
    source_type = next((tensor.source_type for tensor in opened.tensors.values()), "f32")
    return Adapter(str(path), opened.architecture, alpha, changes, source_type, tuple(opened.files))


def _factor(source: TensorSource, name: str) -> np.ndarray:
    """float32 [matrices, rows, columns]. Raises FormatError for a tensor that is missing, no matrix, or not finite."""
    tensor = source.tensors.get(name)
    if tensor is None or len(tensor.shape) not in (2, 3) or 0 in tensor.shape:
        raise FormatError(f"{source.path}: tensor {name} is {'missing' if tensor is None else 'no matrix'}")
    columns, rows, *stack = tensor.shape
    values = np.concatenate([tensor.read(at, at + rows) for at in range(0, tensor.n_rows, rows)])
    if not np.isfinite(values).all():
        raise FormatError(f"{source.path}: tensor {name} has numbers that are not finite")
    return values.reshape(*(stack or [1]), rows, columns)


def _check(adapter: Adapter, source: TensorSource) -> None:
    if adapter.architecture != source.architecture:
        raise FormatError(f"{adapter.path} is for {adapter.architecture!r:.40}, {source.path} is {source.architecture!r:.40}")
    for name, change in adapter.changes.items():
        tensor = source.tensors.get(name)
        if tensor is None:
            raise FormatError(f"{adapter.path}: changes {name}, which {source.path} does not have")
        if not change.fits(tensor.shape):
            shape = (change.columns, change.rows, change.matrices)
            raise FormatError(f"{adapter.path}: its change of {name} has shape {shape}, the tensor {tensor.shape}")
    check_tied(adapter.path, adapter.changes, set(source.tensors))


def with_notes(source: TensorSource, adapters: Sequence[Adapter], identity: str) -> TensorSource:
    """The source with the adapters' files, notes on what they change, and another identity."""
    notes = [
        note for adapter in adapters for note in (*adapter.notes, f"{adapter.path}: {len(adapter.changes)} tensors changed")
    ]
    files = [path for adapter in adapters for path in adapter.files]
    return replace(source, identity=identity, files=[*source.files, *files], notes=[*source.notes, *notes])
