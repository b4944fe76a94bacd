"""Generates text token by token: reads the prompt, samples, decodes, and decides when to end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...formats import MillError, PlanError
from ...simd.compile.compile_time import seconds_without_compilation
from ..placement.stored_sizes import tensor_sizes
from ..session import Session, SessionModel
from .drafter import Drafter
from .grammar import Grammar
from .recommended import recommended_sampling
from .repetition import Breakers
from .sampling import SampledToken, Sampler, token_biases
from .sampling_options import Sampling

_PROMPT_STEP = 512  # tokens of a prompt in one pass at most; a generation can be cancelled between passes
# Where layers keep a recurrent state, a prompt's last tokens have a pass of their own, so that there is a checkpoint before
# them: the next prompt of a conversation often repeats this one up to the template's opening of the answer.
_LAST_TOKENS = 8
_SCORED_STEP = 128  # the same where all of their logits are needed, n_vocab numbers each
_WARM_UP_TOKENS = 4  # of the prompt of `compile_for_generation`
_WARM_UP_MAX_BYTES = 256 << 20  # weights of a model that takes some hundredths of a second per token


@dataclass
class Timings:
    """Tokens and seconds of reading the prompt and of generating.

    cached_tokens     tokens of the prompt that were in the KV cache already; not part of prompt_tokens
    generated_passes  passes through the model; the first generated token needs none, its logits are the prompt's last
    drafted_tokens    that the draft layer proposed, and of these accepted_tokens: the model sampled the same
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generated_passes: int = 0
    generated_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prompt_per_second(self) -> float:
        """Tokens per second; 0 if none was read."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generated_per_second(self) -> float:
        """Tokens per second, without the first; 0 if there was no other."""
        tokens = self.generated_passes + self.accepted_tokens
        return tokens / self.generated_seconds if self.generated_seconds else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted tokens that were accepted; None if none was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


def compile_for_generation(model: SessionModel) -> None:
    """Runs a short prompt and one token through a small model, so that the speeds measured afterwards are not those of the
    first passes: these prepare data that all later passes share, and a prompt prepares other data than a single token.

    With a large model one token takes so long that this would not show in its speed, and the warm-up itself would be felt:
    nothing is done.
    """
    if tensor_sizes(model.stored)["nbytes"] <= _WARM_UP_MAX_BYTES:
        session = model.session(_WARM_UP_TOKENS + 1)
        session.feed([0] * _WARM_UP_TOKENS)
        session.feed([0])


def generate(
    model: SessionModel,
    prompt: str | Sequence[int],
    n_predict: int = 128,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    session: Session | None = None,
    n_probs: int | None = None,
    post_sampling: bool = False,
    visible_special: Collection[int] = (),
    draft_max: int = 0,
    score_prompt: bool = False,
    grammar: Grammar | None = None,
    breakers: Breakers | None = None,
    **sampling: Any,
) -> Generation:
    """Continues a prompt; iterate over the result to get the text piece by piece.

    prompt           text (control tokens spelled out in it are recognised) or token ids
    n_predict        largest number of tokens; -1: until the model ends or the context is full
    stop             texts that end the generation; they are not part of the output
    ignore_eos       tokens that end a generation are generated like any other
    session          session to continue: what it shares with the beginning of the prompt is not computed again
    n_probs          record each token's log probability and those of the n_probs most probable ones in `sampled`; None: do not
    post_sampling    these are the probabilities that tokens are drawn by, not those of the model
    visible_special  ids of control tokens whose text is part of the output instead of left out
    draft_max        tokens that the model's draft layer proposes at a time, for the model to verify in one pass; the text stays
                     the same. 0: none
    score_prompt     record the same of each token of the prompt but the first in `prompt_scores`; needs n_probs
    grammar          the text follows it, up to where it ends or another limit ends the text
    breakers         what `find_breakers` finds for the dry_sequence_breakers, if it was looked for already
    sampling         fields of `Sampling` by name, in place of what the model's file recommends (general.sampling.*) and of the
                     defaults; logit_bias also for texts, whose tokens all get that bias

    Raises PlanError for an empty prompt, invalid sampling settings or draft_max without draft layers, MillError when the prompt
    does not fit.
    """
    if "logit_bias" in sampling:
        sampling["logit_bias"] = token_biases(model.tokenizer, sampling["logit_bias"])
    try:
        settings = Sampling(**(recommended_sampling(model.stored.metadata) | sampling))
    except TypeError as error:
        raise PlanError(f"unknown sampling setting: {str(error).rsplit(' ', 1)[-1]}") from None
    ids = model.tokenizer.encode(prompt, parse_special=True) if isinstance(prompt, str) else [int(i) for i in prompt]
    if not ids:
        raise PlanError("the prompt is empty and the model has no token to begin a text with")
    session = session or model.session()
    if draft_max < 0:
        raise PlanError(f"draft_max is {draft_max}; 0 or more tokens can be drafted")
    if draft_max and (session.drafter is None or not session.drafter.reaches(draft_max)):
        session.rewind(0)
        session.drafter = Drafter(model, session.n_ctx, draft_max, model.tokenizer.vocabulary.padding)
    sampler, special = Sampler(settings, model.tokenizer, breakers), frozenset(visible_special)
    return Generation(
        model,
        session,
        ids,
        n_predict,
        tuple(stop),
        ignore_eos,
        sampler,
        n_probs,
        post_sampling,
        special,
        draft_max,
        score_prompt,
        grammar,
    )


class Generation:
    """A running generation: an iterator over pieces of text (whole characters, never empty).

    A caller that runs several generations in one pass feeds their sessions itself: `pending_tokens` are what the session has to
    be fed next, `advance` takes the resulting logits of the last `n_logits` of them.

    pending_tokens  tokens for the next pass; empty when the generation has ended
    tokens          generated token ids, without the one that ended the generation
    sampled         the same with their probabilities, if n_probs is not None
    ending          the token that ended the generation ('eos'), if n_probs is not None
    prompt_scores   the tokens of the prompt from the second one on, with their probabilities, if score_prompt is set
    reason          why it ended: 'eos', 'length' (n_predict), 'context' (full), 'stop' (a stop text) or 'cancelled'; '' before
    stop_text       the one of `stop` that ended it; '' otherwise
    timings         updated after each pass
    """

    def __init__(
        self,
        model: SessionModel,
        session: Session,
        prompt: list[int],
        n_predict: int,
        stop: tuple[str, ...],
        ignore_eos: bool,
        sampler: Sampler,
        n_probs: int | None = None,
        post_sampling: bool = False,
        visible_special: Collection[int] = (),
        draft_max: int = 0,
        score_prompt: bool = False,
        grammar: Grammar | None = None,
    ):
        """Rewinds the session to the longest beginning that it shares with the prompt. Arguments as of `generate`."""
        if len(prompt) > session.n_ctx:
            n_tokens = f"{len(prompt)} tokens, and {session.n_ctx} fit"
            raise MillError(f"the context is full: the prompt has {n_tokens}; choose a larger n_ctx (-c)")
        self.model, self.session, self.prompt = model, session, prompt
        self.n_predict, self.stop, self.ignore_eos, self.sampler = n_predict, stop, ignore_eos, sampler
        self.n_probs, self.post_sampling, self.visible_special, self.draft_max = (
            n_probs,
            post_sampling,
            visible_special,
            draft_max,
        )
        self._mask = grammar.start() if grammar is not None else None
        self._drafts: list[int] = []  # the last of the pending tokens
        self.tokens: list[int] = []
        self.sampled: list[SampledToken] = []
        self.ending: SampledToken | None = None
        self.score_prompt, self.prompt_scores = score_prompt and n_probs is not None, list[SampledToken]()
        self.reason, self.stop_text = "", ""
        self._cancelled = False
        self._stream, self._unsent = model.tokenizer.stream(), ""
        self._eog_ids = frozenset() if ignore_eos else model.tokenizer.eog_ids
        # The last token of the prompt is computed as generated ones are, always: its logits are needed. Of a short one all are:
        # its length alone decides it, so that what is cached of others changes nothing.
        self._is_short = not self.score_prompt and len(prompt) <= model.short_prompt
        shared = 0 if self.score_prompt or self._is_short else session.shared(prompt[:-1])
        n_cached = session.resumable(shared)  # less only of recurrent states
        session.rewind(n_cached)
        self.timings = Timings(cached_tokens=n_cached)
        self.pending_tokens = self._next_prompt_tokens()
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def text(self) -> str:
        """Runs to the end. Returns all text that has not been iterated over yet."""
        return "".join(self._pieces)

    def cancel(self) -> None:
        """Ends the generation after the pass under way; may be called from another thread or a signal handler."""
        self._cancelled = True

    def _run(self) -> Iterator[str]:
        while self.pending_tokens:
            if self._cancelled:
                text = self.finish_cancelled()
            else:
                start = seconds_without_compilation()
                text = self.advance(self._feed(), start)
            if text:
                yield text

    def _feed(self) -> np.ndarray:
        return feed_pending(self.model, [self])[0]

    @property
    def n_logits(self) -> int:
        """Number of the last pending tokens whose logits `advance` needs."""
        if self.score_prompt and self.is_reading:
            return len(self.pending_tokens)
        return 1 + len(self._drafts)

    @property
    def is_reading(self) -> bool:
        """Whether the next pass reads tokens of the prompt before its last one, as prompts are read."""
        return not self._is_short and len(self.session.tokens) < len(self.prompt) - 1

    def finish_cancelled(self) -> str:
        """Ends the generation now with the reason 'cancelled'. Returns the text that was not returned yet."""
        return self._finish("cancelled")

    def advance(self, logits: np.ndarray, start: float) -> str:
        """Continues after the session was fed with `pending_tokens`. Returns the new text, often none.

        logits: float32 [n_logits, n_vocab], or [n_vocab], after the last of these tokens; start: the clock's
        `seconds_without_compilation()` at the beginning of the pass. Raises MillError for logits that are not finite.
        """
        if not np.isfinite(logits).all():
            raise self.model.explain_nonfinite(self.session.tokens)
        logits = logits.reshape(-1, logits.shape[-1])
        timings, now = self.timings, seconds_without_compilation()
        if not self.tokens:
            timings.prompt_tokens = len(self.session.tokens) - timings.cached_tokens
            timings.prompt_seconds += now - start
            start = now
            if self.score_prompt:
                self._score(logits)
            self.pending_tokens = self._next_prompt_tokens()
            if self.pending_tokens:
                return ""
            if not self.n_predict:
                return self._finish("length")
        else:
            timings.generated_passes += 1
        text = self._sample(logits[-1 - len(self._drafts) :])
        if not self.reason:
            self._draft()
        timings.generated_seconds += seconds_without_compilation() - start
        return text

    def _score(self, rows: np.ndarray) -> None:
        """Records the probabilities of the tokens of the prompt that follow those that were just read."""
        assert self.n_probs is not None
        following = self.prompt[len(self.session.tokens) - len(rows) + 1 :][: len(rows)]
        for token, logits in zip(following, rows, strict=False):  # after the last token of the prompt there is none
            self.prompt_scores.append(SampledToken.from_logits(token, logits, self.n_probs))

    def _sample(self, rows: np.ndarray) -> str:
        """Samples a token from each row of logits, up to the first that is not the token drafted there. Returns the new text.

        The session then has the accepted drafts, and not the others.
        """
        session, drafts, pieces = self.session, self._drafts, []
        first = len(session.tokens) - len(drafts)
        self._drafts, accepted = [], 0
        for logits in rows:
            length = first + accepted
            allowed = logits if self._mask is None else self._mask(self.tokens, logits)
            if allowed is None:
                pieces.append(self._finish("eos"))
                break
            token = self.sampler.sample(allowed, session.tokens if not drafts else session.tokens[:length])
            pieces.append(self._take(token, logits, length))
            if self.reason or accepted == len(drafts) or token != drafts[accepted]:
                break
            accepted += 1
        if accepted < len(drafts):
            session.rewind(first + accepted)
        self.timings.drafted_tokens += len(drafts)
        self.timings.accepted_tokens += accepted
        return "".join(pieces)

    def _take(self, token: int, logits: np.ndarray, length: int) -> str:
        """Adds a sampled token to the text; length: tokens before it. Returns the new text."""
        if token in self._eog_ids:
            if self.n_probs is not None:
                self.ending = self._sampled(token, logits, self.n_probs)
            return self._finish("eos")
        self.tokens.append(token)
        if self.n_probs is not None:
            self.sampled.append(self._sampled(token, logits, self.n_probs))
        self.timings.generated_tokens += 1
        self.pending_tokens = [token]
        return self._new_text(token, length)

    def _sampled(self, token: int, logits: np.ndarray, n_probs: int) -> SampledToken:
        if self.post_sampling:
            return SampledToken.from_candidates(token, *self.sampler.candidates, n_probs)
        return SampledToken.from_logits(token, logits, n_probs)

    def _draft(self) -> None:
        """Adds drafts to the pending token: as many as the answer, the context and a pass with exact results have space for."""
        session, count = self.session, self.draft_max
        if not count or session.drafter is None:
            return
        if self.n_predict >= 0:
            count = min(count, self.n_predict - len(self.tokens) - 1)
        count = min(count, session.n_ctx - len(session.tokens) - 1, self.model.decode_batch - 1 - session.uncomputed)
        self._drafts = session.drafter.propose(session.tokens, self.pending_tokens[0], count)
        self.pending_tokens = [*self.pending_tokens, *self._drafts]

    def _next_prompt_tokens(self) -> list[int]:
        """The tokens of the prompt for the next pass; empty when the session holds the whole prompt."""
        start, before_last = len(self.session.tokens), len(self.prompt) - 1
        if start >= before_last or self._is_short:
            return self.prompt[start:]
        end = min(before_last, start + min(_SCORED_STEP if self.score_prompt else _PROMPT_STEP, self.model.settings.ubatch))
        last = len(self.prompt) - _LAST_TOKENS
        return self.prompt[start : last if self.model.is_recurrent and start < last < end else end]

    def _new_text(self, token: int, length: int) -> str:
        """The text that is certain after a new token: what may be the beginning of a stop text waits in `_unsent`.

        length: tokens before it."""
        stream = self._stream
        if token in self.visible_special:
            self._unsent += stream.flush() + self.model.tokenizer.vocabulary.tokens[token]
        else:
            self._unsent += stream.feed(token)
        stops = [(position, text) for text in self.stop if text and (position := self._unsent.find(text)) >= 0]
        if stops:
            position, self.stop_text = min(stops)
            self._unsent = self._unsent[:position]
            stream.flush()
            return self._finish("stop")
        if len(self.tokens) == self.n_predict:
            return self._finish("length")
        if length >= self.session.n_ctx:
            return self._finish("context")
        n_certain = len(self._unsent) - self._partial_stop_length(self._unsent)
        text, self._unsent = self._unsent[:n_certain], self._unsent[n_certain:]
        return text

    def _finish(self, reason: str) -> str:
        """Ends the generation. Returns the text that was not returned yet."""
        text = self._unsent + self._stream.flush()
        self.reason, self.pending_tokens, self._unsent, self._drafts = reason, [], "", []
        return text

    def _partial_stop_length(self, text: str) -> int:
        """Length of the longest suffix of the text that is a beginning of a stop text."""
        return max((_overlap(text, stop) for stop in self.stop), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that is a beginning of `stop`, but not all of it."""
    starts = range(max(len(text) - len(stop) + 1, 0), len(text))
    return next((len(text) - start for start in starts if stop.startswith(text[start:])), 0)


def feed_pending(model: SessionModel, generations: Sequence[Generation]) -> list[np.ndarray]:
    """Feeds the pending tokens of several generations, that all read or all do not, in one pass; returns what each one's
    `advance` needs."""
    generated = not generations[0].is_reading
    if all(each.n_logits == 1 for each in generations):
        return [*model.feed([(each.session, each.pending_tokens) for each in generations], generated)]
    return model.feed_rows([(each.session, each.pending_tokens, each.n_logits) for each in generations], generated)
