"""Opening the vision tower of a checkpoint as the source of a projector file (general.architecture clip)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from ...formats import TYPES, FormatError, TensorSource, TensorType
from ...formats.safetensors import StoredTensor
from ..checkpoint import Checkpoint, assemble, open_checkpoint
from ..config import Config, read_json
from ..hub.fetch import FetchedRepository, fetch_repository, is_repository
from ..metadata import general_keys, size_label
from ..model_card import card_metadata
from ..model_spec import ModelSpec, TensorSpec
from .keys import KEYS
from .rows import Row, one_row, plain
from .towers import TOWERS, Tower, size_keys

DEFAULT_IMAGE_SIZES = {"qwen2vl_merger": 560, "qwen2.5vl_merger": 560, "gemma4v": 224}
PROCESSORS = (("preprocessor_config.json", "media_proc_cfg"), ("processor_config.json", "image_processor"))
SUFFIXES = (".weight", ".bias", "")
IMAGE_BREAK = "v.token_embd.img_break"


def open_projector(path: str | Path, *, remote: bool = False) -> TensorSource:
    """The vision tower and the projector of a checkpoint (a folder or hf:OWNER/NAME) as llama.cpp's projector file.

    Raises FormatError for checkpoints without a tower or with one that cannot be converted; every tensor of the tower has to be
    known.
    """
    fetched = fetch_repository(str(path), remote=remote) if is_repository(path) else FetchedRepository(str(path), Path(path))
    checkpoint = open_checkpoint(fetched.folder, fetched.shards, fetched.origin, fetched.prefetch)
    config = checkpoint.config
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "no architecture"
    if name not in TOWERS:
        near = get_close_matches(name, TOWERS, 1, 0)[0]
        raise config.error(f"the vision tower of {name} is not known; the nearest known name is {near}")
    tower = TOWERS[name]
    vision, processor = config.section("vision_config"), _processor(fetched.folder)
    own = _renamed(checkpoint.stored, tower)
    metadata = _metadata(tower, config, vision, processor)
    specs = _specs(checkpoint, tower, own, vision)
    embedding = _image_break(checkpoint, tower)
    model = ModelSpec("clip", metadata, [*specs, *embedding], 0)
    used = {source: checkpoint.stored[source] for spec in embedding for source in spec.sources}
    model, tensors, notes = assemble(replace(checkpoint, stored=own | used), model)
    general = general_keys("clip", fetched.folder, config) | {"general.type": "mmproj"} | card_metadata(fetched.folder, notes)
    general["general.size_label"] = size_label({n: t.shape for n, t in tensors.items()})
    identity = f"{checkpoint.identity} mmproj"
    return TensorSource(fetched.name, general | metadata, tensors, identity, files=checkpoint.files, notes=notes)


def projector_types(source: TensorSource, outtype: str) -> tuple[dict[str, TensorType], int]:
    """An outtype -> the type of each tensor as llama.cpp's converter chooses it, and general.file_type. auto: f16.

    Vectors, norms and position embeddings are f32; convolutions over patches f16 in an f16 file, else f32.
    """
    chosen = TYPES["f16" if outtype in ("auto", "mxfp4") else outtype]
    keys = ("clip.projector_type", "clip.vision.projector_type")
    projector = next(source.metadata[key] for key in keys if key in source.metadata)
    tower = next(t for t in TOWERS.values() if t.projector == projector)
    sources = {row.name: row.source for row in tower.rows}
    types = {}
    for name, tensor in source.tensors.items():
        origin = sources.get(name.removesuffix(".weight"), "")
        if len(tensor.shape) == 1 or name.endswith(("_norm.weight", "position_embd.weight")):
            kind = TYPES["f32"]
        elif any(part in origin for part in tower.float16):
            kind = TYPES["f16"]
        elif any(part in origin for part in tower.float32):
            kind = TYPES["f32"]
        elif ".patch_embd.weight" in name or ".patch_merger.weight" in name:
            kind = TYPES["f16" if chosen.name == "f16" else "f32"]
        else:
            kind = chosen
        types[name] = kind
    return types, chosen.ftype or 0


def _processor(folder: Path) -> Config:
    """preprocessor_config.json and processor_config.json as one. Raises FormatError if there is neither."""
    values: dict[str, Any] = {}
    for file, section in PROCESSORS:
        if (folder / file).is_file():
            read = read_json(folder / file)
            values |= read | (read[section] if isinstance(read.get(section), dict) else {})
    if not values:
        raise FormatError(f"{folder}: {PROCESSORS[0][0]} is missing, which says how images are prepared")
    return Config(folder / PROCESSORS[0][0], values)


def _renamed(stored: Mapping[str, StoredTensor], tower: Tower) -> dict[str, StoredTensor]:
    """The tower's tensors under the names that its rows use."""
    own = {}
    for name, tensor in stored.items():
        prefix = next((p for p in sorted(tower.prefixes, key=len, reverse=True) if name.startswith(p)), None)
        if prefix is not None:
            own[tower.prefixes[prefix] + name.removeprefix(prefix)] = tensor
    return own


def _metadata(tower: Tower, config: Config, vision: Config, processor: Config) -> dict[str, Any]:
    text = {**config.values, **(config.get("text_config") or {})}
    keys: dict[str, Any] = {"clip.has_vision_encoder": True}
    keys["clip.vision.projection_dim"] = np.uint32(Config(config.path, text).integer("hidden_size"))
    vision = vision.with_defaults(_image_size(tower, vision))
    for key, names in size_keys(tower).items():
        name = next((n for n in names if vision.get(n) is not None), names[0])
        keys[f"clip.vision.{key}"] = np.uint32(vision.integer(name))
    for key in ("image_mean", "image_std"):
        values = processor.get(key)
        if not isinstance(values, list) or len(values) != 3 or not all(isinstance(v, int | float) for v in values):
            raise processor.error(f"{key} is {values!r:.60}; three numbers are needed")
        keys[f"clip.vision.{key}"] = np.array(values, np.float32)
    keys[f"clip.{'vision.' * tower.by_modality}projector_type"] = tower.projector
    return keys | KEYS[tower.projector](config, vision, processor)


def _image_size(tower: Tower, vision: Config) -> dict[str, int]:
    """The side of images where vision_config does not say it, as llama.cpp's converter sets it."""
    if tower.projector == "qwen3vl_merger":
        side = vision.integer("num_position_embeddings", 2304) ** 0.5
        return {"image_size": int(side * vision.integer("patch_size", 16))}
    size = DEFAULT_IMAGE_SIZES.get(tower.projector)
    return {"image_size": size} if size is not None else {}


def _specs(checkpoint: Checkpoint, tower: Tower, own: Mapping[str, StoredTensor], vision: Config) -> list[TensorSpec]:
    keys = size_keys(tower)
    layers, heads = vision.count(keys["block_count"][0]), vision.integer(keys["attention.head_count"][0])
    specs = []
    for row in tower.rows:
        numbers = [(i, i) for i in range(layers)] if "{}" in row.source else [(0, 0)]
        if row.numbers is not None:
            indexes = vision.get("deepstack_visual_indexes", [])
            numbers = [(i, int(layer)) for i, layer in enumerate(indexes)]
        present = [s for s in SUFFIXES if any(row.source.format(i) + s in own for i, _ in numbers)]
        for stored_number, number in numbers:
            source = row.source.format(stored_number)
            for suffix in present or ([] if row.optional else [".weight"]):
                if source + suffix not in own:
                    raise FormatError(f"{checkpoint.folder}: the tower's tensor {source}{suffix} is missing")
                specs += _tensors(row, source + suffix, number, suffix or ".weight", own[source + suffix].shape, heads)
    return specs


def _tensors(row: Row, source: str, number: int, suffix: str, shape: tuple[int, ...], heads: int) -> list[TensorSpec]:
    parts = row.make(heads, shape) if row.make is not None and (len(shape) > 1 or suffix == ".weight") else {"": plain(shape)}
    if row.make is not None and suffix == ".bias" and row.name.endswith("attn_"):
        parts = row.make(heads, shape)
    name, specs = row.name.format(number), []
    for part, transform in parts.items():
        whole = f"{name}{suffix}{part}" if part.startswith(".") else f"{name}{part}{suffix}"
        specs.append(TensorSpec(whole, (source,), shape, transform))
    return specs


def _image_break(checkpoint: Checkpoint, tower: Tower) -> list[TensorSpec]:
    """Pixtral's embedding of [IMG_BREAK], which ends each row of patches."""
    if tower.projector != "pixtral":
        return []
    path = checkpoint.folder / "tokenizer.json"
    tokens = read_json(path).get("added_tokens", []) if path.is_file() else []
    number = next((t["id"] for t in tokens if isinstance(t, dict) and t.get("content") == "[IMG_BREAK]"), None)
    name = next((n for n in checkpoint.stored if n.endswith("embed_tokens.weight")), None)
    if number is None or name is None:
        raise FormatError(f"{checkpoint.folder}: the token [IMG_BREAK], or its embedding, is missing")
    return [TensorSpec(IMAGE_BREAK, (name,), checkpoint.stored[name].shape, one_row(int(number)))]
