"""SentencePiece's model files (tokenizer.model, spiece.model) and unigram models of tokenizer.json -> keys of a GGUF.

A model file is a protocol buffer (google/sentencepiece, src/sentencepiece_model.proto); the few fields that matter are read
here. BPE becomes GGUF's model 'llama', unigram (arXiv:1804.10959) its 't5'; token types have the same numbers in both.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...formats import FormatError
from ...formats.file_range import read_file
from ...formats.metadata_values import BYTE, NORMAL, UNKNOWN
from .token_list import BYTE_TOKEN, AddedTokens, token_list

FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_PIECE_TYPES = range(1, 7)
UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5  # wire types
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of ModelProto


@dataclass
class PieceModel:
    """A SentencePiece model.

    pieces                    (text, score, type) of every id
    special_ids               of unk, bos, eos and pad; -1 for none
    charsmap                  the compiled normalisation
    add_dummy_prefix          whether a space is put before a text
    remove_extra_whitespaces  whether runs of spaces become one, and spaces at both ends are removed
    """

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    model_type: int = UNIGRAM
    special_ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def model_keys(model: PieceModel, added: AddedTokens, vocab_size: int, notes: list[str]) -> dict[str, Any]:
    """Keys without tokenizer.ggml. for vocab_size tokens, special tokens not included."""
    if model.model_type == BPE:
        keys: dict[str, Any] = {"model": "llama", "pre": "default", "add_space_prefix": model.add_dummy_prefix}
    else:
        keys = {"model": "t5", "pre": "default", "add_space_prefix": model.add_dummy_prefix}
        keys["remove_extra_whitespaces"] = model.remove_extra_whitespaces
        if model.charsmap:
            keys["precompiled_charsmap"] = np.frombuffer(model.charsmap, np.uint8)
    tokens = {}
    for id, (text, _, piece_type) in enumerate(model.pieces):
        is_byte = piece_type == NORMAL and BYTE_TOKEN.fullmatch(text)
        tokens[id] = (text, BYTE if is_byte else UNKNOWN if id == model.special_ids["unk"] else piece_type)
    texts, types = token_list(tokens, added, vocab_size, notes)
    scores = np.full(vocab_size, min((score for _, score, _ in model.pieces), default=0.0) - 1, np.float32)
    scores[: len(model.pieces)] = [score for _, score, _ in model.pieces[:vocab_size]]
    return keys | {"tokens": texts, "token_type": np.array(types, np.int32), "scores": scores}


def read_model(path: Path) -> PieceModel:
    """Reads a model file. Raises FormatError for a damaged one, and for word and character models."""
    try:
        model = _parse_model(read_file(path))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError, IndexError, OverflowError, struct.error) as error:
        raise FormatError(f"{path}: not a SentencePiece model ({error})") from None
    if model.model_type not in (UNIGRAM, BPE):
        raise FormatError(
            f"{path}: a SentencePiece model of kind {model.model_type}; only unigram (1) and BPE (2) can be converted"
        )
    return model


def _parse_model(data: bytes) -> PieceModel:
    model = PieceModel()
    for number, value in _fields(data):
        if number == _PIECES and isinstance(value, bytes):
            piece = dict(_fields(value))
            text, score, piece_type = piece.get(1, b""), piece.get(2, 0.0), piece.get(3, NORMAL)
            if not isinstance(text, bytes):
                raise ValueError("a piece without a text")
            if piece_type not in _PIECE_TYPES:
                raise ValueError(f"a piece of type {piece_type!r:.40}")
            model.pieces.append((text.decode("utf-8"), float(score), int(piece_type)))
        elif number == _TRAINER and isinstance(value, bytes):
            trainer = dict(_fields(value))
            model.model_type = int(trainer.get(3, UNIGRAM))
            for name, field_number in (("unk", 40), ("bos", 41), ("eos", 42), ("pad", 43)):
                model.special_ids[name] = _signed(trainer.get(field_number, model.special_ids[name]))
        elif number == _NORMALIZER and isinstance(value, bytes):
            normalizer = dict(_fields(value))
            charsmap = normalizer.get(2, b"")
            model.charsmap = charsmap if isinstance(charsmap, bytes) else b""
            model.add_dummy_prefix = bool(normalizer.get(3, 1))
            model.remove_extra_whitespaces = bool(normalizer.get(4, 1))
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def _signed(value: Any) -> int:
    """The value of an int32 field; negative ones are written as 64-bit two's complement."""
    return int(value) - (1 << 64) if int(value) >= 1 << 63 else int(value)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value: int, float or bytes) of each field of a message. Raises ValueError if it is damaged."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, position = _varint(data, position)
            yield number, value
        elif wire_type == _LEN:
            size, position = _varint(data, position)
            if position + size > len(data):
                raise ValueError(f"field {number} ends beyond byte {len(data)}")
            yield number, data[position : position + size]
            position += size
        elif wire_type in (_I32, _I64):
            size = 4 if wire_type == _I32 else 8
            yield number, struct.unpack_from("<f" if size == 4 else "<d", data, position)[0]
            position += size
        else:
            raise ValueError(f"field {number} is of unknown wire type {wire_type}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """(the integer at a position, the position after it)."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError(f"a number of more than 64 bits at byte {position}")


def _removes_spaces(step: dict[str, Any]) -> bool:
    """Whether a Replace step removes spaces at the ends, or all but one of a run."""
    pattern = step.get("pattern")
    regex = pattern.get("Regex", "") if isinstance(pattern, dict) else ""
    return regex in (" {2,}", "^ +| +$", "^ +", " +$", " +") and step.get("content") in ("", " ", "▁")


def from_tokenizer_json(tokenizer: dict[str, Any], steps: list[dict[str, Any]], notes: list[str]) -> PieceModel:
    """The unigram model of a tokenizer.json. steps: of its normalizer and pre-tokenizer; those that a GGUF cannot express are
    noted. Raises KeyError, TypeError or ValueError for a malformed one."""
    unigram = tokenizer["model"]
    unknown = unigram.get("unk_id")
    pieces = [(str(text), float(score), NORMAL) for text, score in unigram["vocab"]]
    if unknown is not None:
        pieces[unknown] = (pieces[unknown][0], pieces[unknown][1], UNKNOWN)
    special_ids = {"unk": -1 if unknown is None else int(unknown)}
    model = PieceModel(pieces, UNIGRAM, special_ids, add_dummy_prefix=False, remove_extra_whitespaces=False)
    for step in steps:
        step_type = step.get("type")
        if step_type == "Precompiled":
            model.charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
        elif step_type == "Metaspace":
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            model.add_dummy_prefix = scheme != "never"
        elif step_type == "Prepend":
            model.add_dummy_prefix = True
        elif step_type in ("Strip", "WhitespaceSplit") or (step_type == "Replace" and _removes_spaces(step)):
            model.remove_extra_whitespaces = True
        elif step_type != "Replace" or step.get("pattern") != {"String": " "}:
            notes.append(f"the tokenizer's step {step_type} has no counterpart in GGUF: text is taken as it stands")
    return model
