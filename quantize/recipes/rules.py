"""The rule language of recipes: `regex=type`, searched for anywhere in a tensor's name; the first rule that matches wins.

Accepted as people post them: one rule per line or many joined by commas, blank lines, `#` comments, type names in any letter
case, and complete shell scripts that call llama-quantize (`shell`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cached_property, lru_cache
from itertools import islice

from ...data_classes import dataclass
from ...formats import TYPES, MillError, PlanError, TensorType
from ...formats.source import form_of
from ...jobs.patterns import NamePattern, PatternError
from .mixes import default_type, file_type_name, file_types


class RecipeError(MillError):
    """A recipe cannot be understood; the text says where and why, of every rule that cannot."""


_FORMS = 4096  # of names, whose candidates are kept
_LITERAL_NAME = re.compile(r"\^((?:[A-Za-z0-9_-]|\\\.)+)\$")


@dataclass(frozen=True)
class Rule:
    """Tensors whose name the pattern matches get the type. line: counted from 1, in the text that was parsed."""

    pattern: str
    type: TensorType
    line: int
    regex: NamePattern = field(repr=False, compare=False)

    def __hash__(self) -> int:
        return hash((self.pattern, self.line))

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return f"{self.pattern}={self.type.name}"

    @cached_property
    def literal_name(self) -> str | None:
        """The only name that the rule can match, if its pattern is one full name (`^blk\\.3\\.ffn_up\\.weight$`)."""
        match = _LITERAL_NAME.fullmatch(self.pattern)
        return match[1].replace("\\.", ".") if match else None

    def first_match(self, names: TensorNames) -> str | None:
        """The first of the names that the rule matches, regardless of other rules; None if it matches none."""
        if self.literal_name is not None:
            return self.literal_name if self.literal_name in names.all else None
        tried = names.first_of_forms if self.regex.ignores_numbers else names.all
        return next((name for name in tried if self.regex.search(name)), None)


class TensorNames:
    """The names of a model's tensors, to be searched by many rules."""

    def __init__(self, names: Iterable[str]):
        self.all = dict.fromkeys(names)

    @cached_property
    def first_of_forms(self) -> list[str]:
        """The first name of each form (`form_of`), in order."""
        first: dict[str, str] = {}
        for name in self.all:
            first.setdefault(form_of(name), name)
        return list(first.values())


class RuleMatcher:
    """Finds the first rule that matches a tensor name.

    Recipes may hold thousands of rules that each name one tensor: these are looked up in a dictionary instead of tried. Models
    may have a million names of few forms: patterns that ignore numbers are tried once for each form.
    """

    def __init__(self, rules: Sequence[Rule]):
        self._rules = rules
        self._by_name: dict[str, int] = {}
        self._regex_rules: list[tuple[int, Rule]] = []
        for i, rule in enumerate(rules):
            if rule.literal_name is None:
                self._regex_rules.append((i, rule))
            else:
                self._by_name.setdefault(rule.literal_name, i)
        self._candidates = lru_cache(_FORMS)(self._find_candidates)

    def first(self, name: str) -> Rule | None:
        if not self._rules:
            return None
        by_name = self._by_name.get(name, len(self._rules))
        for i, rule, matches in self._candidates(form_of(name)):
            if i > by_name:
                break
            if matches or rule.regex.search(name):
                return rule
        return self._rules[by_name] if by_name < len(self._rules) else None

    def tells_apart(self, form: str) -> bool:
        """Whether names of a form may have different first rules."""
        if not self._rules:
            return False
        return form in self._named_forms or not all(matches for _, _, matches in self._candidates(form))

    @cached_property
    def _named_forms(self) -> set[str]:
        return {form_of(name) for name in self._by_name}

    def _find_candidates(self, form: str) -> list[tuple[int, Rule, bool]]:
        """The rules that may match a name of this form, with their places, and whether they surely do, as the last does."""
        candidates = []
        for i, rule in self._regex_rules:
            matches = None
            if rule.regex.ignores_numbers:
                with suppress(PlanError):  # it takes too long: that is raised if the rule is ever needed
                    matches = rule.regex.search(form)
            if matches is not False:
                candidates.append((i, rule, matches is True))
            if matches:
                break
        return candidates


# What may end a rule: '=' and a type name, followed by a comma, the end of the line or a comment. Runs of white space are taken
# from their first character only, as a line of a million spaces would otherwise be read a million times.
RULE_END = re.compile(r"(?<!\s)\s*=\s*(?P<type>[A-Za-z0-9_]+)\s*(?:,|$|(?=\s#))")
_COMMENT = re.compile(r"(?<!\s)\s+#.*$")
_NO_SPACE = re.compile(r"\S")
_MOST_WRONG = 20  # rules that an error names
_MAX_ENDS = 32  # ends tried for one rule, so that a long line whose first rule is wrong is not tried to its end


def parse_rules(text: str, where: str = "recipe") -> list[Rule]:
    """The rules of a text, in order. where: names the text in errors.

    Raises RecipeError with line and column of each rule that is wrong and, for an unknown type, the most similar names.
    """
    rules: list[Rule] = []
    wrong: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("#"):
            continue
        line, column = _COMMENT.sub("", line).rstrip().rstrip(","), 0
        while (first := _NO_SPACE.search(line, column)) is not None:
            try:
                rule, column = _parse_rule(line, first.start(), number, where)
            except RecipeError as error:
                wrong.append(str(error))
                if len(wrong) == _MOST_WRONG:
                    raise RecipeError("; ".join([*wrong, "what follows was not read"])) from None
                end = RULE_END.search(line, first.start() + 1)
                column = end.end() if end is not None else len(line)
            else:
                rules.append(rule)
    if wrong:
        raise RecipeError("; ".join(wrong))
    return rules


def _parse_rule(line: str, first: int, number: int, where: str) -> tuple[Rule, int]:
    """The rule that begins at this column of the line, not a space, and the column after it.

    `=type,` may also occur within a group or character set of the regex: the rule ends at the first end before which the
    regex compiles.
    """
    place = f"{where}, line {number}, column "
    if line[first] == ",":
        raise RecipeError(f"{place}{first + 1}: there is no rule before this comma")
    failure: RecipeError | None = None
    for end in islice(_rule_ends(line, first), _MAX_ENDS):
        pattern = line[first : end.start()]
        try:
            regex = NamePattern(pattern)
        except PatternError as error:
            column = first + 1 + (error.position or 0)
            shown = pattern if len(pattern) <= 200 else f"{pattern[:200]}..."
            failure = failure or RecipeError(f"{place}{column}: '{shown}' is not a regular expression ({error})")
            continue
        tensor_type = parse_type(end["type"], place + str(end.start("type") + 1))
        return Rule(pattern, tensor_type, number, regex), end.end()
    raise failure or RecipeError(f"{place}{first + 1}: {line[first:].strip()[:60]!r} is not `regex=type`")


def _rule_ends(line: str, start: int) -> Iterator[re.Match[str]]:
    """Possible ends of the rule that begins at `start`, nearest first. A regex has at least one character."""
    end = RULE_END.search(line, start + 1)
    while end is not None:
        yield end
        end = RULE_END.search(line, end.end())


def parse_type(name: str, where: str) -> TensorType:
    """A type that tensors can be quantised to, its name in any letter case.

    where: begins the message of an error. Raises RecipeError with the most similar names.
    """
    if name not in TYPES:
        from difflib import get_close_matches

        known = [t.lower() for t in TYPES if TYPES[t].has_codec]
        similar = [TYPES[n].name for n in get_close_matches(name.lower(), known, 3, 0.5)]
        hint = f"; near it are {', '.join(similar)}" if similar else ""
        raise RecipeError(f"{where}: there is no tensor type {name!r}{hint}")
    if not TYPES[name].has_codec:
        raise RecipeError(f"{where}: tensors cannot be quantised to {TYPES[name].name} yet")
    return TYPES[name]


_FOUR, _EIGHT = ("Q4_K_M", "IQ4_XS", "IQ4_K"), ("Q8_0",)
# what others call quantised models -> file types of as many bits
_ALIKE = {
    **dict.fromkeys(("awq", "gptq", "int4", "4bit", "w4a16", "nf4", "bnb4bit", "marlin"), _FOUR),
    **dict.fromkeys(("int8", "8bit", "fp8", "w8a8", "w8a16", "bnb8bit"), _EIGHT),
    **dict.fromkeys(("int3", "3bit"), ("Q3_K_M", "IQ3_K", "IQ3_S")),
    **dict.fromkeys(("int2", "2bit"), ("Q2_K", "IQ2_K", "IQ2_M")),
    "fp4": ("NVFP4", "MXFP4"),
}


def parse_default(name: str, where: str) -> TensorType | str:
    """What tensors become that no rule matches: a file type ('q4_k_m' -> 'Q4_K_M', as llama-quantize reads it) or a type.

    A name of both (IQ4_K) means the file type, whose mix `--pure` turns off. Raises RecipeError.
    """
    file_type = file_type_name(name)
    if file_type is not None and default_type(file_type).has_codec:
        return file_type
    if name not in TYPES:
        from difflib import get_close_matches

        similar = _ALIKE.get(name.lower().replace("-", "")) or get_close_matches(name.upper(), file_types(), 3, 0.5)
        hint = f"; near it are {', '.join(similar)}" if similar else ""
        raise RecipeError(f"{where}: there is no file type {name!r}{hint}; `ggufmill quantize --help-all` lists all")
    return parse_type(name, where)
