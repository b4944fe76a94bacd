"""How a request reads its source, as arguments of `open_source`."""

from __future__ import annotations

from typing import Any

from ...request_fields import values_of
from ..common.arguments import as_adapters
from .groups import SourceOptions

_NOT_OF_READING = ("program",)  # of SourceOptions: it decides types and layout


def reading_of(request: SourceOptions) -> dict[str, Any]:
    """The arguments of `open_source` that a request says."""
    values = {name: value for name, value in values_of(request, SourceOptions).items() if name not in _NOT_OF_READING}
    return values | {"lora": as_adapters(request.lora)}
