"""What clients get: objects of OpenAI's API, with llama-server's `timings` besides."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from ..generation.generate import Timings
from ..generation.sampling import Drawn
from ..text.tokenizer import Tokenizer
from .engine import End
from .stream_parser import Speech

Json = dict[str, Any]

# reason of a Generation -> finish_reason
_FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


def timings(t: Timings) -> Json:
    """As llama-server gives them: tokens, milliseconds, each per the other; cache_n: tokens of the prompt known from before."""
    shares: Json = {"cache_n": t.cached_tokens}
    for name, n, seconds in (
        ("prompt", t.prompt_tokens, t.prompt_seconds),
        ("predicted", t.generated_tokens, t.generated_seconds),
    ):
        shares |= {
            f"{name}_n": n,
            f"{name}_ms": 1000 * seconds,
            f"{name}_per_token_ms": 1000 * seconds / n if n else 0.0,
            f"{name}_per_second": n / seconds if seconds else 0.0,
        }
    return shares


def usage(t: Timings) -> Json:
    prompt = t.prompt_tokens + t.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": t.generated_tokens,
        "total_tokens": prompt + t.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": t.cached_tokens},
    }


class Replies:
    """The objects of one answer, which share an id. chat: /v1/chat/completions rather than /v1/completions."""

    def __init__(self, tokenizer: Tokenizer, model: str, chat: bool, probabilities: bool, speech: Speech | None = None):
        """speech: tells the answer's parts apart."""
        self._tokenizer, self._chat, self._probabilities = tokenizer, chat, probabilities
        self._speech = speech or Speech()
        self._unsent: list[Drawn] = []
        self._offset = 0
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:24]}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": "ggufmill",
        }

    def whole(self, text: str, drawn: Sequence[Drawn], end: End) -> Json:
        """The answer in one object."""
        deltas = self._speech.hear(text) + self._speech.end()
        said: Json = {"message": _message(deltas)} if self._chat else {"text": text}
        kind = "chat.completion" if self._chat else "text_completion"
        return self._object(kind, said, drawn, end) | {"usage": usage(end.timings), "timings": timings(end.timings)}

    def begin(self) -> Json | None:
        """The first chunk of a stream; there is none for a completion."""
        return self._chunk({"role": "assistant", "content": ""}, ()) if self._chat else None

    def pieces(self, text: str, drawn: Sequence[Drawn]) -> list[Json]:
        """Chunks for a piece of text; none while it is not certain what it is."""
        self._unsent += drawn
        return self._chunks(self._speech.hear(text))

    def last(self, end: End) -> list[Json]:
        """What was held back, and the chunk that says why it ended."""
        chunks = self._chunks(self._speech.end())
        return [*chunks, self._chunk({}, [*self._unsent, *end.drawn], end) | {"timings": timings(end.timings)}]

    def _chunks(self, deltas: Sequence[Json]) -> list[Json]:
        """The first of them tells the probabilities of all tokens so far."""
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(delta, self._unsent))
            self._unsent = []
        return chunks

    def used(self, end: End) -> Json:
        """The chunk after the last, for those who asked for usage."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [], "usage": usage(end.timings), "timings": timings(end.timings)}

    def _chunk(self, delta: Json, drawn: Sequence[Drawn], end: End | None = None) -> Json:
        if self._chat:
            return self._object("chat.completion.chunk", {"delta": delta}, drawn, end)
        return self._object("text_completion", {"text": delta.get("content", "")}, drawn, end)

    def _object(self, kind: str, said: Json, drawn: Sequence[Drawn], end: End | None) -> Json:
        probabilities = None
        if self._probabilities and (drawn or end is not None):
            probabilities = {"content": [self._entry(d) for d in drawn]} if self._chat else self._columns(drawn)
        finish = _FINISH[end.reason] if end is not None else None
        if finish == "stop" and self._speech.called:
            finish = "tool_calls"
        choice = {"index": 0, **said, "logprobs": probabilities, "finish_reason": finish}
        return {**self._head, "object": kind, "choices": [choice]}

    def _entry(self, drawn: Drawn) -> Json:
        return {**self._named(drawn.token, drawn.logprob), "top_logprobs": [self._named(i, p) for i, p in drawn.top]}

    def _named(self, token: int, logprob: float) -> Json:
        piece = self._tokenizer.piece(token)
        return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}

    def _columns(self, drawn: Sequence[Drawn]) -> Json:
        """The older form. text_offset counts characters of the tokens' own texts."""
        tokens = [self._tokenizer.piece(d.token).decode("utf-8", "replace") for d in drawn]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        top = [{self._tokenizer.piece(i).decode("utf-8", "replace"): p for i, p in d.top} for d in drawn]
        return {"tokens": tokens, "token_logprobs": [d.logprob for d in drawn], "top_logprobs": top, "text_offset": offsets}


def _message(deltas: Sequence[Json]) -> Json:
    """The message that the chunks of a stream add up to."""
    texts = {key: "".join(delta.get(key, "") for delta in deltas) for key in ("content", "reasoning_content")}
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    message: Json = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
    if texts["reasoning_content"]:
        message["reasoning_content"] = texts["reasoning_content"]
    if calls:
        message["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
    return message
