"""Regular expressions that choose tensors by name, matched in bounded time: recipes are posted by strangers.

`re` tries all ways in which a pattern may match, whose number may double with each character (`(a+)+!`). Patterns with several
choices are therefore matched by `regex`, which reads the same language and takes a time limit.
"""

from __future__ import annotations

import re
from functools import cached_property
from math import prod
from typing import Any

from ..errors import PlanError

TIME_LIMIT = 5.0  # seconds for one name; a usual pattern takes microseconds
_SHORT_NAME = 256  # characters; the time that a few choices take grows with a power of the name's length
_FEW_CHOICES = 2
_COUNT, _MAX_COUNT = re.compile(r"\{(\d+)(?:,\d*)?\}"), 100_000  # `regex` writes out what is repeated
_ERRORS = (re.error, OverflowError, RecursionError)

_TOKEN = re.compile(
    r"""(?P<literal>\\.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*+\])|(?P<flags>\(\?[#aiLmsux-])|(?P<open>\((?:\?(?:P?[<>=!:]|\())?)"""
    r"""|(?P<repeated>\)(?:[*+]|\{(?:\d+(?:,\d*)?|,\d*)\}))|(?P<close>\))|(?P<or>\|)"""
    r"""|(?P<fixed>\{\d+\})|(?P<choice>(?:[*+?]|\{\d*,\d*\})[?+]?)|(?P<brace>\{)|(?P<other>.)""",
    re.DOTALL,
)


class NamePattern:
    """A compiled regular expression. Raises PatternError for a text that is none.

    ignores_numbers  whether it finds the same in all names of a form (`formats.source.form_of`), as far as its text shows
    """

    def __init__(self, text: str):
        self.text = text
        try:
            self._regex = re.compile(text)
        except _ERRORS as error:
            raise PatternError(str(getattr(error, "msg", error)), getattr(error, "pos", None)) from None
        self._has_many_choices, self._portable, self.ignores_numbers = _read(text)

    def search(self, name: str) -> bool:
        """Whether the pattern matches anywhere in the name. Raises PlanError if finding out takes longer than TIME_LIMIT."""
        if not self._has_many_choices and len(name) <= _SHORT_NAME:
            return self._regex.search(name) is not None
        try:
            return self._limited.search(name, timeout=TIME_LIMIT) is not None
        except (TimeoutError, MemoryError):
            where = f"in the name {name[:80]!r}"
            raise PlanError(
                f"{self.text[:200]!r}: searching for it {where} takes more than {TIME_LIMIT:g} s; write it with fewer repeats"
            ) from None

    @cached_property
    def _limited(self) -> Any:
        import regex

        if prod(int(count) for count in _COUNT.findall(self.text) if int(count)) > _MAX_COUNT:
            raise PlanError(f"{self.text[:200]!r}: repeats that want more than {_MAX_COUNT} characters match no name")
        try:
            return regex.compile(self._portable, regex.V0)
        except (regex.error, OverflowError, RecursionError, MemoryError) as error:
            raise PlanError(f"{self.text[:200]!r} cannot be matched in bounded time ({error})") from None


def compile_pattern(text: str, where: str) -> NamePattern:
    """The pattern of an option or a key. Raises PlanError, beginning with `where`, for a text that is none."""
    try:
        return NamePattern(text)
    except PatternError as error:
        raise PlanError(f"{where}: {text[:200]!r} is not a regular expression ({error})") from None


class PatternError(ValueError):
    """A text is not a regular expression. position: where, counted from 0; None: not known."""

    def __init__(self, text: str, position: int | None):
        super().__init__(text)
        self.position = position


# Patterns of what stands for no digit, or for any characters: a match stays one when a number in it becomes another.
_NUMBERLESS = re.compile(
    r"(?:\\[^A-Za-z0-9]|\[[A-Za-z_.]+\]|\((?:\?:)?|\)|\||[A-Za-z_^$-]"
    r"|\.\*\??(?![*+?{])|(?<=[^.(|^])[*+?]\??(?![*+?{]))*"
)


def _read(text: str) -> tuple[bool, str, bool]:
    """Whether a valid pattern has more than a few choices, or one within a repeat; the pattern as `regex` understands it; and
    whether it ignores numbers.

    Choices are repeats and groups of alternatives. What `regex` would read otherwise is escaped: braces that are no repeat
    (fuzzy matching there), brackets within sets (POSIX classes there).
    """
    choices, is_slow, parts = 0, False, []
    alternatives: list[bool] = []  # of each open group, whether it has any
    for token in _TOKEN.finditer(text):
        kind, part = token.lastgroup, token[0]
        if kind == "set":
            part = part[0] + re.sub(r"(\\.)|\[", lambda match: match[1] or r"\[", part[1:], flags=re.DOTALL)
        elif kind == "brace":
            part = r"\{"
        elif kind in ("open", "flags"):
            alternatives.append(False)
        elif kind == "or" and alternatives:
            alternatives[-1] = True
        elif kind in ("close", "repeated"):
            choices += alternatives.pop() if alternatives else 0
        choices += kind == "choice"
        is_slow |= kind in ("repeated", "flags")
        parts.append(part)
    return is_slow or choices > _FEW_CHOICES, "".join(parts), _NUMBERLESS.fullmatch(text) is not None
