"""Rules in posted shell scripts that call llama-quantize, read in time that grows with the length of the script."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator

from .rules import RULE_END

# Places of rules in a shell script; the rules are the last group that matched, or the here-document that the word ends.
_IN_SHELL = (
    r"""(?ms)^[ \t]*\w+=(?P<mark>["'])(?P<assigned>.*?)(?P=mark)"""
    r"""|<<-?[ \t]*+(?P<around>["']?)(?P<word>\w++)(?P=around)"""
    r"""|--custom-q[= \t]+(?:(?P<quote>["'])(?P<option>.*?)(?P=quote)|(?P<bare>[^\s"']\S*))"""
)


def rules_from_shell(text: str) -> str:
    """The rules in a posted shell script, on the same lines as there; any other text is returned unchanged.

    People post the script that calls llama-quantize: its rules are in the quotes of an assignment (`custom="..."`), in a
    here-document, or after --custom-q. Everything else in the script is dropped.
    """
    parts, done = [], 0
    for start, end in _places(text):
        if RULE_END.search(text[start:end]):
            line_breaks = "\n" * text.count("\n", done, start) or "," * bool(parts)
            parts += [line_breaks, text[start:end].replace("\\\n", "\n").rstrip(", ")]
            done = end
    return "".join(parts) if parts else text


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Where in a script rules may stand: start and end of quoted text, here-documents and the option's bare argument."""
    lines: defaultdict[str, list[int]] | None = None  # where the lines begin that may end a here-document, by their word
    at = seen = 0
    in_comment = False
    in_shell = re.compile(_IN_SHELL)
    while (match := in_shell.search(text, at)) is not None:
        before = text[seen : match.start()]
        in_comment = "#" in before[before.rfind("\n") + 1 :] or (in_comment and "\n" not in before)
        seen = at = match.start()
        if match["word"] is None:
            assert match.lastgroup is not None
            start, end = match.span(match.lastgroup)
            at = match.end()
        else:
            lines = lines if lines is not None else _lines_by_word(text)
            start = text.find("\n", match.end()) + 1
            closing = lines.get(match["word"], [])
            number = bisect_left(closing, start)
            if start == 0 or number == len(closing):
                at += 1
                continue
            end = closing[number]
            at = end + 1
        if not in_comment:
            yield start, end


def _lines_by_word(text: str) -> defaultdict[str, list[int]]:
    """Where the lines with one word and nothing else begin, by their word."""
    lines: defaultdict[str, list[int]] = defaultdict(list)
    at = 0
    for line in text.split("\n"):
        word = line.strip(" \t")
        if word:
            lines[word].append(at)
        at += len(line) + 1
    return lines
