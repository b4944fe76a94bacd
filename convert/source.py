"""Opening a model, whether a Hugging Face checkpoint folder, a repository on the hub or a GGUF, as a source of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..formats import FormatError, PlanError, TensorSource
from ..formats.loaders import MLA_LAYOUTS
from ..quantize import gguf_source
from ..quantize.prune import drop_draft_layers
from .hub.fetch import FetchedRepository, fetch_repository, is_repository

if TYPE_CHECKING:
    from .lora import AdapterFile
    from .model_spec import ModelSpec


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
    in_hub = is_repository(path)
    if remote and not in_hub:
        raise PlanError(f"{path}: only a repository (hf:OWNER/NAME) can be read remotely")
    if in_hub or Path(path).is_dir():
        from .checkpoint_source import checkpoint_source

        if not in_hub and not (Path(path) / "config.json").exists():
            raise FormatError(f"{path} is no checkpoint: it has no config.json")
        fetched = fetch_repository(str(path), remote=remote) if in_hub else FetchedRepository(str(path), Path(path))
        source, model = checkpoint_source(fetched, mla_layout, architecture, mtp, vocab, allow_lossy_config)
        return _merged(source, model, lora)
    path = Path(path)
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


def _merged(source: TensorSource, model: ModelSpec | None, lora: Sequence[str | Path | AdapterFile]) -> TensorSource:
    """The source with adapters merged, which its metadata then says."""
    if not lora:
        return source
    from .lora import load_adapters, merge_adapters
    from .lora.merge import RECORD, record

    merged = merge_adapters(source, load_adapters(lora, source, model))
    earlier = list(source.metadata.get(RECORD, []))
    return replace(merged, metadata=merged.metadata | {RECORD: earlier + record(lora)})
