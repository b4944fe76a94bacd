"""Which pre-tokenizer of llama.cpp's list a byte-level tokenizer.json has.

A GGUF names the rule that cuts text into words (tokenizer.ggml.pre); tokenizer.json spells it out. The two are brought together
by what they do, not by how they are written: both cut a long probe text full of awkward places, and equal cuts count as the
same rule. So another spelling of a regex is recognised, and a small difference in meaning is not missed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from ...formats.pretokenizers import PRE_TOKENIZERS

# Names that a checkpoint's rule is compared with, in this order: of several that cut alike the first is written.
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

# What the probe text is drawn from: characters and runs between which the rules differ.
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


Cutter = Callable[[str], list[str]]


def _cutter(pre_tokenizer: dict[str, Any]) -> Cutter:
    """What cuts a text as a pre_tokenizer of tokenizer.json does. Raises what `tokenizers` does if it cannot be one."""
    shell = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    built = Tokenizer.from_str(json.dumps(shell)).pre_tokenizer
    return lambda text: [piece for piece, _ in built.pre_tokenize_str(text)]


@cache
def _known_cutter(name: str) -> Cutter:
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in PRE_TOKENIZERS[name].splits
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _cutter({"type": "Sequence", "pretokenizers": [*splits, to_bytes]})


def identify(pre_tokenizer: dict[str, Any], ignore_merges: bool) -> tuple[str, str]:
    """(name for tokenizer.ggml.pre, what is not as it should be or '').

    'default' where no known rule cuts the same; a rule that only differs in `ignore_merges` is taken, and the difference told.
    """
    try:
        cutter = _cutter(pre_tokenizer)
        cuts = [cutter(text) for text in _probe()]
    except Exception as error:  # `tokenizers` raises bare exceptions
        return "default", f"the pre-tokenizer of tokenizer.json cannot be built ({error}); written as 'default'"
    same = []
    for name in _CANDIDATES:
        known = _known_cutter(name)
        if all(known(text) == cut for text, cut in zip(_probe(), cuts, strict=True)):  # most differ in the first text
            if PRE_TOKENIZERS[name].ignore_merges == ignore_merges:
                return name, ""
            same.append(name)
    if same:
        return same[0], f"the pre-tokenizer is that of {same[0]} but for ignore_merges {ignore_merges}: token ids may differ"
    return "default", "the pre-tokenizer of tokenizer.json is unknown; written as 'default', so token ids may differ"
