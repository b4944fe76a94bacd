"""What verbs that run a model can be asked for, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...request_fields import argument, fields_of, option, request, values_of
from ...runtime.settings import Settings
from ..common.arguments import TypeName
from ..common.progress import OnProgress
from .groups import CheckpointOptions

if TYPE_CHECKING:
    from ..common.models import ModelLike


@request
class RunningModel(Settings, CheckpointOptions):
    """How a model is opened and run."""


@request
class WarmUpRequest(CheckpointOptions):
    model: ModelLike | None = argument(
        "A GGUF file or a checkpoint folder, of which a few tokens are read: this takes as long as reading its weights.",
        default=None,
        kind="model",
        kw_only=False,
    )
    types: Sequence[TypeName] = option("Compile the codecs of these types, separated by commas.", default=(), kind="types")
    threads: int | None = option(
        "Run the model with this many threads.", default=None, flags="-t --threads", least=1, shown="all processors"
    )
    progress: OnProgress | bool | None = option(
        "Call this with each `Progress` report; True shows a bar. Stages 'codecs' in types and 'model' in passes.",
        default=None,
        in_cli=False,
    )


def settings_of(request: RunningModel | WarmUpRequest, *without: str) -> dict[str, Any]:
    """The settings of `load_model` and of `open_source` that were given, but for those named: a model that is loaded already
    takes none."""
    given = getattr(request, "given", ())
    of_both = [field for field in fields_of(RunningModel) if field.name in values_of(request)]
    values = {field.name: (getattr(request, field.name), field.default) for field in of_both}
    return {
        name: value
        for name, (value, default) in values.items()
        if name not in without and value is not None and (value != default or (name in given and value is not False))
    }


def window(shown: str, key: str = "") -> Any:
    """The field n_ctx of a verb that reads a text in windows. shown: its default, in words; key: of a recipe."""
    help, most = "Read windows of this many tokens.", 2**31 - 1
    return option(help, default=None, flags="-c --ctx-size", least=4, most=most, shown=shown, key=key)
