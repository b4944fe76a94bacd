"""tokenizer.json and tokenizer_config.json -> the tokenizer.* metadata of a GGUF.

Two kinds of BPE are known. Byte-level ones become model 'gpt2': tokens, types, merges, and the name of the rule that cuts
words. SentencePiece-like ones (spaces written as U+2581, unknown characters as byte tokens) become model 'llama', whose
readers know no merges: they join the neighbours whose joint token has the highest score, so a token's score is the negative
rank of the merge that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import FormatError
from .config import Config, read_json
from .pretokenizers import identify

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # values of tokenizer.ggml.token_type

SPACE = "\u2581"
_LONGEST_NAME = 200  # of a chat template: it becomes part of a key
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Added tokens that some models do not mark as special, but that only chat templates should produce (llama.cpp's list).
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
# name in tokenizer_config.json (NAME_token) and config.json (NAME_token_id) -> key; the misspelling is GGUF's
_SPECIAL_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}


def read_vocabulary(folder: Path, config: Config, n_vocab: int) -> tuple[dict[str, Any], list[str]]:
    """(tokenizer.* metadata for n_vocab tokens, notes). Token ids without a token become unused ones named [PADn].

    Without a tokenizer.json, or with one of another kind, the model is 'no_vocab' and a note says so. Raises FormatError for a
    malformed tokenizer.json.
    """
    notes: list[str] = []
    path = folder / "tokenizer.json"
    settings = _settings(folder)
    if not path.exists():
        return {"tokenizer.ggml.model": "no_vocab"}, ["there is no tokenizer.json: the GGUF will have no vocabulary"]
    tokenizer = read_json(path)
    try:
        kind = _kind(tokenizer)
        if kind is None:
            note = "tokenizer.json is neither byte-level nor SentencePiece-like BPE: the GGUF will have no vocabulary"
            return {"tokenizer.ggml.model": "no_vocab"}, [note]
        texts, types = _tokens(tokenizer, kind, n_vocab, notes)
        pairs = [_pair(merge) for merge in tokenizer["model"].get("merges", [])]
        keys: dict[str, Any] = {"tokenizer.ggml.model": kind}
        keys |= _byte_level(tokenizer, notes) if kind == "gpt2" else _sentencepiece(tokenizer, notes)
        keys |= {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": np.array(types, np.int32)}
        if kind == "gpt2":
            keys["tokenizer.ggml.merges"] = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in pairs]
        else:
            keys["tokenizer.ggml.scores"] = _scores(texts, types, pairs)
        ids = _special_ids(texts, settings, config, notes)
        keys |= {f"tokenizer.ggml.{_SPECIAL_KEYS[name]}": np.uint32(id) for name, id in ids.items()}
        first, last = _ends(tokenizer)
        for name, found in (("bos", first), ("eos", last)):
            told = settings.get(f"add_{name}_token")
            added = told if isinstance(told, bool) else name in ids and found == texts[ids[name]]
            keys[f"tokenizer.ggml.add_{name}_token"] = added
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a tokenizer of the usual form ({type(error).__name__}: {error})") from None
    return keys | _chat_templates(folder, settings, notes), notes


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; either may be absent."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            settings |= read_json(folder / name)
    return settings


def _parts(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre_tokenizer, post_processor or decoder, sequences taken apart."""
    if node is None:
        return
    if node.get("type") == "Sequence":
        for key in ("normalizers", "pretokenizers", "processors", "decoders"):
            for child in node.get(key) or []:
                yield from _parts(child)
    else:
        yield node


def _kind(tokenizer: dict[str, Any]) -> str | None:
    """'gpt2', 'llama', or None if it is neither."""
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or "merges" not in model:
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    steps = [s for key in ("pre_tokenizer", "decoder") for s in _parts(tokenizer.get(key))]
    if any(s.get("type") == "ByteLevel" for s in steps):
        return "gpt2"
    if any(s.get("type") == "Metaspace" for s in steps) or any(_writes_spaces(s) for s in _parts(tokenizer.get("normalizer"))):
        return "llama"
    return None


def _writes_spaces(step: dict[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == SPACE


def _tokens(tokenizer: dict[str, Any], kind: str, n_vocab: int, notes: list[str]) -> tuple[list[str], list[int]]:
    """Text and type of each of n_vocab ids."""
    model = tokenizer["model"]
    texts = [f"[PAD{i}]" for i in range(n_vocab)]
    types = [UNUSED] * n_vocab
    beyond = set()
    for text, id in model["vocab"].items():
        if not 0 <= id < n_vocab:
            beyond.add(id)
            continue
        texts[id], types[id] = text, NORMAL
        if kind == "llama" and _BYTE_TOKEN.fullmatch(text):
            types[id] = BYTE
    for token in tokenizer.get("added_tokens") or []:
        id, text = token["id"], token["content"]
        if not isinstance(text, str):
            raise ValueError(f"the content of added token {id} is {text!r:.40}")
        if not 0 <= id < n_vocab:
            beyond.add(id)
        elif token.get("special") or _LOOKS_SPECIAL.fullmatch(text):
            texts[id], types[id] = text, CONTROL
        else:
            # Readers of 'llama' look for these in the text before spaces are rewritten.
            texts[id], types[id] = text.replace(SPACE, " ") if kind == "llama" else text, USER_DEFINED
    unknown = model.get("unk_token")
    if kind == "llama" and unknown in texts:
        types[texts.index(unknown)] = UNKNOWN
    if beyond:
        notes.append(f"{len(beyond)} tokens of tokenizer.json have ids beyond the {n_vocab} of the model and are left out")
    return texts, types


def _pair(merge: str | list[str]) -> tuple[str, str]:
    """A merge as 'a b' (older files) or ['a', 'b']. Raises ValueError for anything else."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if len(parts) != 2 or not all(isinstance(p, str) and p for p in parts):
        raise ValueError(f"the merge {merge!r} is not a pair")
    return parts[0], parts[1]


def _byte_level(tokenizer: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    notes += _unwritten("normalizer", list(_parts(tokenizer.get("normalizer"))))
    pre, problem = identify(tokenizer.get("pre_tokenizer") or {}, bool(tokenizer["model"].get("ignore_merges")))
    if problem:
        notes.append(problem)
    return {"tokenizer.ggml.pre": pre}


def _sentencepiece(tokenizer: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    normalizers, pre = list(_parts(tokenizer.get("normalizer"))), list(_parts(tokenizer.get("pre_tokenizer")))
    prefix = any(s.get("type") == "Prepend" and s.get("prepend") == SPACE for s in normalizers)
    for step in pre:
        if step.get("type") == "Metaspace":
            prefix |= step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
    notes += _unwritten("pre-tokenizer", [s for s in pre if s.get("type") != "Metaspace"])
    notes += _unwritten("normalizer", [s for s in normalizers if s.get("type") != "Prepend" and not _writes_spaces(s)])
    return {"tokenizer.ggml.pre": "default", "tokenizer.ggml.add_space_prefix": prefix}


def _unwritten(what: str, steps: list[dict[str, Any]]) -> list[str]:
    return [f"the tokenizer's {what} {s.get('type')} has no counterpart in GGUF: text is taken as it stands" for s in steps]


def _scores(texts: list[str], types: list[int], pairs: list[tuple[str, str]]) -> np.ndarray:
    """float32 [number of tokens]: 0 for the first merge's token, -1 for the second's, ...; what no merge makes comes after."""
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(pairs):
        rank.setdefault(left + right, number)
    scores = np.zeros(len(texts), np.float32)
    for id, (text, kind) in enumerate(zip(texts, types, strict=True)):
        if kind == NORMAL:
            scores[id] = -rank.get(text, len(pairs) + id)
        elif kind in (USER_DEFINED, UNUSED):
            scores[id] = -len(pairs) - id
    return scores


def _special_ids(texts: list[str], settings: dict[str, Any], config: Config, notes: list[str]) -> dict[str, int]:
    """name in _SPECIAL_KEYS -> token id, for those that tokenizer_config.json or else config.json names."""
    by_text = {text: id for id, text in enumerate(texts)}
    ids: dict[str, int] = {}
    for name in _SPECIAL_KEYS:
        told = settings.get(f"{name}_token")
        text = told.get("content") if isinstance(told, dict) else told
        id = by_text.get(text) if isinstance(text, str) else None
        if id is None:
            id = config.get(f"{name}_token_id")
            id = id[0] if isinstance(id, list) and id else id
        if type(id) is int and 0 <= id < len(texts):
            ids[name] = id
        elif id is not None or isinstance(text, str):
            notes.append(f"the {name} token {text if id is None else id!r} is none of the {len(texts)} tokens and is left out")
    return ids


def _ends(tokenizer: dict[str, Any]) -> tuple[str | None, str | None]:
    """The special tokens that the post_processor's template sets before and after a text; None where it sets none."""
    for step in _parts(tokenizer.get("post_processor")):
        if step.get("type") == "TemplateProcessing" and len(step["single"]) > 1:
            first, last = (step["single"][i].get("SpecialToken", {}).get("id") for i in (0, -1))
            return first, last
    return None, None


def _chat_templates(folder: Path, settings: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """tokenizer.chat_template: a chat_template.jinja file, or tokenizer_config.json's text or list of named ones.

    A model is of use without: what is broken is left out and noted.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return {"tokenizer.chat_template": path.read_text("utf-8")}
        except OSError as error:
            notes.append(f"{path.name} cannot be read ({error.strerror or error}) and is left out")
        except UnicodeDecodeError:
            notes.append(f"{path.name} is not UTF-8 text and is left out")
    told = settings.get("chat_template")
    if told is None:
        return {}
    if isinstance(told, str):
        return {"tokenizer.chat_template": told}
    if not isinstance(told, list):
        notes.append("the chat_template of tokenizer_config.json is neither a text nor a list of named ones and is left out")
        return {}
    templates: dict[str, str] = {}
    for entry in told:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and isinstance(text, str):
            templates[name] = text
        else:
            notes.append(f"the chat template {entry!r:.100} is not a name with a text and is left out")
    keys: dict[str, Any] = {}
    if "default" in templates:
        keys["tokenizer.chat_template"] = templates.pop("default")
    if templates:
        keys["tokenizer.chat_templates"] = list(templates)
        keys |= {f"tokenizer.chat_template.{name}": text for name, text in templates.items()}
    return keys
