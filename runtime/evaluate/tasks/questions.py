"""Questions that a model answers in its own words: their files, and which answers are right."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from ....data_classes import dataclass
from ....errors import FormatError, PlanError
from ....formats.file_range import check_regular

# Names of fields in files of questions, in the order in which they are looked for.
_QUESTIONS = ("question", "problem", "prompt", "input", "instruction")
_ANSWERS = ("answer", "target", "solution", "output", "label")
_FINAL = "####"  # stands before the result of GSM8K's answers, behind how it is found
_THOUGHTS_END = "</think>"
# A number with commas between thousands or without; what follows a letter, a digit or a point is a part of something else.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<=-)\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """A question, and its right answer."""

    question: str
    answer: str


def read_questions(path: Path) -> list[Question]:
    """The questions of a file: JSON lines with the fields `question` and `answer` (GSM8K and files like it; problem, prompt,
    input, instruction, and target, solution, output, label are read too), or lines of a question, a tab and its answer. Of an
    answer with '####' what follows it counts. Raises FormatError for other files."""
    check_regular(path)
    questions = []
    for number, line in enumerate(path.read_bytes().decode("utf-8", "surrogateescape").split("\n"), 1):
        if line.strip():
            questions.append(_read_line(line, f"{path}, line {number}"))
    if not questions:
        raise FormatError(f"{path} has no questions")
    return questions


def _read_line(line: str, where: str) -> Question:
    if line.lstrip().startswith("{"):
        try:
            fields: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: not JSON: {error}") from None
        question, answer = (next((fields[name] for name in names if name in fields), None) for names in (_QUESTIONS, _ANSWERS))
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)
        if not isinstance(question, str) or not isinstance(answer, str):
            raise FormatError(f"{where}: an object with the fields question and answer is needed, both texts")
    else:
        question, tab, answer = line.rstrip("\r").rpartition("\t")
        if not tab:
            raise FormatError(f"{where}: neither JSON nor a question, a tab and its answer")
    answer = answer.rpartition(_FINAL)[2].strip()
    if not question.strip() or not answer:
        raise FormatError(f"{where}: the question or its answer is empty")
    return Question(question, answer)


def compile_answer(pattern: str | None) -> re.Pattern[str] | None:
    """The regular expression that finds the result in an answer. Raises PlanError for a text that is none."""
    try:
        return re.compile(pattern) if pattern is not None else None
    except re.error as error:
        raise PlanError(f"the pattern {pattern!r} of answers is no regular expression: {error}") from None


def result_of(text: str, question: Question, pattern: re.Pattern[str] | None) -> str:
    """The result in an answer, '' if there is none: the last match of the pattern, or of its first group if it has one; without
    a pattern the last number where the right answer is one, else all of the answer. What a model thinks before </think> is no
    part of its answer."""
    text = text.rpartition(_THOUGHTS_END)[2]
    if pattern is not None:
        matches = list(pattern.finditer(text))
        return ((matches[-1][1] if pattern.groups else matches[-1][0]) or "").strip() if matches else ""
    if _as_number(question.answer) is None:
        return text.strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else ""


def is_right(result: str, question: Question) -> bool:
    """Whether a result is the right one: the same number, or the same text but for case, white space and a full stop."""
    numbers = _as_number(result), _as_number(question.answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return bool(result) and _plain(result) == _plain(question.answer)


def _as_number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text.strip().removeprefix("$").removesuffix("%").removesuffix("."))
    return Decimal(match[0].replace(",", "")) if match else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".").strip()
