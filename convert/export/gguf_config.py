"""A config.json that is not there: its keys are answered from a GGUF, and the answers are noted."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ...data_classes import dataclass
from ..config import Config
from .config_keys import NESTED, NULL, candidates
from .facts import Facts


@dataclass
class Answers:
    """What has been asked, and answered.

    facts     of the GGUF
    chosen    place of a key -> which of its candidates is taken, where that is not the first
    open      place of a key -> how many candidates it has, in the order in which they were asked for
    given     place of a key -> the value from the GGUF
    assumed   place of a key -> the value that the conversion takes where the file has none
    asked     places of all keys that were asked for
    """

    facts: Facts
    chosen: dict[tuple[str, ...], int] = field(default_factory=dict)
    open: dict[tuple[str, ...], int] = field(default_factory=dict)
    given: dict[tuple[str, ...], Any] = field(default_factory=dict)
    assumed: dict[tuple[str, ...], Any] = field(default_factory=dict)
    asked: set[tuple[str, ...]] = field(default_factory=set)

    def answer(self, place: tuple[str, ...], found: list[Any]) -> Any:
        """The chosen one of the candidates; None without any."""
        if not found:
            return None
        self.open[place] = len(found)
        value = found[min(self.chosen.get(place, 0), len(found) - 1)]
        if value is not None:
            self.given[place] = None if value is NULL else value
        return value


class GgufConfig(Config):
    """The config of the model in a GGUF, as far as the file says it; other keys are absent."""

    def __init__(
        self,
        answers: Answers,
        place: tuple[str, ...] = (),
        defaults: dict[str, Any] | None = None,
        replaced: dict[str, Any] | None = None,
        asked: set[str] | None = None,
    ):
        super().__init__(answers.facts.folder / "config.json", replaced or {}, asked=asked, losses=[])
        self._answers, self._place = answers, place
        self._defaults, self._replaced = defaults or {}, replaced or {}
        at = (*place, "moe_normalize_expert_weights")
        if answers.chosen.get(at):  # whether it is there makes a difference
            self.values = {**self.values, at[-1]: None}

    def get(self, key: str, default: Any = None) -> Any:
        """As `Config.get`; the answer comes from the GGUF."""
        self.asked.add(key)
        place = (*self._place, key)
        self._answers.asked.add(place)
        if key in self._replaced:
            value = self._replaced[key]
        elif key in NESTED:
            return {"": True} if self._answers.facts.architecture in NESTED[key] else None
        else:
            value = self._answers.answer(place, candidates(self._answers.facts, key))
            if value is NULL:
                return default if key not in self._defaults else None
            if value is None and self._defaults.get(key) is not None:
                value = self._defaults[key]
                self._assume(place, value)
        if value is None and default is not None:
            self._assume(place, default)
        return default if value is None else value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """As `Config.flag`: one that the GGUF does not say is open."""
        place = (*self._place, key)
        if key not in self._replaced and not candidates(self._answers.facts, key):
            first = self._defaults.get(key)
            first = default if not isinstance(first, bool) else first
            values = [None, not first] if isinstance(first, bool) else [False, True]
            value = self._answers.answer(place, values)
            if value is None:
                self._assume(place, first)
                value = first
            self.asked.add(key)
            return bool(value)
        return super().flag(key, default)

    def require(self, key: str, supported: Any, what: str) -> None:
        """What can be converted was there."""
        self.asked.add(key)
        if supported is not None and key not in self._replaced:
            self._assume((*self._place, key), supported)

    def lose_unless(self, key: str, supported: Any, problem: str) -> None:
        """What a GGUF cannot say is taken as it was computed."""
        self.require(key, supported, problem)

    def with_defaults(self, defaults: dict[str, Any]) -> Config:
        """As `Config.with_defaults`: what the GGUF says has precedence."""
        return GgufConfig(self._answers, self._place, defaults | self._defaults, self._replaced, self.asked)

    def with_values(self, values: dict[str, Any]) -> Config:
        """As `Config.with_values`."""
        return GgufConfig(self._answers, self._place, self._defaults, self._replaced | values, self.asked)

    def section(self, key: str) -> Config:
        """As `Config.section`; those of NESTED are answered as this one is."""
        if key in NESTED and key not in self._replaced:
            return GgufConfig(self._answers, (*self._place, key))
        return super().section(key)

    def _assume(self, place: tuple[str, ...], value: Any) -> None:
        self._answers.assumed.setdefault(place, value)
