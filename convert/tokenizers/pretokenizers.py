"""Recognising llama.cpp's name for the pre-tokenizer of a byte-level tokenizer.json.

A GGUF names the pre-tokenizer (tokenizer.ggml.pre), tokenizer.json defines it by regular expressions. Those that are not spelt
as they are known here are compared by their behaviour: both split a long probe text that is full of edge cases, and equal
pieces count as the same rule. So a regex that is written differently is recognised, and a small difference in meaning is not
missed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from ...formats.pretokenizers import PRE_TOKENIZERS

# Names that are compared, in this order: of several with the same behaviour the first is written.
_CANDIDATES = (
    "deepseek-v3",
    "deepseek-llm",
    "deepseek-coder",
    "llama-bpe",
    "smaug-bpe",
    "qwen2",
    "qwen35",
    "gpt-4o",
    "tekken",
    "seed-coder",
    "starcoder",
    "gpt-2",
    "kimi-k2",
    "exaone-moe",
    "jais-2",
    "tiny_aya",
    "falcon",
    "bloom",
    "viking",
)

# The probe text is drawn from these characters and runs, in whose treatment the rules differ.
_RUNS = (
    "'s|'T|'ll|'RE|'x|the|The|HTTP|iPhone|12345|3.14|   |    |\r\n|\n\n\n| \n | \t|());\n|//|#include|=="
    "|中文|カタカナ|Привет|العربية|हिन्दी|ไทย| a| 1| !| 中|!a|a1|1a"
)
_PIECES = (
    *"abzABZ019 .,!?-_/'\"$+^`|~\t\n\r",
    *"  \n\n",
    *"éßİμΩжЯաՖႠაאبेिกำ中龥鿿ぁんアヶー한글ᄀ가ᏣⅣ²½٣〇",
    *"\u00a0\u3000\u200b\u2028\u0301\u20dd、。！～“”…—€±×🙂\U0001f468\u200d",
    *_RUNS.split("|"),
)
_TEXTS, _LENGTH = 60, 200


@cache
def _probe() -> tuple[str, ...]:
    draw = random.Random(7)
    return tuple("".join(draw.choices(_PIECES, k=_LENGTH)) for _ in range(_TEXTS))


_ESCAPED = {"r": "\r", "n": "\n", '"': '"'}  # characters behind a backslash

Splitter = Callable[[str], list[str]]  # text -> its pieces


def _splitter(pre_tokenizer: dict[str, Any]) -> Splitter:
    """The splitter of a pre_tokenizer of tokenizer.json. Raises what `tokenizers` raises for a malformed one."""
    minimal = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    from tokenizers import Tokenizer  # not for planning

    built = Tokenizer.from_str(json.dumps(minimal)).pre_tokenizer
    return lambda text: [piece for piece, _ in built.pre_tokenize_str(text)]


def _literal(regex: str) -> str:
    return re.sub(r'\\(?:x\{(\w+)\}|([rn"]))', lambda m: chr(int(m[1], 16)) if m[1] else _ESCAPED[m[2]], regex)


@cache
def definition(name: str, literal: bool = False) -> dict[str, Any]:
    """A known rule as a pre_tokenizer of tokenizer.json; literal: with characters where the rule has escapes for them."""
    splits = [
        {"type": "Split", "pattern": {"Regex": _literal(regex) if literal else regex}, "behavior": "Isolated", "invert": False}
        for regex in PRE_TOKENIZERS[name].splits
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}


@cache
def _known_splitter(name: str) -> Splitter:
    return _splitter(definition(name))


# Published definitions that split some texts otherwise than llama.cpp's rule of their name, which is what runs their GGUFs.
# Falcon's isolates numbers: " 1" is two pieces, and no token of its vocabulary joins them, so the ids are mostly the same.
_GROUPS_OF_DIGITS = {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False}
_PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        {"type": "Digits", "individual_digits": False},  # of the bytes' characters: letters of two bytes are split, too
        _GROUPS_OF_DIGITS,
    ],
}


@cache
def _published_splitter(name: str) -> Splitter:
    return _splitter({"type": "Sequence", "pretokenizers": _PUBLISHED[name]})


def identify(pre_tokenizer: dict[str, Any], ignore_merges: bool) -> tuple[str, str]:
    """A pre_tokenizer and ignore_merges of tokenizer.json -> (name for tokenizer.ggml.pre, a problem or '').

    'default' if no known rule splits the same; a rule that differs only in `ignore_merges` is taken, and the problem says so.
    """
    for name in _CANDIDATES:  # most models spell their rule as it is known here, and comparing texts takes 30 ms
        spellings = definition(name), definition(name, literal=True)
        if PRE_TOKENIZERS[name].ignore_merges == ignore_merges and pre_tokenizer in spellings:
            return name, ""
    return identified_by_behaviour(json.dumps(pre_tokenizer), ignore_merges)


@lru_cache(16)  # a job opens its checkpoint for each of its steps
def identified_by_behaviour(pre_tokenizer: str, ignore_merges: bool) -> tuple[str, str]:
    """As `identify`, for a definition as JSON: by how it splits texts."""
    try:
        split = _splitter(json.loads(pre_tokenizer))
        pieces = [split(text) for text in _probe()]
    except Exception as error:  # `tokenizers` raises bare exceptions
        return "default", f"the pre-tokenizer of tokenizer.json cannot be built ({error}); written as 'default'"
    candidates = []
    for name in _CANDIDATES:
        known = _known_splitter(name)
        if all(known(text) == p for text, p in zip(_probe(), pieces, strict=True)):  # most differ in the first text
            if PRE_TOKENIZERS[name].ignore_merges == ignore_merges:
                return name, ""
            candidates.append(name)
    if candidates:
        return candidates[
            0
        ], f"the pre-tokenizer is that of {candidates[0]} but for ignore_merges {ignore_merges}: token ids may differ"
    for name in _PUBLISHED:
        published = _published_splitter(name)
        if all(published(text) == p for text, p in zip(_probe(), pieces, strict=True)):
            problem = f"the pre-tokenizer is the one that {name} was published with, which GGUF's rule of this name does not"
            return name, f"{problem} follow everywhere: token ids of a few texts may differ"
    return "default", "the pre-tokenizer of tokenizer.json is unknown; written as 'default', so token ids may differ"
