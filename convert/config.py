"""config.json of a checkpoint, read with errors that name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..formats import FormatError


class Config:
    """The keys of a config.json. `path` is named in errors; `values` are the keys as they stand."""

    def __init__(self, path: Path, values: dict[str, Any]):
        self.path, self.values = path, values

    def fail(self, problem: str) -> FormatError:
        return FormatError(f"{self.path}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands; `default` where the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`. Raises FormatError; without a default also if the key is absent."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise self.fail(f"{key} is {value!r}; a whole number of at least {least} is needed")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number. Raises FormatError; without a default also if the key is absent."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(f"{key} is {value!r}; a number is needed")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false. Raises FormatError; without a default also if the key is absent."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{key} is {value!r}; true or false is needed")
        return value

    def expect(self, key: str, supported: Any, what: str) -> None:
        """Refuses a value other than `supported` (absent and null count as supported), saying what cannot be converted."""
        value = self.values.get(key)
        if value is not None and value != supported:
            raise self.fail(f"{key} is {value!r}: {what} cannot be converted, only {supported!r}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise self.fail(f"the key {key} is missing")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises FormatError if it cannot be read or is something else."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise FormatError(f"{path}: not a JSON object")
    return values


def read_config(folder: Path) -> Config:
    """config.json of a checkpoint folder. Raises FormatError if it is absent or malformed."""
    path = folder / "config.json"
    return Config(path, read_json(path))
