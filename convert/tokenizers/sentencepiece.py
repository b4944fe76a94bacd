"""SentencePiece's own model files (tokenizer.model, spiece.model) and unigram models of tokenizer.json -> keys of a GGUF.

A model file is a protocol buffer (google/sentencepiece, src/sentencepiece_model.proto); the few fields that matter are read
here. BPE becomes GGUF's model 'llama', unigram (arXiv:1804.10959) its 't5'; types of tokens have the same numbers in both.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...formats import FormatError

NORMAL, UNKNOWN = 1, 2
_KINDS = range(1, 7)  # of pieces
UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
_VARINT, _LONG, _BYTES, _SHORT = 0, 1, 2, 5  # wire types
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of ModelProto


@dataclass
class PieceModel:
    """pieces: text, score and type of every id; ids: of unk, bos, eos and pad, -1 for none; charsmap: SentencePiece's compiled
    normalisation; prefix: a space is put in front of a text; trimmed: runs of spaces become one, at the ends none."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    kind: int = UNIGRAM
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    charsmap: bytes = b""
    prefix: bool = True
    trimmed: bool = True

    def keys(self) -> dict[str, Any]:
        """tokenizer.ggml.* without tokens, types and scores."""
        if self.kind == BPE:
            return {"model": "llama", "pre": "default", "add_space_prefix": self.prefix}
        keys: dict[str, Any] = {"model": "t5", "pre": "default", "add_space_prefix": self.prefix}
        keys["remove_extra_whitespaces"] = self.trimmed
        if self.charsmap:
            keys["precompiled_charsmap"] = np.frombuffer(self.charsmap, np.uint8)
        return keys


def read_pieces(path: Path) -> PieceModel:
    """A model file. Raises FormatError for one that is damaged, or of words or characters."""
    try:
        model = _model(path.read_bytes())
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError, IndexError, OverflowError, struct.error) as error:
        raise FormatError(f"{path}: not a SentencePiece model ({error})") from None
    if model.kind not in (UNIGRAM, BPE):
        raise FormatError(f"{path}: a SentencePiece model of kind {model.kind}; only unigram (1) and BPE (2) can be converted")
    return model


def _model(data: bytes) -> PieceModel:
    model = PieceModel()
    for number, value in _fields(data):
        if number == _PIECES and isinstance(value, bytes):
            parts = dict(_fields(value))
            text, score, kind = parts.get(1, b""), parts.get(2, 0.0), parts.get(3, NORMAL)
            if not isinstance(text, bytes):
                raise ValueError("a piece without a text")
            if kind not in _KINDS:
                raise ValueError(f"a piece of type {kind!r:.40}")
            model.pieces.append((text.decode("utf-8"), float(score), int(kind)))
        elif number == _TRAINER and isinstance(value, bytes):
            parts = dict(_fields(value))
            model.kind = int(parts.get(3, UNIGRAM))
            for name, at in (("unk", 40), ("bos", 41), ("eos", 42), ("pad", 43)):
                model.ids[name] = _signed(parts.get(at, model.ids[name]))
        elif number == _NORMALIZER and isinstance(value, bytes):
            parts = dict(_fields(value))
            charsmap = parts.get(2, b"")
            model.charsmap = charsmap if isinstance(charsmap, bytes) else b""
            model.prefix, model.trimmed = bool(parts.get(3, 1)), bool(parts.get(4, 1))
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def _signed(value: Any) -> int:
    """An int32, whose negative values are written as 64-bit ones."""
    return int(value) - (1 << 64) if int(value) >= 1 << 63 else int(value)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, int, float or bytes) of each field of a message. Raises ValueError where it is damaged."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
        elif wire == _BYTES:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError(f"field {number} ends beyond byte {len(data)}")
            yield number, data[at : at + size]
            at += size
        elif wire in (_SHORT, _LONG):
            size = 4 if wire == _SHORT else 8
            yield number, struct.unpack_from("<f" if size == 4 else "<d", data, at)[0]
            at += size
        else:
            raise ValueError(f"field {number} is of unknown wire type {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError(f"a number of more than 64 bits at byte {at}")


def _is_trimming(step: dict[str, Any]) -> bool:
    """Whether a Replace takes away spaces at the ends, or all but one of a run."""
    pattern = step.get("pattern")
    regex = pattern.get("Regex", "") if isinstance(pattern, dict) else ""
    return regex in (" {2,}", "^ +| +$", "^ +", " +$", " +") and step.get("content") in ("", " ", "▁")


def from_json(tokenizer: dict[str, Any], steps: list[dict[str, Any]], notes: list[str]) -> PieceModel:
    """A unigram model of tokenizer.json. steps: its normalizer's and pre-tokenizer's, taken apart; what GGUF cannot say of
    them is noted. Raises what a malformed one raises: KeyError, TypeError, ValueError."""
    stored = tokenizer["model"]
    unknown = stored.get("unk_id")
    pieces = [(str(text), float(score), NORMAL) for text, score in stored["vocab"]]
    if unknown is not None:
        pieces[unknown] = (pieces[unknown][0], pieces[unknown][1], UNKNOWN)
    model = PieceModel(pieces, UNIGRAM, {"unk": -1 if unknown is None else int(unknown)}, prefix=False, trimmed=False)
    for step in steps:
        kind = step.get("type")
        if kind == "Precompiled":
            model.charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
        elif kind == "Metaspace":
            model.prefix = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
        elif kind == "Prepend":
            model.prefix = True
        elif kind in ("Strip", "WhitespaceSplit") or (kind == "Replace" and _is_trimming(step)):
            model.trimmed = True
        elif kind != "Replace" or step.get("pattern") != {"String": " "}:
            notes.append(f"the tokenizer's step {kind} has no counterpart in GGUF: text is taken as it stands")
    return model
