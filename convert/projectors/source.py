"""Opening the vision and audio towers of a checkpoint as the source of a projector file (general.architecture clip)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...formats import FormatError, SourceTensor, TensorSource
from ...formats.safetensors import StoredTensor
from ..checkpoint import Checkpoint, assemble, open_checkpoint
from ..config import Config, read_json
from ..hub.fetch import FetchedRepository, fetch_repository, is_repository
from ..metadata import general_keys, size_label
from ..model_card import card_metadata
from ..model_spec import ModelSpec, TensorSpec
from ..tensor_transforms import computed
from .rows import Row, one_row, plain
from .tower import Tower
from .towers import TOWERS

PROCESSORS = (("preprocessor_config.json", "media_proc_cfg"), ("processor_config.json", "image_processor"))
SUFFIXES = (".weight", ".bias", "")
IMAGE_BREAK = "v.token_embd.img_break"


def open_projector(path: str | Path, *, remote: bool = False) -> TensorSource:
    """The vision and audio towers and the projectors of a checkpoint (a folder or hf:OWNER/NAME) as llama.cpp's projector file.

    Raises FormatError for checkpoints without a tower or with one that cannot be converted; every tensor of the towers has to
    be known.
    """
    fetched = fetch_repository(str(path), remote=remote) if is_repository(path) else FetchedRepository(str(path), Path(path))
    checkpoint = open_checkpoint(fetched)
    config = checkpoint.config
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "no architecture"
    if name not in TOWERS:
        near = get_close_matches(name, TOWERS, 1, 0)[0]
        raise config.error(f"the tower of {name} is not known; the nearest known name is {near}")
    metadata: dict[str, Any] = {}
    tensors: dict[str, SourceTensor] = {}
    notes: list[str] = []
    for tower in TOWERS[name]:
        section = _section(config, tower, len(TOWERS[name]) > 1)
        if section is None:
            continue
        processor = Config(config.path, {}) if tower.audio else _processor(fetched.folder)
        own = _renamed(checkpoint.stored, tower)
        metadata |= _metadata(tower, config, section, processor)
        specs = [*_specs(checkpoint, tower, own, section), *_image_break(checkpoint, tower)]
        own |= {source: checkpoint.stored[source] for spec in specs for source in spec.sources if source not in own}
        _, made, noted = assemble(replace(checkpoint, stored=own), ModelSpec("clip", {}, specs, 0))
        tensors, notes = tensors | made, notes + noted
    general = general_keys("clip", fetched.folder, config) | {"general.type": "mmproj"} | card_metadata(fetched.folder, notes)
    general["general.size_label"] = size_label({n: t.shape for n, t in tensors.items()})
    identity = f"{checkpoint.identity} mmproj"
    return TensorSource(fetched.name, general | metadata, tensors, identity, files=checkpoint.files, notes=notes)


def _section(config: Config, tower: Tower, optional: bool) -> Config | None:
    """What config.json says of the tower, with its defaults; lists of one number for each side as that number. None if it has
    no such tower and is not bound to."""
    section = config
    for key in tower.section:
        if section.get(key) is None and optional:
            return None
        section = section.section(key)
    squares = {}
    for key in ("image_size", "patch_size"):
        sides = section.get(key)
        if isinstance(sides, list):
            if len(set(map(str, sides))) != 1:
                raise section.error(f"{key} is {sides!r:.60}; towers of square images can be converted")
            squares[key] = sides[0]
    section = Config(section.path, section.values | squares, config.n_stored)
    return section.with_defaults(dict(tower.defaults(section)))


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
            renamed = tower.prefixes[prefix] + name.removeprefix(prefix)
            if not renamed.startswith(tower.ignored):
                own[renamed] = tensor
    return own


def _metadata(tower: Tower, config: Config, section: Config, processor: Config) -> dict[str, Any]:
    modality = f"clip.{tower.modality}."
    keys: dict[str, Any] = {f"clip.has_{tower.modality}_encoder": True}
    keys[f"{modality}projection_dim"] = np.uint32(_text_config(config).integer("hidden_size"))
    for key in tower.size_keys:
        keys[f"{modality}{key}"] = np.uint32(section.integer(_key(tower, section, key)))
    for key in () if tower.audio else ("image_mean", "image_std"):
        values = processor.get(key)
        if not isinstance(values, list) or len(values) != 3 or not all(isinstance(v, int | float) for v in values):
            raise processor.error(f"{key} is {values!r:.60}; three numbers are needed")
        keys[f"{modality}{key}"] = np.array(values, np.float32)
    keys[f"{modality if tower.by_modality else 'clip.'}projector_type"] = tower.projector
    return keys | tower.keys(config, section, processor)


def _key(tower: Tower, section: Config, size: str) -> str:
    """The section's name of a size."""
    names = tower.size_keys[size]
    return next((name for name in names if section.get(name) is not None), names[0])


def _text_config(config: Config) -> Config:
    """What config.json says of the text model, wherever that is."""
    values = config.values | (config.get("thinker_config") or {})
    return Config(config.path, values | (config.get("llm_config") or {}) | (values.get("text_config") or {}))


def _specs(checkpoint: Checkpoint, tower: Tower, own: Mapping[str, StoredTensor], section: Config) -> list[TensorSpec]:
    layers = section.count(_key(tower, section, "block_count"))
    heads = section.integer(_key(tower, section, "attention.head_count"))
    specs = [TensorSpec(name, (), (), computed(partial(make, section))) for name, make in tower.computed.items()]
    for row in tower.rows:
        numbers = [(i, i) for i in range(layers)] if "{}" in row.source else [(0, 0)]
        if row.numbers is not None:
            indexes = section.get("deepstack_visual_indexes", [])
            numbers = [(i, int(layer)) for i, layer in enumerate(indexes)]
        present = [s for s in SUFFIXES if any(row.source.format(i) + s in own for i, _ in numbers)]
        for stored_number, number in numbers:
            source = row.source.format(stored_number)
            for suffix in present or ([] if row.optional else [".weight"]):
                stored = own.get(source + suffix)
                if stored is None:
                    raise FormatError(f"{checkpoint.folder}: the tower's tensor {source}{suffix} is missing")
                ending = suffix or ".weight" * (not row.bare)
                specs += _tensors(row, source + suffix, number, ending, stored.shape, heads)
    return specs


def _tensors(row: Row, source: str, number: int, suffix: str, shape: tuple[int, ...], heads: int) -> list[TensorSpec]:
    parts = row.make(heads, shape) if row.make is not None else {"": plain(shape)}
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
