"""Builds the JSON objects that clients get: OpenAI's API, with the `timings` of llama-server in addition."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from ..generation.generate import Timings
from ..generation.sampling import SampledToken
from ..text.tokenizer import Tokenizer
from .engine import EndEvent
from .requests import JsonObject
from .stream_parser import StreamParser

# reason of a Generation -> finish_reason
_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


def timings_object(timings: Timings) -> JsonObject:
    """The timings of llama-server: tokens, milliseconds, and one per the other; cache_n: tokens of the prompt in the cache."""
    result: JsonObject = {"cache_n": timings.cached_tokens}
    for name, n, seconds in (
        ("prompt", timings.prompt_tokens, timings.prompt_seconds),
        ("predicted", timings.generated_tokens, timings.generated_seconds),
    ):
        result |= {
            f"{name}_n": n,
            f"{name}_ms": 1000 * seconds,
            f"{name}_per_token_ms": 1000 * seconds / n if n else 0.0,
            f"{name}_per_second": n / seconds if seconds else 0.0,
        }
    return result


def usage_object(timings: Timings) -> JsonObject:
    """The `usage` of OpenAI's API."""
    n_prompt = timings.prompt_tokens + timings.cached_tokens
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": timings.generated_tokens,
        "total_tokens": n_prompt + timings.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": timings.cached_tokens},
    }


class ReplyBuilder:
    """Builds the objects of one answer, which share an id: either one object or the chunks of a stream."""

    def __init__(self, tokenizer: Tokenizer, model: str, chat: bool, logprobs: bool, parser: StreamParser | None = None):
        """chat: /v1/chat/completions, else /v1/completions; parser: separates reasoning and tool calls from the content."""
        self._tokenizer, self._chat, self._logprobs = tokenizer, chat, logprobs
        self._parser = parser or StreamParser()
        self._unsent: list[SampledToken] = []
        self._text_offset = 0
        self._common_fields = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:24]}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": "ggufmill",
        }

    def complete(self, text: str, sampled: Sequence[SampledToken], end: EndEvent) -> JsonObject:
        """The whole answer as one object."""
        deltas = self._parser.feed(text) + self._parser.finish()
        answer: JsonObject = {"message": _merge_deltas(deltas)} if self._chat else {"text": text}
        reply = self._object("chat.completion" if self._chat else "text_completion", answer, sampled, end)
        return reply | {"usage": usage_object(end.timings), "timings": timings_object(end.timings)}

    def first_chunk(self) -> JsonObject | None:
        """The chunk that begins a stream; None for /v1/completions, which has no such chunk."""
        return self._chunk({"role": "assistant", "content": ""}, ()) if self._chat else None

    def text_chunks(self, text: str, sampled: Sequence[SampledToken]) -> list[JsonObject]:
        """The chunks for a piece of text; none while it may be part of a tag."""
        self._unsent += sampled
        return self._chunks(self._parser.feed(text))

    def last_chunks(self, end: EndEvent) -> list[JsonObject]:
        """The chunks for the rest of the text, and the one with the finish_reason."""
        chunks = self._chunks(self._parser.finish())
        last = self._chunk({}, [*self._unsent, *end.sampled], end) | {"timings": timings_object(end.timings)}
        return [*chunks, last]

    def usage_chunk(self, end: EndEvent) -> JsonObject:
        """The chunk after the last one, for clients that set stream_options.include_usage."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        counts = {"usage": usage_object(end.timings), "timings": timings_object(end.timings)}
        return {**self._common_fields, "object": kind, "choices": [], **counts}

    def _chunks(self, deltas: Sequence[JsonObject]) -> list[JsonObject]:
        """A chunk for each delta; the first one has the log probabilities of all tokens so far."""
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(delta, self._unsent))
            self._unsent = []
        return chunks

    def _chunk(self, delta: JsonObject, sampled: Sequence[SampledToken], end: EndEvent | None = None) -> JsonObject:
        if self._chat:
            return self._object("chat.completion.chunk", {"delta": delta}, sampled, end)
        return self._object("text_completion", {"text": delta.get("content", "")}, sampled, end)

    def _object(self, kind: str, answer: JsonObject, sampled: Sequence[SampledToken], end: EndEvent | None) -> JsonObject:
        logprobs = None
        if self._logprobs and (sampled or end is not None):
            logprobs = {"content": [self._logprob_entry(s) for s in sampled]} if self._chat else self._legacy_logprobs(sampled)
        finish_reason = _FINISH_REASONS[end.reason] if end is not None else None
        if finish_reason == "stop" and self._parser.n_calls:
            finish_reason = "tool_calls"
        choice = {"index": 0, **answer, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._common_fields, "object": kind, "choices": [choice]}

    def _logprob_entry(self, sampled: SampledToken) -> JsonObject:
        top = [self._token_object(token, logprob) for token, logprob in sampled.top]
        return {**self._token_object(sampled.token, sampled.logprob), "top_logprobs": top}

    def _token_object(self, token: int, logprob: float) -> JsonObject:
        piece = self._tokenizer.piece(token)
        return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}

    def _legacy_logprobs(self, sampled: Sequence[SampledToken]) -> JsonObject:
        """The form of /v1/completions. text_offset counts the characters of the tokens' own texts."""
        tokens = [self._tokenizer.piece(s.token).decode("utf-8", "replace") for s in sampled]
        offsets = []
        for token in tokens:
            offsets.append(self._text_offset)
            self._text_offset += len(token)
        top = [{self._tokenizer.piece(i).decode("utf-8", "replace"): p for i, p in s.top} for s in sampled]
        return {"tokens": tokens, "token_logprobs": [s.logprob for s in sampled], "top_logprobs": top, "text_offset": offsets}


def _merge_deltas(deltas: Sequence[JsonObject]) -> JsonObject:
    """The message that the deltas of a stream add up to."""
    texts = {key: "".join(delta.get(key, "") for delta in deltas) for key in ("content", "reasoning_content")}
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    message: JsonObject = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
    if texts["reasoning_content"]:
        message["reasoning_content"] = texts["reasoning_content"]
    if calls:
        message["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
    return message
