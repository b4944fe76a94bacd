"""Draft layers, which predict further tokens (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2).

A draft layer is an ordinary layer of the model whose input is eh_proj @ [enorm(embedding of the next token), hnorm(hidden
state)]. In a GGUF it is a block after those of the model: block_count counts it, nextn_predict_layers says how many there are,
and its own tensors are blk.N.nextn.*, as llama.cpp and ik_llama.cpp name them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from .model_spec import ModelSpec
from .tensor_spec import TensorSpec
from .tensor_transforms import Transform, unchanged

# What the parts are called in the checkpoint: DeepSeek and GLM, with the layer's prefix before; Qwen and EXAONE.
DEEPSEEK_NAMES = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}
DEEPSEEK_NAMES |= {"embed_tokens": "embed_tokens", "shared_head_head": "shared_head.head"}
QWEN_NAMES = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head_norm": "norm"}
LAYER_NORM_NAMES = {part: name for part, name in DEEPSEEK_NAMES.items() if part != "shared_head_norm"}  # it is the layer's
OWN_PARTS = ("embed_tokens", "shared_head_head")  # which a layer may lack: it then uses the model's
# Names of draft layers in published checkpoints: mtp., model.mtp_layers., ..., or a layer after the model's with such parts.
_MTP = re.compile(r"(?:model\.)?mtp[^.]*\.")
_LATER_LAYER = re.compile(r"(model\.layers\.(\d+)\.)(?:eh_proj|enorm|hnorm)\.")
UNNAMED = "multi-token prediction, which has no names in a GGUF of this architecture"  # why tensors are left out


def nextn_tensors(
    block: str, source: str, sizes: tuple[int, int], names: Mapping[str, str], norm: Transform = unchanged
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """The tensors blk.N.nextn.* of a draft layer: those that it needs, and the optional ones.

    block: prefix in the GGUF, blk.N; source: in the checkpoint; sizes: of the vocabulary and of the hidden state; names: in the
    checkpoint; norm: the transform of the norms' weights
    """
    n_vocab, n = sizes
    shapes = {"eh_proj": (n, 2 * n), "embed_tokens": (n_vocab, n), "shared_head_head": (n_vocab, n)}
    required, optional = [], []
    for part, name in names.items():
        transform = unchanged if part in shapes else norm
        tensor = TensorSpec(f"{block}.nextn.{part}.weight", (f"{source}.{name}.weight",), shapes.get(part, (n,)), transform)
        (optional if part in OWN_PARTS else required).append(tensor)
    return required, optional


def with_draft_layers(model: ModelSpec, names: Collection[str], keep: bool | None = None) -> ModelSpec:
    """The model with its draft layers, as many as the checkpoint has, if they are to be kept; else their tensors are skipped,
    as are those of draft layers that the architecture does not know.

    names: of the checkpoint's tensors, as the `ModelSpec` has them; keep: None: as `DraftLayers.default` says.
    """
    model = replace(model, skipped_prefixes=model.skipped_prefixes | dict.fromkeys(unknown_prefixes(model, names), UNNAMED))
    draft = model.draft
    if draft is None:
        return model
    stored = [any(name.startswith(layer.prefix) for name in names) for layer in draft.layers]
    layers = draft.layers[: stored.index(False) if False in stored else len(stored)]
    if not layers and keep is not False:
        missing = f"draft layers (multi-token prediction): the model has {len(draft.layers)}, the files have none"
        model = replace(model, notes=[*model.notes, missing])
    if not layers or not (draft.default if keep is None else keep):
        why = f", which {draft.refused_by} does not load; --mtp keeps them" if keep is None and not draft.default else ""
        what = f"draft layers (multi-token prediction{why})"
        return replace(model, skipped_prefixes=model.skipped_prefixes | dict.fromkeys(draft.prefixes, what))
    architecture, count = model.architecture, int(model.metadata[f"{model.architecture}.block_count"]) + len(layers)
    metadata = model.metadata | {key: values[:count] for key, values in draft.metadata.items()}
    metadata[f"{architecture}.block_count"] = np.uint32(count)
    metadata[f"{architecture}.nextn_predict_layers"] = np.uint32(len(layers))
    at = next(i for i, tensor in enumerate(model.tensors) if tensor.name.startswith("output_norm"))
    added = [tensor for layer in layers for tensor in (*layer.tensors, *_stored(layer.optional, names))]
    notes = list(model.notes)
    if len(layers) < len(draft.layers):
        notes.append(f"draft layers (multi-token prediction): {len(layers)} of {len(draft.layers)} are in the checkpoint")
    if draft.refused_by:
        notes.append(f"{draft.refused_by} does not load {architecture} with its draft layers; --no-mtp leaves them out")
    return replace(model, metadata=metadata, tensors=[*model.tensors[:at], *added, *model.tensors[at:]], notes=notes)


def unknown_prefixes(model: ModelSpec, names: Iterable[str]) -> set[str]:
    """Prefixes of the draft layers among a checkpoint's tensors that the architecture does not know."""
    known = (*model.skipped_prefixes, *(model.draft.prefixes if model.draft else ()))
    n_layers = model.metadata.get(f"{model.architecture}.block_count")
    if n_layers is None:  # a tower of a projector file, which is no language model
        return set()
    found = set()
    for name in names:
        match, layer = _MTP.match(name), _LATER_LAYER.match(name)
        if match is not None:
            found.add(match[0])
        elif layer is not None and int(layer[2]) >= n_layers:
            found.add(layer[1])
    return {prefix for prefix in found if not prefix.startswith(known)}


def _stored(tensors: Iterable[TensorSpec], names: Collection[str]) -> Iterator[TensorSpec]:
    """Those of which the checkpoint has anything: a weight, or its codes and scales."""
    for tensor in tensors:
        stem = tensor.sources[0].removesuffix("weight").removesuffix("bias")
        if any(name.startswith(stem) for name in names):
            yield tensor
