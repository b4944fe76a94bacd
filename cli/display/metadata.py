"""Metadata of a GGUF as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...pipeline.common.messages import printable
from .console import table

_WIDTH = 80  # of a value


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """A row per key; values as `pipeline.inspect.plain_value` gives them."""
    return table(("key", "value"), [(printable(key), short_text(value)) for key, value in metadata.items()])


def short_text(value: Any, width: int = _WIDTH) -> str:
    """A value in one line of at most `width` characters."""
    if isinstance(value, dict):
        return f"[{value['length']:,}] {', '.join(map(_item, value['first'][:5]))}, ..."
    if isinstance(value, list | tuple):
        value = f"[{', '.join(map(_item, value))}]"
    text = printable(str(value)[: width + 1])
    return text if len(text) <= width else text[: width - 3] + "..."


def _item(value: Any) -> str:
    """An item of an array; a text between quotes, its backslashes as they are."""
    return f"'{value}'" if isinstance(value, str) else str(value)
