"""config.json of a checkpoint, read with errors that name the key."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from ..formats import FormatError

LARGEST, SMALLEST = 3.4e38, 1.2e-38  # of float32's normal numbers: GGUF holds nothing beyond in its keys
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half of a surrogate pair, or half of a whole one, as JSON escapes it


class Config:
    """The keys of a config.json. `path` is named in errors; `values` are the keys as they stand, for `n_stored` tensors."""

    def __init__(self, path: Path, values: dict[str, Any], n_stored: int = sys.maxsize):
        self.path, self.values, self.n_stored = path, values, n_stored

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
            raise self.fail(f"{key} is {value!r:.60}; a whole number of at least {least} is needed")
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 1, times: int = 1, where: str = "") -> int:
        """As `integer`, for what has at least one tensor of its own, `times` over: refused if fewer tensors are stored."""
        value = self.integer(key, default, least=least)
        if value * times > self.n_stored:
            raise self.fail(f"{key} is {value}{where}, more than the {self.n_stored} tensors that are stored")
        return value

    def real(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        """A number that float32 can hold, above 0 if so wanted. Raises FormatError; without a default also if it is absent."""
        value = self._value(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (SMALLEST if positive else -LARGEST) <= value <= LARGEST:
            wanted = "a number above 0" if positive else "a number"
            raise self.fail(f"{key} is {value!r:.60}; {wanted} that fits float32 is needed")
        return float(value)

    def over(self, defaults: dict[str, Any]) -> Config:
        """The same keys, those that are absent or null taken from `defaults`."""
        present = {key: value for key, value in self.values.items() if value is not None}
        return Config(self.path, defaults | present, self.n_stored)

    def replaced(self, values: dict[str, Any]) -> Config:
        """The same keys, but these."""
        return Config(self.path, self.values | values, self.n_stored)

    def section(self, key: str) -> Config:
        """The object under a key as a config of its own, such as text_config. Raises FormatError if it is none."""
        values = self._value(key, None)
        if not isinstance(values, dict):
            raise self.fail(f"{key} is {values!r:.60}; an object is needed")
        return Config(self.path, values, self.n_stored)

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
        text = path.read_text("utf-8")
        values = json.loads(text)
        if _HALF.search(text):
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.start + 1]
        raise FormatError(f"{path}: not Unicode text: half a character at the end of {near!a}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise FormatError(f"{path}: not a JSON object")
    return values


def read_config(folder: Path, n_stored: int = sys.maxsize) -> Config:
    """config.json of a checkpoint folder that holds n_stored tensors. Raises FormatError if it is absent or malformed."""
    path = folder / "config.json"
    return Config(path, read_json(path), n_stored)
