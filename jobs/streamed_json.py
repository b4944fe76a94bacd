"""Results whose JSON has an entry for each tensor, of which there may be a million."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class StreamedJson:
    """A result with a description of each tensor: as one object for callers, and in parts for printing it."""

    def json_fields(self) -> dict[str, Any]:
        """What --json prints, key by key; long lists as iterators, which make an item when it is asked for."""
        raise NotImplementedError

    def as_json(self) -> dict[str, Any]:
        """What --json prints."""
        return {key: list(value) if isinstance(value, Iterator) else value for key, value in self.json_fields().items()}
