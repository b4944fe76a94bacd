"""Has a model answer questions: greedily, several answers in each pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

from ....data_classes import dataclass
from ....errors import PlanError
from ....request_fields import fields_of
from ....simd.compile.compile_time import seconds_without_compilation
from ...generation.generate import Generation, feed_pending, generate
from ...generation.sampling_options import Sampling
from ...model import Model
from ...text.chat import ChatTemplate, prompt_tokens

TOGETHER = 8  # answers that are generated together, where the settings do not say (parallel)
# Nothing that a model's file recommends: the most probable token, always.
_GREEDY: dict[str, Any] = {each.name: each.default for each in fields_of(Sampling)} | {"temp": 0.0}
_PLAIN, _STOP = "Question: {}\nAnswer:", ("\nQuestion:",)  # without a template


@dataclass(frozen=True)
class Answer:
    """number: of the question, from 0; reason: why it ended, as of a `Generation`; tokens: that were generated."""

    number: int
    text: str
    reason: str
    tokens: int


@dataclass(eq=False)
class _Running:
    number: int
    generation: Generation
    pieces: list[str] = field(default_factory=list)


def answer_questions(
    model: Model, questions: Sequence[tuple[int, str]], template: ChatTemplate | None, n_predict: int = 512
) -> Iterator[Answer]:
    """The answers to numbered questions, as they end. An answer does not depend on those that are generated with it.

    template   a question is the user's only message; None: 'Question: ...\\nAnswer:', up to a line that begins a further
               question
    n_predict  tokens of an answer at most; -1: as many as fit into the context

    Raises PlanError for a model that predicts no tokens, and for a question that the template refuses; MillError for one that
    does not fit into the context.
    """
    if not model.has_head:
        raise PlanError(f"{model.source.path}: {model.graph.architecture} predicts no tokens: it answers no questions")
    together = model.settings.parallel if model.settings.parallel > 1 else TOGETHER
    waiting, running = list(reversed(questions)), list[_Running]()
    while waiting or running:
        while waiting and len(running) < min(together, model.decode_batch):
            number, question = waiting.pop()
            running.append(_Running(number, _begin(model, question, template, n_predict)))
        reading = next(([each] for each in running if each.generation.is_reading), None)
        for each in _pass(model, reading or running):
            running.remove(each)
            generation = each.generation
            yield Answer(each.number, "".join(each.pieces), generation.reason, generation.timings.generated_tokens)


def _begin(model: Model, question: str, template: ChatTemplate | None, n_predict: int) -> Generation:
    text = _PLAIN.format(question) if template is None else template.render([{"role": "user", "content": question}])
    ids = prompt_tokens(model.tokenizer, text)
    limit = model.n_ctx if n_predict < 0 else min(model.n_ctx, len(ids) + n_predict)
    stop = _STOP if template is None else ()
    return generate(model, ids, n_predict, stop, session=model.session(limit), **_GREEDY)


def _pass(model: Model, together: Sequence[_Running]) -> list[_Running]:
    """One pass through the model; returns those that have ended."""
    start = seconds_without_compilation()
    for each, logits in zip(together, feed_pending(model, [each.generation for each in together]), strict=True):
        each.pieces.append(each.generation.advance(logits, start))
    return [each for each in together if not each.generation.pending_tokens]
