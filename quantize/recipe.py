"""The recipe language: `regex=type` rules, first match wins, searched for anywhere in a tensor's name.

Accepted as people post them: one rule per line or many joined by commas, blank lines, `#` comments, type names in any letter
case. A TOML recipe carries the same text under `[quantize] rules` and may name the other stages.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..formats import TYPES, MillError, TensorType
from .codec import can_encode


class RecipeError(MillError):
    """A recipe cannot be understood; the text says where."""


@dataclass(frozen=True)
class Rule:
    """pattern is searched for in tensor names; line counts from 1 in the text that was read."""

    pattern: str
    type: TensorType
    line: int
    regex: re.Pattern[str] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.pattern}={self.type.name}"


@dataclass(frozen=True)
class Recipe:
    """rules in order; text as read; stages: the tables of a TOML recipe ({} for a text recipe)."""

    name: str
    rules: list[Rule]
    text: str
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)


# A rule ends at a type name that is followed by a comma, the line's end or a comment: `=` and `,` inside a regex stay there.
_RULE = re.compile(r"\s*(?P<pattern>\S.*?)\s*=\s*(?P<type>[A-Za-z0-9_]+)\s*(?:,|$|(?=\s#))")
_COMMENT = re.compile(r"\s+#.*$")
# Stages of a TOML recipe and the keys each may have.
STAGES: dict[str, set[str]] = {
    "source": {"model", "revision"},
    "convert": {"outtype", "mla_layout"},
    "imatrix": {"text", "ctx", "chunks", "file"},
    "quantize": {"type", "rules", "split_max_size"},
    "validate": {"text", "ctx", "chunks", "baseline", "prompt", "n", "max_ppl_ratio", "max_kld"},
}


def parse_rules(text: str, where: str = "recipe") -> list[Rule]:
    """Rules of a text, in order. Raises RecipeError naming line, column and, for an unknown type, the nearest names."""
    rules: list[Rule] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("#"):
            continue
        line, at = _COMMENT.sub("", line).rstrip().rstrip(","), 0
        while line[at:].strip():
            match = _RULE.match(line, at)
            if match is None:
                raise RecipeError(f"{where}, line {number}, column {at + 1}: {line[at:].strip()[:60]!r} is not `regex=type`")
            rules.append(_rule(match, number, where))
            at = match.end()
    return rules


def _rule(match: re.Match[str], number: int, where: str) -> Rule:
    place = f"{where}, line {number}, column "
    try:
        regex = re.compile(match["pattern"])
    except re.error as error:
        column = match.start("pattern") + 1 + (error.pos or 0)
        raise RecipeError(f"{place}{column}: {match['pattern']!r} is not a regular expression ({error.msg})") from None
    return Rule(match["pattern"], parse_type(match["type"], place + str(match.start("type") + 1)), number, regex)


def parse_type(name: str, where: str) -> TensorType:
    """A type that tensors can be quantised to, by name in any case. Raises RecipeError with the nearest names."""
    if name not in TYPES:
        possible = [t.lower() for t in TYPES if can_encode(TYPES[t])]
        near = [TYPES[n].name for n in get_close_matches(name.lower(), possible, 3, 0.5)]
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise RecipeError(f"{where}: there is no tensor type {name!r}{hint}")
    if not can_encode(TYPES[name]):
        raise RecipeError(f"{where}: tensors cannot be quantised to {TYPES[name].name} yet")
    return TYPES[name]


def load_recipe(path: str | Path) -> Recipe:
    """Reads a text or (by its suffix) TOML recipe. Raises RecipeError for what is missing or not understood."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: {error.strerror if isinstance(error, OSError) else 'not UTF-8 text'}") from None
    if path.suffix != ".toml":
        return Recipe(path.name, parse_rules(text, str(path)), text)
    try:
        stages = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: {error}") from None
    for stage, values in stages.items():
        if stage not in STAGES or not isinstance(values, dict):
            raise RecipeError(f"{path}: [{stage}] is not a stage; stages are {', '.join(STAGES)}")
        unknown = sorted(set(values) - STAGES[stage])
        if unknown:
            raise RecipeError(f"{path}: [{stage}] has no key {unknown[0]!r}; it may have {', '.join(sorted(STAGES[stage]))}")
    rules = stages.get("quantize", {}).get("rules", "")
    return Recipe(path.name, parse_rules(rules, f"{path}, [quantize] rules"), text, stages)


def first_match(rules: Sequence[Rule], name: str) -> Rule | None:
    return next((rule for rule in rules if rule.regex.search(name)), None)


_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


def suspicious(rules: Sequence[Rule]) -> list[str]:
    """Character classes that look like numeric ranges: [0-10] matches only the digits 0 and 1."""
    found = []
    for rule in rules:
        for low, high in _RANGE.findall(rule.pattern):
            if len(low) > 1 or len(high) > 1:
                found.append(
                    f"line {rule.line}: [{low}-{high}] in {rule.pattern!r} is a set of single digits, not the numbers "
                    f"{low} to {high}"
                )
    return found
