"""Text to token ids and back, from the vocabulary that a GGUF file carries; the `tokenizers` library does the merging."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Merger

from ...formats import FormatError, MillError, PlanError
from ...formats.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from .vocabulary import BYTE, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary, byte_characters

# Halves of surrogate pairs are no characters. Those from U+DC80 on stand for bytes that were no UTF-8 (PEP 383).
_HALF, _RAW_BYTE = re.compile("[\ud800-\udfff]"), re.compile("([\udc80-\udcff])")
_REPLACEMENT = "\ufffd"
_LONGEST = 512  # characters of a token whose parts are looked for: the time this takes grows with the square


class Tokenizer:
    """Encodes and decodes. bos, eos: ids or None; add_bos, add_eos: what `encode` adds; endings: ids that end a generation."""

    def __init__(self, metadata: Mapping[str, Any]):
        """Raises PlanError for a vocabulary that is absent or of an unsupported kind, FormatError for a contradictory one."""
        self.vocabulary = Vocabulary(metadata)
        kind = self.vocabulary.kind
        pre = _pre_tokenizer(self.vocabulary) if kind == "gpt2" else PreTokenizer((), add_bos=kind != "t5")
        try:
            self._merger = _MERGERS[kind](self.vocabulary, pre)
        except MillError:
            raise
        except Exception as error:  # `tokenizers` has no exceptions of its own
            raise FormatError(f"the vocabulary (tokenizer.ggml.*) cannot be used: {error}") from None
        self._prefix = "▁" if kind == "llama" and self.vocabulary.space_prefix else ""
        self.bos, self.eos, self.endings = self.vocabulary.bos, self.vocabulary.eos, self.vocabulary.endings
        self.add_bos = self.vocabulary.flag("add_bos_token", pre.add_bos) and self.bos is not None
        self.add_eos = self.vocabulary.flag("add_eos_token", kind == "t5") and self.eos is not None
        add_separator = self.vocabulary.flag("add_sep_token", kind == "bert")
        self._last = [self.eos] if self.add_eos and self.eos is not None else []
        if add_separator and self.vocabulary.separator is not None:
            self._last = [self.vocabulary.separator]

    @property
    def n_vocab(self) -> int:
        return len(self.vocabulary.tokens)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        add_special: begin with BOS and end with EOS (or BERT's separator) if the model's metadata says so; parse_special:
        control tokens that are spelled out in the text ('<|im_start|>') become themselves instead of ordinary characters.
        Bytes that are no UTF-8, as Python reads them from a command line (surrogateescape), become the tokens of these bytes,
        or U+FFFD if there are none.
        """
        ids: list[int] = [self.bos] if add_special and self.add_bos and self.bos is not None else []
        for fragment in self._cut_special(text, parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
            elif fragment:
                ids += self._merge(self._prefix + fragment)
        return ids + self._last if add_special else ids

    def _merge(self, text: str) -> list[int]:
        """Token ids of a text without special tokens."""
        if _HALF.search(text) is None:
            return self._merged(text)
        known, merged = self._byte_tokens, self._merged
        text = _HALF.sub(lambda half: half[0] if half[0] in known else _REPLACEMENT, text)
        if self.vocabulary.kind == "t5" and _HALF.search(text):
            text, merged = self._normalised(text), self._merged_as_is
        ids: list[int] = []
        for part in _RAW_BYTE.split(text):
            ids += [known[part]] if part in known else merged(part)
        return ids

    def _normalised(self, text: str) -> str:
        """The text as a whole, bytes in it left alone: what is done at its ends is not to be done beside each of them."""
        used = {ord(c) >> 7 for c in text}
        free = next(block for block in range(0xF0000 >> 7, 0xFFF00 >> 7) if block not in used) << 7  # of private characters
        stand_ins = {0xDC80 + i: free + i for i in range(0x80)}
        normalised = self._merger.normalizer.normalize_str(text.translate(stand_ins))  # type: ignore[union-attr]
        return normalised.translate({stand_in: raw for raw, stand_in in stand_ins.items()})

    def _merged(self, text: str) -> list[int]:
        return self._ids(lambda: self._merger.encode(text, add_special_tokens=False).ids)

    def _merged_as_is(self, text: str) -> list[int]:
        """As `_merged`, of what is normalised already."""
        return self._ids(lambda: [token.id for token in self._merger.model.tokenize(text)]) if text else []

    def _ids(self, merge: Callable[[], list[int]]) -> list[int]:
        try:
            return merge()
        except Exception as error:  # such as characters that nothing stands for
            raise FormatError(f"the vocabulary (tokenizer.ggml.*) cannot write this text: {error}") from None

    @cached_property
    def _byte_tokens(self) -> dict[str, int]:
        """Surrogate that stands for a byte -> the byte's own token, where the vocabulary has one."""
        ids, characters = self.vocabulary.ids, byte_characters()
        if self.vocabulary.kind == "bert":
            return {}
        names = {b: f"<0x{b:02X}>" if self.vocabulary.kind in ("llama", "t5") else characters[b] for b in range(0x80, 0x100)}
        return {chr(0xDC00 + b): ids[name] for b, name in names.items() if name in ids}

    def _cut_special(self, text: str, parse_special: bool) -> list[str | int]:
        """The text with special tokens taken out, in order; longer tokens are looked for first."""
        fragments: list[str | int] = [text]
        for special, token, always in self.vocabulary.splitting:
            if not (always or parse_special) or special not in text:
                continue
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                    continue
                for i, part in enumerate(fragment.split(special)):
                    cut += [token, part] if i else [part]
            fragments = cut
        return fragments

    def piece(self, token: int) -> bytes:
        """The bytes of one token; they need not be whole characters."""
        return self.vocabulary.piece(token)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; control tokens are left out unless skip_special is False. Broken UTF-8 becomes U+FFFD.

        The space that encoding put before the text is taken away again.
        """
        stream = TextStream(self, skip_special)
        return "".join([stream.feed(int(token)) for token in ids]) + stream.flush()

    def stream(self, skip_special: bool = True, begins_text: bool = False) -> TextStream:
        """A decoder for tokens that come one by one; begins_text: take the encoder's leading space away."""
        return TextStream(self, skip_special, begins_text)


class TextStream:
    """Turns tokens into text as they come; a character is given out when its last byte has arrived."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, begins_text: bool = True):
        self._vocabulary, self._skip = tokenizer.vocabulary, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = begins_text and self._vocabulary.space_prefix

    def feed(self, token: int) -> str:
        if self._vocabulary.is_control(token):
            # A control token ends whatever character was unfinished before it.
            return self.flush() + ("" if self._skip else self._vocabulary.tokens[token])
        piece = self._vocabulary.piece(token)
        if self._strip:
            piece, self._strip = piece.removeprefix(b" "), False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is left of an unfinished character."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    name = str(vocabulary.get("pre", "default"))
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise PlanError(f"pre-tokenizer {name!r} is not supported, another would give wrong tokens (known: {known})")
    return PRE_TOKENIZERS[name]


def _byte_level(vocabulary: Vocabulary, pre: PreTokenizer) -> Merger:
    """GPT-2's scheme: words by expressions, bytes as printable characters, merges in the order of their list."""
    merges, ids = vocabulary.merges, vocabulary.ids
    if not merges:  # tiktoken vocabularies have none: a token's rank is its id
        merges = _merges_by_rank(vocabulary, -np.arange(len(vocabulary.tokens)))
    usable = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
    merger = Merger(models.BPE(vocab=ids, merges=usable, ignore_merges=pre.ignore_merges))
    splits: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.splits]
    merger.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return merger


def _sentencepiece(vocabulary: Vocabulary, pre: PreTokenizer) -> Merger:
    """SentencePiece's BPE: the pair whose union has the best score is merged first; unknown characters fall back to bytes."""
    scores = vocabulary.scores if vocabulary.scores is not None else -np.arange(len(vocabulary.tokens))
    unknown = vocabulary.tokens[vocabulary.unknown] if vocabulary.unknown is not None else None
    model = models.BPE(
        vocab=vocabulary.ids, merges=_merges_by_rank(vocabulary, scores), unk_token=unknown, byte_fallback=True, fuse_unk=True
    )
    merger = Merger(model)
    merger.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    return merger


def _unigram(vocabulary: Vocabulary, pre: PreTokenizer) -> Merger:
    """SentencePiece's unigram model: the pieces whose scores have the largest sum; the text is normalised by its own table."""
    kinds = vocabulary.kinds
    scores = vocabulary.scores if vocabulary.scores is not None else np.zeros(len(kinds))
    used = np.isin(kinds, (NORMAL, USER_DEFINED, BYTE, UNKNOWN))
    lowest = float(scores[kinds == NORMAL].min(initial=0.0))
    # Tokens that no text can become must not be found: a name of their own, which no text has.
    names = [token if used[i] else f"\uffff{i}" for i, token in enumerate(vocabulary.tokens)]
    table = [(name, float(scores[i]) if used[i] else lowest - 100) for i, name in enumerate(names)]
    has_bytes = np.count_nonzero(kinds == BYTE) == 256
    merger = Merger(models.Unigram(table, vocabulary.unknown, has_bytes))
    steps: list[Any] = []
    charsmap = vocabulary.get("precompiled_charsmap", None)
    if charsmap is not None and not (isinstance(charsmap, np.ndarray) and charsmap.ndim == 1 and charsmap.dtype.itemsize == 1):
        raise FormatError("tokenizer.ggml.precompiled_charsmap is no list of bytes")
    if charsmap is not None and len(charsmap):
        steps.append(normalizers.Precompiled(charsmap.tobytes()))
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.space_prefix:
        steps.append(normalizers.Prepend("▁"))
    merger.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    return merger


def _word_pieces(vocabulary: Vocabulary, pre: PreTokenizer) -> Merger:
    """BERT's scheme: words without case and accents, each cut into the longest pieces from its beginning on."""
    ids: dict[str, int] = {}
    for i, token in enumerate(vocabulary.tokens):
        plain = vocabulary.kinds[i] not in (NORMAL, UNUSED)
        ids.setdefault(token if plain else token[1:] if token.startswith("▁") else f"##{token}", i)
    unknown = vocabulary.tokens[vocabulary.unknown] if vocabulary.unknown is not None else "[UNK]"
    merger = Merger(models.WordPiece(vocab=ids, unk_token=unknown))
    merger.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
    merger.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    return merger


def _merges_by_rank(vocabulary: Vocabulary, scores: np.ndarray) -> list[tuple[str, str]]:
    """All ways to make a token of two others, best score of the result first."""
    ids = vocabulary.ids
    merges: list[tuple[str, str]] = []
    for i in np.argsort(-scores, kind="stable").tolist():
        if vocabulary.kinds[i] in (NORMAL, USER_DEFINED, UNUSED):
            token = vocabulary.tokens[i]
            if len(token) > _LONGEST:
                continue
            merges += [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in ids and token[k:] in ids]
    return merges


_MERGERS = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _word_pieces, "t5": _unigram}  # by tokenizer.ggml.model
