"""What verbs that run a model can be asked for, and what they share."""

from __future__ import annotations

from typing import Any

from ...request_fields import fields_of, option, request
from ...runtime.settings import Settings
from .groups import Reading


@request
class RunningModel(Settings, Reading):
    """How a model is opened and run."""


def settings_of(request: RunningModel, *without: str) -> dict[str, Any]:
    """The settings of `load_model` and of `open_source` that were given, but for those named: a model that is loaded already
    takes none."""
    given = getattr(request, "given", ())
    values = {field.name: (getattr(request, field.name), field.default) for field in fields_of(RunningModel)}
    return {
        name: value
        for name, (value, default) in values.items()
        if name not in without and value is not None and (value != default or (name in given and value is not False))
    }


def window(shown: str) -> Any:
    """The field n_ctx of a verb that reads a text in windows. shown: its default, in words."""
    return option("Tokens per window.", default=None, flags="-c --ctx-size", least=4, most=2**31 - 1, shown=shown)
