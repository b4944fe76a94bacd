"""Generating text, a piece at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...formats import MillError, PlanError
from ..evaluate.clock import working_seconds
from ..evaluate.provenance import tensor_sizes
from ..model import Model, Session
from .sampling import Drawn, Sampler, Sampling

_PROMPT_STEP = 512  # tokens of a prompt that are read between two looks at whether to go on
_FEW = 4  # tokens of a short prompt
_SMALL = 256 << 20  # bytes of a model that reads a token within some hundredths of a second


@dataclass
class Timings:
    """Tokens and seconds of reading the prompt and of generating; cached_tokens: of the prompt, known from before;
    generated_passes: through the model, which the first token that is generated does not need."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generated_passes: int = 0
    generated_seconds: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generated_per_second(self) -> float:
        """Passes, that is; 0 if there was none."""
        return self.generated_passes / self.generated_seconds if self.generated_seconds else 0.0


def warm_up(model: Model) -> None:
    """Has a small model read a short prompt and a token, so that its speeds are not those of the first passes, which make
    ready what all others use: several tokens at once decode matrices that a single one takes as they are.

    Large ones take so long for a token that this does not show in their speed, and that some tokens more would be felt.
    """
    if tensor_sizes(model)["nbytes"] <= _SMALL:
        session = model.session(_FEW + 1)
        session.feed([0] * _FEW)
        session.feed([0])


def generate(
    model: Model,
    prompt: str | Sequence[int],
    n_predict: int = 128,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    session: Session | None = None,
    n_probs: int | None = None,
    shown: Collection[int] = (),
    **sampling: Any,
) -> Generation:
    """Text that follows a prompt; iterate over the result to get it piece by piece.

    prompt: text (control tokens spelled out in it are recognised) or token ids; n_predict: at most so many tokens, -1: until
    the model ends or the context is full; stop: texts that end the generation and are not given out; session: one to go on
    with (what it shares with the prompt's beginning is not computed again); n_probs: note each token's log probability and
    those of so many most probable ones in `drawn`; shown: control tokens that are written out instead of left out; sampling:
    fields of `Sampling` by name.
    Raises PlanError for an empty prompt or sampling settings that make no sense, MillError when the prompt does not fit.
    """
    try:
        settings = Sampling(**sampling)
    except TypeError as error:
        raise PlanError(f"unknown sampling setting: {str(error).split(' ', 1)[-1]}") from None
    ids = model.tokenizer.encode(prompt, parse_special=True) if isinstance(prompt, str) else [int(i) for i in prompt]
    if not ids:
        raise PlanError("the prompt is empty and the model has no token to begin a text with")
    session = session or model.session()
    return Generation(model, session, ids, n_predict, tuple(stop), ignore_eos, Sampler(settings), n_probs, frozenset(shown))


class Generation:
    """A running generation: an iterator over text pieces (whole characters only, never empty).

    Who runs several at once feeds their sessions together instead: `wanted` says with what, `take` gets what came of it.

    wanted   the tokens that its session has to be fed next; none when it has ended
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
        shown: Collection[int] = (),
    ):
        """Takes back what the session holds beyond the beginning that it shares with the prompt."""
        if len(prompt) > session.n_ctx:
            fits = f"{len(prompt)} tokens, {session.n_ctx} fit (a larger n_ctx, -c, has room)"
            raise MillError(f"the context is full: the prompt has {fits}")
        self.model, self.session, self.prompt = model, session, prompt
        self.n_predict, self.stop, self.ignore_eos, self.sampler = n_predict, stop, ignore_eos, sampler
        self.n_probs, self.shown = n_probs, shown
        self.tokens: list[int] = []
        self.drawn: list[Drawn] = []
        self.reason = ""
        self._cancelled = False
        self._stream, self._held = model.tokenizer.stream(), ""
        self._endings = frozenset() if ignore_eos else model.tokenizer.endings
        # The last token is always computed anew: its logits are needed.
        known = common_prefix(session.tokens, prompt[:-1])
        session.rewind(known)
        self.timings = Timings(cached_tokens=known)
        self.wanted = self._next_of_prompt()
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
        while self.wanted:
            began = working_seconds()
            text = self.take(self.session.feed(self.wanted), began) if not self._cancelled else self.cancelled()
            if text:
                yield text

    def cancelled(self) -> str:
        """Ends it now. Returns the text that was held back."""
        return self._end("cancelled")

    def take(self, logits: np.ndarray, began: float) -> str:
        """Goes on after `wanted` was fed. Returns the text that is new, often none.

        logits: float32 [n_vocab] after its last token; began: the `working_seconds()` from which on the step's time counts.
        Raises MillError for logits that are not finite.
        """
        if not np.isfinite(logits).all():
            raise self.model.explain_nonfinite(self.session.tokens)
        t, now = self.timings, working_seconds()
        if not self.tokens:
            t.prompt_tokens = len(self.session.tokens) - t.cached_tokens
            t.prompt_seconds += now - began
            began = now
            self.wanted = self._next_of_prompt()
            if self.wanted:
                return ""
            if not self.n_predict:
                return self._end("length")
        else:
            t.generated_passes += 1
        token = self.sampler.pick(logits, self.session.tokens)
        t.generated_seconds += working_seconds() - began
        if token in self._endings:
            return self._end("eos")
        self.tokens.append(token)
        if self.n_probs is not None:
            self.drawn.append(Drawn.of(token, logits, self.n_probs))
        t.generated_tokens += 1
        self.wanted = [token]
        return self._said(token)

    def _next_of_prompt(self) -> list[int]:
        """The next tokens of the prompt: what is read between two looks at whether to go on."""
        start = len(self.session.tokens)
        return self.prompt[start : start + min(_PROMPT_STEP, self.model.settings.ubatch)]

    def _said(self, token: int) -> str:
        """The text that a new token makes certain, with all that was held back where it is the last one."""
        stream = self._stream
        written = token in self.shown
        self._held += stream.flush() + self.model.tokenizer.vocabulary.tokens[token] if written else stream.feed(token)
        ends = [at for at in (self._held.find(text) for text in self.stop if text) if at >= 0]
        if ends:
            self._held = self._held[: min(ends)]
            stream.flush()
            return self._end("stop")
        if len(self.tokens) == self.n_predict:
            return self._end("length")
        if len(self.session.tokens) >= self.session.n_ctx:
            return self._end("context")
        ready = len(self._held) - self._may_begin_stop(self._held)
        text, self._held = self._held[:ready], self._held[ready:]
        return text

    def _end(self, reason: str) -> str:
        text = self._held + self._stream.flush()
        self.reason, self.wanted, self._held = reason, [], ""
        return text

    def _may_begin_stop(self, text: str) -> int:
        """Length of the longest end of text that is the beginning of a stop text."""
        lengths = [n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return max(lengths, default=0)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)
