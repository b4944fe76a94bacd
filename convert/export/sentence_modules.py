"""What sentence-transformers keeps beside an embedding model, from a GGUF: how outputs become one vector, and dense layers."""

from __future__ import annotations

import json
from typing import Any

from ...formats import TensorSource
from ..architectures.encoders.pooling import FILE, POOLINGS

_MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}
_KIND = "sentence_transformers.models"


def sentence_modules(source: TensorSource) -> dict[str, bytes]:
    """File name -> content of modules.json and of each module's config.json; none for a model that is not pooled so."""
    names = {number: name for name, number in POOLINGS.items()}
    pooling = names.get(int(source.metadata.get(f"{source.architecture}.pooling_type", -1)))
    if pooling not in _MODES:
        return {}
    size = int(source.metadata[f"{source.architecture}.embedding_length"])
    settings: dict[str, dict[str, Any]] = {"": {}}
    settings["1_Pooling"] = {"word_embedding_dimension": size} | {mode: name == pooling for name, mode in _MODES.items()}
    for number in (2, 3):
        dense = source.tensors.get(f"dense_{number}.weight")
        if dense is not None:
            sizes = {"in_features": dense.shape[0], "out_features": dense.shape[1], "bias": False}
            settings[f"{number}_Dense"] = sizes | {"activation_function": "torch.nn.modules.linear.Identity"}
    kinds = {folder: folder.partition("_")[2] or "Transformer" for folder in settings}
    modules = [
        {"idx": at, "name": str(at), "path": folder, "type": f"{_KIND}.{kind}"}
        for at, (folder, kind) in enumerate(kinds.items())
    ]
    files = {f"{folder}/config.json": json.dumps(values, indent=2).encode() for folder, values in settings.items() if folder}
    return {**files, FILE: json.dumps(modules, indent=2).encode()}
