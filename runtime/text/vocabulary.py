"""A model's vocabulary from GGUF metadata: token texts, their kinds, the special ids, and the bytes each token stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ...formats import FormatError, PlanError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type

# Texts that end a turn or a document, whatever the metadata calls them.
_ENDINGS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<EOT>", "<｜end▁of▁sentence｜>", "<|end▁of▁sentence|>", "<|return|>", "<|call|>", "[EOS]", "<|eot|>"),
        *("_<EOT>", "[EOT]", "<end_of_utterance>"),
    )
)
# Where a vocabulary has these, <|end|> only ends a channel (gpt-oss thinks in one and answers in the next).
_CHANNELS = frozenset(("<|return|>", "<|call|>"))

# tokenizer.ggml.model -> special tokens where the metadata does not name them; the misspelling is GGUF's
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "gpt2": {},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102},
    "t5": {"eos": 1, "unknown": 2},
}

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 characters are themselves, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


class Vocabulary:
    """tokens: text of every id; kinds: int array [n].

    kind: 'gpt2' (byte-level BPE), 'llama' (SentencePiece's BPE with scores), 't5' (its unigram) or 'bert' (WordPiece, words
    begin with U+2581).
    """

    def __init__(self, metadata: Mapping[str, Any]):
        """Raises PlanError when there is no vocabulary or its kind is not supported, FormatError when it contradicts itself."""
        self.metadata = metadata
        self.kind = str(self.get("model", ""))
        if "tokenizer.ggml.tokens" not in metadata or not self.kind:
            raise PlanError("the model's metadata has no vocabulary (tokenizer.ggml.model and tokenizer.ggml.tokens)")
        if self.kind not in _DEFAULT_IDS:
            known = ", ".join(_DEFAULT_IDS)
            raise PlanError(f"a vocabulary of kind {self.kind!r} is not supported (tokenizer.ggml.model is one of {known})")
        tokens = self.get("tokens", [])
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise FormatError("tokenizer.ggml.tokens is no list of texts")
        self.tokens: list[str] = tokens
        kinds = np.asarray(self.get("token_type", np.full(len(tokens), NORMAL)))
        if kinds.shape != (len(tokens),) or kinds.dtype.kind not in "iu":
            found = f"{kinds.size} values of {kinds.dtype}" if kinds.ndim else f"{kinds!r:.60}"
            raise FormatError(f"tokenizer.ggml.token_type has {found} for {len(tokens)} tokens; each needs a whole number")
        self.kinds = kinds.astype(np.int64)
        default = _DEFAULT_IDS[self.kind]
        self.bos = self.special("bos", self.special("cls", default.get("bos")))
        self.eos = self.special("eos", default.get("eos"))
        self.unknown = self.special("unknown", default.get("unknown"))
        self.separator = self.special("seperator", default.get("seperator"))
        self.space_prefix = self.kind == "bert" or (self.kind in ("llama", "t5") and self.flag("add_space_prefix", True))

    def get(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    @property
    def scores(self) -> np.ndarray | None:
        """float64 [n], None where there are none. Raises FormatError if they are not one for each token."""
        scores = self.get("scores", None)
        if scores is None:
            return None
        found = np.asarray(scores)
        if found.shape != (len(self.tokens),) or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
            raise FormatError(f"tokenizer.ggml.scores has to hold {len(self.tokens)} numbers, one for each token")
        return found.astype(np.float64)

    @property
    def merges(self) -> list[tuple[str, str]]:
        """The halves of each merge, in order. Raises FormatError."""
        merges = self.get("merges", [])
        if not isinstance(merges, list) or not all(isinstance(merge, str) and " " in merge[1:] for merge in merges):
            raise FormatError("tokenizer.ggml.merges is no list of pairs of tokens with a space between them")
        # The first character belongs to the first part, whatever it is.
        return [(merge[:at], merge[at + 1 :]) for merge in merges for at in [merge.index(" ", 1)]]

    def flag(self, key: str, default: bool) -> bool:
        """True or false, of one number as well. Raises FormatError."""
        value = self.get(key, default)
        if not isinstance(value, (bool, int, np.bool_, np.integer)):
            raise FormatError(f"tokenizer.ggml.{key} is {value!r:.60}; it has to be true or false")
        return bool(value)

    def special(self, name: str, default: int | None = None) -> int | None:
        """Id of the token that the metadata calls NAME_token_id, None if it is not a token. Raises FormatError if no number."""
        value = self.get(f"{name}_token_id", default)
        if value is not None and not isinstance(value, (int, np.integer)):
            raise FormatError(f"tokenizer.ggml.{name}_token_id is {value!r:.60}; it has to be the number of a token")
        return int(value) if value is not None and 0 <= value < len(self.tokens) else None

    @cached_property
    def ids(self) -> dict[str, int]:
        """text -> id; of tokens with the same text, the first. Texts that are no valid UTF-8 in the file are left out."""
        ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if token.isascii() or not any("\ud800" <= c <= "\udfff" for c in token):
                ids.setdefault(token, i)
        return ids

    @cached_property
    def endings(self) -> frozenset[int]:
        """Ids after which a model has finished: eos, end of turn or message, and tokens known to mean that."""
        named = (self.special(name) for name in ("eos", "eot", "eom"))
        special = {UNKNOWN, CONTROL, USER_DEFINED}
        known = _ENDINGS - {"<|end|>"} if self.ids.keys() >= _CHANNELS else _ENDINGS
        texts = (self.ids[text] for text in known if text in self.ids and self.kinds[self.ids[text]] in special)
        return frozenset([i for i in named if i is not None] + list(texts))

    @cached_property
    def splitting(self) -> list[tuple[str, int, bool]]:
        """(text, id, always) of the tokens that are cut out of a text before anything else, longest first.

        User-defined tokens always are; control tokens only where the text may hold them (`always` is False).
        """
        wanted = np.flatnonzero(np.isin(self.kinds, (UNKNOWN, CONTROL, USER_DEFINED)))
        found = [(self.tokens[i], int(i), bool(self.kinds[i] == USER_DEFINED)) for i in wanted if self.tokens[i]]
        return sorted(found, key=lambda entry: -len(entry[0]))

    def is_control(self, token: int) -> bool:
        return bool(self.kinds[token] in (UNKNOWN, CONTROL))

    @cached_property
    def _bytes_of_character(self) -> dict[str, int]:
        return {character: b for b, character in byte_characters().items()}

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for (control tokens: their own text)."""
        text, kind = self.tokens[token], self.kinds[token]
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            return text.encode("utf-8", "surrogateescape")
        if self.kind != "gpt2":
            if kind == BYTE and _BYTE_TOKEN.fullmatch(text):
                return bytes([int(text[3:-1], 16)])
            return text.replace("▁", " ").encode("utf-8", "surrogateescape")
        table = self._bytes_of_character
        return b"".join(bytes([table[c]]) if c in table else c.encode("utf-8", "surrogateescape") for c in text)
