"""Encodes text to token ids and decodes them, with the vocabulary of a GGUF file; the `tokenizers` library does the merging."""

from __future__ import annotations

import codecs
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ...formats import FormatError, MillError, PlanError
from ...formats.metadata_values import BYTE, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from ...formats.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from ...formats.string_array import StringArray, byte_lengths, numbers_of
from .charsmap import check_charsmap
from .vocabulary import Vocabulary, byte_characters

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # read by `tokenizers`, whose threads a fork would not have
# Lone surrogates are not characters. Those from U+DC80 on stand for bytes that are not valid UTF-8 (PEP 383).
_SURROGATE, _RAW_BYTE = re.compile("[\ud800-\udfff]"), re.compile("([\udc80-\udcff])")
_REPLACEMENT = "\ufffd"
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
_SPACES = " \t\n\v\f\r"  # what C's isspace calls so
_NUMBER = re.compile(r"\d+")
# Characters of the first texts, for which not all merges of a file are prepared, and the least that a text counts for.
_FEW, _LEAST = 160, 20
_MAX_MERGED_LENGTH = 512  # characters of a token that `_merges_by_score` splits: its time grows with the square
_DROPPED = (
    4  # bytes of a text for each that a token stands for, where spaces, accents or unknown characters are dropped or merged
)
T = TypeVar("T")


class Tokenizer:
    """Encodes and decodes text.

    bos, eos          token ids or None
    add_bos, add_eos  what `encode` adds by default
    eog_ids           token ids that end a generation
    """

    def __init__(self, metadata: Mapping[str, Any]):
        """Raises PlanError if the vocabulary is absent or its model not supported, FormatError if it contradicts itself."""
        self.vocabulary = Vocabulary(metadata)
        model = self.vocabulary.model
        pre = _pre_tokenizer(self.vocabulary) if model == "gpt2" else PreTokenizer((), add_bos=model != "t5")
        self._pre = pre
        # Merging all of a large vocabulary takes longer to prepare than all else that a generation's first token needs.
        if model == "llama":
            self.vocabulary.scores  # noqa: B018 (raises what is wrong with them)
        has_merges = model == "llama" or (model == "gpt2" and self.vocabulary.has_merges)
        self._few = _FEW if has_merges and isinstance(self.vocabulary.tokens, StringArray) else 0
        if not self._few:
            self._backend  # noqa: B018 (raises what is wrong with the vocabulary)
        self._thousands = pre.thousands
        self._prefix = "▁" if model == "llama" and self.vocabulary.space_prefix else ""
        self.bos, self.eos, self.eog_ids = self.vocabulary.bos, self.vocabulary.eos, self.vocabulary.eog_ids
        self.add_bos = self.vocabulary.flag("add_bos_token", pre.add_bos) and self.bos is not None
        self.add_eos = self.vocabulary.flag("add_eos_token", model == "t5") and self.eos is not None
        add_separator = self.vocabulary.flag("add_sep_token", model == "bert")
        self.grammar_tokens: Any = None  # llguidance's table of the vocabulary, once a grammar has been used
        self.breakers: dict[tuple[str, ...], Any] = {}  # texts that end repetitions -> their tokens, once DRY was used
        self._suffix = [self.eos] if self.add_eos and self.eos is not None else []
        if add_separator and self.vocabulary.separator is not None:
            self._suffix = [self.vocabulary.separator]

    @cached_property
    def _backend(self) -> Backend:
        try:
            return _BACKENDS[self.vocabulary.model](self.vocabulary, self._pre)
        except MillError:
            raise
        except BaseException as error:  # `tokenizers` has no exceptions of its own
            _raise_unless_of_library(error)
            raise FormatError(f"the vocabulary (tokenizer.ggml.*) cannot be used: {error}") from None

    def _backend_for(self, text: str) -> Backend:
        """What encodes this text; for the first few short ones, only with the tokens that occur in it."""
        if "_backend" in self.__dict__:
            return self._backend
        self._few -= max(_LEAST, len(text))
        if self._few < 0:
            return self._backend
        written = text.replace(" ", "▁")
        if self.vocabulary.model == "gpt2":
            characters = byte_characters()
            written = "".join(characters[byte] for byte in text.encode())
        parts = {written[i:j] for i in range(len(written)) for j in range(i + 1, len(written) + 1)}
        return _BACKENDS[self.vocabulary.model](self.vocabulary, self._pre, parts)

    @property
    def n_vocab(self) -> int:
        return len(self.vocabulary.tokens)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        add_special: begin with BOS and end with EOS (or BERT's separator) if the model's metadata says so; parse_special:
        the texts of control tokens ('<|im_start|>') become these tokens instead of ordinary characters. Bytes that are not
        valid UTF-8, as Python reads them from a command line (surrogateescape), become the tokens of these bytes, or U+FFFD
        if there are none. Raises FormatError if the vocabulary cannot represent the text.
        """
        ids: list[int] = [self.bos] if add_special and self.add_bos and self.bos is not None else []
        for fragment in self._split_special(text, parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
            elif fragment:
                ids += self._encode_ordinary(self._prefix + fragment)
        return ids + self._suffix if add_special else ids

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of a text that continues another: without the space that begins a text, without special tokens. Raises
        FormatError as `encode`."""
        if self.vocabulary.model == "t5" and self.vocabulary.space_prefix:
            return self._encode_normalised(text.replace(" ", "▁"))
        return self._encode_ordinary(text)

    def _encode_ordinary(self, text: str) -> list[int]:
        """Token ids of a text without special tokens; surrogates in it become byte tokens or U+FFFD."""
        if _SURROGATE.search(text) is None:
            return self._encode_valid(text)
        byte_tokens, encode = self._byte_tokens, self._encode_valid
        text = _SURROGATE.sub(lambda match: match[0] if match[0] in byte_tokens else _REPLACEMENT, text)
        if self.vocabulary.model == "t5" and _SURROGATE.search(text):
            text, encode = self._normalise(text), self._encode_normalised
        ids: list[int] = []
        for part in _RAW_BYTE.split(text):
            ids += [byte_tokens[part]] if part in byte_tokens else encode(part)
        return ids

    def _normalise(self, text: str) -> str:
        """Normalises a text that contains surrogates as one text: the normaliser treats the beginning and the end of a text
        differently, so the parts between the surrogates cannot be normalised one by one. Unused private characters replace the
        surrogates meanwhile, as the normaliser takes valid text only."""
        used = {ord(c) >> 7 for c in text}
        first = next(block for block in range(0xF0000 >> 7, 0xFFF00 >> 7) if block not in used) << 7
        placeholders = {0xDC80 + i: first + i for i in range(0x80)}
        normalised = self._checked(
            lambda: self._backend.normalizer.normalize_str(text.translate(placeholders))  # type: ignore[union-attr]
        )
        return normalised.translate({placeholder: surrogate for surrogate, placeholder in placeholders.items()})

    def _encode_valid(self, text: str) -> list[int]:
        parts = split_thousands(text) if self._thousands else [text]
        # Unlike `encode`, this lets other threads run meanwhile, and computes no offsets.
        encode = self._backend_for(text).encode_batch_fast
        return self._checked(lambda: [i for each in encode(parts, add_special_tokens=False) for i in each.ids])

    def least_tokens(self, n_bytes: int) -> int:
        """A lower bound of the number of tokens of a text with so many bytes of UTF-8: no token stands for more than the
        longest one. 0 for vocabularies that drop or merge what they have no token for."""
        return -(-n_bytes // self._longest) if self._writes_all_bytes else 0

    def most_bytes(self, n_tokens: int) -> int:
        """Bytes of UTF-8 of the longest text of so many tokens; for vocabularies that drop or merge what they have no token
        for, which makes texts of any length few tokens, several times what tokens stand for."""
        return n_tokens * self._longest * (1 if self._writes_all_bytes else _DROPPED)

    @cached_property
    def _writes_all_bytes(self) -> bool:
        """Whether every byte has a token of its own."""
        vocabulary = self.vocabulary
        if vocabulary.model == "gpt2":
            characters = [*byte_characters().values()]
            return len(vocabulary.ids_of(characters)) == len(characters)
        return vocabulary.model == "llama" and np.count_nonzero(vocabulary.token_types == BYTE) == 256

    @cached_property
    def _longest(self) -> int:
        """Bytes that the longest token stands for: at most those of its text."""
        lengths, longest = byte_lengths(self.vocabulary.tokens), 0
        for token in np.argsort(-lengths).tolist():
            if lengths[token] <= longest:
                break
            longest = max(longest, len(self.vocabulary.piece(token)))
        return longest

    def _encode_normalised(self, text: str) -> list[int]:
        return self._checked(lambda: [token.id for token in self._backend.model.tokenize(text)]) if text else []

    def _checked(self, encode: Callable[[], T]) -> T:
        try:
            return encode()
        except BaseException as error:  # for example a character without a token, and no unknown token
            _raise_unless_of_library(error)
            raise FormatError(f"the vocabulary (tokenizer.ggml.*) cannot write this text: {error}") from None

    @cached_property
    def _byte_tokens(self) -> dict[str, int]:
        """surrogate that stands for a byte -> id of the byte's token, where the vocabulary has one."""
        ids, characters = self.vocabulary.ids, byte_characters()
        if self.vocabulary.model == "bert":
            return {}
        names = {b: _BYTE_TOKENS[b] if self.vocabulary.model in ("llama", "t5") else characters[b] for b in range(0x80, 0x100)}
        return {chr(0xDC00 + b): ids[name] for b, name in names.items() if name in ids}

    def _split_special(self, text: str, parse_special: bool) -> list[str | int]:
        """The text split at its special tokens, which are replaced by their ids; longer tokens are searched first. In time that
        grows with the text and the number of tokens, not with the product of what is found."""
        taken = bytearray(len(text))  # 1: a token has this character
        found: list[tuple[int, int, int]] = []
        for special, token, always in self.vocabulary.special_tokens:
            if not (always or parse_special):
                continue
            start, strip = text.find(special), token in self.vocabulary.strips_after
            while start >= 0:
                stop = start + len(special)
                blocked = taken.find(1, start, stop)
                if blocked >= 0:
                    free = taken.find(0, blocked)
                    start = text.find(special, free) if free >= 0 else -1
                    continue
                while strip and stop < len(text) and not taken[stop] and text[stop] in _SPACES:
                    stop += 1
                taken[start:stop] = b"\1" * (stop - start)
                found.append((start, stop, token))
                start = text.find(special, stop)
        fragments: list[str | int] = []
        end = 0
        for start, stop, token in sorted(found):
            fragments += [text[end:start], token]
            end = stop
        return [*fragments, text[end:]]

    def piece(self, token: int) -> bytes:
        """The bytes of one token, which may be part of a character."""
        return self.vocabulary.piece(token)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; control tokens are left out unless skip_special is False. Invalid UTF-8 becomes U+FFFD.

        The space that `encode` puts in front of a text is removed.
        """
        stream = TextStream(self, skip_special)
        return "".join([stream.feed(int(token)) for token in ids]) + stream.flush()

    def stream(self, skip_special: bool = True, begins_text: bool = False) -> TextStream:
        """A decoder for tokens that come one by one; begins_text: remove the space that `encode` puts in front of a text."""
        return TextStream(self, skip_special, begins_text)


def _raise_unless_of_library(error: BaseException) -> None:
    """Raises an exception again that is neither an Exception nor the library's panic, which is a BaseException."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


class TextStream:
    """Decodes tokens one by one; a character is returned when its last byte has arrived."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, begins_text: bool = True):
        self._vocabulary, self._skip = tokenizer.vocabulary, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = begins_text and self._vocabulary.space_prefix

    def feed(self, token: int) -> str:
        """The characters that this token completes."""
        if self._vocabulary.is_control(token):
            # A control token ends an incomplete character before it.
            return self.flush() + ("" if self._skip else self._vocabulary.tokens[token])
        piece = self._vocabulary.piece(token)
        if self._strip:
            piece, self._strip = piece.removeprefix(b" "), False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """U+FFFD for an incomplete character at the end, otherwise nothing."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def split_thousands(text: str) -> list[str]:
    """The text with the digits of each number in groups of three from the right as parts of their own, which is what the first
    expression of such pre-tokenizers isolates (`PreTokenizer.thousands`). A number that a letter follows has no end to count
    from (`\\b`) and stays as it is.
    """
    cuts = [0]
    for number in _NUMBER.finditer(text):
        begin, end = number.span()
        category = unicodedata.category(text[end]) if end < len(text) else "Zs"
        if category[0] not in "LMN" and category != "Pc":
            cuts += [begin, *range(begin + ((end - begin) % 3 or 3), end, 3), end]
    return [text[i:j] for i, j in zip(cuts, [*cuts[1:], len(text)], strict=True) if i < j]


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    name = str(vocabulary.get("pre", "default"))
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise PlanError(f"pre-tokenizer {name!r} is not supported, another would give wrong tokens (known: {known})")
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(vocabulary: Vocabulary, pre: PreTokenizer, within: Set[str] | None = None) -> Backend:
    """GPT-2's scheme: regular expressions split the text into words, bytes are printable characters, merges apply by rank.

    within: all parts of the text that is to be encoded, in such characters; other tokens are left out."""
    merges, ids = vocabulary.merges(within), vocabulary.ids if within is None else vocabulary.ids_of(within)
    if not merges and within is None:  # tiktoken vocabularies have none: a token's rank is its id
        merges = _merges_by_score(vocabulary, -np.arange(len(vocabulary.tokens)))
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges)
    except BaseException as error:  # some are of texts that are no tokens: looking at each first would take as long as the rest
        _raise_unless_of_library(error)
        usable = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
        model = models.BPE(vocab=ids, merges=usable, ignore_merges=pre.ignore_merges)
    backend = Backend(model)
    splits: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.splits[pre.thousands :]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


def _sentencepiece_bpe(vocabulary: Vocabulary, pre: PreTokenizer, within: Set[str] | None = None) -> Backend:
    """SentencePiece's BPE: the pair whose union has the best score is merged first; unknown characters fall back to bytes.

    within: all parts of the text that is to be encoded; but for bytes and the unknown one, other tokens are left out."""
    scores = vocabulary.scores if vocabulary.scores is not None else -np.arange(len(vocabulary.tokens))
    unknown = vocabulary.tokens[vocabulary.unknown] if vocabulary.unknown is not None else None
    merges = _merges_by_score(vocabulary, scores, within)
    ids = vocabulary.ids if within is None else vocabulary.ids_of({*within, *_BYTE_TOKENS, *filter(None, [unknown])})
    model = models.BPE(vocab=ids, merges=merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    return backend


def _unigram(vocabulary: Vocabulary, pre: PreTokenizer) -> Backend:
    """SentencePiece's unigram model: the segmentation with the largest sum of scores; the file's character map normalises."""
    types = vocabulary.token_types
    scores = vocabulary.scores if vocabulary.scores is not None else np.zeros(len(types))
    usable = np.isin(types, (NORMAL, USER_DEFINED, BYTE, UNKNOWN))
    lowest = float(scores[types == NORMAL].min(initial=0.0))
    # Control and unused tokens must not match any text: they get names that no text contains.
    names = [token if usable[i] else f"\uffff{i}" for i, token in enumerate(vocabulary.tokens)]
    table = [(name, float(scores[i]) if usable[i] else lowest - 100) for i, name in enumerate(names)]
    has_bytes = np.count_nonzero(types == BYTE) == 256
    backend = Backend(models.Unigram(table, vocabulary.unknown, has_bytes))
    steps: list[Any] = []
    charsmap = vocabulary.get("precompiled_charsmap", None)
    if charsmap is not None and not (isinstance(charsmap, np.ndarray) and charsmap.ndim == 1 and charsmap.dtype.itemsize == 1):
        raise FormatError("tokenizer.ggml.precompiled_charsmap is no list of bytes")
    if charsmap is not None and len(charsmap):
        check_charsmap(charsmap)
        steps.append(normalizers.Precompiled(charsmap.tobytes()))
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.space_prefix:
        steps.append(normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    return backend


def _word_piece(vocabulary: Vocabulary, pre: PreTokenizer) -> Backend:
    """BERT's WordPiece: words without case and accents, each split greedily into the longest pieces."""
    ids: dict[str, int] = {}
    for i, token in enumerate(vocabulary.tokens):
        special = vocabulary.token_types[i] not in (NORMAL, UNUSED)
        ids.setdefault(token if special else token[1:] if token.startswith("▁") else f"##{token}", i)
    unknown = vocabulary.tokens[vocabulary.unknown] if vocabulary.unknown is not None else "[UNK]"
    backend = Backend(models.WordPiece(vocab=ids, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    return backend


def _merges_by_score(vocabulary: Vocabulary, scores: np.ndarray, within: Set[str] | None = None) -> list[tuple[str, str]]:
    """All pairs of tokens whose union is a token, best score (float64 [n_vocab]) of the union first; within: of these texts
    alone, and of the parts of each that is a token."""
    is_merged = np.isin(vocabulary.token_types, (NORMAL, USER_DEFINED, UNUSED))
    if within is None:
        ids, texts, numbers = vocabulary.ids, list(vocabulary.tokens), np.flatnonzero(is_merged)
    else:
        ids, texts, some = vocabulary.ids_of(within), vocabulary.tokens, numbers_of(vocabulary.tokens, within)
        numbers = np.array([number for number in some if is_merged[number] and texts[number] in within], np.int64)
    order: list[int] = numbers[np.argsort(-scores[numbers], kind="stable")].tolist()
    merges: list[tuple[str, str]] = []
    for token in (texts[number] for number in order):
        if len(token) <= _MAX_MERGED_LENGTH:
            merges += [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in ids and token[k:] in ids]
    return merges


# tokenizer.ggml.model -> function that makes the `tokenizers` object
_BACKENDS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe, "bert": _word_piece, "t5": _unigram}
