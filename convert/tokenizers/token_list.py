"""The token list of a GGUF: text and type of every id, from a tokenizer's tokens and those added to it."""

from __future__ import annotations

import re
from typing import Any

from ...formats.metadata_values import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Added tokens that some models do not mark as special, but that only chat templates should produce (llama.cpp's list).
LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)

AddedTokens = dict[int, tuple[str, bool]]  # id -> (text, whether it is special)


def read_added_tokens(tokenizer: dict[str, Any]) -> AddedTokens:
    """added_tokens of tokenizer.json, or added_tokens_decoder of tokenizer_config.json. Raises ValueError if malformed."""
    decoder = tokenizer.get("added_tokens_decoder")
    entries = list(tokenizer.get("added_tokens") or [])
    if isinstance(decoder, dict):
        entries = [{"id": int(id), **entry} for id, entry in decoder.items()]
    added: AddedTokens = {}
    for entry in entries:
        id, text = entry["id"], entry["content"]
        if not isinstance(text, str) or type(id) is not int:
            raise ValueError(f"the content of added token {id} is {text!r:.40}")
        added[id] = text, bool(entry.get("special"))
    return added


def token_list(
    tokens: dict[int, tuple[str, int]], added: AddedTokens, vocab_size: int, notes: list[str]
) -> tuple[list[str], list[int]]:
    """(texts, types) of vocab_size ids; added tokens take precedence, ids without a token become unused ones named [PADn].

    tokens: id -> (text, type).
    """
    texts, types = [f"[PAD{i}]" for i in range(vocab_size)], [UNUSED] * vocab_size
    beyond = {id for id in (*tokens, *added) if not 0 <= id < vocab_size}
    for id, (text, token_type) in tokens.items():
        if id not in beyond:
            texts[id], types[id] = text, token_type
    for id, (text, is_special) in added.items():
        if id in beyond:
            continue
        texts[id] = text
        if types[id] not in (UNKNOWN, BYTE):
            types[id] = CONTROL if is_special or LOOKS_SPECIAL.fullmatch(text) else USER_DEFINED
    if beyond:
        notes.append(f"{len(beyond)} tokens of the tokenizer have ids beyond the {vocab_size} of the model and are left out")
    return texts, types
