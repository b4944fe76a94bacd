"""WordPiece (BERT): a vocab.txt with a word to a line, or tokenizer.json's model of this name -> GGUF's model 'bert'.

There a piece that continues a word is written "##x", in a GGUF as it is, and one that begins a word behind U+2581.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...formats import FormatError

USUAL = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
CASE = "the tokenizer tells capitals from small letters; readers of GGUF do not, so token ids may differ"


def gguf_text(piece: str) -> str:
    """A piece as GGUF spells it."""
    return piece[2:] if piece.startswith("##") and len(piece) > 2 else "\u2581" + piece


def read_words(path: Path) -> dict[str, int]:
    """word -> id of a vocab.txt. Raises FormatError if it cannot be read."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{path}: not UTF-8 text") from None
    words: dict[str, int] = {}
    for id, line in enumerate(lines[:-1] if lines[-1] == "" else lines):
        words.setdefault(line.rstrip("\r"), id)
    return words


def differences(tokenizer: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    """Notes on what readers of GGUF do otherwise. steps: of the normalizer and the pre-tokenizer."""
    notes = [
        f"the tokenizer's step {step.get('type')} has no counterpart in GGUF: words may be cut otherwise"
        for step in steps
        if step.get("type") not in ("BertNormalizer", "BertPreTokenizer")
    ]
    if any(step.get("type") == "BertNormalizer" and step.get("lowercase") is False for step in steps):
        notes.append(CASE)
    if tokenizer["model"].get("continuing_subword_prefix", "##") != "##":
        notes.append("pieces that continue a word begin with something else than ##: token ids may differ")
    return notes
