"""The types of a projector file's tensors."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ...formats import TYPES, PlanError, SourceTensor, TensorSource, TensorType
from .tower import Tower
from .towers import towers_of

AUDIO = ("a.", "mm.a.")  # what names of the audio tower's tensors begin with


def projector_types(source: TensorSource, outtype: str) -> tuple[dict[str, TensorType], int]:
    """An outtype -> the type of each tensor as llama.cpp's converter chooses it, and general.file_type. auto: f16.

    Vectors, norms, position embeddings and what is not a matrix of weights are f32; convolutions over patches f16 in an f16
    file, else f32. Raises PlanError for mxfp4.
    """
    if outtype == "mxfp4":
        raise PlanError(f"{source.path}: a projector file is auto, f32, f16, bf16 or q8_0, not {outtype}")
    chosen = TYPES["f16" if outtype == "auto" else outtype]
    types = dict.fromkeys(source.tensors, TYPES["f32"])
    for tower in towers_of({str(value) for key, value in source.metadata.items() if key.endswith("projector_type")}):
        own = [name for name in source.tensors if name.startswith(AUDIO) == tower.audio]
        types |= {name: _type(name, source.tensors[name], tower, chosen) for name in own}
    return types, chosen.ftype or 0


def _type(name: str, tensor: SourceTensor, tower: Tower, chosen: TensorType) -> TensorType:
    stem, f32, f16 = name.removesuffix(".1"), TYPES["f32"], TYPES["f16"]
    if len(tensor.shape) == 1 or not stem.endswith(".weight") or stem.endswith(("_norm.weight", "position_embd.weight")):
        return f32
    if any(fnmatchcase(name, pattern) for pattern in tower.float16):
        return f16
    if any(fnmatchcase(name, pattern) for pattern in tower.float32):
        return f32
    if ".patch_embd.weight" in name or ".patch_merger.weight" in name:
        return f16 if chosen.name == "f16" else f32
    return chosen
