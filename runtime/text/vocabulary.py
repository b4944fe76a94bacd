"""A model's vocabulary from GGUF metadata: token texts and types, special token ids, the bytes that each token stands for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import numpy as np

from ...formats import FormatError, PlanError
from ...formats.metadata_values import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from ...formats.string_array import StringArray, all_have_inner_space, is_list_of_strings, numbers_of

# Tokens that end a generation, whatever the metadata says about them (llama.cpp: special_eog_ids)
_EOG_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<EOT>", "<｜end▁of▁sentence｜>", "<|end▁of▁sentence|>", "<|return|>", "<|call|>", "[EOS]", "<|eot|>"),
        *("_<EOT>", "[EOT]", "<end_of_utterance>"),
    )
)
# In a vocabulary with these tokens, <|end|> only ends a channel of an answer (gpt-oss: analysis, then final).
_CHANNEL_TOKENS = frozenset(("<|return|>", "<|call|>"))

_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's special tokens that leave the white space after them
# tokenizer.ggml.model -> ids of special tokens where the metadata has none; the misspelling is GGUF's
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "gpt2": {},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102},
    "t5": {"eos": 1, "unknown": 2},
}

_BYTE_TOKEN, _SURROGATE = re.compile(r"<0x[0-9A-Fa-f]{2}>"), re.compile("[\ud800-\udfff]")


def byte_characters() -> dict[int, str]:
    """byte -> character of GPT-2's byte-level BPE: printable Latin-1 characters as they are, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


class Vocabulary:
    """The keys tokenizer.ggml.* of GGUF metadata.

    model        'gpt2' (byte-level BPE), 'llama' (SentencePiece's BPE with scores), 't5' (its unigram) or 'bert' (WordPiece,
                 words begin with U+2581)
    tokens       text of every id
    token_types  int64 [n_vocab]: NORMAL, UNKNOWN, ...
    bos, eos, unknown, separator  ids, None where there is none
    space_prefix a text is encoded with a space in front of it
    """

    def __init__(self, metadata: Mapping[str, Any]):
        """Raises PlanError if there is no vocabulary or its model is not supported, FormatError if it contradicts itself."""
        self.metadata = metadata
        self.model = str(self.get("model", ""))
        if "tokenizer.ggml.tokens" not in metadata or not self.model:
            raise PlanError("the model's metadata has no vocabulary (tokenizer.ggml.model and tokenizer.ggml.tokens)")
        if self.model not in _DEFAULT_IDS:
            known = ", ".join(_DEFAULT_IDS)
            raise PlanError(f"a vocabulary of kind {self.model!r} is not supported (tokenizer.ggml.model is one of {known})")
        tokens = self.get("tokens", [])
        if not is_list_of_strings(tokens):
            raise FormatError("tokenizer.ggml.tokens is no list of texts")
        self.tokens: Sequence[str] = tokens
        types = np.asarray(self.get("token_type", np.full(len(tokens), NORMAL)))
        if types.shape != (len(tokens),) or types.dtype.kind not in "iu":
            actual = f"{types.size} values of {types.dtype}" if types.ndim else f"{types!r:.60}"
            raise FormatError(f"tokenizer.ggml.token_type has {actual} for {len(tokens)} tokens; each needs a whole number")
        self.token_types = types.astype(np.int64)
        default = _DEFAULT_IDS[self.model]
        self.bos = self.special_id("bos", self.special_id("cls", default.get("bos")))
        self.eos = self.special_id("eos", default.get("eos"))
        self.unknown = self.special_id("unknown", default.get("unknown"))
        self.separator = self.special_id("seperator", default.get("seperator"))
        self.space_prefix = self.model == "bert" or (self.model in ("llama", "t5") and self.flag("add_space_prefix", True))

    @cached_property
    def padding(self) -> np.ndarray:
        """int64: ids that no tokenizer has, and a converter named [PADn], since the model has as many rows."""
        unused = np.flatnonzero(self.token_types == UNUSED).tolist()
        return np.array([i for i in unused if self.tokens[i] == f"[PAD{i}]"], np.int64)

    def get(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    @property
    def scores(self) -> np.ndarray | None:
        """float64 [n_vocab], None if the metadata has none. Raises FormatError if they are not one number for each token."""
        value = self.get("scores", None)
        if value is None:
            return None
        scores = np.asarray(value)
        if scores.shape != (len(self.tokens),) or scores.dtype.kind not in "iuf" or not np.isfinite(scores).all():
            raise FormatError(f"tokenizer.ggml.scores has to hold {len(self.tokens)} numbers, one for each token")
        return scores.astype(np.float64)

    @cached_property
    def _merge_texts(self) -> Sequence[str]:
        """Two tokens each, with a space between them, in order of rank. Raises FormatError."""
        merges = self.get("merges", [])
        # The separator is the first space after the first character: that may be a space itself.
        if not is_list_of_strings(merges) or not all_have_inner_space(merges):
            raise FormatError("tokenizer.ggml.merges is no list of pairs of tokens with a space between them")
        return merges

    @property
    def has_merges(self) -> bool:
        """Raises FormatError if they are no pairs of tokens."""
        return len(self._merge_texts) > 0

    def merges(self, within: Set[str] | None = None) -> list[tuple[str, str]]:
        """The two parts of each merge, in order of rank; within: only of merges that make one of these texts, which have no
        spaces in them. Raises FormatError."""
        merges = self._merge_texts
        if within is not None:
            some = (merges[number] for number in numbers_of(merges, within, without=1))
            merges = [merge for merge in some if merge.replace(" ", "", 1) in within]
        return [(merge[:at], merge[at + 1 :]) for merge in merges for at in [merge.index(" ", 1)]]

    def flag(self, key: str, default: bool) -> bool:
        """The boolean tokenizer.ggml.KEY; an integer is accepted. Raises FormatError."""
        value = self.get(key, default)
        if not isinstance(value, (bool, int, np.bool_, np.integer)):
            raise FormatError(f"tokenizer.ggml.{key} is {value!r:.60}; it has to be true or false")
        return bool(value)

    def special_id(self, name: str, default: int | None = None) -> int | None:
        """The id tokenizer.ggml.NAME_token_id; None if absent or out of range. Raises FormatError if it is not an integer."""
        value = self.get(f"{name}_token_id", default)
        if value is not None and not isinstance(value, (int, np.integer)):
            raise FormatError(f"tokenizer.ggml.{name}_token_id is {value!r:.60}; it has to be the number of a token")
        return int(value) if value is not None and 0 <= value < len(self.tokens) else None

    @cached_property
    def ids(self) -> dict[str, int]:
        """text -> id; of tokens with the same text, the first. Texts that are not valid UTF-8 in the file are left out."""
        tokens = list(self.tokens)
        ids = dict(zip(reversed(tokens), reversed(range(len(tokens))), strict=True))  # the first is set last
        try:
            "".join(ids).encode()
        except UnicodeEncodeError:
            return {token: i for token, i in ids.items() if _SURROGATE.search(token) is None}
        return ids

    def ids_of(self, texts: Collection[str]) -> dict[str, int]:
        """As `ids`, of those of these texts that are tokens; the others of the vocabulary are not decoded for it."""
        if isinstance(self.tokens, StringArray) and "ids" not in self.__dict__:
            some = reversed(numbers_of(self.tokens, texts))
            found = {self.tokens[number]: number for number in some}  # the first is set last
        else:
            found = self.ids
        return {text: found[text] for text in texts if text in found and _SURROGATE.search(text) is None}

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """Ids that end a generation: end of sequence, turn or message, by metadata or by their text."""
        by_key = (self.special_id(name) for name in ("eos", "eot", "eom"))
        special = {UNKNOWN, CONTROL, USER_DEFINED}
        ids = self.ids_of(_EOG_TEXTS | _CHANNEL_TOKENS)
        texts = _EOG_TEXTS - {"<|end|>"} if ids.keys() >= _CHANNEL_TOKENS else _EOG_TEXTS
        by_text = (ids[text] for text in texts if text in ids and self.token_types[ids[text]] in special)
        return frozenset([i for i in by_key if i is not None] + list(by_text))

    @cached_property
    def special_tokens(self) -> list[tuple[str, int, bool]]:
        """(text, id, always) of the tokens that are recognised in a text before the merges, longest text first.

        always: True for user-defined tokens; control tokens are recognised only when the caller asks for it.
        """
        ids = np.flatnonzero(np.isin(self.token_types, (UNKNOWN, CONTROL, USER_DEFINED)))
        tokens = [(self.tokens[i], int(i), bool(self.token_types[i] == USER_DEFINED)) for i in ids.tolist() if self.tokens[i]]
        return sorted(tokens, key=lambda token: -len(token[0]))

    @cached_property
    def control_texts(self) -> dict[str, int]:
        """text -> id of the control tokens."""
        return {text: id for text, id, _ in self.special_tokens if self.is_control(id)}

    @cached_property
    def strips_after(self) -> frozenset[int]:
        """Ids of special tokens that take the white space after them with them (`rstrip` of a tokenizer.json). A GGUF does not
        say which: as in llama.cpp (llama-vocab.cpp), all special tokens of models called Phi-3 but those of _KEEP_SPACES."""
        name = str(self.metadata.get("general.name", "")).lower()
        if "phi-3" not in name and "phi3" not in name:
            return frozenset()
        return frozenset(id for text, id, _ in self.special_tokens if text not in _KEEP_SPACES)

    def is_control(self, token: int) -> bool:
        return bool(self.token_types[token] in (UNKNOWN, CONTROL))

    @cached_property
    def _bytes_of_character(self) -> dict[str, int]:
        return {character: b for b, character in byte_characters().items()}

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for (control tokens: their own text)."""
        text, token_type = self.tokens[token], self.token_types[token]
        if token_type in (UNKNOWN, CONTROL, USER_DEFINED):
            return text.encode("utf-8", "surrogateescape")
        if self.model != "gpt2":
            if token_type == BYTE and _BYTE_TOKEN.fullmatch(text):
                return bytes([int(text[3:-1], 16)])
            return text.replace("▁", " ").encode("utf-8", "surrogateescape")
        table = self._bytes_of_character
        return b"".join(bytes([table[c]]) if c in table else c.encode("utf-8", "surrogateescape") for c in text)
