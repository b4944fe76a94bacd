"""Questions that models answer for `evaluate`: the answers are kept, line by line, and compared question by question."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from ...data_classes import dataclass
from ...errors import PlanError
from ...formats.file_range import read_text
from ...jobs.atomic_write import write_text
from ...runtime import Model
from ...runtime.evaluate.paired import mcnemar_p
from ...runtime.evaluate.provenance import describe_model, describe_settings
from ...runtime.evaluate.tasks.answers import Answer, answer_questions
from ...runtime.evaluate.tasks.questions import Question, is_right, read_questions, result_of
from ...runtime.evaluate.tasks.score import TaskScore
from ...runtime.text.chat import ChatTemplate, find_template
from ..common.figures import SHARE_DIGITS, error_text
from ..common.messages import note
from ..common.progress import OnProgress, Stage
from .domains import Domain
from .results import result_key
from .verdict import SURE


@dataclass(frozen=True)
class QuestionFile:
    """A file of questions: those that are asked, and a digest of all that decides the answers to them but the model."""

    name: str
    questions: list[Question]
    digest: str


@dataclass(frozen=True)
class Answered:
    """What a model has right of a file of questions, in percent.

    error     standard error; interval: between which the score is with a probability of 95 %
    cut       answers that a limit of tokens ended
    tokens    generated, per answer
    right     for each question whether its answer is right
    lost, won  questions that the baseline alone has right, and the model alone; p: that so unequal numbers come about by chance
               (McNemar's test). None of the baseline itself
    answers   file of the answers
    """

    task: str
    model: str
    score: float
    error: float | None
    interval: tuple[float, float]
    correct: int
    questions: int
    cut: int
    tokens: float
    right: list[bool]
    answers: str
    lost: int | None = None
    won: int | None = None
    p: float | None = None


def open_questions(files: Sequence[Domain], count: int | None, n_predict: int, template: str | None) -> list[QuestionFile]:
    """The first `count` questions of each file. Raises FormatError."""
    found = []
    for file in files:
        questions = read_questions(file.path)[:count]
        deciding = [each.question for each in questions], n_predict, template
        found.append(QuestionFile(file.name, questions, xxhash.xxh3_64_hexdigest(json.dumps(deciding).encode())))
    return found


class Questioner:
    """Has models answer files of questions, one after the other.

    folder    of the answers; template: as for `find_template`; pattern: finds the result in an answer, see `result_of`
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[QuestionFile],
        n_predict: int,
        template: str | None,
        pattern: re.Pattern[str] | None,
        report: OnProgress,
    ):
        self._folder, self._files, self._n_predict = folder, files, n_predict
        self._template, self._pattern, self._report = template, pattern, report

    def ask(self, name: str, model: Model, of_mix: str = "") -> list[Answered]:
        """What a model has right of each file. of_mix: the file type of one that no file holds. Raises MillError."""
        try:
            template = find_template(model.metadata, self._template)
        except PlanError:
            if self._template is not None:
                raise
            template = None
            note(f"{name} has no chat template: it is asked in the form Question: ... Answer:")
        about = describe_model(model)
        about |= {"files": [], "stock": of_mix, "identity": model.source.identity} if of_mix else {}
        return [self._ask(name, model, about, template, file) for file in self._files]

    def _ask(
        self, name: str, model: Model, about: dict[str, Any], template: ChatTemplate | None, file: QuestionFile
    ) -> Answered:
        key = result_key(about, file.digest, 0, None, describe_settings(model))
        path = self._folder / f"answers-{file.name}-{key[:16]}.jsonl"
        answers = _read_answers(path, key)
        stage = Stage(self._report, f"{name}: {file.name}", len(file.questions), "question")
        n_right = sum(self._is_right(answer, file) for answer in answers.values())

        def reach() -> None:
            stage.reach(len(answers), None, f"{100 * n_right / len(answers):.1f} % right")

        if answers:
            note(f"{name}: {len(answers)} of {len(file.questions)} questions were answered before ({path})", detail=True)
            reach()
        missing = [(i, question.question) for i, question in enumerate(file.questions) if i not in answers]
        if missing:
            header = json.dumps({"of": key, "model": name, "task": file.name})
            write_text(path, "".join(f"{line}\n" for line in (header, *map(_line, answers.values()))))
            with path.open("a", encoding="utf-8") as out:
                for answer in answer_questions(model, missing, template, self._n_predict):
                    out.write(f"{_line(answer)}\n")
                    out.flush()
                    answers[answer.number] = answer
                    n_right += self._is_right(answer, file)
                    reach()
        right = [self._is_right(answers[i], file) for i in range(len(file.questions))]
        score = TaskScore(len(right), sum(right), 0.0)
        given = [answers[i] for i in range(len(right))]
        return Answered(
            task=file.name,
            model=name,
            score=score.score,
            error=score.error,
            interval=score.interval,
            correct=score.correct,
            questions=len(right),
            cut=sum(answer.reason in ("length", "context") for answer in given),
            tokens=sum(answer.tokens for answer in given) / len(given),
            right=right,
            answers=str(path),
        )

    def _is_right(self, answer: Answer, file: QuestionFile) -> bool:
        question = file.questions[answer.number]
        return is_right(result_of(answer.text, question, self._pattern), question)


def _line(answer: Answer) -> str:
    return json.dumps(vars(answer))


def _read_answers(path: Path, key: str) -> dict[int, Answer]:
    """The answers in a file, by their numbers, up to a line that an interruption has cut. Raises PlanError for another file."""
    if not path.exists():
        return {}
    found: dict[int, Answer] = {}
    for i, line in enumerate(read_text(path).split("\n")[:-1]):
        try:
            fields: Any = json.loads(line)
            if i == 0:
                if fields["of"] != key:
                    raise ValueError
                continue
            answer = Answer(**fields)
        except (ValueError, TypeError, KeyError, RecursionError):
            if i == 0:
                raise PlanError(f"{path} is where answers are kept, and is something else: remove it") from None
            break
        found[answer.number] = answer
    return found


def against_baseline(rows: Sequence[Answered], baseline: str) -> list[Answered]:
    """The rows, each with what it has lost and won against the baseline's row of its task."""
    found = []
    for row in rows:
        base = next((each for each in rows if (each.task, each.model) == (row.task, baseline)), None)
        if base is None or base is row:
            found.append(row)
            continue
        lost, won = _only(base, row), _only(row, base)
        found.append(Answered(**{**vars(row), "lost": lost, "won": won, "p": mcnemar_p(lost, won)}))
    return found


def _only(a: Answered, b: Answered) -> int:
    return sum(x and not y for x, y in zip(a.right, b.right, strict=True))


HEADINGS = ("task", "model", "right", "95 %", "lost", "won", "p", "tokens", "cut")


def cells(row: Answered) -> tuple[object, ...]:
    """The texts of a row under HEADINGS."""
    low, high = row.interval
    return (
        row.task,
        row.model,
        error_text(row.score, row.error, SHARE_DIGITS, " %"),
        f"{low:.1f} to {high:.1f}",
        *("" if value is None else value for value in (row.lost, row.won)),
        "" if row.p is None else f"{row.p:.2g}",
        f"{row.tokens:.1f}",
        row.cut,
    )


def sentences(rows: Sequence[Answered]) -> list[str]:
    """Of each task the models by falling score, each against the next: which is better, if that is certain."""
    found = []
    for task in dict.fromkeys(row.task for row in rows):
        ordered = sorted((row for row in rows if row.task == task), key=lambda row: -row.correct)
        for better, worse in pairwise(ordered):
            won, lost = _only(better, worse), _only(worse, better)
            p = mcnemar_p(won, lost)
            figures = f"{won} questions to {lost} that only one has right (p = {p:.1g})"
            if p < SURE:
                found.append(f"{task}: {better.model} is better than {worse.model}: {figures}.")
            else:
                found.append(f"{task}: no difference between {better.model} and {worse.model} is certain: {figures}.")
    return found
