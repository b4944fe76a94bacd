"""Opening a model, whether a Hugging Face checkpoint folder, a repository on the hub or a GGUF, as a source of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..formats import FormatError, PlanError, TensorSource
from ..formats.safetensors import LocalShard
from ..formats.source import LOST_CONFIG
from ..quantize import gguf_source
from ..quantize.prune import drop_draft_layers
from .architectures.registry import model_spec
from .checkpoint import assemble, open_checkpoint, stored_values
from .config import read_config
from .hub.fetch import FetchedRepository, fetch_repository, is_repository
from .lora import AdapterFile, load_adapters, merge_adapters
from .lora.merge import RECORD, record
from .metadata import general_keys, sampling_keys, size_label
from .model_card import card_metadata
from .model_spec import ModelSpec
from .tokenizers.vocabulary import NO_VOCABULARY, read_vocabulary

MLA_LAYOUTS = ("ik", "mainline", "legacy")


def open_source(
    path: str | Path,
    *,
    mla_layout: str | None = None,
    remote: bool = False,
    architecture: str | None = None,
    lora: Sequence[str | Path | AdapterFile] = (),
    mtp: bool | None = None,
    vocab: bool | None = None,
    allow_lossy_config: bool = False,
) -> TensorSource:
    """A checkpoint folder (config.json, *.safetensors, tokenizer.json), a .gguf file, or hf:OWNER/NAME[@REVISION] as a source.

    mla_layout  how DeepSeek's latent attention is written (see `deepseek`): 'ik' (also for None), 'mainline' or
                'legacy'; no effect on other architectures, not allowed for a GGUF
    remote      a repository's weights are not downloaded: their headers are read now, their data when it is needed
    architecture  as which a checkpoint is converted, a name as in config.json's architectures (None: what is there); a relative
                of a model that is not known may do. Every tensor has to fit all the same
    lora        LoRA adapters, FILE or FILE=SCALE, which are merged into the weights as these are read: a GGUF, or for a
                checkpoint a folder of peft
    mtp         draft layers (multi-token prediction) of a checkpoint are kept, or not; None: they are, unless the program that
                the layout is for does not load them. False leaves out those of a GGUF, too
    vocab       True: a checkpoint without a tokenizer is an error; False: its tokenizer is left out; None: the metadata has the
                vocabulary if there is one
    allow_lossy_config  settings of a checkpoint that a GGUF cannot say, and without which it still makes sense, are left out
                instead of refused; the metadata key LOST_CONFIG names them

    Without `remote` a repository is downloaded into the hub's cache. No tensor data is read. Raises FormatError for malformed
    or incomplete models and unknown architectures, PlanError for an unknown layout or `architecture`, or one for a GGUF.
    """
    if mla_layout not in (None, *MLA_LAYOUTS):
        raise PlanError(f"unknown MLA layout {mla_layout!r}; known are {', '.join(MLA_LAYOUTS)}")
    if is_repository(path):
        fetched = fetch_repository(str(path), remote=remote)
        return _checkpoint_source(fetched, mla_layout, architecture, lora, mtp, vocab, allow_lossy_config)
    path = Path(path)
    if remote:
        raise PlanError(f"{path}: only a repository (hf:OWNER/NAME) can be read remotely")
    if path.is_dir():
        if not (path / "config.json").exists():
            raise FormatError(f"{path} is no checkpoint: it has no config.json")
        fetched = FetchedRepository(str(path), path)
        return _checkpoint_source(fetched, mla_layout, architecture, lora, mtp, vocab, allow_lossy_config)
    if path.suffix == ".gguf":
        if mla_layout is not None:
            raise PlanError(f"{path} has the MLA layout it has: another ({mla_layout}) is made from the checkpoint")
        if architecture is not None:
            raise PlanError(f"{path} is a GGUF, whose architecture stays; --architecture {architecture} is for checkpoints")
        if vocab is False:
            raise PlanError(f"{path} is a GGUF, whose vocabulary stays; --no-vocab is for checkpoints")
        if allow_lossy_config:
            raise PlanError(f"{path} is a GGUF, which has no config.json; --allow-lossy-config is for checkpoints")
        source = drop_draft_layers(gguf_source(path)) if mtp is False else gguf_source(path)
        return _merged(source, None, lora)
    problem = "is neither a checkpoint folder nor a .gguf file" if path.exists() else "does not exist"
    raise FormatError(f"{path} {problem}")


def describe(folder: Path, mla_layout: str | None = None, architecture: str | None = None) -> ModelSpec:
    """The metadata and tensors that the GGUF of a checkpoint folder has, from config.json alone. Raises FormatError.

    mla_layout, architecture: as for `open_source`; what the GGUF cannot say of the config is left out"""
    return model_spec(read_config(folder, lossy=True), mla_layout or MLA_LAYOUTS[0], architecture)


def _checkpoint_source(
    fetched: FetchedRepository,
    mla_layout: str | None,
    architecture: str | None,
    lora: Sequence[str | Path | AdapterFile],
    mtp: bool | None,
    vocab: bool | None,
    allow_lossy_config: bool,
) -> TensorSource:
    folder = fetched.folder
    checkpoint = open_checkpoint(folder, fetched.shards, fetched.origin, fetched.prefetch, lossy=allow_lossy_config)
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
    return _merged(source, model, lora)


def _merged(source: TensorSource, model: ModelSpec | None, lora: Sequence[str | Path | AdapterFile]) -> TensorSource:
    """The source with adapters merged, which its metadata then says."""
    if not lora:
        return source
    merged = merge_adapters(source, load_adapters(lora, source, model))
    earlier = list(source.metadata.get(RECORD, []))
    return replace(merged, metadata=merged.metadata | {RECORD: earlier + record(lora)})
