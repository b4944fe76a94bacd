"""Drafts the next tokens of a sequence with the model's draft layers, for the model to verify in one pass.

Speculative decoding (arXiv:2211.17192) with drafts that are always the most probable token of a draft layer: the model
samples each token from its own distribution, as it would without drafts, and a draft is accepted if it is the sampled token.
That is rejection sampling for a proposal of one token: the text's distribution, and with a seed the text, stay the same.

The first draft layer proposes the token after the next, the second the one after that, and so on (DeepSeek-V3,
arXiv:2412.19437, section 2.2); what is wanted beyond, the last one proposes from its own output and draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..draft_head import DraftHead, DraftingModel, check_draft_layers

_WAITING = 64  # hidden states that wait for the next draft at most


class _Depth:
    """One draft layer's side of a session: its cache, and the inputs of the rows from the cache's length on.

    Row i of depth d joins hidden state i with token i + d + 1.
    """

    def __init__(self, head: DraftHead, depth: int, limit: int, n_embd: int, excluded: np.ndarray):
        self.head, self.depth, self.cache, self.excluded = head, depth, head.new_cache(limit), excluded
        self.states = np.empty((0, n_embd), np.float32)

    @property
    def reads_model(self) -> bool:
        """Whether its inputs are the model's hidden states; else the outputs of the draft layer before it."""
        return self.depth == 0 or not self.head.is_chained

    @property
    def known(self) -> int:
        """How many rows have an input."""
        return self.cache.length + len(self.states)

    def extend(self, states: np.ndarray) -> None:
        """Takes the inputs of the next rows."""
        self.states = np.concatenate([self.states, states])

    def read(self, tokens: Sequence[int], inputs: np.ndarray) -> np.ndarray:
        """Runs the rows that the tokens reach to, with these inputs; returns their outputs float32 [n, n_embd]."""
        new = np.array(tokens[self.cache.length + self.depth + 1 :], np.int64)
        return self.head.hidden(self.cache, new, inputs[: len(new)]) if len(new) else inputs[:0]

    def most_probable(self, outputs: np.ndarray) -> int:
        """The token that the last row predicts."""
        logits = self.head.logits(outputs[-1:])[0]
        logits[self.excluded] = -np.inf
        return int(logits.argmax())


class Drafter:
    """The draft layers' side of a session."""

    def __init__(self, model: DraftingModel, n_ctx: int, draft_max: int, excluded: Sequence[int] | np.ndarray = ()):
        """draft_max: how many tokens are proposed at most; layers beyond are not run. excluded: ids that are never sampled.

        Raises PlanError for a model without draft layers."""
        check_draft_layers(model)
        self.model, self.n_ctx, self.draft_max = model, n_ctx, draft_max
        heads = enumerate(model.draft_heads[:draft_max])
        never = np.array(excluded, np.int64)
        self.depths = [_Depth(head, depth, n_ctx, model.graph.n_embd, never) for depth, head in heads]

    def reaches(self, draft_max: int) -> bool:
        """Whether it runs all draft layers that `n` tokens want."""
        return len(self.depths) == len(self.model.draft_heads[:draft_max])

    def observe(self, first: int, hidden: np.ndarray, tokens: Sequence[int]) -> None:
        """Takes the hidden states after tokens first, first + 1, ... of a session that now has these tokens."""
        for each in self.depths:
            if each.reads_model and first <= each.known:
                each.extend(hidden[each.known - first :])
        if max(len(each.states) for each in self.depths) > _WAITING and self.depths[0].known == len(tokens):
            for each in self.depths:
                if len(tokens) > each.cache.length + each.depth + 1:
                    self._keep(each, each.read(tokens, each.states))

    def _keep(self, each: _Depth, outputs: np.ndarray) -> None:
        """After rows that stay: their inputs have been used, and their outputs are the next layer's inputs."""
        each.states = each.states[len(outputs) :]
        below = self.depths[each.depth + 1 : each.depth + 2]
        if below and not below[0].reads_model:
            below[0].extend(outputs)

    def propose(self, tokens: Sequence[int], token: int, count: int) -> list[int]:
        """`count` tokens that may follow a session's tokens and `token`, which it is fed next; none where the hidden states of
        the session have not all been observed."""
        if self.depths[0].known != len(tokens) or not tokens or count < 1:
            return []
        known, drafts, ends = [*tokens, token], [], []
        outputs = ahead = np.empty((0, self.model.graph.n_embd), np.float32)
        try:
            for each in self.depths:  # those that are not asked for a draft keep up
                first = each.cache.length
                ends.append(first)
                inputs = each.states if each.reads_model else np.concatenate([each.states, ahead])
                outputs = each.read([*known, *drafts], inputs)
                certain = max(len(tokens) - each.depth - first, 0)  # rows that read no draft
                ends[-1] += certain
                self._keep(each, outputs[:certain])
                ahead = outputs[certain:]
                if each.depth < count:
                    drafts.append(each.most_probable(outputs))
            last = self.depths[-1]
            while len(drafts) < count:
                outputs = last.head.hidden(last.cache, np.array(drafts[-1:]), outputs[-1:])
                drafts.append(last.most_probable(outputs))
        finally:
            for each, end in zip(self.depths, ends, strict=False):
                each.cache.truncate(end)
        return drafts

    def lacking(self, length: int) -> int:
        """How many tokens at the end of the first `length` have to be computed again after `truncate(length)`, for their hidden
        states."""
        is_whole = all(each.cache.length <= max(length - 1 - each.depth, 0) for each in self.depths)
        if is_whole and self.depths[0].known >= length:
            return 0
        return min(len(self.depths), length)

    def truncate(self, length: int) -> None:
        """Forgets tokens from position `length` on."""
        lacking = self.lacking(length)
        for each in self.depths:
            each.cache.truncate(length - lacking if lacking else length)
            rows = 0 if lacking else length if each.reads_model else length - each.depth
            each.states = each.states[: max(rows - each.cache.length, 0)]

    def fork(self, length: int) -> Drafter:
        """A drafter of its own for the first `length` tokens."""
        copy = Drafter(self.model, self.n_ctx, self.draft_max)
        for own, each in zip(copy.depths, self.depths, strict=True):
            own.cache, own.states = each.cache.fork(), each.states
        copy.truncate(length)
        return copy
