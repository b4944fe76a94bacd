"""Grammars that a text has to follow: JSON schemas, GBNF, Lark. `llguidance` makes masks over the vocabulary of them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data_classes import dataclass
from ...errors import PlanError, installation
from ...formats.metadata_values import UNUSED
from ..text.tokenizer import Tokenizer
from .gbnf import gbnf_to_lark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_LENGTH = 1 << 16  # characters of a grammar or schema: compiling takes about a second at most
# Between the parts of a JSON text: unbounded white space would let a model go on for ever without an error.
_JSON_OPTIONS = {"whitespace_pattern": r"[ ]?|\n[ \t]{0,20}"}
# Work of the lexer and the parser for one token; a mask then takes some hundredths of a second at most, or is an error.
_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 20_000, "max_items_in_row": 2_000}
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:[^:])")
_COMPILING = threading.Lock()  # the table of a vocabulary is built once


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar; an argument of `generate`, for any number of texts at the same time.

    awaited    the text is free up to the first occurrence of this; b'': the grammar holds for all of it
    inclusive  the grammar holds from there on; else for what follows
    """

    _matcher: LLMatcher
    _tokenizer: Tokenizer
    awaited: bytes = b""
    inclusive: bool = False

    def start(self) -> GrammarMask:
        """The mask of a text that begins."""
        return GrammarMask(self._matcher.deep_copy(), self._tokenizer, self.awaited, self.inclusive)


class GrammarMask:
    """Excludes the tokens with which a text would leave its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer, awaited: bytes, inclusive: bool):
        self._matcher, self._tokenizer, self._awaited, self._inclusive = matcher, tokenizer, awaited, inclusive
        self._n_read, self._before = 0, b""

    def __call__(self, tokens: Sequence[int], logits: np.ndarray) -> np.ndarray | None:
        """The logits, float32 [n_vocab], with -inf for tokens that cannot follow; None when nothing can.

        tokens: all that were generated so far, those of earlier calls included. Raises PlanError when the grammar takes too
        much work, and for one that wants texts that the vocabulary cannot write.
        """
        for token in tokens[self._n_read :]:
            self._read(token)
        self._n_read = len(tokens)
        if self._awaited:
            return logits
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise PlanError(f"the grammar cannot be followed: {_in_words(self._matcher.get_error())}")
        if self._matcher.is_stopped():
            return None
        allowed = np.zeros(len(logits), bool)
        bits = np.unpackbits(mask, bitorder="little")[: len(logits)]
        allowed[: len(bits)] = bits
        return np.where(allowed, logits, np.float32(-np.inf)) if allowed.any() else None

    def _read(self, token: int) -> None:
        if not self._awaited:
            self._matcher.consume_token(token)
            return
        piece = self._tokenizer.piece(token)
        self._before = self._before[-len(self._awaited) :] + piece
        position = self._before.find(self._awaited)
        if position < 0:
            return
        rest = self._before[position:] if self._inclusive else self._before[position + len(self._awaited) :].lstrip()
        # Which tokens a text is made of makes no difference to the matcher, but for control tokens.
        self._matcher.consume_tokens(
            [token] if rest == piece else _token_table(self._tokenizer).greedy_tokenize(rest.decode("utf-8", "replace"))
        )
        self._awaited = b""


def compile_grammar(tokenizer: Tokenizer, text: str, starts_after: str = "", starts_at: str = "") -> Grammar:
    """A grammar in GBNF, which has ::=, or in llguidance's dialect of Lark.

    starts_after, starts_at: the grammar holds for what follows this in the text, or from there on; only one can be given.
    Raises PlanError for an invalid or too large grammar, or without llguidance.
    """
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise PlanError(f"the grammar has {len(text)} characters; at most {MAX_GRAMMAR_LENGTH} are read")
    return _compile(
        tokenizer,
        gbnf_to_lark(text) if not _LARK.search(text) and "::=" in text else text,
        starts_at or starts_after,
        bool(starts_at),
    )


def compile_schema(tokenizer: Tokenizer, schema: Mapping[str, Any], starts_after: str = "") -> Grammar:
    """JSON texts that fit a schema. Raises PlanError as `compile_grammar`, and for what llguidance does not know of schemas."""
    return compile_grammar(tokenizer, f"start: {json_rule(schema)}", starts_after)


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON texts that fit a schema, as an expression of Lark. Raises PlanError for one that is nested too deep."""
    try:
        return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS})
    except RecursionError:
        raise PlanError("the schema is nested too deep") from None


def _compile(tokenizer: Tokenizer, lark: str, awaited: str, inclusive: bool) -> Grammar:
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError:
        raise PlanError(f"grammars need llguidance: {installation('llguidance')}") from None
    limits = LLParserLimits(**_LIMITS)
    matcher = LLMatcher(_token_table(tokenizer), LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
    matcher.compute_bitmask()  # finds grammars that take too much work at once
    if matcher.is_error():
        raise PlanError(f"invalid grammar: {_in_words(matcher.get_error())}")
    return Grammar(matcher, tokenizer, awaited.encode(), inclusive)


def _token_table(tokenizer: Tokenizer) -> LLTokenizer:
    """The vocabulary as llguidance reads it; takes about a second for a large one, once."""
    from llguidance import LLTokenizer, TokenizerWrapper

    with _COMPILING:
        if tokenizer.grammar_tokens is None:
            eog = sorted(tokenizer.eog_ids) or [tokenizer.n_vocab]
            tokenizer.grammar_tokens = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, eog[0])), eos_token=eog)
        return tokenizer.grammar_tokens


class _Vocabulary:
    """A vocabulary with the attributes that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer, eos: int):
        """eos: an id, or n_vocab: a token is added that no model generates."""
        vocabulary = tokenizer.vocabulary
        self._tokenizer, self.eos_token_id, self.bos_token_id = tokenizer, eos, vocabulary.bos
        self.tokens = [b"" if vocabulary.token_types[i] == UNUSED else vocabulary.piece(i) for i in range(tokenizer.n_vocab)]
        self.special_token_ids = [i for i in range(tokenizer.n_vocab) if vocabulary.is_control(i)]
        if eos == len(self.tokens):
            self.tokens.append(b"</s>")
            self.special_token_ids.append(eos)

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_continuation(text.decode("utf-8", "surrogateescape"))


# What llguidance says, as a regular expression -> what it means to who wrote the grammar
_MEANINGS = {
    r"NoExtensionBias": "a rule or $ref leads to nothing but itself",
    r"forced bytes: got '(.*?)'": r"the vocabulary has no token for the text '\1' that has to follow",
    r"too many expressions constructed": "a pattern, or a list of texts, is too large",
    r"Current row has (\d+) items; max is (\d+)": r"\1 alternatives are possible at one place, and \2 are the most",
    r"fuel": "it takes too much work",
}


def _in_words(message: str) -> str:
    """What llguidance says, without the text of the grammar and the state of the parser, in other words where they say more."""
    line = message.split("<state>")[0].strip().split("\n")[0]
    for said, meaning in _MEANINGS.items():
        match = re.search(said, line)
        if match is not None:
            return match.expand(meaning)
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", line)[:300]
