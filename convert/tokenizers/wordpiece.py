"""WordPiece (BERT): a vocab.txt with a word per line, or tokenizer.json's model of this name -> GGUF's model 'bert'.

In these files a piece that continues a word is written "##x"; in a GGUF it is "x", and one that begins a word starts with
U+2581.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...formats import FormatError
from ...formats.file_range import read_text
from ...formats.metadata_values import CONTROL, NORMAL
from .token_list import AddedTokens, token_list

CONTINUES = "##"  # before a piece that continues a word, in the files
SPECIAL_TOKENS = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
SPECIAL_TOKENS |= {"mask_token": "[MASK]"}
CASE_NOTE = "the tokenizer distinguishes capitals from small letters; readers of GGUF do not, so token ids may differ"


def gguf_text(piece: str) -> str:
    """A piece as it is written in a GGUF."""
    return piece[2:] if piece.startswith(CONTINUES) and len(piece) > 2 else "\u2581" + piece


def read_words(path: Path) -> dict[str, int]:
    """A vocab.txt: word -> id. Raises FormatError if it cannot be read."""
    try:
        lines = read_text(path).split("\n")
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{path}: not UTF-8 text") from None
    words: dict[str, int] = {}
    for id, line in enumerate(lines[:-1] if lines[-1] == "" else lines):
        words.setdefault(line.rstrip("\r"), id)
    return words


def model_keys(vocab: dict[str, int], added: AddedTokens, vocab_size: int, notes: list[str]) -> dict[str, Any]:
    """Keys without tokenizer.ggml. for vocab_size tokens, special tokens not included; vocab: word -> id."""
    special = {text for text, _ in added.values()} | set(SPECIAL_TOKENS.values())
    tokens = {}
    for text, id in vocab.items():
        tokens[id] = (text, CONTROL) if text in special else (gguf_text(text), NORMAL)
    texts, types = token_list(tokens, added, vocab_size, notes)
    return {"model": "bert", "pre": "default", "tokens": texts, "token_type": np.array(types, np.int32)}


def differences(tokenizer: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    """Notes on what readers of a GGUF do differently. steps: of the normalizer and the pre-tokenizer."""
    notes = [
        f"the tokenizer's step {step.get('type')} has no counterpart in GGUF: words may be cut otherwise"
        for step in steps
        if step.get("type") not in ("BertNormalizer", "BertPreTokenizer")
    ]
    if any(step.get("type") == "BertNormalizer" and step.get("lowercase") is False for step in steps):
        notes.append(CASE_NOTE)
    if tokenizer["model"].get("continuing_subword_prefix", CONTINUES) != CONTINUES:
        notes.append("pieces that continue a word begin with something else than ##: token ids may differ")
    return notes
