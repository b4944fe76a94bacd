"""Splits an answer, as it is generated, into reasoning, content and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from ..requests.checks import JsonObject
from .tool_formats import ReasoningFormat, ToolCall, ToolFormat


class StreamParser:
    """Takes text piece by piece and returns deltas of OpenAI's API: `content`, `reasoning_content` or `tool_calls`.

    Without formats all text is content, unchanged. With a format, white space around the parts is removed, and text that may be
    the beginning of a tag is withheld until this is certain. A tool call is returned when it is complete; text that begins like
    a call but cannot be parsed is content, unless the answer was cut: half a call is of no use to anybody.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
        functions: Mapping[str, Any] | None = None,
        in_reasoning: bool = False,
    ):
        """functions: name -> JSON schema of its parameters; in_reasoning: the prompt ends with the start tag of reasoning."""
        self._reasoning, self._tools, self._functions = reasoning, tools, dict(functions or {})
        self._in_reasoning, self._in_call = in_reasoning, False
        self._buffer, self._searched = "", 0  # text not returned yet; characters of it that hold no end of a call
        self._at_part_start, self._has_answer = True, False  # no text of this part returned yet; some content or call returned
        self.n_calls = 0  # tool calls returned so far
        self._cut = False

    def fresh(self) -> StreamParser:
        """A parser for another answer to the same prompt, before this one has been fed."""
        return StreamParser(self._reasoning, self._tools, self._functions, self._in_reasoning)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How calls are written; None where none are looked for."""
        return self._tools

    @property
    def reasoning_end(self) -> str:
        """The tag that ends the reasoning in which the answer begins; '' where it does not begin in one."""
        return self._reasoning.end_tag if self._reasoning is not None and self._in_reasoning else ""

    def feed(self, text: str) -> list[JsonObject]:
        """The deltas that are certain after a piece of text; often none."""
        self._buffer += text
        return self._parse(final=False)

    def finish(self, cut: bool = False) -> list[JsonObject]:
        """The deltas of the rest, when the answer has ended; cut: by a limit, in the middle of what the model was writing."""
        self._cut = cut
        return self._parse(final=True)

    def _parse(self, final: bool) -> list[JsonObject]:
        deltas: list[JsonObject] = []
        while self._parse_call(deltas, final) if self._in_call else self._parse_text(deltas, final):
            pass
        return deltas

    def _parse_text(self, deltas: list[JsonObject], final: bool) -> bool:
        """Appends the text up to the next tag. Returns whether there was one."""
        anywhere, at_start = self._active_tags()
        buffer = self._buffer
        if not anywhere and not at_start:
            self._append_text(deltas, len(buffer), strip=False)
            return False
        start = len(buffer) - len(buffer.lstrip())
        # The first tag; of tags at the same position the longest.
        matches = [(position, -len(tag), tag) for tag in anywhere if (position := buffer.find(tag)) >= 0]
        matches += [(start, -len(tag), tag) for tag in at_start if buffer.startswith(tag, start)]
        n_certain = len(buffer)
        if not final:
            incomplete = any(len(tag) > len(buffer) - start and tag.startswith(buffer[start:]) for tag in at_start)
            n_certain = start if incomplete else _partial_tag_position(buffer, anywhere)
        if not matches or n_certain <= min(matches)[0]:
            self._append_text(deltas, n_certain, strip=not final or self._in_reasoning)
            return False
        position, _, tag = min(matches)
        self._append_text(deltas, position, strip=True)
        if self._tools is not None and not self._in_reasoning and tag in self._tools.start_tags:
            self._in_call, self._searched = True, 0
            return True
        self._buffer = self._buffer.lstrip().removeprefix(tag)
        if self._reasoning is not None and tag in (self._reasoning.start_tag, self._reasoning.end_tag):
            self._in_reasoning = tag == self._reasoning.start_tag and not self._in_reasoning
        self._at_part_start = True
        return True

    def _active_tags(self) -> tuple[list[str], list[str]]:
        """(tags recognised anywhere in the text, tags recognised at the beginning of the answer only)"""
        reasoning, tools = self._reasoning, self._tools
        if self._in_reasoning:
            return ([reasoning.end_tag] if reasoning is not None else []), []
        anywhere, at_start = [], []
        if reasoning is not None:
            anywhere += reasoning.removed_tags
            (anywhere if reasoning.anywhere else at_start).append(reasoning.start_tag)
        if tools is not None:
            (at_start if tools.untagged else anywhere).extend(tools.start_tags)
        return anywhere, [] if self._has_answer else at_start

    def _append_text(self, deltas: list[JsonObject], length: int, strip: bool) -> None:
        """Appends the first `length` characters of the buffer. strip: trailing white space stays in the buffer."""
        text = self._buffer[:length]
        if strip:
            text = text.rstrip()
        self._buffer = self._buffer[len(text) :]
        if self._at_part_start and (self._reasoning is not None or self._tools is not None):
            text = text.lstrip()
        if not text:
            return
        self._at_part_start = False
        self._has_answer = self._has_answer or not self._in_reasoning
        key = "reasoning_content" if self._in_reasoning else "content"
        if deltas and key in deltas[-1]:
            deltas[-1][key] += text
        else:
            deltas.append({key: text})

    def _parse_call(self, deltas: list[JsonObject], final: bool) -> bool:
        """Appends the calls of a block if it is complete. Returns whether there may be more to parse."""
        assert self._tools is not None
        end_tag = self._tools.end_tag
        while end_tag and (position := self._buffer.find(end_tag, self._searched)) >= 0:
            self._searched = position + len(end_tag)
            calls = self._tools.parse(self._buffer[: self._searched], self._functions)
            if calls is not None:
                self._buffer, self._in_call = self._buffer[self._searched :], False
                self._append_calls(deltas, calls)
                return True
        self._searched = max(self._searched, len(self._buffer) - len(end_tag) + 1)
        if final:
            # Some models leave the last end tag out; but of a call that was cut before it, names and arguments may be cut, too.
            calls = None if self._cut and end_tag else self._tools.parse(self._buffer, self._functions)
            if calls is not None:
                self._buffer = ""
                self._append_calls(deltas, calls)
            elif self._cut and not self._tools.untagged:  # without a tag it may have been JSON that was asked for
                self._buffer = ""
            self._in_call = False
            self._append_text(deltas, len(self._buffer), strip=False)
        return False

    def _append_calls(self, deltas: list[JsonObject], calls: Iterable[ToolCall]) -> None:
        entries = []
        for call in calls:
            # Some templates accept only ids of nine letters or digits.
            id, function = call.id or secrets.token_hex(5)[:9], {"name": call.name, "arguments": call.arguments}
            entries.append({"index": self.n_calls, "id": id, "type": "function", "function": function})
            self.n_calls += 1
        deltas.append({"tool_calls": entries})
        self._at_part_start = self._has_answer = True


def _partial_tag_position(text: str, tags: Iterable[str]) -> int:
    """Position of the longest suffix that is an incomplete tag; the length of the text if there is none."""
    lengths = (n for tag in tags for n in range(1, len(tag)) if text.endswith(tag[:n]))
    return len(text) - max(lengths, default=0)
