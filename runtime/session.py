"""A growing sequence of a model, which can fork and go back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from ..formats import MillError, PlanError, TensorSource
from .backends import Cache
from .draft_head import DraftingModel
from .generation.drafter import Drafter
from .text.tokenizer import Tokenizer

Tokens = Sequence[int] | np.ndarray


class SessionModel(DraftingModel, Protocol):
    """What sessions and generations use of their model: `model.Model`."""

    stored: TensorSource

    @cached_property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def decode_batch(self) -> int: ...
    @property
    def short_prompt(self) -> int: ...
    @property
    def is_recurrent(self) -> bool: ...
    def session(self, n_ctx: int | None = None) -> Session: ...
    def new_cache(self, limit: int) -> Cache: ...
    def feed(self, batch: Sequence[tuple[Session, Tokens]], generated: bool | None = None) -> np.ndarray: ...
    def feed_rows(self, batch: Sequence[tuple[Session, Tokens, int]], generated: bool | None = None) -> list[np.ndarray]: ...
    def hidden(self, batch: Sequence[tuple[Cache, Tokens]], last: Sequence[int | None] | None = None) -> list[np.ndarray]: ...
    def explain_nonfinite(self, tokens: Tokens) -> MillError: ...


class Session:
    """One growing sequence with its cache.

    tokens   those it holds
    n_read   how many of them, from the first on, were computed as a prompt is. What is cached of the others has other last bits
             than if they were read: no prompt can begin with them (see `shared`)
    drafter  drafts the next ones, if it is set
    """

    def __init__(self, model: SessionModel, n_ctx: int):
        self.model, self.n_ctx = model, n_ctx
        self.cache = model.new_cache(n_ctx)
        self.tokens: list[int] = []
        self.n_read = 0
        self.drafter: Drafter | None = None

    def feed(self, tokens: Tokens) -> np.ndarray:
        """Appends tokens; returns the logits after the last one, float32 [n_vocab]. Raises MillError when they do not fit."""
        return self.model.feed([(self, tokens)])[0]

    def prepare(self, generated: bool) -> None:
        """Before its next tokens are computed, as generated ones or as a prompt. In front of generated ones, what the cache
        lacks of a prompt is computed as prompts are, and recurrent states become a checkpoint: the next prompt may begin alike.
        """
        self.drop_unknown()
        first = self.cache.length
        if not generated or first > self.n_read:
            return
        if first < self.n_read:
            wanted = 0 if self.drafter is None else None
            (rows,) = self.model.hidden([(self.cache, self.tokens[first : self.n_read])], [wanted])
            if self.drafter is not None:
                self.drafter.observe(first, rows, self.tokens[: self.n_read])
        self.cache.checkpoint()

    def append(self, tokens: Tokens, generated: bool) -> None:
        """Notes tokens that have been computed, as generated ones or as a prompt."""
        is_read = not generated and self.n_read == len(self.tokens)
        self.tokens += [int(token) for token in tokens]
        if is_read:
            self.n_read = len(self.tokens)

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens from its beginning on a prompt has in common with what was read here."""
        longest = min(self.n_read, len(prompt))
        return next((i for i in range(longest) if self.tokens[i] != prompt[i]), longest)

    @property
    def uncomputed(self) -> int:
        """How many of the last tokens the cache does not hold: the next `feed` computes them again."""
        return max(len(self.tokens) - self.cache.length, 0)

    def missing(self, tokens: Tokens) -> Sequence[int] | np.ndarray:
        """New tokens, after those of this sequence that its cache does not hold: it went back to an earlier checkpoint."""
        held = self.cache.length
        return tokens if held == len(self.tokens) else [*self.tokens[held:], *tokens]

    def resumable(self, length: int) -> int:
        """How many of the first `length` tokens need not be computed again after `rewind(length)`: all, unless layers keep a
        recurrent state and have none for that many tokens."""
        return self.cache.resumable(length)

    def drop_unknown(self) -> None:
        """Where a `feed` was interrupted at its end, the cache has rows of tokens that never were appended."""
        self.cache.truncate(len(self.tokens))

    def fork(self, length: int | None = None) -> Session:
        """A session of its own that begins with the first `length` tokens of this one (all if None or more than there are)."""
        _check_length(length)
        self.drop_unknown()
        other = Session(self.model, self.n_ctx)
        other.tokens = self.tokens[:length]
        other.n_read = min(self.n_read, len(other.tokens))
        if self.drafter is not None:
            length = self._computed(len(other.tokens))
            other.drafter = self.drafter.fork(len(other.tokens))
        other.cache = self.cache.fork(length)
        return other

    def _computed(self, length: int) -> int:
        """What the cache may hold of the first `length` tokens, so that the drafter gets the hidden states that it lacks."""
        return length if self.drafter is None else length - self.drafter.lacking(length)

    def rewind(self, length: int) -> None:
        """Forgets everything from position `length` on, to continue differently from there. What the cache then lacks of the
        tokens (see `resumable`) is computed again with the next ones."""
        _check_length(length)
        del self.tokens[length:]  # first: an interruption may come in between
        self.n_read = min(self.n_read, len(self.tokens))
        self.cache.truncate(self._computed(len(self.tokens)))
        if self.drafter is not None:
            self.drafter.truncate(len(self.tokens))


def _check_length(length: int | None) -> None:
    if length is not None and length < 0:
        raise PlanError(f"a sequence has no position {length}")
