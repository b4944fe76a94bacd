"""Calibration text that a model writes itself: sampled from its own distribution, many sequences at a time.

Each document is drawn with random numbers of its own and does not depend on the others, so that neither the number of those
that are written together nor an interruption changes the file. What a document begins with takes turns: the control token that
begins texts, a random token, the beginning of a text in one of many languages, and for a model with a chat template an empty
user's turn, which it fills (arXiv:2406.08464) and then answers. Sampling at temperature 1 keeps the model's own frequencies
(arXiv:2305.17888).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..data_classes import dataclass
from ..errors import MillError, PlanError
from ..formats.file_range import read_text
from ..jobs.code_digest import code_digest
from ..runtime import Model, Session
from ..runtime.text.chat import find_template
from ..runtime.text.vocabulary import NORMAL
from .texts import OWN_COLUMN

SELF = "self"  # names the text where one is asked for
TOKENS, LENGTH, BATCH = 51_200, 512, 32  # in all, of a document at most, documents at a time
_BEGINNINGS = (
    *("The", "In", "Le", "Der", "El", "Il", "O", "De", "Det", "Na", "Ja", "Ez", "Bu", "Các", "Ang", "Ο", "Это", "У", "של"),
    *("في", "यह", "এই", "இந்த", "ที่", "这", "この", "이", "#include", "def", "import", "<", "{", "1.", "Question:", "Theorem"),
)
_MARK = "\x02text\x03"  # stands for the user's text in a rendered template


def own_tokens(tokens: int) -> int:
    """How many tokens to write for so many to be read: a text may be cut into fewer than it was written in."""
    return tokens + tokens // 16


@dataclass(frozen=True)
class Beginnings:
    """What documents begin with, in turn: token ids."""

    model: Model

    @cached_property
    def turn(self) -> tuple[list[int], list[int]] | None:
        """The tokens around a user's text, up to where the answer begins; None without a usable chat template."""
        tokenizer = self.model.tokenizer
        try:
            template = find_template(self.model.metadata)
            text = template.render([{"role": "user", "content": _MARK}])
        except PlanError:
            return None
        before, mark, after = text.partition(_MARK)
        if not mark:
            return None
        return tuple(tokenizer.encode(part, add_special=False, parse_special=True) for part in (before, after))  # type: ignore[return-value]

    @cached_property
    def _ordinary(self) -> np.ndarray:
        return np.flatnonzero(self.model.tokenizer.vocabulary.token_types == NORMAL)

    def of(self, number: int, draw: np.random.Generator) -> tuple[list[int], list[int]]:
        """(the first tokens of the document of this number, the tokens after an ended user's turn)."""
        tokenizer = self.model.tokenizer
        kinds = 4 if self.turn is not None else 3
        start = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        kind = number % kinds
        if kind == 3 and self.turn is not None:
            first, after = self.turn
            return (first if first[:1] == start else [*start, *first]), after
        ends = [tokenizer.eos] if tokenizer.eos is not None else []
        if kind == 0 and (start or ends):
            return start or ends, []
        if kind == 1 or kind == 0:
            return [*start, int(draw.choice(self._ordinary))], []
        beginning = _BEGINNINGS[number // kinds % len(_BEGINNINGS)]
        return [*start, *tokenizer.encode(beginning, add_special=False)], []


@dataclass
class _Document:
    number: int
    draw: np.random.Generator
    session: Session
    following: list[int]  # tokens to feed next
    after: list[int]
    tokens: list[int] = field(default_factory=list)

    def take(self, logits: np.ndarray, ends: frozenset[int], length: int) -> bool:
        """Draws the next token from logits float32 [n_vocab]; returns whether the document is finished."""
        shifted = logits.astype(np.float64) - logits.max()
        sums = np.cumsum(np.exp(shifted))
        token = int(min(np.searchsorted(sums, self.draw.random() * sums[-1], side="right"), len(sums) - 1))
        if token in ends:
            if not self.after:
                return True
            self.following, self.after = self.after, []
        else:
            self.following = [token]
        self.tokens += self.following
        return len(self.tokens) >= length


def fingerprint(model: Model, tokens: int, seed: int) -> str:
    """A digest of all that decides the text."""
    about = code_digest(), model.source.identity, tokens, seed, LENGTH, model.settings.cache_choices
    return xxhash.xxh3_64_hexdigest(repr(about).encode())


def is_written(path: Path, digest: str) -> bool:
    """Whether the file is the text with this digest. Raises PlanError for a file that no model wrote."""
    if not path.exists():
        return False
    if path.is_file():
        with path.open("rb") as file:
            match = re.match(rb'\{"of": "(\w{1,32})"', file.read(64))
        if match is not None:
            return match[1].decode() == digest
    raise PlanError(f"{path} is where the text goes that the model writes (-f self), and is something else: remove it")


def write_own_text(
    model: Model,
    path: Path,
    tokens: int = TOKENS,
    seed: int = 0,
    batch: int = BATCH,
    on_tokens: Callable[[int, int], None] | None = None,
) -> None:
    """Has a model write about so many tokens to a .jsonl file, a document a line. What an interrupted call had finished is in
    PATH.part, from which the next one continues, to the same bytes.

    seed: of the random numbers; batch: documents that are written together; on_tokens: called with tokens done and in all.
    Raises PlanError for a model that predicts no tokens, MillError for predictions that are not finite.
    """
    if not model.has_head:
        raise PlanError(f"{model.source.path}: {model.graph.architecture} predicts no tokens: it cannot write a text (-f self)")
    digest, part = fingerprint(model, tokens, seed), path.with_name(path.name + ".part")
    lines = _finished(part, digest)
    done = sum(json.loads(line)["tokens"] for line in lines)
    length = min(LENGTH, model.n_ctx)
    beginnings, ends = Beginnings(model), model.tokenizer.eog_ids
    running: list[_Document] = []
    waiting: dict[int, str] = {}  # finished before those in front of them
    started = written = len(lines)
    with part.open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(lines)
        while done < tokens:
            ahead = done + sum(json.loads(line)["tokens"] for line in waiting.values())
            while len(running) < batch and ahead + length * len(running) < tokens:
                running.append(_begin(model, beginnings, started, seed, length))
                started += 1
            logits = model.feed([(each.session, each.following) for each in running], generated=False)
            logits[:, model.tokenizer.vocabulary.padding] = -np.inf
            if not np.isfinite(logits.max(axis=1)).all():  # NaN or +infinity
                raise model.explain_nonfinite(running[int(np.argmin(np.isfinite(logits.max(axis=1))))].tokens)
            finished = [each for each, row in zip(running, logits, strict=True) if each.take(row, ends, length)]
            running = [each for each in running if each not in finished]
            waiting |= {each.number: _line(model, each, digest) for each in finished}
            while written in waiting and done < tokens:
                line = waiting.pop(written)
                out.write(line)
                out.flush()
                done += json.loads(line)["tokens"]
                written += 1
            if on_tokens is not None:
                on_tokens(min(done, tokens), tokens)
    os.replace(part, path)


def _begin(model: Model, beginnings: Beginnings, number: int, seed: int, length: int) -> _Document:
    draw = np.random.default_rng([seed, number])
    first, after = beginnings.of(number, draw)
    first = first[: length - 1]
    return _Document(number, draw, model.session(length), first, after, list(first))


def _line(model: Model, document: _Document, digest: str) -> str:
    text = model.tokenizer.decode(document.tokens, skip_special=False)
    row: dict[str, Any] = {"of": digest, "tokens": len(document.tokens), OWN_COLUMN: text}
    return json.dumps(row, ensure_ascii=False) + "\n"


def _finished(part: Path, digest: str) -> list[str]:
    """The whole lines of an interrupted call with the same result; none of another."""
    if not part.exists():
        return []
    lines = read_text(part).splitlines(keepends=True)
    try:
        return [line for line in lines if line.endswith("\n") and json.loads(line)["of"] == digest]
    except (ValueError, KeyError, TypeError):
        raise MillError(f"{part} is not of a text that a model writes: remove it") from None
