"""Builds the JSON objects that clients get: OpenAI's API, with the `timings` of llama-server in addition."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import field, fields

from ....data_classes import dataclass
from ...generation.generate import Timings
from ...generation.sampling import SampledToken
from ...text.tokenizer import Tokenizer
from ..requests.checks import JsonObject
from ..tasks import EndEvent, Event, PromptEvent, TextEvent
from ..tool_calls.stream_parser import StreamParser

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


def total_timings(timings: Sequence[Timings], n_prompts: int) -> Timings:
    """The sum over the answers to some prompts, the same number to each; a prompt counts as its first answer read it."""
    total = Timings(**{each.name: sum(getattr(t, each.name) for t in timings) for each in fields(Timings)})
    first = timings[:: len(timings) // n_prompts]
    total.prompt_tokens, total.cached_tokens = sum(t.prompt_tokens for t in first), sum(t.cached_tokens for t in first)
    return total


@dataclass
class Generated:
    """What a task has generated so far. prompt_scores: of the tokens of its prompt, if they were asked for."""

    pieces: list[str] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)
    prompt_scores: list[SampledToken] = field(default_factory=list)
    end: EndEvent = field(default_factory=EndEvent)

    def add(self, event: Event) -> None:
        """Takes the next event of the task."""
        if isinstance(event, PromptEvent):
            self.prompt_scores = event.scores
            return
        self.sampled += event.sampled
        if isinstance(event, TextEvent):
            self.pieces.append(event.text)
        else:
            self.end = event

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def mean_logprob(self) -> float:
        """The mean over all tokens, that which ended the answer included."""
        tokens = [*self.sampled, *filter(None, [self.end.ending])]
        return sum(each.logprob for each in tokens) / len(tokens) if tokens else -math.inf


@dataclass(frozen=True)
class Prompt:
    """A prompt of a request. text: what is returned of it with `echo`; begins_with_bos: and that is not part of the text."""

    ids: list[int]
    text: str = ""
    begins_with_bos: bool = False


class _Choice:
    """One of the choices of a reply, as it is generated."""

    def __init__(self, index: int, prompt: Prompt, parser: StreamParser):
        self.index, self.prompt, self.parser = index, prompt, parser
        self.unsent: list[SampledToken] = []
        self.text_offset = 0


class ReplyBuilder:
    """Builds the objects of one reply, which share an id: either one object or the chunks of a stream."""

    last_line = b"data: [DONE]\n\n"

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        prompts: Sequence[Prompt],
        parser: StreamParser | None = None,
        *,
        n: int = 1,
        logprobs: bool = False,
        echo: bool = False,
    ):
        """parser: of a chat, separates reasoning and tool calls from the content; None: a completion. n: choices per prompt."""
        self._tokenizer, self._chat, self._logprobs, self._echo = tokenizer, parser is not None, logprobs, echo
        self._prompts, self._n = prompts, n
        plain = StreamParser()
        self._choices = [_Choice(i, prompts[i // n], (parser or plain).fresh()) for i in range(n * len(prompts))]
        self._common_fields = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex[:24]}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": "ggufmill",
        }

    def complete(self, answers: Sequence[Generated]) -> JsonObject:
        """The whole reply as one object. answers: the same number to each prompt; if more than n, the most probable ones are
        returned."""
        per_prompt, choices = len(answers) // len(self._prompts), []
        for choice in self._choices:
            first = choice.index // self._n * per_prompt
            group = answers[first : first + per_prompt]
            if per_prompt > self._n:
                group = sorted(group, key=lambda answer: -answer.mean_logprob)
            choices.append(self._complete_choice(choice, group[choice.index % self._n], answers[first].prompt_scores))
        timings = total_timings([answer.end.timings for answer in answers], len(self._prompts))
        kind = "chat.completion" if self._chat else "text_completion"
        counts = {"usage": usage_object(timings), "timings": timings_object(timings)}
        return {**self._common_fields, "object": kind, "choices": choices, **counts}

    def _complete_choice(self, choice: _Choice, answer: Generated, prompt_scores: Sequence[SampledToken]) -> JsonObject:
        if self._chat:
            deltas = choice.parser.feed(answer.text) + choice.parser.finish(answer.end.was_cut)
            return self._choice(choice, {"message": _merge_deltas(deltas)}, answer.sampled, answer.end)
        if not self._echo:
            return self._choice(choice, {"text": answer.text}, answer.sampled, answer.end)
        echoed = self._echoed_choice(choice, prompt_scores)
        generated = self._choice(choice, {"text": answer.text}, answer.sampled, answer.end)
        logprobs = generated["logprobs"]
        if logprobs is not None:
            logprobs = {key: [*echoed["logprobs"][key], *values] for key, values in logprobs.items()}
        return {**generated, "text": echoed["text"] + generated["text"], "logprobs": logprobs}

    def first_chunks(self) -> list[JsonObject]:
        """The chunks that begin a stream: the role of each message, or the prompts that are echoed."""
        if self._chat:
            first = {"delta": {"role": "assistant", "content": ""}}
            return [self._chunk(self._choice(choice, first)) for choice in self._choices]
        if self._echo and not self._logprobs:
            return [self._chunk(self._echoed_choice(choice)) for choice in self._choices]
        return []

    def chunks(self, index: int, event: Event) -> list[JsonObject]:
        """The chunks for an event of choice `index`; none while its text may be part of a tag."""
        choice = self._choices[index]
        if isinstance(event, PromptEvent):
            first = index // self._n * self._n
            return [self._chunk(self._echoed_choice(c, event.scores)) for c in self._choices[first : first + self._n]]
        choice.unsent += event.sampled
        if isinstance(event, TextEvent):
            return self._delta_chunks(choice, choice.parser.feed(event.text))
        chunks = self._delta_chunks(choice, choice.parser.finish(event.was_cut))
        last = {"delta": {}} if self._chat else {"text": ""}
        chunk = self._chunk(self._choice(choice, last, choice.unsent, event))
        return [*chunks, chunk | {"timings": timings_object(event.timings)}]

    def usage_chunk(self, ends: Sequence[EndEvent]) -> JsonObject:
        """The chunk after the last one, for clients that set stream_options.include_usage. ends: of all choices."""
        timings = total_timings([end.timings for end in ends], len(self._prompts))
        counts = {"usage": usage_object(timings), "timings": timings_object(timings)}
        return {**self._chunk(None), **counts}

    def _delta_chunks(self, choice: _Choice, deltas: Sequence[JsonObject]) -> list[JsonObject]:
        """A chunk for each delta; the first one has the log probabilities of all tokens so far."""
        chunks = []
        for delta in deltas:
            answer = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
            chunks.append(self._chunk(self._choice(choice, answer, choice.unsent)))
            choice.unsent = []
        return chunks

    def _chunk(self, choice: JsonObject | None) -> JsonObject:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._common_fields, "object": kind, "choices": [] if choice is None else [choice]}

    def _choice(
        self, choice: _Choice, answer: JsonObject, sampled: Sequence[SampledToken] = (), end: EndEvent | None = None
    ) -> JsonObject:
        """An entry of `choices`."""
        logprobs = None
        if self._echo and end is not None and end.ending is not None:  # every token that was sampled has an entry
            sampled = [*sampled, end.ending]
        if self._logprobs and (sampled or end is not None):
            if self._chat:
                logprobs = {"content": [self._logprob_entry(s) for s in sampled]}
            else:
                logprobs = self._token_lists([(s.token, s) for s in sampled], self._own_offsets(choice, sampled))
        finish_reason = _FINISH_REASONS[end.reason] if end is not None else None
        if finish_reason == "stop" and choice.parser.n_calls:
            finish_reason = "tool_calls"
        return {"index": choice.index, **answer, "logprobs": logprobs, "finish_reason": finish_reason}

    def _echoed_choice(self, choice: _Choice, scores: Sequence[SampledToken] = ()) -> JsonObject:
        """An entry of `choices` with the prompt. scores: of its tokens from the second one on."""
        prompt, logprobs = choice.prompt, None
        if self._logprobs:
            pairs = zip(prompt.ids, [None, *scores], strict=True)
            logprobs = self._token_lists(pairs, self._prompt_offsets(prompt))
        choice.text_offset = len(prompt.text)
        return {"index": choice.index, "text": prompt.text, "logprobs": logprobs, "finish_reason": None}

    def _prompt_offsets(self, prompt: Prompt) -> list[int]:
        """Where the tokens of a prompt begin in its text."""
        stream, offsets, length = self._tokenizer.stream(skip_special=False, begins_text=True), [], 0
        for i, token in enumerate(prompt.ids):
            offsets.append(min(length, len(prompt.text)))
            if i or not prompt.begins_with_bos:
                length += len(stream.feed(token))
        return offsets

    def _own_offsets(self, choice: _Choice, sampled: Sequence[SampledToken]) -> list[int]:
        """Where generated tokens begin, counted in the characters of the tokens' own texts."""
        offsets = []
        for each in sampled:
            offsets.append(choice.text_offset)
            choice.text_offset += len(self._text(each.token))
        return offsets

    def _token_lists(self, tokens: Iterable[tuple[int, SampledToken | None]], offsets: list[int]) -> JsonObject:
        """The log probabilities of /v1/completions; None of a token: it has none."""
        pairs = list(tokens)
        return {
            "tokens": [self._text(token) for token, _ in pairs],
            "token_logprobs": [None if scored is None else scored.logprob for _, scored in pairs],
            "top_logprobs": [None if scored is None else self._top_object(scored) for _, scored in pairs],
            "text_offset": offsets,
        }

    def _top_object(self, scored: SampledToken) -> JsonObject:
        """The most probable tokens and the token itself; of tokens with the same text the most probable one."""
        result: JsonObject = {}
        for token, logprob in [*scored.top, (scored.token, scored.logprob)]:
            result.setdefault(self._text(token), logprob)
        return result

    def _text(self, token: int) -> str:
        return self._tokenizer.piece(token).decode("utf-8", "replace")

    def _logprob_entry(self, sampled: SampledToken) -> JsonObject:
        top = [self._token_object(token, logprob) for token, logprob in sampled.top]
        return {**self._token_object(sampled.token, sampled.logprob), "top_logprobs": top}

    def _token_object(self, token: int, logprob: float) -> JsonObject:
        piece = self._tokenizer.piece(token)
        return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}


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
