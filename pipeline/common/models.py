"""Opening the models that a call runs, and describing where they come from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...convert import open_source
from ...convert.hub.fetch import is_repository
from ...errors import UsageError
from ...formats import TensorSource
from ...request_fields import fields_of
from ...runtime import Model, load_model
from ...runtime.evaluate.perplexity import context_notes
from ...runtime.evaluate.provenance import describe_model
from ...runtime.micro_batches import PIECE
from ..requests.groups import CheckpointOptions
from .dropped_config import warn_on_dropped_config
from .figures import size_text
from .messages import note, warn
from .progress import OnProgress, Stage

# A GGUF file (any shard of a split one), a checkpoint folder, hf:OWNER/NAME, an opened source, or a loaded model.
ModelLike = str | Path | TensorSource | Model
CHECKPOINT_OPTIONS = tuple(field.name for field in fields_of(CheckpointOptions))


def open_model(model: ModelLike, settings: dict[str, Any]) -> Model:
    """The model, loaded with settings of `load_model` unless it is loaded already.

    settings: with those of `open_source` in CHECKPOINT_OPTIONS, too. Raises UsageError for settings beside a loaded model, and
    what `open_source` and `load_model` raise.
    """
    settings = dict(settings)
    if isinstance(model, Model):
        if settings:
            raise UsageError(f"{model.source.path} is loaded already: {', '.join(settings)} is a setting of load_model")
        return model
    source = opened_source(model, pop_checkpoint_options(settings))
    loaded = load_model(source, **settings)
    warn(loaded.notes, detail=True)
    if loaded.packed_bytes:
        note(f"{source.path}: {size_text(loaded.packed_bytes)} of weights interleaved in memory")
    return loaded


def fast_settings(model: ModelLike, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for generating text and measuring speed: products of prompts round more, as other programs' do, where they do
    not say otherwise. What measures a model's quality leaves them as they are."""
    return settings if isinstance(model, Model) else {"fast": True, **settings}


def pop_checkpoint_options(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that say how a checkpoint is read, which are taken out of the others."""
    return {name: value for name in CHECKPOINT_OPTIONS if (value := settings.pop(name, None)) is not None}


def opened_source(model: ModelLike, checkpoint_options: Mapping[str, Any] = MappingProxyType({})) -> TensorSource:
    """The tensors of a model, opened with these settings of `open_source` unless it is open already. What a checkpoint lost,
    now or when it was converted, is a warning.

    Raises UsageError for settings of what is open, and as `open_source`.
    """
    if not isinstance(model, Model | TensorSource):
        source = open_source(model, **checkpoint_options)
        warn_on_dropped_config(source)
        return source
    source = model.source if isinstance(model, Model) else model
    for name in checkpoint_options:
        raise UsageError(f"{source.path} is open already: --{name.replace('_', '-')} is for a checkpoint's folder")
    return source


def settings_of_each(models: Sequence[ModelLike | None], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings for each of several models: those in CHECKPOINT_OPTIONS are of the checkpoints among them. If there is none,
    each has them, and opening them raises what it should."""
    is_file = [isinstance(model, str | Path) and Path(model).suffix == ".gguf" for model in models]
    only_files = all(is_file[i] for i, model in enumerate(models) if model is not None)
    if only_files or not any(name in settings for name in CHECKPOINT_OPTIONS):
        return [settings] * len(models)
    others = {name: value for name, value in settings.items() if name not in CHECKPOINT_OPTIONS}
    return [others if gguf else settings for gguf in is_file]


def window_settings(model: ModelLike, n_ctx: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings to open a model with that reads windows of n_ctx tokens; a model that is loaded already needs none."""
    return settings if isinstance(model, Model) else {"n_ctx": n_ctx, **settings}


def note_micro_batch(n_ctx: int, settings: dict[str, Any]) -> None:
    """Says that passes are larger than what `ubatch` asks for, where windows of n_ctx tokens make them so."""
    ubatch, least = settings.get("ubatch"), min(n_ctx, PIECE)
    if ubatch is not None and ubatch < least:
        note(f"-ub {ubatch}: {least} tokens of a window are computed in one pass, for figures that do not depend on it")


def model_name(model: ModelLike) -> str:
    """The path or name that a model was given by."""
    if isinstance(model, Model):
        return model.source.path
    return model.path if isinstance(model, TensorSource) else str(model)


def file_stem(model: str | Path) -> str:
    """What files made of a model begin with: its name, without what says how it was stored."""
    name = Path(str(model).partition("@")[0] if is_repository(model) else model).resolve().name
    return re.sub(r"(-0+1-of-\d+)?\.gguf$", "", name).removesuffix("-bf16").removesuffix("-f16").removesuffix("-f32")


def open_generating_model(model: ModelLike, settings: dict[str, Any]) -> Model:
    """As `open_model` with `fast_settings`, and a warning for a context longer than the model was trained with: what is
    generated there may make no sense."""
    loaded = open_model(model, fast_settings(model, settings))
    if "n_ctx" in settings:
        warn(context_notes(loaded, None, loaded.n_ctx))
    return loaded


def describe_origin(model: Model, full: bool, report: OnProgress) -> dict[str, Any]:
    """What `describe_model` says, with progress over the bytes where files are hashed in full."""
    if not full:
        return describe_model(model)
    stage = Stage(report, "checksum", sum(path.stat().st_size for path in model.source.files))
    return describe_model(model, True, stage.advance)
