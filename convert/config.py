"""config.json of a checkpoint: typed access to its keys, with errors that name the key."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from ..formats import FormatError
from ..formats.file_range import check_regular

FLOAT32_MAX, FLOAT32_MIN = 3.4e38, 1.2e-38  # of float32's normal numbers, in which GGUF stores metadata
_MAX_BYTES = 1 << 29  # of a JSON file; the largest tokenizer.json have some 40 MB
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escaped surrogate code point, alone or in a pair


class Config:
    """The keys of a config.json.

    path      of the file, for errors
    values    key -> value as in the file
    n_stored  number of tensors in the checkpoint, which bounds `count`
    asked     keys that were asked for, of this and of all configs made from it by `with_defaults` and `with_values`
    losses    what was said to `lose`, of this and of all configs made from it; None: losing something is an error
    """

    def __init__(
        self,
        path: Path,
        values: dict[str, Any],
        n_stored: int = sys.maxsize,
        asked: set[str] | None = None,
        losses: list[str] | None = None,
    ):
        self.path, self.values, self.n_stored, self.losses = path, values, n_stored, losses
        self.asked: set[str] = set() if asked is None else asked

    def error(self, problem: str) -> FormatError:
        """An exception to raise, naming the file."""
        return FormatError(f"{self.path}: {problem}")

    def lose(self, problem: str) -> None:
        """Notes that a GGUF cannot say a setting without which the model still makes sense; problem: names it, and says what is
        computed instead. Raises FormatError unless losses are allowed."""
        if self.losses is None:
            raise self.error(f"{problem}; --allow-lossy-config converts without it")
        self.losses.append(problem)

    def lose_unless(self, key: str, supported: Any, problem: str) -> None:
        """As `lose`, for a value other than `supported` (absent and null are accepted)."""
        value = self.get(key)
        if value is not None and value != supported:
            self.lose(f"{key} is {value!r:.60}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value as in the file; `default` if the key is absent or null."""
        self.asked.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`. Raises FormatError, without a default also if the key is absent."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 1 << 31:
            raise self.error(f"{key} is {value!r:.60}; a whole number of at least {minimum} is needed")
        return value

    def count(self, key: str, default: int | None = None, *, minimum: int = 1, layers: int | None = None) -> int:
        """As `integer`, for things with at least one stored tensor each (per layer, if `layers` is given).

        Raises FormatError for a number above that of the stored tensors, so that a damaged file does not cost memory.
        """
        value = self.integer(key, default, minimum=minimum)
        if value * (1 if layers is None else layers) > self.n_stored:
            where = "" if layers is None else f" in each of {layers} layers"
            raise self.error(f"{key} is {value}{where}, more than the {self.n_stored} tensors that are stored")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        """A number that float32 can hold, above 0 if `positive`. Raises FormatError, without a default also if it is absent."""
        value = self._value(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (FLOAT32_MIN if positive else -FLOAT32_MAX) <= value <= FLOAT32_MAX:
            expected = "a number above 0" if positive else "a number"
            raise self.error(f"{key} is {value!r:.60}; {expected} that fits float32 is needed")
        return float(value)

    def with_defaults(self, defaults: dict[str, Any]) -> Config:
        """The same keys; those that are absent or null are taken from `defaults`."""
        present = {key: value for key, value in self.values.items() if value is not None}
        return Config(self.path, defaults | present, self.n_stored, self.asked, self.losses)

    def with_values(self, values: dict[str, Any]) -> Config:
        """The same keys, with these values replaced or added."""
        return Config(self.path, self.values | values, self.n_stored, self.asked, self.losses)

    def part(self, values: dict[str, Any]) -> Config:
        """Settings that the same file has in another place."""
        return Config(self.path, values, self.n_stored, losses=self.losses)

    def section(self, key: str) -> Config:
        """The object under a key, such as text_config, as a config of its own. Raises FormatError if it is not an object."""
        values = self._value(key, None)
        if not isinstance(values, dict):
            raise self.error(f"{key} is {values!r:.60}; an object is needed")
        return self.part(values)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false. Raises FormatError, without a default also if the key is absent."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}; true or false is needed")
        return value

    def require(self, key: str, supported: Any, what: str) -> None:
        """Raises FormatError for a value other than `supported` (absent and null are accepted): `what` cannot be converted."""
        value = self.get(key)
        if value is not None and value != supported:
            raise self.error(f"{key} is {value!r}: {what} cannot be converted, only {supported!r}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"the key {key} is missing")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises FormatError if it cannot be read or is something else."""
    check_regular(path, _MAX_BYTES)
    try:
        text = path.read_text("utf-8")
        values = json.loads(text)
        if _SURROGATE.search(text):
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


def read_config(folder: Path, n_stored: int = sys.maxsize, *, lossy: bool = False) -> Config:
    """config.json of a checkpoint folder with n_stored tensors; lossy: losses are allowed (`Config.lose`). Raises FormatError
    if it is absent or malformed."""
    path = folder / "config.json"
    return Config(path, read_json(path), n_stored, losses=[] if lossy else None)
