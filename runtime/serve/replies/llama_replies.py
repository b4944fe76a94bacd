"""Builds the replies of llama-server's /completion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...generation.sampling import SampledToken
from ...text.tokenizer import Tokenizer
from ..requests.checks import JsonObject
from ..tasks import EndEvent, Event, PromptEvent
from .openai_replies import Generated, Prompt, timings_object

# reason of a Generation -> stop_type
_STOP_TYPES = {"eos": "eos", "stop": "word", "length": "limit", "context": "limit"}


class LlamaReplies:
    """One object per prompt, or chunks."""

    last_line = b""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        prompts: Sequence[Prompt],
        settings: Mapping[str, Any],
        *,
        n_probs: int,
        post_sampling: bool,
        with_tokens: bool,
        as_list: bool,
        shown: Sequence[str] = (),
    ):
        """prompts: text: as it is shown; settings: likewise; post_sampling: probabilities are those that tokens were drawn by;
        with_tokens: a complete reply has them; as_list: it is a list, one for each prompt; shown: the fields that a reply has,
        like 'timings/prompt_n' under that name; none: all."""
        self._tokenizer, self._model, self._prompts, self._settings = tokenizer, model, prompts, dict(settings)
        self._post_sampling = post_sampling
        self._n_probs, self._with_tokens, self._as_list, self._shown = n_probs, with_tokens, as_list, shown
        self._has_new_line = [False] * len(prompts)
        self._n_tokens = [0] * len(prompts)

    def complete(self, answers: Sequence[Generated]) -> Any:
        """The reply: an object, or a list of them."""
        replies = []
        for i, answer in enumerate(answers):
            self._has_new_line[i] = "\n" in answer.text
            tokens = [each.token for each in answer.sampled] if self._with_tokens else []
            reply = {**self._text(i, answer.text, tokens, answer.end.slot), **self._last(i, answer.end)}
            replies.append(self._filtered(reply | self._probabilities(answer.sampled)))
        return replies if self._as_list else replies[0]

    def first_chunks(self) -> list[JsonObject]:
        return []

    def chunks(self, index: int, event: Event) -> list[JsonObject]:
        """The chunks for an event."""
        if isinstance(event, PromptEvent):
            return []
        if isinstance(event, EndEvent):
            text = self._text(index, "", [each.token for each in event.sampled], event.slot)
            return [self._filtered({**text, **self._last(index, event)})]
        self._has_new_line[index] = self._has_new_line[index] or "\n" in event.text
        self._n_tokens[index] += len(event.sampled)
        counts = {"stop": False, "tokens_predicted": self._n_tokens[index], "tokens_evaluated": len(self._prompts[index].ids)}
        chunk = {**self._text(index, event.text, [each.token for each in event.sampled], event.slot), **counts}
        return [chunk | self._probabilities(event.sampled)]

    def usage_chunk(self, ends: Sequence[EndEvent]) -> JsonObject:
        raise NotImplementedError("the last chunk has the counts")

    def _text(self, index: int, text: str, tokens: list[int], slot: int) -> JsonObject:
        return {"index": index, "content": text, "tokens": tokens, "id_slot": slot}

    def _last(self, index: int, end: EndEvent) -> JsonObject:
        prompt, timings = self._prompts[index], end.timings
        return {
            "stop": True,
            "model": self._model,
            "tokens_predicted": timings.generated_tokens,
            "tokens_evaluated": len(prompt.ids),
            "generation_settings": self._settings,
            "prompt": prompt.text,
            "has_new_line": self._has_new_line[index],
            "truncated": False,
            "stop_type": _STOP_TYPES[end.reason],
            "stopping_word": end.stop_text,
            "tokens_cached": len(prompt.ids) + max(0, timings.generated_tokens - 1),  # the last one is not fed
            "timings": timings_object(timings),
        }

    def _filtered(self, reply: JsonObject) -> JsonObject:
        if not self._shown:
            return reply
        result: JsonObject = {}
        for path in self._shown:
            value: Any = reply
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                result[path] = value
        return result

    def _probabilities(self, sampled: Sequence[SampledToken]) -> JsonObject:
        if not self._n_probs:
            return {}
        top = "top_probs" if self._post_sampling else "top_logprobs"
        return {
            "completion_probabilities": [
                {**self._token(each.token, each.logprob), top: [self._token(i, p) for i, p in each.top]} for each in sampled
            ]
        }

    def _token(self, token: int, logprob: float) -> JsonObject:
        piece = self._tokenizer.piece(token)
        p = {"prob": math.exp(logprob)} if self._post_sampling else {"logprob": logprob}
        return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), **p}
