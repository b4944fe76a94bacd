"""vocab.json and merges.txt, in which GPT-2 and those after it keep a byte-level BPE, beside or instead of a tokenizer.json.

vocab.json has the tokens, spelt as in GGUF, with their ids; merges.txt a pair to a line, the first to be merged first. Tokens
that were added later are in added_tokens.json. The rule that cuts words is in none of these files, but in the class that
tokenizer_config.json names, or known by the family that config.json names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...formats import FormatError
from ..config import read_json

FILES = ("vocab.json", "merges.txt")
_ADDED = "added_tokens.json"
_GPT2_END = "<|endoftext|>"
_HEADING = "#version"
# beginning of model_type or of tokenizer_class -> name for tokenizer.ggml.pre; families first: some name GPT-2's class, but
# cut digits apart, as only their tokenizer.json would tell
RULES = {"starcoder2": "starcoder", "qwen": "qwen2", "Qwen": "qwen2", "GPT2": "gpt-2", "CodeGen": "gpt-2"}
# tokens that the classes themselves name, where a checkpoint's files do not
_USUAL = {"qwen2": ("eos", "pad", "unk")}
_USUAL_OTHERWISE = ("bos", "eos", "unk")


def is_there(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def rule(settings: dict[str, Any], model_type: str) -> str | None:
    """The name for tokenizer.ggml.pre, or None if nothing tells it."""
    told = (model_type, str(settings.get("tokenizer_class")))
    return next((pre for begins, pre in RULES.items() if any(name.startswith(begins) for name in told)), None)


def usual(pre: str | None, vocab: dict[str, int]) -> dict[str, Any]:
    """Special tokens as tokenizer_config.json would name them, to be used where it does not."""
    names = _USUAL.get(pre or "", _USUAL_OTHERWISE)
    return {f"{name}_token": _GPT2_END for name in names} if _GPT2_END in vocab else {}


def read_vocab(folder: Path) -> dict[str, int]:
    """token -> id. Raises FormatError for anything else, and for an id that two tokens have."""
    return _ids(folder / FILES[0])


def read_added(folder: Path) -> dict[str, int]:
    """As `read_vocab`, of added_tokens.json; empty without one."""
    path = folder / _ADDED
    return _ids(path) if path.is_file() else {}


def special_texts(settings: dict[str, Any]) -> set[str]:
    """Every token that tokenizer_config.json or special_tokens_map.json gives a name or calls an additional special one."""
    told = [value for key, value in settings.items() if key.endswith("_token") and not key.startswith("add_")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key)
        told += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    texts = [value.get("content") if isinstance(value, dict) else value for value in told]
    return {text for text in texts if isinstance(text, str)}


def read_merges(folder: Path) -> list[str]:
    """'LEFT RIGHT' in order. Raises FormatError for a line that is no pair."""
    path = folder / FILES[1]
    try:
        lines = path.read_text("utf-8").split("\n")  # and at nothing else: some of a token's characters end lines elsewhere
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{path}: not UTF-8 text") from None
    merges = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith(_HEADING)):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise FormatError(f"{path}: line {number} is not a pair of tokens: {line!r:.60}")
        merges.append(line)
    return merges


def _ids(path: Path) -> dict[str, int]:
    vocab = read_json(path)
    if not all(type(id) is int for id in vocab.values()):
        raise FormatError(f"{path}: not a list of tokens with their ids")
    if len(set(vocab.values())) != len(vocab):
        raise FormatError(f"{path}: several tokens have the same id")
    return vocab
