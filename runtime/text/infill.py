"""Prompts of models that fill in the middle: what comes before and after a gap becomes a prompt that the gap's text follows."""

from __future__ import annotations

from collections.abc import Mapping

from ...formats import PlanError
from .tokenizer import Tokenizer
from .vocabulary import Vocabulary

# part -> (names of the keys tokenizer.ggml.NAME_token_id, texts that such tokens have in vocabularies without these keys)
_TOKENS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prefix": (
        ("fim_pre", "prefix"),
        ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "▁<PRE>", "<PRE>", "<｜fim▁begin｜>", "<|code_prefix|>", "[PREFIX]"),
    ),
    "suffix": (
        ("fim_suf", "suffix"),
        ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "▁<SUF>", "<SUF>", "<｜fim▁hole｜>", "<|code_suffix|>", "[SUFFIX]"),
    ),
    "middle": (
        ("fim_mid", "middle"),
        ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "▁<MID>", "<MID>", "<｜fim▁end｜>", "<|code_middle|>", "[MIDDLE]"),
    ),
}


def _token(vocabulary: Vocabulary, part: str) -> int | None:
    keys, texts = _TOKENS[part]
    by_text = vocabulary.ids_of(texts)
    ids = [*(vocabulary.special_id(key) for key in keys), *(by_text.get(text) for text in texts)]
    return next((i for i in ids if i is not None), None)


def infill_prompt(tokenizer: Tokenizer, prefix: str | list[int], suffix: str | list[int]) -> list[int]:
    """Token ids of a prompt that is continued with the text between prefix and suffix.

    The order is prefix, suffix, middle; where the vocabulary has no token for the middle (Codestral) suffix, prefix. Control
    tokens spelled out in the texts are ordinary text. Raises PlanError if the vocabulary has no tokens for it.
    """
    before, after, middle = (_token(tokenizer.vocabulary, part) for part in ("prefix", "suffix", "middle"))
    if before is None or after is None:
        raise PlanError("the vocabulary has no tokens to fill in the middle (tokenizer.ggml.fim_pre_token_id and others)")

    def ids(part: str | list[int]) -> list[int]:
        return tokenizer.encode(part, add_special=False) if isinstance(part, str) else part

    start = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    if middle is None:
        return [*start, after, *ids(suffix), before, *ids(prefix)]
    return [*start, before, *ids(prefix), after, *ids(suffix), middle]
