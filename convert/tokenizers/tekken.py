"""tekken.json, Mistral's file for a tiktoken vocabulary -> tokenizer.ggml.* keys of a GGUF.

It lists tokens as base64 by rank, special tokens, and the regular expression that cuts words. Special tokens have the first
ids; the id of any other token is its rank plus their number (mistral-common, tokens/tokenizers/tekken.py).
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np

from ...formats import FormatError
from ...formats.metadata_values import CONTROL, NORMAL
from ..config import read_json
from . import tiktoken
from .byte_level_bpe import to_characters
from .pretokenizers import identify
from .token_list import token_list

FILE = "tekken.json"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Those of files that list none (of versions up to 7), in order of their ids.
_UNLISTED = "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
_UNLISTED += "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"


def model_keys(path: Path, vocab_size: int, notes: list[str]) -> dict[str, Any]:
    """Keys without tokenizer.ggml. for vocab_size tokens, special tokens not included. Raises FormatError if malformed."""
    data = read_json(path)
    try:
        config = data["config"]
        n_special = int(config["default_num_special_tokens"])
        n_ranks = int(config["default_vocab_size"]) - n_special
        if not 0 <= n_special <= vocab_size:
            raise ValueError(f"{n_special} special tokens, where the model has {vocab_size} tokens")
        special, ranks = _special_tokens(data, n_special), _ranks(data["vocab"], n_ranks)
        pattern = str(config["pattern"])
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise FormatError(f"{path}: not a vocabulary of the usual form ({type(error).__name__}: {error})") from None
    tokens = {id: (text, CONTROL) for id, text in special.items()}
    tokens |= {n_special + rank: (to_characters(token), NORMAL) for token, rank in ranks.items()}
    texts, types = token_list(tokens, {}, vocab_size, notes)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pre, problem = identify({"type": "Sequence", "pretokenizers": [split, to_bytes]}, ignore_merges=True)
    if problem:
        notes.append(problem.replace("tokenizer.json", FILE))
    keys = {"model": "gpt2", "pre": pre, "tokens": texts, "token_type": np.array(types, np.int32)}
    return keys | {"merges": [f"{to_characters(left)} {to_characters(right)}" for left, right in tiktoken.merges(ranks)]}


def _special_tokens(data: dict[str, Any], n: int) -> dict[int, str]:
    """Id -> text of n special tokens; ids that the file does not name have the texts that mistral-common gives them."""
    listed = data.get("special_tokens")
    named = dict(enumerate(_UNLISTED.split())) if listed is None else {t["rank"]: t["token_str"] for t in listed}
    if not all(type(id) is int and 0 <= id < n and isinstance(text, str) for id, text in named.items()):
        raise ValueError(f"special tokens with other ids than 0 to {n - 1}, or without a text")
    texts = {id: f"<SPECIAL_{id}>" for id in range(n)} | named
    if len(set(texts.values())) != n:
        raise ValueError("two special tokens have the same text")
    return texts


def _ranks(vocab: list[dict[str, Any]], n: int) -> dict[bytes, int]:
    """Bytes of a token -> rank, in order of rank, for the first n."""
    ranks: dict[bytes, int] = {}
    for rank, token in enumerate(vocab[: max(n, 0)]):
        if token["rank"] != rank:
            raise ValueError(f"token {rank} of the list has the rank {token['rank']!r:.40}")
        ranks[base64.b64decode(token["token_bytes"], validate=True)] = rank
    if len(ranks) != n or b"" in ranks:
        raise ValueError(f"{len(ranks)} different tokens; {n} are expected")
    return ranks
