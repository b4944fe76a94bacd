"""Drafts the next tokens of a sequence with the model's draft layer, for the model to verify in one pass.

Speculative decoding (arXiv:2211.17192) with drafts that are always the most probable token of the draft layer: the model
samples each token from its own distribution, as it would without drafts, and a draft is accepted if it is the sampled token.
That is rejection sampling for a proposal of one token: the text's distribution, and with a seed the text, stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..draft_head import check_draft_layers
from ..model import Model

_WAITING = 64  # hidden states that wait for the next draft at most


class Drafter:
    """The draft layer's side of a session.

    The cache has row i once the hidden state behind token i and token i + 1 are known; `_states` are the hidden states behind
    the tokens from the cache's length on.
    """

    def __init__(self, model: Model, n_ctx: int):
        """Raises PlanError for a model without draft layers."""
        check_draft_layers(model)
        self.model, self.head = model, model.draft_heads[0]
        self.cache = self.head.new_cache(n_ctx)
        self._states = np.empty((0, model.graph.n_embd), np.float32)

    def observe(self, first: int, hidden: np.ndarray, tokens: Sequence[int]) -> None:
        """Takes the hidden states behind tokens first, first + 1, ... of a session that now has these tokens."""
        known = self.cache.length + len(self._states)
        if first <= known:
            self._states = np.concatenate([self._states, hidden[known - first :]])
        if len(self._states) > _WAITING:
            self._read(tokens[self.cache.length + 1 :])

    def _read(self, tokens: Sequence[int]) -> np.ndarray:
        """Runs the next rows, with these tokens; returns the last one's output, float32 [1, n_embd]."""
        out = self.head.hidden(self.cache, np.array(tokens, np.int64), self._states[: len(tokens)])
        self._states = self._states[len(tokens) :]
        return out[-1:]

    def propose(self, tokens: Sequence[int], token: int, count: int) -> list[int]:
        """`count` tokens that may follow a session's tokens and `token`, which it is fed next; none where the hidden states of
        the session have not all been observed."""
        if self.cache.length + len(self._states) != len(tokens) or not len(self._states) or count < 1:
            return []
        hidden = self._read([*tokens[self.cache.length + 1 :], token])
        length, drafts = self.cache.length, [self._most_probable(hidden)]
        try:
            while len(drafts) < count:
                hidden = self.head.hidden(self.cache, np.array(drafts[-1:]), hidden)
                drafts.append(self._most_probable(hidden))
        finally:
            self.cache.truncate(length)
        return drafts

    def _most_probable(self, hidden: np.ndarray) -> int:
        return int(self.head.logits(hidden)[0].argmax())

    def needs_last(self, length: int) -> bool:
        """Whether the hidden state behind token length - 1 would be missing after `truncate(length)`."""
        return self.cache.length > max(length - 1, 0) or self.cache.length + len(self._states) < length

    def truncate(self, length: int) -> None:
        """Forgets tokens from position `length` on."""
        self.cache.truncate(max(length - 1, 0))
        self._states = self._states[: max(length - self.cache.length, 0)]

    def fork(self, length: int) -> Drafter:
        """A drafter of its own for the first `length` tokens."""
        copy = Drafter(self.model, self.cache.limit)
        copy.cache, copy._states = self.cache.fork(), self._states
        copy.truncate(length)
        return copy
