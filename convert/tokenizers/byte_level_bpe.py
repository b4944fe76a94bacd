"""Byte-level BPE: GPT-2's characters for bytes, and its files vocab.json and merges.txt, with or without a tokenizer.json.

vocab.json has the tokens, written as in a GGUF, with their ids; merges.txt a pair per line, in order of rank. Tokens that were
added later are in added_tokens.json. The pre-tokenizer is in none of these files; it follows from the tokenizer class that
tokenizer_config.json names, or from config.json's model_type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...formats import FormatError
from ...formats.file_range import read_text
from ..config import read_json

FILES = ("vocab.json", "merges.txt")
_ADDED_TOKENS = "added_tokens.json"
_GPT2_END = "<|endoftext|>"
_VERSION_LINE = "#version"
# prefix of model_type or of tokenizer_class -> name for tokenizer.ggml.pre. Families first: some name GPT-2's class but split
# digits, which only their tokenizer.json would show
PRE_TOKENIZERS = {"starcoder2": "starcoder", "qwen": "qwen2", "Qwen": "qwen2", "GPT2": "gpt-2", "CodeGen": "gpt-2"}
# special tokens that the tokenizer classes define themselves: name for tokenizer.ggml.pre -> names of tokens
_DEFAULT_SPECIAL = {"qwen2": ("eos", "pad", "unk")}
_OTHER_DEFAULT_SPECIAL = ("bos", "eos", "unk")

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # Latin-1 characters that stand for themselves
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
CHARACTERS = [chr(b) if b in _PRINTABLE else chr(0x100 + _OTHERS.index(b)) for b in range(256)]  # of each byte


def to_characters(token: bytes) -> str:
    """The text in GPT-2's printable characters that stands for the bytes of a token."""
    return "".join(CHARACTERS[b] for b in token)


def has_files(folder: Path) -> bool:
    """Whether the folder has vocab.json and merges.txt."""
    return all((folder / name).is_file() for name in FILES)


def pre_tokenizer_name(settings: dict[str, Any], model_type: str) -> str | None:
    """The name for tokenizer.ggml.pre; None if neither tokenizer_config.json (settings) nor model_type shows it."""
    names = (model_type, str(settings.get("tokenizer_class")))
    return next((pre for prefix, pre in PRE_TOKENIZERS.items() if any(name.startswith(prefix) for name in names)), None)


def default_special_tokens(pre: str | None, vocab: dict[str, int]) -> dict[str, Any]:
    """Special tokens as keys of tokenizer_config.json, for those that it does not name itself."""
    names = _DEFAULT_SPECIAL.get(pre or "", _OTHER_DEFAULT_SPECIAL)
    return {f"{name}_token": _GPT2_END for name in names} if _GPT2_END in vocab else {}


def read_vocab(folder: Path) -> dict[str, int]:
    """vocab.json: token -> id. Raises FormatError for anything else, and for an id with two tokens."""
    return _read_ids(folder / FILES[0])


def read_added_tokens(folder: Path) -> dict[str, int]:
    """added_tokens.json: token -> id; empty without the file. Raises FormatError as `read_vocab` does."""
    path = folder / _ADDED_TOKENS
    return _read_ids(path) if path.is_file() else {}


def special_texts(settings: dict[str, Any]) -> set[str]:
    """Every token that tokenizer_config.json or special_tokens_map.json names or lists as an additional special token."""
    values = [value for key, value in settings.items() if key.endswith("_token") and not key.startswith("add_")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key)
        values += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    texts = [value.get("content") if isinstance(value, dict) else value for value in values]
    return {text for text in texts if isinstance(text, str)}


def read_merges(folder: Path) -> list[str]:
    """merges.txt: 'LEFT RIGHT', in order of rank. Raises FormatError for a line that is not a pair."""
    path = folder / FILES[1]
    try:
        lines = read_text(path).split("\n")  # only here: splitlines would also split at characters of tokens
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{path}: not UTF-8 text") from None
    merges = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith(_VERSION_LINE)):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise FormatError(f"{path}: line {number} is not a pair of tokens: {line!r:.60}")
        merges.append(line)
    return merges


def _read_ids(path: Path) -> dict[str, int]:
    vocab = read_json(path)
    if not all(type(id) is int for id in vocab.values()):
        raise FormatError(f"{path}: not a list of tokens with their ids")
    if len(set(vocab.values())) != len(vocab):
        raise FormatError(f"{path}: several tokens have the same id")
    return vocab
