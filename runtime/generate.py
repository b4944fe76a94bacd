"""Generating text, a piece at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..formats import MillError, PlanError
from .model import Model, Session
from .sampling import Drawn, Sampler, Sampling

_PROMPT_STEP = 512  # tokens of a prompt that are read between two looks at whether to go on


@dataclass
class Timings:
    """Tokens and seconds of reading the prompt and of generating; cached_tokens: of the prompt, known from before."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
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
    n_probs: int | None = None,
    **sampling: Any,
) -> Generation:
    """Text that follows a prompt; iterate over the result to get it piece by piece.

    prompt: text (control tokens spelled out in it are recognised) or token ids; n_predict: at most so many tokens, -1: until
    the model ends or the context is full; stop: texts that end the generation and are not given out; session: one to go on
    with (what it shares with the prompt's beginning is not computed again); n_probs: note each token's log probability and
    those of so many most probable ones in `drawn`; sampling: fields of `Sampling` by name.
    Raises PlanError for an empty prompt or sampling settings that make no sense, MillError when the prompt does not fit.
    """
    try:
        settings = Sampling(**sampling)
    except TypeError as error:
        raise PlanError(f"unknown sampling setting: {str(error).split(' ', 1)[-1]}") from None
    ids = model.tokenizer.encode(prompt, parse_special=True) if isinstance(prompt, str) else [int(i) for i in prompt]
    if not ids:
        raise PlanError("the prompt is empty and the model has no token to begin a text with")
    return Generation(model, session or model.session(), ids, n_predict, tuple(stop), ignore_eos, Sampler(settings), n_probs)


class Generation:
    """A running generation: an iterator over text pieces (whole characters only, never empty).

    tokens   generated so far, without the one that ended it
    drawn    the same with their probabilities, if they were asked for
    reason   why it ended: 'eos', 'length' (n_predict), 'context' (full), 'stop' (a stop text) or 'cancelled'; '' while it runs
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
        n_probs: int | None = None,
    ):
        self.model, self.session, self.prompt = model, session, prompt
        self.n_predict, self.stop, self.ignore_eos, self.sampler = n_predict, stop, ignore_eos, sampler
        self.n_probs = n_probs
        self.tokens: list[int] = []
        self.drawn: list[Drawn] = []
        self.reason = ""
        self._cancelled = False
        self.timings = Timings()
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def text(self) -> str:
        """Everything that is still to come, in one string."""
        return "".join(self._pieces)

    def cancel(self) -> None:
        """Ends it after the step under way; may be called from another thread or a signal handler."""
        self._cancelled = True

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
        if logits is None:
            self.reason = "cancelled"
            return
        endings = frozenset() if self.ignore_eos else self.model.tokenizer.endings
        while self.n_predict < 0 or len(self.tokens) < self.n_predict:
            if self._cancelled:
                self.reason = "cancelled"
                return
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
            if self.n_probs is not None:
                self.drawn.append(Drawn.of(token, logits, self.n_probs))
            self.timings.generated_tokens += 1
            yield token
        self.reason = "length"

    def _read_prompt(self) -> np.ndarray | None:
        """Logits after the prompt, None if cancelled. The last token is always computed anew: its logits are needed."""
        if len(self.prompt) > self.session.n_ctx:
            raise MillError(
                f"the context is full: the prompt has {len(self.prompt)} tokens, {self.session.n_ctx} fit (set n_ctx higher)"
            )
        known = common_prefix(self.session.tokens, self.prompt[:-1])
        self.session.rewind(known)
        self.timings.cached_tokens = known
        logits = None
        for start in range(known, len(self.prompt), _PROMPT_STEP):
            if self._cancelled:
                return None
            logits = self._checked(self.session.feed(self.prompt[start : start + _PROMPT_STEP]))
            self.timings.prompt_tokens = len(self.session.tokens) - known
        return logits

    def _checked(self, logits: np.ndarray) -> np.ndarray:
        if not np.isfinite(logits).all():
            raise self.model.explain_nonfinite(self.session.tokens)
        return logits


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)
