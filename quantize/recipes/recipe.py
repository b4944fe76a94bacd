"""The recipe language: `regex=type` rules, first match wins, searched for anywhere in a tensor's name.

Accepted as people post them: one rule per line or many joined by commas, blank lines, `#` comments, type names in any letter
case. A TOML recipe carries the same text under `[quantize] rules` and may name the other stages.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from ...formats import TYPES, MillError, PlanError, TensorType
from ...jobs.plan import parse_size
from ..codecs.registry import can_encode
from .mixes import default_type, file_type_name, file_types


class RecipeError(MillError):
    """A recipe cannot be understood; the text says where."""


_WHOLE_NAME = re.compile(r"\^((?:[A-Za-z0-9_-]|\\\.)+)\$")


@dataclass(frozen=True)
class Rule:
    """pattern is searched for in tensor names; line counts from 1 in the text that was read."""

    pattern: str
    type: TensorType
    line: int
    regex: re.Pattern[str] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.pattern}={self.type.name}"

    @cached_property
    def whole(self) -> str | None:
        """The one name that the rule can match, if it spells a whole one (`^blk\\.3\\.ffn_up\\.weight$`)."""
        spelled = _WHOLE_NAME.fullmatch(self.pattern)
        return spelled[1].replace("\\.", ".") if spelled else None

    def matched(self, names: Collection[str]) -> str | None:
        """The first of the names that the rule matches, whatever other rules there are."""
        if self.whole is not None:
            return self.whole if self.whole in names else None
        return next((name for name in names if self.regex.search(name)), None)


@dataclass(frozen=True)
class Recipe:
    """rules in order; text as read; stages: the tables of a TOML recipe, every value checked ({} for a text recipe).

    type            for tensors that no rule takes, [quantize] type: a file type's name or a type; None: not said
    split_max_size  bytes per file, [quantize] split_max_size; None: one file
    """

    name: str
    rules: list[Rule]
    text: str
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    type: TensorType | str | None = None
    split_max_size: int | None = None

    @property
    def rules_text(self) -> str:
        """The rules alone, as they stand in the recipe."""
        return self.stages["quantize"].get("rules", "") if "quantize" in self.stages else from_shell(self.text)


@dataclass(frozen=True)
class Key:
    """A key of a TOML recipe. allowed: its values in words, as an error says them; accepts: whether a value is one."""

    allowed: str
    accepts: Callable[[Any], bool]


def _whole(least: int) -> Key:
    return Key(f"a whole number, at least {least}", lambda v: type(v) is int and v >= least)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_size(value: Any) -> bool:
    try:
        return value > 0 if type(value) is int else isinstance(value, str) and parse_size(value) > 0
    except PlanError:
        return False


def _is_regex(value: Any) -> bool:
    try:
        return isinstance(value, str) and value != "" and bool(re.compile(value))
    except (re.error, OverflowError, RecursionError):
        return False


# What [convert] outtype may be; a file is only written in it where no rule of [quantize] says otherwise.
OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0", "mxfp4")
_LAYOUTS = ("ik", "mainline", "legacy")
_TEXT = Key("text", lambda v: isinstance(v, str))
_NAME = Key("text that is not empty", lambda v: isinstance(v, str) and v != "")
_WINDOW = _whole(4)
_COUNT = _whole(1)
_SIZE = Key("a size such as '180G', or a number of bytes", _is_size)
_POSITIVE = Key("a number above 0", lambda v: _is_number(v) and v > 0)
# Stages of a TOML recipe and the keys each may have.
STAGES: dict[str, dict[str, Key]] = {
    "source": {"model": _NAME, "revision": _NAME},
    "convert": {
        "outtype": Key(f"one of {', '.join(OUTTYPES)}", lambda v: v in OUTTYPES),
        "mla_layout": Key("ik, mainline or legacy", lambda v: v in _LAYOUTS),
    },
    "imatrix": {"text": _NAME, "ctx": _WINDOW, "chunks": _COUNT, "file": _NAME},
    "quantize": {
        "type": _NAME,
        "rules": _TEXT,
        "target_size": _SIZE,
        "target_bpw": _POSITIVE,
        "max_kld": _POSITIVE,
        "split_max_size": _SIZE,
    },
    "search": {
        "text": _NAME,
        "ctx": _WINDOW,
        "chunks": _COUNT,
        "types": _NAME,
        "repacked": Key("true or false", lambda v: isinstance(v, bool)),
        "gpu": Key("a regular expression", _is_regex),
        "gpu_size": _SIZE,
        "rows": _whole(8),
        "seed": _whole(0),
        "measurements": _COUNT,
        "refine": _whole(0),
    },
    "repack": {"pattern": _NAME},
    "validate": {
        "text": _NAME,
        "ctx": _WINDOW,
        "chunks": _COUNT,
        "baseline": _NAME,
        "prompt": _TEXT,
        "n": _COUNT,
        "max_ppl_ratio": _POSITIVE,
        "max_kld": Key("a number, at least 0", lambda v: _is_number(v) and v >= 0),
    },
    "report": {"base_model": _NAME, "quantized_by": _NAME},
}

TARGETS = ("target_size", "target_bpw", "max_kld")  # keys of [quantize]: types for what no rule takes are searched for

# Where a rule may end: a type name that is followed by a comma, the line's end or a comment.
_END = re.compile(r"\s*=\s*(?P<type>[A-Za-z0-9_]+)\s*(?:,|$|(?=\s#))")
_COMMENT = re.compile(r"\s+#.*$")
_MOST_ENDS = 32  # that are tried for one rule: a long line of many rules, the first of them wrong, is not tried to its end


def parse_rules(text: str, where: str = "recipe") -> list[Rule]:
    """Rules of a text, in order. Raises RecipeError naming line, column and, for an unknown type, the nearest names."""
    rules: list[Rule] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("#"):
            continue
        line, at = _COMMENT.sub("", line).rstrip().rstrip(","), 0
        while line[at:].strip():
            rule, at = _next_rule(line, at, number, where)
            rules.append(rule)
    return rules


# Where a shell script may have rules; they are the last group of what matched.
_IN_SHELL = re.compile(
    r"""^[ \t]*\w+=(?P<mark>["'])(?P<assigned>.*?)(?P=mark)"""
    r"""|<<-?[ \t]*(?P<around>["']?)(?P<word>\w+)(?P=around)[^\n]*\n(?P<document>.*?)^[ \t]*(?P=word)[ \t]*$"""
    r"""|--custom-q[= \t]+(?:(?P<quote>["'])(?P<option>.*?)(?P=quote)|(?P<bare>[^\s"']\S*))""",
    re.MULTILINE | re.DOTALL,
)


def from_shell(text: str) -> str:
    """The rules of a posted shell script, at the lines where they stood; any other text as it is.

    People post the script that calls llama-quantize: rules are within the quotes of an assignment, `custom="..."`, in a
    here-document, or beside --custom-q. What is elsewhere is no rule.
    """
    kept, at = [], 0
    for match in _IN_SHELL.finditer(text):
        is_comment = "#" in text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if match.lastgroup and not is_comment and _END.search(match[match.lastgroup]):
            start, end = match.span(match.lastgroup)
            between = re.sub(r"[^\n]", "", text[at:start]) or "," * bool(kept)
            kept += [between, text[start:end].replace("\\\n", "\n").rstrip(", ")]
            at = end
    return "".join(kept) if kept else text


# A path of this machine in a TOML recipe, up to the name that it ends in.
_FOLDERS = re.compile(r"""((?<![\w-])(?:model|text|file)["']?\s*=\s*(["']))(?!hf:)(?:(?!\2).)*/(?=(?!\2)[^/\n])""")


def without_folders(text: str) -> str:
    """A recipe's text as others may read it: of local paths only the names."""
    return _FOLDERS.sub(r"\1", text)


def _next_rule(line: str, at: int, number: int, where: str) -> tuple[Rule, int]:
    """The rule that begins at a column of the line, and the column after it.

    `=type,` may also stand inside a group or a set of the regex: the rule ends at the first before which the regex is whole.
    """
    place = f"{where}, line {number}, column "
    start = at + len(line[at:]) - len(line[at:].lstrip())
    if line[start] == ",":
        raise RecipeError(f"{place}{start + 1}: there is no rule before this comma")
    failure: RecipeError | None = None
    for end in islice(_ends(line, start), _MOST_ENDS):
        pattern = line[start : end.start()]
        try:
            regex = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            column = start + 1 + (getattr(error, "pos", None) or 0)
            shown, said = pattern if len(pattern) <= 200 else f"{pattern[:200]}...", getattr(error, "msg", error)
            failure = failure or RecipeError(f"{place}{column}: {shown!r} is not a regular expression ({said})")
            continue
        kind = parse_type(end["type"], place + str(end.start("type") + 1))
        return Rule(pattern, kind, number, regex), end.end()
    raise failure or RecipeError(f"{place}{at + 1}: {line[at:].strip()[:60]!r} is not `regex=type`")


def _ends(line: str, start: int) -> Iterator[re.Match[str]]:
    """Where a rule that begins at `start` may end, nearest first. A regex has at least one character."""
    end = _END.search(line, start + 1)
    while end is not None:
        yield end
        end = _END.search(line, end.end())


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


def parse_default(name: str, where: str) -> TensorType | str:
    """What tensors become that no rule takes: a file type ('q4_k_m' -> 'Q4_K_M', as llama-quantize reads it), else a type.

    Where both have the name (IQ4_K) it is the file type, whose mix `--pure` leaves away. Raises RecipeError.
    """
    mix = file_type_name(name)
    if mix is not None and can_encode(default_type(mix)):
        return mix
    if name not in TYPES:
        near = get_close_matches(name.upper(), file_types(), 3, 0.5)
        raise RecipeError(f"{where}: there is no file type {name!r}" + (f"; near it are {', '.join(near)}" if near else ""))
    return parse_type(name, where)


def load_recipe(path: str | Path) -> Recipe:
    """Reads a text or (by its suffix) TOML recipe. Raises RecipeError for what is missing or not understood."""
    path = Path(path)
    try:
        text = path.read_text("utf-8-sig")  # Windows' editors begin a file with a mark
    except FileNotFoundError as error:
        raise RecipeError(f"{path}: {error.strerror}; `ggufmill recipes list` shows those that come along") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: {error.strerror if isinstance(error, OSError) else 'not UTF-8 text'}") from None
    if path.suffix != ".toml":
        return Recipe(path.name, parse_rules(from_shell(text), str(path)), text)
    try:
        stages = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError; numbers of thousands of digits; tables nested as deep
        raise RecipeError(f"{path}: {error}") from None
    _check(stages, path)
    wanted = stages.get("quantize", {})
    size = wanted.get("split_max_size")
    return Recipe(
        path.name,
        parse_rules(wanted.get("rules", ""), f"{path}, [quantize] rules"),
        text,
        stages,
        parse_default(wanted["type"], f"{path}: [quantize] type") if "type" in wanted else None,
        parse_size(size) if isinstance(size, str) else size,
    )


def _check(stages: dict[str, Any], path: Path) -> None:
    """Refuses stages, keys and values that are not in STAGES, and keys that nothing would come of."""
    for stage, values in stages.items():
        if stage not in STAGES or not isinstance(values, dict):
            raise RecipeError(f"{path}: [{stage}] is not a stage; stages are {', '.join(STAGES)}")
        known = STAGES[stage]
        for key, value in values.items():
            if key not in known:
                raise RecipeError(f"{path}: [{stage}] has no key {key!r}; it may have {', '.join(sorted(known))}")
            if not known[key].accepts(value):
                said = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
                raise RecipeError(f"{path}: [{stage}] {key} = {said} has to be {known[key].allowed}")
    imatrix, validate = stages.get("imatrix", {}), stages.get("validate", {})
    if "text" in imatrix and "file" in imatrix:
        raise RecipeError(f"{path}: [imatrix] has both text and file; give the one to compute from, or the other to read")
    for stage, values in (("imatrix", imatrix), ("validate", validate)):
        idle = [key for key in values if key not in ("text", "file")]
        if idle and "text" not in values:
            raise RecipeError(f"{path}: [{stage}] {idle[0]} needs text = ... beside it, a file to read")
    if "outtype" in stages.get("convert", {}):
        given = next((key for key in ("type", *TARGETS) if key in stages.get("quantize", {})), None)
        if given is not None:
            raise RecipeError(f"{path}: [convert] outtype and [quantize] {given} both say what no rule takes is to be")
    _check_search(stages, path)
    if "baseline" in validate:
        parse_type(validate["baseline"], f"{path}: [validate] baseline")


def _check_search(stages: dict[str, Any], path: Path) -> None:
    """Refuses a target and what goes with it where they contradict each other, or nothing would come of them."""
    quantize, search = stages.get("quantize", {}), stages.get("search")
    targets = [key for key in TARGETS if key in quantize]
    if len(targets) > 1:
        raise RecipeError(f"{path}: [quantize] has both {targets[0]} and {targets[1]}; give one target")
    if targets and "type" in quantize:
        raise RecipeError(f"{path}: [quantize] {targets[0]} leaves no room for type; give rules for what is fixed")
    if search is None:
        search = {}
    elif not targets:
        raise RecipeError(f"{path}: [search] needs a target: [quantize] {', '.join(TARGETS[:-1])} or {TARGETS[-1]}")
    idle = [key for key in ("ctx", "chunks", "measurements", "refine") if key in search]
    if idle and "text" not in search:
        raise RecipeError(f"{path}: [search] {idle[0]} needs text = ... beside it, a file to read")
    if "gpu_size" in search and ("gpu" not in search or "max_kld" in quantize):
        raise RecipeError(f"{path}: [search] gpu_size needs gpu beside it, a regex, and [quantize] target_size or target_bpw")
    if "max_kld" in quantize and "text" not in search:
        raise RecipeError(f"{path}: [quantize] max_kld needs [search] text, a file to measure on")
    if search.get("repacked") and "repack" in stages:
        raise RecipeError(f"{path}: [search] repacked and [repack] are two ways to the same; give one of them")


class Matcher:
    """Finds the first rule that matches a name. Rules that spell a whole name, of which people post thousands, are looked up
    instead of tried."""

    def __init__(self, rules: Sequence[Rule]):
        self._whole: dict[str, int] = {}
        self._tried: list[tuple[int, Rule]] = []
        self._rules = rules
        for i, rule in enumerate(rules):
            if rule.whole is None:
                self._tried.append((i, rule))
            else:
                self._whole.setdefault(rule.whole, i)

    def first(self, name: str) -> Rule | None:
        known = self._whole.get(name, len(self._rules))
        for i, rule in self._tried:
            if i > known:
                break
            if rule.regex.search(name):
                return rule
        return self._rules[known] if known < len(self._rules) else None
