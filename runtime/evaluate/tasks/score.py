"""Scores tasks as llama-perplexity does: the choice whose own tokens are the most probable ones is the model's answer.

The tokens with which all choices of a task begin run once; then the rest of each choice runs on a copy of their cache, all
choices of several tasks in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

import numpy as np

from ....data_classes import dataclass
from ....errors import PlanError
from ...model import Model
from ..divergence import BLOCK_BYTES
from .files import ChoiceTask

_Z = 1.959963984540054  # of a 95 % interval
_FEW = 3  # tokens after what was filled in, up to which WinoGrande counts that too


@dataclass
class _Choices:
    """The tokens of a task's choices, of which the first `common` are the same.

    wanted: (choice, position, token): the log probability of the token after the choice's tokens up to this position. ends: of
    each choice the end of its part of `wanted`.
    """

    tokens: list[list[int]]
    common: int
    wanted: list[tuple[int, int, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return self.common + sum(len(tokens) - self.common for tokens in self.tokens)


@dataclass(frozen=True)
class TaskScore:
    """correct: right answers of `tasks`; chance: percent that guessing would have right."""

    tasks: int
    correct: int
    chance: float

    @property
    def score(self) -> float:
        """Percent."""
        return 100 * self.correct / self.tasks

    @property
    def error(self) -> float | None:
        """Standard error of the score; None for a single task."""
        share = self.correct / self.tasks
        return 100 * math.sqrt(share * (1 - share) / (self.tasks - 1)) if self.tasks > 1 else None

    @property
    def interval(self) -> tuple[float, float]:
        """Percent between which the score is with a probability of 95 % (Wilson 1927)."""
        n, share = self.tasks, self.correct / self.tasks
        z = _Z * _Z / n
        half = z * math.sqrt(n * (4 * share * (1 - share) + z)) / (2 * _Z)
        return 100 * (share + z / 2 - half) / (1 + z), 100 * (share + z / 2 + half) / (1 + z)


def score_tasks(model: Model, tasks: Sequence[ChoiceTask], on_task: Callable[[TaskScore], None] | None = None) -> TaskScore:
    """on_task: called with the score so far, after each task.

    Raises PlanError for a model that predicts no tokens, no tasks, and choices without a common beginning.
    """
    if not model.has_head:
        raise PlanError(f"{model.source.path}: {model.graph.architecture} predicts no tokens and has no score")
    if not tasks:
        raise PlanError("there are no tasks")
    correct, n_choices, score = 0, 0, TaskScore(0, 0, 0.0)
    prepared = [_prepare(model, task, number) for number, task in enumerate(tasks, 1)]
    for number, (task, scores) in enumerate(zip(tasks, _run(model, prepared), strict=True), 1):
        correct += _best(scores, is_pair=bool(task.bases)) in task.right
        n_choices += len(task.texts)
        score = TaskScore(number, correct, 100 * number / n_choices)
        if on_task is not None:
            on_task(score)
    return score


def _best(scores: Sequence[float], is_pair: bool) -> int:
    """The first of the best choices; of WinoGrande's two the second, which also wins where there is nothing to compare."""
    if is_pair:
        return 0 if scores[0] > scores[1] else 1
    return int(np.argmax(scores))


def _prepare(model: Model, task: ChoiceTask, number: int) -> _Choices:
    tokens = [model.tokenizer.encode(text) for text in task.texts]
    shortest = min(map(len, tokens))
    common = next((i for i in range(shortest) if len({each[i] for each in tokens}) > 1), shortest)
    if task.bases:
        return _winogrande(_Choices(tokens, common), [len(model.tokenizer.encode(base)) for base in task.bases], number)
    choices = _Choices(tokens, min(common, shortest - 1))
    if not choices.common:
        raise PlanError(f"task {number}: its choices do not begin with the same token, so nothing predicts their first ones")
    for i, each in enumerate(tokens):
        choices.wanted += [(i, at - 1, each[at]) for at in range(choices.common, len(each))]
        choices.ends.append(len(choices.wanted))
    return choices


def _winogrande(choices: _Choices, bases: list[int], number: int) -> _Choices:
    """What follows the word that was filled in counts, but for its last token; where that is little, the word too."""
    tokens, common = choices.tokens, choices.common
    if not common or common >= min(map(len, tokens)):
        raise PlanError(f"task {number}: its two sentences have no token in common at their beginning, or are the same")
    skips_word = all(len(each) - common > _FEW for each in tokens)
    for i, (each, base) in enumerate(zip(tokens, bases, strict=True)):
        first = base if skips_word else common
        last = len(each) - (len(each) - first > 1)
        for at in range(first, last):
            # As llama-perplexity: where the word counts, the second one's first token is rated after the whole first sentence.
            choice, before = (0, len(tokens[0]) - 1) if i and at == common else (i, at - 1)
            choices.wanted.append((choice, before, each[at]))
        choices.ends.append(len(choices.wanted))
    return choices


def _run(model: Model, prepared: Sequence[_Choices]) -> Iterator[list[float]]:
    """For each task the mean log probability of each choice's tokens; NaN where it has none to rate."""
    group: list[_Choices] = []
    for i, choices in enumerate(prepared):
        group.append(choices)
        following = prepared[i + 1].n_tokens if i + 1 < len(prepared) else 0
        if not following or sum(each.n_tokens for each in group) + following > model.settings.batch:
            yield from map(_means, group, _log_probs(model, group))
            group = []


def _means(choices: _Choices, log_probs: np.ndarray) -> list[float]:
    starts = [0, *choices.ends[:-1]]
    parts = [log_probs[start:end] for start, end in zip(starts, choices.ends, strict=True)]
    return [float(part.mean()) if len(part) else math.nan for part in parts]


def _log_probs(model: Model, group: Sequence[_Choices]) -> list[np.ndarray]:
    """Log probabilities that are wanted of each task, float64."""
    caches = [model.new_cache(max(map(len, choices.tokens))) for choices in group]
    common = [choices.tokens[0][: choices.common] for choices in group]
    beginnings = model.hidden(list(zip(caches, common, strict=True)))
    batch, places = [], []
    for number, (cache, choices) in enumerate(zip(caches, group, strict=True)):
        needed = dict.fromkeys(range(len(choices.tokens)), -1)
        for choice, position, _ in choices.wanted:
            needed[choice] = max(needed[choice], position)
        for choice, tokens in enumerate(choices.tokens):
            if needed[choice] >= choices.common:
                batch.append((cache.fork(), tokens[choices.common : needed[choice] + 1]))
                places.append((number, choice))
    rests = dict(zip(places, model.hidden(batch), strict=True)) if batch else {}
    rows, targets = [], []
    for number, choices in enumerate(group):
        for choice, position, token in choices.wanted:
            is_common = position < choices.common
            rows.append(beginnings[number][position] if is_common else rests[number, choice][position - choices.common])
            targets.append(token)
    values = _target_log_probs(model, np.array(rows), np.array(targets))
    return np.split(values, np.cumsum([len(choices.wanted) for choices in group])[:-1])


def _target_log_probs(model: Model, hidden: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float32 [n, n_embd] and int [n] -> log probabilities, float64 [n]."""
    step, parts = max(1, BLOCK_BYTES // (4 * model.n_vocab)), []
    for first in range(0, len(hidden), step):
        logits = model.head(hidden[first : first + step], generated=False)
        largest = logits.max(axis=1)
        total = np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
        own = logits[np.arange(len(logits)), targets[first : first + step]]
        parts.append((own - largest).astype(np.float64) - np.log(total))
    return np.concatenate(parts)
