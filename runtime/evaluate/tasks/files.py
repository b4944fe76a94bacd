"""Reads the files of tasks that llama-perplexity reads."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from ....data_classes import dataclass
from ....errors import FormatError
from ....formats.file_range import check_regular

_MOST_ANSWERS = 100


@dataclass(frozen=True)
class ChoiceTask:
    """A question with its choices, each a whole text; `right` has the numbers of those that are right.

    bases: of WinoGrande, each text up to the end of what was filled in; empty for others.
    """

    texts: tuple[str, ...]
    right: frozenset[int]
    bases: tuple[str, ...] = ()


def read_hellaswag(path: Path) -> list[ChoiceTask]:
    """Six lines per task: context, number of the right ending (from 0), four endings. Raises FormatError for other files."""
    lines = _text(path).removesuffix("\n").split("\n")
    if len(lines) % 6:
        raise FormatError(f"{path}: {len(lines)} lines are not a multiple of the six that a HellaSwag task has")
    tasks = []
    for first in range(0, len(lines), 6):
        context, label, *endings = lines[first : first + 6]
        if label.strip() not in ("0", "1", "2", "3"):
            raise FormatError(f"{path}, line {first + 2}: {label!r:.40} is not the number of an ending, 0 to 3")
        tasks.append(ChoiceTask(tuple(f"{context} {ending}" for ending in endings), frozenset([int(label)])))
    return tasks


def read_winogrande(path: Path) -> list[ChoiceTask]:
    """A line per task: number, sentence with a _, two choices, the right one (1 or 2), with commas between. A sentence with
    commas stands in quotation marks. Raises FormatError for other files."""
    tasks = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        fields = _fields(line)
        if len(fields) != 5 or "_" not in fields[1] or fields[4].strip() not in ("1", "2"):
            raise FormatError(f"{path}, line {number}: not NUMBER,SENTENCE WITH _,CHOICE,CHOICE,1 OR 2")
        before, _, after = fields[1].partition("_")
        bases = tuple(before + choice for choice in fields[2:4])
        tasks.append(ChoiceTask(tuple(base + after for base in bases), frozenset([int(fields[4]) - 1]), bases))
    return tasks


def _fields(line: str) -> list[str]:
    """The line cut at its first four commas outside of quotation marks, the second field without these."""
    cuts, quoted = [], False
    for at, letter in enumerate(line):
        if letter == '"':
            quoted = not quoted
        elif letter == "," and not quoted and len(cuts) < 4:
            cuts.append(at)
    fields = [line[a + 1 : b] for a, b in zip([-1, *cuts], [*cuts, len(line)], strict=True)]
    if len(fields) > 1 and fields[1].startswith('"'):
        fields[1] = fields[1][1:-1]
    return fields


def read_multiple_choice(path: Path) -> list[ChoiceTask]:
    """A binary file, little-endian: uint32 number of tasks, uint32 offset of each, and the tasks: a question, then answers with
    one right one and answers with several (which are not used); both are uint32 number, texts, and an int32 per text that is 1
    for a right one. A text is uint32 length and bytes. Raises FormatError for other files."""
    check_regular(path)
    data = path.read_bytes()
    reader = _Reader(path, data)
    offsets = [reader.number() for _ in range(reader.count(reader.number(), 4, "tasks"))]
    tasks = []
    for number, offset in enumerate(offsets, 1):
        reader.at = offset
        question = reader.text()
        (answers, labels), _ = reader.answers(number), reader.answers(number)
        if not question or not answers or not all(answers):
            raise FormatError(f"{path}: task {number} has an empty question, no answers or an empty one")
        right = frozenset(i for i, label in enumerate(labels) if label == 1)
        tasks.append(ChoiceTask(tuple(f"{question} {answer}" for answer in answers), right))
    return tasks


class _Reader:
    def __init__(self, path: Path, data: bytes):
        self.path, self.data, self.at = path, data, 0

    def number(self) -> int:
        return struct.unpack("<I", self._take(4))[0]

    def count(self, number: int, nbytes: int, what: str) -> int:
        """The number, if that many things of at least nbytes can follow."""
        if not 0 < number <= (len(self.data) - self.at) // nbytes:
            raise FormatError(f"{self.path} is no file of multiple-choice tasks: {number} {what} in {len(self.data)} bytes")
        return number

    def text(self) -> str:
        return self._take(self.number()).decode("utf-8", "surrogateescape")

    def answers(self, task: int) -> tuple[list[str], tuple[int, ...]]:
        n = self.number()
        if n > _MOST_ANSWERS:
            raise FormatError(f"{self.path}: task {task} has {n} answers; {_MOST_ANSWERS} are the most")
        return [self.text() for _ in range(n)], struct.unpack(f"<{n}i", self._take(4 * n))

    def _take(self, n: int) -> bytes:
        if self.at + n > len(self.data):
            raise FormatError(f"{self.path} is no file of multiple-choice tasks, or is cut short")
        self.at += n
        return self.data[self.at - n : self.at]


def _text(path: Path) -> str:
    check_regular(path)
    return path.read_bytes().decode("utf-8", "surrogateescape")


READERS: dict[str, Callable[[Path], list[ChoiceTask]]] = {
    "hellaswag": read_hellaswag,
    "winogrande": read_winogrande,
    "multiple-choice": read_multiple_choice,
}
