"""A checkpoint's folder as a source of tensors: apart from `source`, since a GGUF needs none of it."""

from __future__ import annotations

from pathlib import Path

from ..formats import TensorSource
from ..formats.loaders import MLA_LAYOUTS
from ..formats.safetensors import LocalShard
from ..formats.source import LOST_CONFIG
from .architectures.registry import model_spec
from .checkpoint import assemble, open_checkpoint, stored_values
from .config import read_config
from .hub.fetch import FetchedRepository
from .metadata import general_keys, sampling_keys, size_label
from .model_card import card_metadata
from .model_spec import ModelSpec
from .tokenizers.vocabulary import NO_VOCABULARY, read_vocabulary


def describe(folder: Path, mla_layout: str | None = None, architecture: str | None = None) -> ModelSpec:
    """The metadata and tensors that the GGUF of a checkpoint folder has, from config.json alone. Raises FormatError.

    mla_layout, architecture: as for `open_source`; what the GGUF cannot say of the config is left out"""
    return model_spec(read_config(folder, lossy=True), mla_layout or MLA_LAYOUTS[0], architecture)


def checkpoint_source(
    fetched: FetchedRepository,
    mla_layout: str | None,
    architecture: str | None,
    mtp: bool | None,
    vocab: bool | None,
    allow_lossy_config: bool,
) -> tuple[TensorSource, ModelSpec]:
    """A folder as a source, and what its GGUF has. Arguments and exceptions: those of `source.open_source`."""
    folder = fetched.folder
    checkpoint = open_checkpoint(fetched, lossy=allow_lossy_config)
    config = checkpoint.config
    model = model_spec(config, mla_layout or MLA_LAYOUTS[0], architecture, checkpoint.stored)
    model, tensors, assembly_notes = assemble(checkpoint, model, mtp)
    vocabulary, vocabulary_notes = dict(NO_VOCABULARY), ["the GGUF will have no vocabulary, as --no-vocab says"]
    if vocab is not False:
        vocabulary, vocabulary_notes = read_vocabulary(folder, config, model.vocab_size, is_needed=bool(vocab))
    lost = list(dict.fromkeys(config.losses or ()))
    notes = [*assembly_notes, *model.notes, *vocabulary_notes]
    metadata = general_keys(model.architecture, folder, config) | card_metadata(folder, notes) | sampling_keys(folder, notes)
    metadata["general.size_label"] = size_label({name: t.shape for name, t in tensors.items()})
    metadata |= model.metadata | stored_values(checkpoint, model) | vocabulary | ({LOST_CONFIG: lost} if lost else {})
    shards = {t.path: t.shard for t in checkpoint.stored.values() if isinstance(t.shard, LocalShard)}
    identity = checkpoint.identity if architecture is None else f"{checkpoint.identity} as {architecture}"
    identity = identity if mtp is None else f"{identity} {'with' if mtp else 'without'} draft layers"
    identity = f"{identity} without {'; '.join(lost)}" if lost else identity
    source = TensorSource(
        fetched.name, metadata, tensors, identity, files=checkpoint.files, notes=notes, shards=shards, read_as=architecture
    )
    return source, model
