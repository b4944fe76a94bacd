"""An answer as it comes, told apart: what was thought, what was said, and which functions are called."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from .tool_formats import Call, Calls, Thoughts

Json = dict[str, Any]


class Speech:
    """Takes text in pieces and gives deltas as OpenAI's API has them: `content`, `reasoning_content` or `tool_calls`.

    A text that no marks are known for goes through as it is. Where marks are known, space around the parts is dropped, and what
    may turn out to be a mark is held back; calls come in one piece when they are complete. What looks like a call and is none
    stays text.
    """

    def __init__(
        self,
        thoughts: Thoughts | None = None,
        calls: Calls | None = None,
        functions: Mapping[str, Any] | None = None,
        thinking: bool = False,
    ):
        """functions: name -> JSON schema of its parameters, of those that there are; thinking: it begins within thoughts."""
        self._thoughts, self._calls, self._functions = thoughts, calls, dict(functions or {})
        self._thinking, self._calling = thinking, False
        self._held, self._looked = "", 0
        self._fresh, self._said = True, False  # nothing of this part, or nothing at all, has been said yet
        self.called = 0  # functions so far

    def hear(self, text: str) -> list[Json]:
        """What is certain after a piece of text; often nothing."""
        self._held += text
        return self._deltas(last=False)

    def end(self) -> list[Json]:
        """The rest, when the answer has ended."""
        return self._deltas(last=True)

    def _deltas(self, last: bool) -> list[Json]:
        out: list[Json] = []
        while self._call(out, last) if self._calling else self._say(out, last):
            pass
        return out

    def _say(self, out: list[Json], last: bool) -> bool:
        """Gives out text up to the next mark. Whether there was one."""
        anywhere, first = self._marks()
        held = self._held
        if not anywhere and not first:
            self._tell(out, len(held), strip=False)
            return False
        start = len(held) - len(held.lstrip())
        found = [(at, -len(mark), mark) for mark in anywhere if (at := held.find(mark)) >= 0]
        found += [(start, -len(mark), mark) for mark in first if held.startswith(mark, start)]
        doubtful = len(held)
        if not last:
            begun = any(len(mark) > len(held) - start and mark.startswith(held[start:]) for mark in first)
            doubtful = start if begun else _partial(held, anywhere)
        if not found or doubtful <= min(found)[0]:
            self._tell(out, doubtful, strip=not last or self._thinking)
            return False
        at, _, mark = min(found)
        self._tell(out, at, strip=True)
        if self._calls is not None and not self._thinking and mark in self._calls.begins:
            self._calling, self._looked = True, 0
            return True
        self._held = self._held.lstrip().removeprefix(mark)
        if self._thoughts is not None and mark in (self._thoughts.begin, self._thoughts.end):
            self._thinking = mark == self._thoughts.begin and not self._thinking
        self._fresh = True
        return True

    def _marks(self) -> tuple[list[str], list[str]]:
        """Those that count now: anywhere in the text, or at its beginning only."""
        thoughts, calls = self._thoughts, self._calls
        if self._thinking:
            return ([thoughts.end] if thoughts is not None else []), []
        anywhere, first = [], []
        if thoughts is not None:
            anywhere += thoughts.left_out
            (anywhere if thoughts.again else first).append(thoughts.begin)
        if calls is not None:
            (first if calls.bare else anywhere).extend(calls.begins)
        return anywhere, [] if self._said else first

    def _tell(self, out: list[Json], length: int, strip: bool) -> None:
        """Gives out so much of what is held. strip: not the space at its end, which stays."""
        text = self._held[:length]
        if strip:
            text = text.rstrip()
        self._held = self._held[len(text) :]
        if self._fresh and (self._thoughts is not None or self._calls is not None):
            text = text.lstrip()
        if not text:
            return
        self._fresh = False
        self._said = self._said or not self._thinking
        key = "reasoning_content" if self._thinking else "content"
        if out and key in out[-1]:
            out[-1][key] += text
        else:
            out.append({key: text})

    def _call(self, out: list[Json], last: bool) -> bool:
        """Gives out the calls that are complete. Whether there is more to look at."""
        assert self._calls is not None
        end = self._calls.end
        while end and (at := self._held.find(end, self._looked)) >= 0:
            self._looked = at + len(end)
            calls = self._calls.read(self._held[: self._looked], self._functions)
            if calls is not None:
                self._held, self._calling = self._held[self._looked :], False
                self._tell_calls(out, calls)
                return True
        self._looked = max(self._looked, len(self._held) - len(end) + 1)
        if last:
            calls = self._calls.read(self._held, self._functions)
            if calls is not None:
                self._held = ""
                self._tell_calls(out, calls)
            self._calling = False
            self._tell(out, len(self._held), strip=False)
        return False

    def _tell_calls(self, out: list[Json], calls: Iterable[Call]) -> None:
        entries = []
        for call in calls:
            # Some templates insist on nine letters or digits.
            id, function = call.id or secrets.token_hex(5)[:9], {"name": call.name, "arguments": call.arguments}
            entries.append({"index": self.called, "id": id, "type": "function", "function": function})
            self.called += 1
        out.append({"tool_calls": entries})
        self._fresh = self._said = True


def _partial(text: str, marks: Iterable[str]) -> int:
    """Where the end of a text may be the beginning of a mark; its length if it is not."""
    lengths = (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
    return len(text) - max(lengths, default=0)
