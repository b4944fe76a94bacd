"""tokenizer.json (the format of Hugging Face's `tokenizers`) -> tokenizer.ggml.* keys of a GGUF.

Two kinds of BPE are supported. Byte-level ones become model 'gpt2': tokens, types, merges, and the name of the pre-tokenizer.
SentencePiece-like ones (spaces written as U+2581, unknown characters as byte tokens) become model 'llama', which has no
merges: llama.cpp joins the neighbours whose joint token has the highest score, so a token's score is the negative rank of the
merge that makes it. Unigram models become 't5', WordPiece 'bert'.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...formats.metadata_values import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from . import sentencepiece, wordpiece
from .pretokenizers import identify
from .token_list import BYTE_TOKEN, LOOKS_SPECIAL, read_added_tokens

SPACE = "\u2581"
_BYTE_LEVEL_SPACE = "\u0120"  # as tokens are spelt there


def model_keys(tokenizer: dict[str, Any], vocab_size: int, notes: list[str]) -> dict[str, Any] | None:
    """Keys without tokenizer.ggml. for vocab_size tokens, special tokens not included; None for an unsupported kind.

    Raises what a malformed file raises: KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError.
    """
    model = tokenizer.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if kind == "Unigram":
        steps = [s for key in ("normalizer", "pre_tokenizer") for s in _steps(tokenizer.get(key))]
        pieces = sentencepiece.from_tokenizer_json(tokenizer, steps, notes)
        return sentencepiece.model_keys(pieces, read_added_tokens(tokenizer), vocab_size, notes)
    if kind == "WordPiece":
        steps = [s for key in ("normalizer", "pre_tokenizer") for s in _steps(tokenizer.get(key))]
        notes += wordpiece.differences(tokenizer, steps)
        return wordpiece.model_keys(tokenizer["model"]["vocab"], read_added_tokens(tokenizer), vocab_size, notes)
    gguf_model = _bpe_model(tokenizer)
    if gguf_model is None:
        return None
    texts, types = _bpe_tokens(tokenizer, gguf_model, vocab_size, notes)
    pairs = [_pair(merge) for merge in tokenizer["model"].get("merges", [])]
    keys: dict[str, Any] = {"model": gguf_model}
    keys |= _byte_level_keys(tokenizer, notes) if gguf_model == "gpt2" else _sentencepiece_keys(tokenizer, notes)
    keys |= {"tokens": texts, "token_type": np.array(types, np.int32)}
    if gguf_model == "gpt2":
        keys["merges"] = [
            f"{first.replace(' ', _BYTE_LEVEL_SPACE)} {second.replace(' ', _BYTE_LEVEL_SPACE)}" for first, second in pairs
        ]
    else:
        keys["scores"] = _scores(texts, types, pairs)
    return keys


def enclosing_tokens(tokenizer: dict[str, Any]) -> tuple[str | None, str | None]:
    """The special tokens that the post_processor's template puts before and after a text; None where it puts none."""
    for step in _steps(tokenizer.get("post_processor")):
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            return step["cls"][0], step["sep"][0]
        if step.get("type") == "TemplateProcessing" and len(step["single"]) > 1:
            first, last = (step["single"][i].get("SpecialToken", {}).get("id") for i in (0, -1))
            return first, last
    return None, None


def unsupported_steps(what: str, steps: list[dict[str, Any]]) -> list[str]:
    """A note for each step of a normalizer or pre_tokenizer (`what`) that a GGUF cannot express."""
    return [f"the tokenizer's {what} {s.get('type')} has no counterpart in GGUF: text is taken as it stands" for s in steps]


def _steps(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre_tokenizer, post_processor or decoder; sequences are flattened."""
    if node is None:
        return
    if node.get("type") == "Sequence":
        for key in ("normalizers", "pretokenizers", "processors", "decoders"):
            for child in node.get(key) or []:
                yield from _steps(child)
    else:
        yield node


def _bpe_model(tokenizer: dict[str, Any]) -> str | None:
    """'gpt2' for byte-level BPE, 'llama' for SentencePiece-like BPE, None for anything else."""
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or "merges" not in model:
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    steps = [s for key in ("pre_tokenizer", "decoder") for s in _steps(tokenizer.get(key))]
    if any(s.get("type") == "ByteLevel" for s in steps):
        return "gpt2"
    has_metaspace = any(s.get("type") == "Metaspace" for s in steps)
    if has_metaspace or any(_replaces_spaces(s) for s in _steps(tokenizer.get("normalizer"))):
        return "llama"
    return None


def _splits_at_spaces(step: dict[str, Any]) -> bool:
    """Whether this cuts a text at spaces alone, of which a normalizer that replaces them leaves none (Gemma)."""
    return step.get("type") == "Split" and step.get("pattern") == {"String": " "}


def _replaces_spaces(step: dict[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == SPACE


def _bpe_tokens(tokenizer: dict[str, Any], gguf_model: str, vocab_size: int, notes: list[str]) -> tuple[list[str], list[int]]:
    """(texts, types) of vocab_size ids."""
    model = tokenizer["model"]
    texts = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    beyond = set()
    for text, id in model["vocab"].items():
        if not 0 <= id < vocab_size:
            beyond.add(id)
            continue
        texts[id], types[id] = text, NORMAL
        if gguf_model == "llama" and BYTE_TOKEN.fullmatch(text):
            types[id] = BYTE
    for token in tokenizer.get("added_tokens") or []:
        id, text = token["id"], token["content"]
        if not isinstance(text, str):
            raise ValueError(f"the content of added token {id} is {text!r:.40}")
        if not 0 <= id < vocab_size:
            beyond.add(id)
        elif token.get("special") or LOOKS_SPECIAL.fullmatch(text):
            texts[id], types[id] = text, CONTROL
        else:
            # llama.cpp looks for these in the text before it replaces spaces.
            texts[id], types[id] = text.replace(SPACE, " ") if gguf_model == "llama" else text, USER_DEFINED
    unknown = model.get("unk_token")
    if gguf_model == "llama" and unknown in texts:
        types[texts.index(unknown)] = UNKNOWN
    if beyond:
        notes.append(f"{len(beyond)} tokens of tokenizer.json have ids beyond the {vocab_size} of the model and are left out")
    return texts, types


def _pair(merge: str | list[str]) -> tuple[str, str]:
    """A merge, 'a b' (older files) or ['a', 'b']. Raises ValueError for anything else."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if len(parts) == 2:  # there may be half a million
        first, second = parts
        if first and second and isinstance(first, str) and isinstance(second, str):
            return first, second
    raise ValueError(f"the merge {merge!r} is not a pair")


def _byte_level_keys(tokenizer: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    notes += unsupported_steps("normalizer", list(_steps(tokenizer.get("normalizer"))))
    pre, problem = identify(tokenizer.get("pre_tokenizer") or {}, bool(tokenizer["model"].get("ignore_merges")))
    if problem:
        notes.append(problem)
    return {"pre": pre}


def _sentencepiece_keys(tokenizer: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    normalizers, pre_tokenizers = list(_steps(tokenizer.get("normalizer"))), list(_steps(tokenizer.get("pre_tokenizer")))
    add_prefix = any(s.get("type") == "Prepend" and s.get("prepend") == SPACE for s in normalizers)
    for step in pre_tokenizers:
        if step.get("type") == "Metaspace":
            add_prefix |= step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
    spaces_are_gone = any(map(_replaces_spaces, normalizers))
    active = [s for s in pre_tokenizers if s.get("type") != "Metaspace" and not (spaces_are_gone and _splits_at_spaces(s))]
    notes += unsupported_steps("pre-tokenizer", active)
    notes += unsupported_steps("normalizer", [s for s in normalizers if s.get("type") != "Prepend" and not _replaces_spaces(s)])
    return {"pre": "default", "add_space_prefix": add_prefix}


def _scores(texts: list[str], types: list[int], pairs: list[tuple[str, str]]) -> np.ndarray:
    """float32 [tokens]: 0 for the token of the first merge, -1 for that of the second, ...; tokens without a merge are last."""
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(pairs):
        rank.setdefault(left + right, number)
    scores = np.zeros(len(texts), np.float32)
    for id, (text, token_type) in enumerate(zip(texts, types, strict=True)):
        if token_type == NORMAL:
            scores[id] = -rank.get(text, len(pairs) + id)
        elif token_type in (USER_DEFINED, UNUSED):
            scores[id] = -len(pairs) - id
    return scores
