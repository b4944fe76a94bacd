"""WordPiece vocabularies: words from the longest piece on."""

import unicodedata

import numpy as np
import pytest

from ggufmill.runtime import Tokenizer

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "▁un",
    "▁unaff",
    "affable",
    "able",
    "▁u",
    "▁café",
    "▁cafe",
    "s",
    "▁!",
    "▁中",
    "▁a",
    "b",
)


@pytest.fixture
def word_pieces():
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": list(WORDS),
        "tokenizer.ggml.token_type": np.array([3] * 4 + [1] * (len(WORDS) - 4), np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(2),
        "tokenizer.ggml.seperator_token_id": np.uint32(3),
        "tokenizer.ggml.unknown_token_id": np.uint32(1),
    }


def longest_first(text):
    """BERT's definition: words without accents and case, punctuation and Chinese characters single, longest pieces first."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    spaced = "".join(f" {c} " if unicodedata.category(c)[0] == "P" or "\u4e00" <= c <= "\u9fff" else c for c in plain)
    result = []
    for word in spaced.split():
        rest, pieces = "▁" + word, []
        while rest:
            length = next((k for k in range(len(rest), 0, -1) if rest[:k] in WORDS), 0)
            pieces.append(rest[:length])
            rest = rest[length:] if length else ""
        result += ["[UNK]"] if "" in pieces else pieces
    return result


def test_word_pieces(word_pieces):
    tokenizer = Tokenizer(word_pieces)
    for text in ("Unaffable!", "cafés  UNable", "a中ab!!", "x", "", "ab abx unb\n!"):
        ids = tokenizer.encode(text, add_special=False)
        assert [WORDS[i] for i in ids] == longest_first(text), text
        assert tokenizer.encode(text) == [2, *ids, 3]
    assert tokenizer.decode(tokenizer.encode("unable ab!")) == "unable ab !"
    assert tokenizer.encode("[SEP]", parse_special=True) == [2, 3, 3]
    assert Tokenizer(word_pieces | {"tokenizer.ggml.add_sep_token": False}).encode("a") == [2, WORDS.index("▁a")]
