"""Opening the models that a call runs, and describing where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...convert import open_source
from ...errors import UsageError
from ...formats import TensorSource
from ...runtime import Model, load_model
from ...runtime.evaluate.perplexity import context_notes
from ...runtime.evaluate.provenance import describe_model
from .messages import note, warn
from .progress import OnProgress, Stage

# A GGUF file (any shard of a split one), a checkpoint folder, hf:OWNER/NAME, an opened source, or a loaded model.
ModelLike = str | Path | TensorSource | Model


def open_model(model: ModelLike, settings: dict[str, Any]) -> Model:
    """The model, loaded with settings of `load_model` unless it is loaded already.

    settings: with `architecture`, as for `open_source`. Raises UsageError for settings beside a loaded model, and what
    `open_source` and `load_model` raise.
    """
    settings = dict(settings)
    if isinstance(model, Model):
        if settings:
            raise UsageError(f"{model.source.path} is loaded already: {', '.join(settings)} is a setting of load_model")
        return model
    source = opened_source(model, settings.pop("architecture", None))
    loaded = load_model(source, **settings)
    warn(loaded.notes, detail=True)
    if loaded.packed_bytes:
        note(f"{source.path}: {loaded.packed_bytes / 2**20:.1f} MiB of weights interleaved in memory")
    return loaded


def opened_source(model: ModelLike, architecture: str | None = None) -> TensorSource:
    """The tensors of a model, opened as this architecture (see `open_source`) unless it is open already.

    Raises UsageError for an architecture of what is open, and as `open_source`.
    """
    if not isinstance(model, Model | TensorSource):
        return open_source(model, architecture=architecture)
    source = model.source if isinstance(model, Model) else model
    if architecture is not None:
        raise UsageError(f"{source.path} is open already: --architecture {architecture} is for a checkpoint's folder")
    return source


def settings_of_each(models: Sequence[ModelLike | None], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings for each of several models: an `architecture` is that of the checkpoints among them. If there is none, each has
    it, and opening them raises what it should."""
    is_file = [isinstance(model, str | Path) and Path(model).suffix == ".gguf" for model in models]
    if "architecture" not in settings or all(is_file[i] for i, model in enumerate(models) if model is not None):
        return [settings] * len(models)
    others = {name: value for name, value in settings.items() if name != "architecture"}
    return [others if gguf else settings for gguf in is_file]


def window_settings(model: ModelLike, n_ctx: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings to open a model with that reads windows of n_ctx tokens; a model that is loaded already needs none."""
    return settings if isinstance(model, Model) else {"n_ctx": n_ctx, **settings}


def model_name(model: ModelLike) -> str:
    """The path or name that a model was given by."""
    if isinstance(model, Model):
        return model.source.path
    return model.path if isinstance(model, TensorSource) else str(model)


def open_generating_model(model: ModelLike, settings: dict[str, Any]) -> Model:
    """As `open_model`, with a warning for a context longer than the model was trained with: what is generated there may make no
    sense."""
    loaded = open_model(model, settings)
    if "n_ctx" in settings:
        warn(context_notes(loaded, None, loaded.n_ctx))
    return loaded


def describe_origin(model: Model, full: bool, report: OnProgress) -> dict[str, Any]:
    """What `describe_model` says, with progress over the bytes where files are hashed in full."""
    if not full:
        return describe_model(model)
    stage = Stage(report, "checksum", sum(path.stat().st_size for path in model.source.files))
    return describe_model(model, True, stage.advance)
