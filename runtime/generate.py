"""Generating text, a piece at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..formats import PlanError
from .model import Model, Session
from .sampling import Sampler, Sampling


@dataclass
class Timings:
    """Tokens and seconds of reading the prompt and of generating."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generated_seconds: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generated_per_second(self) -> float:
        return self.generated_tokens / self.generated_seconds if self.generated_seconds else 0.0


def generate(
    model: Model,
    prompt: str | Sequence[int],
    n_predict: int = 128,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    session: Session | None = None,
    **sampling: Any,
) -> Generation:
    """Text that follows a prompt; iterate over the result to get it piece by piece.

    prompt: text (control tokens spelled out in it are recognised) or token ids; n_predict: at most so many tokens, -1: until
    the model ends or the context is full; stop: texts that end the generation and are not given out; session: one to go on
    with (what it shares with the prompt's beginning is not computed again); sampling: fields of `Sampling` by name.
    Raises PlanError for an empty prompt or sampling settings that make no sense, MillError when the prompt does not fit.
    """
    try:
        settings = Sampling(**sampling)
    except TypeError as error:
        raise PlanError(f"unknown sampling setting: {str(error).split(' ', 1)[-1]}") from None
    ids = model.tokenizer.encode(prompt, parse_special=True) if isinstance(prompt, str) else [int(i) for i in prompt]
    if not ids:
        raise PlanError("the prompt is empty and the model has no token to begin a text with")
    return Generation(model, session or model.session(), ids, n_predict, tuple(stop), ignore_eos, Sampler(settings))


class Generation:
    """A running generation: an iterator over text pieces (whole characters only, never empty).

    tokens   generated so far, without the one that ended it
    reason   why it ended: 'eos', 'length' (n_predict), 'context' (full) or 'stop' (a stop text); '' while it runs
    timings  grows as it runs
    """

    def __init__(
        self,
        model: Model,
        session: Session,
        prompt: list[int],
        n_predict: int,
        stop: tuple[str, ...],
        ignore_eos: bool,
        sampler: Sampler,
    ):
        self.model, self.session, self.prompt = model, session, prompt
        self.n_predict, self.stop, self.ignore_eos, self.sampler = n_predict, stop, ignore_eos, sampler
        self.tokens: list[int] = []
        self.reason = ""
        self.timings = Timings()
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def text(self) -> str:
        """Everything that is still to come, in one string."""
        return "".join(self._pieces)

    def _run(self) -> Iterator[str]:
        stream, held = self.model.tokenizer.stream(), ""
        for token in self._ids():
            held += stream.feed(token)
            ends = [at for at in (held.find(text) for text in self.stop if text) if at >= 0]
            if ends:
                self.reason, held = "stop", held[: min(ends)]
                break
            ready = len(held) - self._may_begin_stop(held)
            if ready:
                yield held[:ready]
                held = held[ready:]
        else:
            held += stream.flush()
        if held:
            yield held

    def _may_begin_stop(self, text: str) -> int:
        """Length of the longest end of text that is the beginning of a stop text."""
        lengths = [n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return max(lengths, default=0)

    def _ids(self) -> Iterator[int]:
        began = time.perf_counter()
        logits = self._read_prompt()
        self.timings.prompt_seconds = time.perf_counter() - began
        endings = frozenset() if self.ignore_eos else self.model.tokenizer.endings
        while self.n_predict < 0 or len(self.tokens) < self.n_predict:
            began = time.perf_counter()
            if self.tokens:
                if len(self.session.tokens) >= self.session.n_ctx:
                    self.reason = "context"
                    return
                logits = self._checked(self.session.feed(self.tokens[-1:]))
            token = self.sampler.pick(logits, self.session.tokens)
            self.timings.generated_seconds += time.perf_counter() - began
            if token in endings:
                self.reason = "eos"
                return
            self.tokens.append(token)
            self.timings.generated_tokens += 1
            yield token
        self.reason = "length"

    def _read_prompt(self) -> np.ndarray:
        """Logits after the prompt. The last token is always computed anew: its logits are needed."""
        known, most = 0, min(len(self.session.tokens), len(self.prompt) - 1)
        while known < most and self.session.tokens[known] == self.prompt[known]:
            known += 1
        self.session.rewind(known)
        self.timings.prompt_tokens = len(self.prompt) - known
        return self._checked(self.session.feed(self.prompt[known:]))

    def _checked(self, logits: np.ndarray) -> np.ndarray:
        if not np.isfinite(logits).all():
            raise self.model.explain_nonfinite(self.session.tokens)
        return logits
