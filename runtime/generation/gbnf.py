"""Translates GBNF, llama.cpp's grammars, into the dialect of Lark that llguidance reads.

GBNF is a grammar over characters. Every character becomes a terminal of its own: with longer ones, of which a lexer always
takes the longest, `[a-z]+ "end"` would lose texts that GBNF allows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from ...formats import PlanError

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
      | (?P<rule>[A-Za-z0-9_-]+)[ \t]*::=
      | (?P<name>[A-Za-z0-9_-]+)
      | "(?P<literal>(?:\\.|[^"\\\n])*)"
      | \[(?P<set>(?:\\.|[^\]\\\n])*)\]
      | \{[ \t]*(?P<low>\d{1,4})[ \t]*(?:(?P<comma>,)[ \t]*(?P<high>\d{1,4})?[ \t]*)?\}
      | (?P<sign>[.|()*+?])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([\"\\\[\]^nrt-]))|([^\\])")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_MAX_REPETITION = 2000  # llama.cpp's limit
_ANY = r"/[\x{0}-\x{10FFFF}]/"


def gbnf_to_lark(text: str) -> str:
    """The grammar in Lark's dialect, with the rule `root` as its start.

    Raises PlanError with the line of the first thing that is not GBNF.
    """
    tokens = list(_tokens(text))
    rules = [match["rule"] for match in tokens if match["rule"] is not None]
    if "root" not in rules:
        raise PlanError("the grammar has no rule root")
    names = {name: "start" if name == "root" else f"rule_{number}" for number, name in enumerate(rules)}
    if len(names) < len(rules):
        twice = Counter(rules).most_common(1)[0][0]
        raise PlanError(f"the rule {twice} of the grammar is defined twice")
    parts, depth, previous = ["%llguidance {}"], 0, None
    for match in tokens:
        if previous is None and match["rule"] is None:
            raise _error(text, match.start(), "a rule begins with its name and ::=")
        if match["rule"] is not None:
            _check_depth(text, match.start(), depth)
            parts += ["\n", names[match["rule"]], ":"]
        elif match["name"] is not None:
            if match["name"] not in names:
                raise _error(text, match.start(), f"there is no rule {match['name']}")
            parts.append(names[match["name"]])
        elif match["literal"] is not None:
            parts.append("(" + " ".join(f"/{_escaped(c)}/" for c in _characters(text, match, "literal")) + ' "")')
        elif match["set"] is not None:
            parts.append(_character_set(text, match))
        elif match["low"] is not None:
            parts.append(_repetition(text, match))
        else:
            depth += {"(": 1, ")": -1}.get(match["sign"], 0)
            if depth < 0:
                raise _error(text, match.start(), "a parenthesis closes that was not opened")
            parts.append(_sign(text, match, previous))
        previous = match
    _check_depth(text, len(text), depth)
    return re.sub(r"(?<=[:|(]) *(?=[\n|)]|$)", ' "" ', " ".join(parts)) + "\n"


def _tokens(text: str) -> Iterator[re.Match[str]]:
    """The tokens without white space and comments."""
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _error(text, position, f"{text[position : position + 20]!r} is not GBNF")
        if match["space"] is None:
            yield match
        position = match.end()


def _characters(text: str, match: re.Match[str], group: str) -> Iterator[str]:
    """The characters of a literal or a set, escapes replaced; those of a set that mean something in it are left escaped."""
    position, end = match.span(group)
    while position < end:
        character = _CHARACTER.match(text, position, end)
        if character is None:
            raise _error(text, position, f"{text[position : position + 2]!r} is not an escape of GBNF")
        number = character[1] or character[2] or character[3]
        if number is not None and int(number, 16) > 0x10FFFF:
            raise _error(text, position, f"there is no character {number}")
        yield chr(int(number, 16)) if number else _ESCAPES.get(character[4], character[4]) or character[5]
        position = character.end()


def _escaped(character: str) -> str:
    return rf"\x{{{ord(character):X}}}"


def _character_set(text: str, match: re.Match[str]) -> str:
    """A set such as [^a-z\\n] as a regular expression."""
    begin, inverted = match.start("set"), match["set"].startswith("^")
    raw = [each.group() for each in _CHARACTER.finditer(text, begin + inverted, match.end("set"))]
    characters = list(_characters(text, match, "set"))[inverted:]
    pieces, i = [], 0
    while i < len(characters):
        if i + 2 < len(characters) and raw[i + 1] == "-":
            if characters[i] > characters[i + 2]:
                raise _error(text, begin, f"the range {raw[i]}-{raw[i + 2]} is empty")
            pieces.append(f"{_escaped(characters[i])}-{_escaped(characters[i + 2])}")
            i += 3
        else:
            pieces.append(_escaped(characters[i]))
            i += 1
    if not pieces:
        raise _error(text, begin, "a set of characters is empty")
    return f"/[{'^' if inverted else ''}{''.join(pieces)}]/"


def _repetition(text: str, match: re.Match[str]) -> str:
    low = int(match["low"])
    high = low if match["comma"] is None else int(match["high"]) if match["high"] else None
    if max(low, high or 0) > _MAX_REPETITION or (high is not None and high < max(low, 1)):
        raise _error(text, match.start(), f"repetitions go from a number to one that is not less, from 1 to {_MAX_REPETITION}")
    return f"{{{low},{'' if high is None else high}}}"


def _sign(text: str, match: re.Match[str], previous: re.Match[str] | None) -> str:
    sign = match["sign"]
    if sign in "*+?" and (previous is None or previous["rule"] is not None or previous["sign"] in ("|", "(")):
        raise _error(text, match.start(), f"{sign} has nothing to repeat")
    return _ANY if sign == "." else sign


def _check_depth(text: str, position: int, depth: int) -> None:
    if depth:
        raise _error(text, position, "a parenthesis is not closed")


def _error(text: str, position: int, message: str) -> PlanError:
    return PlanError(f"line {text.count(chr(10), 0, position) + 1} of the grammar: {message}")
