"""Describes the served model for /props, /v1/models and the page: name, sizes, tensor types, metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...formats import TYPES, FormatError, PlanError
from ...formats.metadata_values import text_of
from ..evaluate.provenance import describe_settings
from ..model import Model
from ..settings import CACHE_SETTINGS

_MAX_TEXT = 4000  # characters of a metadata text

# GGUF metadata about the origin of the file -> name in `about`
_METADATA_FIELDS = {
    "general.description": "description",
    "general.author": "author",
    "general.organization": "organization",
    "general.license": "license",
    "general.size_label": "size_label",
    "general.quantized_by": "quantized_by",
    "ggufmill.recipe": "recipe",
    "ggufmill.version": "made_with",
    "quantize.imatrix.file": "imatrix",
    "quantize.imatrix.dataset": "imatrix_text",
    "quantize.imatrix.entries_count": "imatrix_entries",
    "quantize.imatrix.chunks_count": "imatrix_chunks",
}


def model_name(model: Model) -> str:
    """general.name, or the file's name without its suffix."""
    name = text_of(model.metadata, "general.name")
    return name if name.strip() else Path(model.source.path).stem or "model"


def describe(model: Model) -> dict[str, Any]:
    """The object `model` of /props.

    Name, file (without its folder), architecture, sizes, tensor types by descending size, how keys and values are cached,
    context lengths, and under `about` the metadata of _METADATA_FIELDS.
    """
    types: dict[str, list[int]] = {}
    for tensor in model.source.tensors.values():
        totals = types.setdefault(tensor.source_type, [0, 0, 0])
        for i, count in enumerate((1, tensor.n_elements, _nbytes(tensor.source_type, tensor.shape))):
            totals[i] += count
    n_elements, n_bytes = (sum(totals[i] for totals in types.values()) for i in (1, 2))
    by_size = sorted(types.items(), key=lambda item: -item[1][2])
    metadata = model.metadata
    return {
        "name": model_name(model),
        "file": Path(model.source.path).name,
        "architecture": model.source.architecture,
        "parameters": n_elements,
        "bytes": n_bytes,
        "bits_per_weight": round(8 * n_bytes / n_elements, 3) if n_elements else 0.0,
        "types": [{"type": name, "tensors": n[0], "parameters": n[1], "bytes": n[2]} for name, n in by_size],
        "layers": model.n_layers,
        "vocabulary": model.n_vocab,
        "cache": {name: value for name, value in describe_settings(model).items() if name in CACHE_SETTINGS},
        "n_ctx": model.n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "about": {name: _plain(metadata[key]) for key, name in _METADATA_FIELDS.items() if key in metadata},
    }


def _nbytes(type_name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in the file; for types that GGUF does not have: with the bits in their name, or else 16 bits."""
    n_rows = int(np.prod(shape[1:], dtype=np.int64))
    try:
        return TYPES[type_name].row_bytes(shape[0]) * n_rows
    except (KeyError, PlanError, FormatError):
        bits = next((bits for bits in (8, 32, 64, 4) if f"f{bits}" in type_name or f"i{bits}" in type_name), 16)
        return shape[0] * n_rows * bits // 8


def _plain(value: Any) -> Any:
    """The value as JSON can hold it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT] + " ..."
    return value if isinstance(value, int | float | bool) else str(value)[:_MAX_TEXT]
