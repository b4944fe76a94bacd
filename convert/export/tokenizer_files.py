"""The tokenizer.* metadata of a GGUF as the files of a checkpoint.

Byte-level BPE and WordPiece become a tokenizer.json. SentencePiece's models (BPE with scores, unigram) become a
tokenizer.model, since that alone has scores and types as a GGUF has them; `sentencepiece` says what such a file is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...formats.metadata_values import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from ...formats.pretokenizers import PRE_TOKENIZERS
from ..tokenizers.sentencepiece import BPE, UNIGRAM
from ..tokenizers.vocabulary import SPECIAL_KEYS
from ..tokenizers.wordpiece import CONTINUES

SPACE = "\u2581"
_CLASSES = {"llama": "LlamaTokenizer", "t5": "T5Tokenizer", "bert": "BertTokenizer"}


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[dict[str, bytes], dict[str, int]]:
    """(file name -> content, NAME -> id of the special tokens NAME_token_id), both empty for a GGUF without a vocabulary that
    files can say."""
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    model, texts = str(keys.get("model", "")), [str(text) for text in keys.get("tokens", ())]
    if not texts or model not in ("gpt2", "llama", "t5", "bert"):
        return {}, {}
    types = [int(t) for t in keys.get("token_type", [NORMAL] * len(texts))]
    special = {name: int(keys[key]) for name, key in SPECIAL_KEYS.items() if key in keys and int(keys[key]) < len(texts)}
    settings: dict[str, Any] = {f"{name}_token": _text(texts[id], model, types[id]) for name, id in special.items()}
    settings |= {key: bool(keys[key]) for key in ("add_bos_token", "add_eos_token") if key in keys}
    settings["tokenizer_class"] = _CLASSES.get(model, "PreTrainedTokenizerFast")
    files: dict[str, bytes] = {}
    if model in ("llama", "t5"):
        added = {i: t.replace(SPACE, " ") for i, (t, kind) in enumerate(zip(texts, types, strict=True)) if kind == USER_DEFINED}
        exact = {i: texts[i] for i in added if " " in texts[i]}
        settings["added_tokens_decoder"] = {
            str(id): _added(text, special=False)
            for id, text in sorted({**{i: t for i, t in enumerate(texts) if types[i] == CONTROL}, **exact}.items())
        }
        for entry in settings["added_tokens_decoder"].values():
            entry["special"] = entry["content"] not in exact.values()
        files["tokenizer.model"] = _sentencepiece(keys, texts, types, special)
    else:
        tokenizer = _byte_level(keys, texts, types) if model == "gpt2" else _wordpiece(texts, types)
        first = texts[special["bos"]] if settings.get("add_bos_token") and "bos" in special else None
        last = texts[special["eos"]] if settings.get("add_eos_token") and "eos" in special else None
        if model == "bert":
            first, last = (texts[special[name]] if name in special else None for name in ("cls", "sep"))
        tokenizer["post_processor"] = _template(texts, first, last)
        files["tokenizer.json"] = json.dumps(tokenizer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    templates = _chat_templates(metadata)
    if len(templates) > 1:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif templates:
        files["chat_template.jinja"] = templates["default"].encode() if "default" in templates else b""
    if "chat_template.jinja" in files and not files["chat_template.jinja"]:
        del files["chat_template.jinja"]
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    files["tokenizer_config.json"] = (json.dumps(settings, ensure_ascii=False, indent=2) + "\n").encode(
        "utf-8", "surrogatepass"
    )
    return files, special


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template; 'default' for the one without a name."""
    templates = {}
    if "tokenizer.chat_template" in metadata:
        templates["default"] = str(metadata["tokenizer.chat_template"])
    for name in metadata.get("tokenizer.chat_templates", ()):
        templates[str(name)] = str(metadata[f"tokenizer.chat_template.{name}"])
    return templates


def _added(text: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"content": text, **flags}


def _text(text: str, model: str, kind: int) -> str:
    """A token as the files have it."""
    return _word(text) if model == "bert" and kind == NORMAL else text


def _added_list(texts: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is split."""
    return [
        {"id": i, **_added(texts[i], special=kind == CONTROL)}
        for i, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _byte_level(keys: Mapping[str, Any], texts: list[str], types: list[int]) -> dict[str, Any]:
    pre = PRE_TOKENIZERS.get(str(keys.get("pre", "")), PRE_TOKENIZERS["gpt-2"])
    splits = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in pre.splits]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {text: id for id, text in enumerate(texts) if types[id] not in (CONTROL, USER_DEFINED, UNUSED)}
    return _tokenizer(
        {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": [str(merge).split(" ", 1) for merge in keys.get("merges", ())],
        },
        {"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
        to_bytes,
        _added_list(texts, types),
        None,
    )


def _word(text: str) -> str:
    """A piece of WordPiece as vocab.txt has it."""
    return text[1:] if text.startswith(SPACE) else CONTINUES + text


def _wordpiece(texts: list[str], types: list[int]) -> dict[str, Any]:
    vocab = {_word(text) if types[i] == NORMAL else text: i for i, text in enumerate(texts) if types[i] != UNUSED}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": CONTINUES}
    model |= {"max_input_chars_per_word": 100, "vocab": vocab}
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    decoder = {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True}
    added = [entry for entry in _added_list(texts, types) if entry["special"]]
    return _tokenizer(model, {"type": "BertPreTokenizer"}, decoder, added, normalizer | {"lowercase": True})


def _tokenizer(model: Any, pre_tokenizer: Any, decoder: Any, added: list[Any], normalizer: Any) -> dict[str, Any]:
    parts = {"added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": None}
    return {"version": "1.0", "truncation": None, "padding": None, **parts, "decoder": decoder, "model": model}


def _template(texts: list[str], first: str | None, last: str | None) -> dict[str, Any] | None:
    """The step that puts tokens before and after a text; None without any."""
    if first is None and last is None:
        return None
    around = [{"SpecialToken": {"id": text, "type_id": 0}} if text is not None else None for text in (first, last)]
    whole = [part for part in (around[0], {"Sequence": {"id": "A", "type_id": 0}}, around[1]) if part is not None]
    special = {text: {"id": text, "ids": [texts.index(text)], "tokens": [text]} for text in (first, last) if text is not None}
    pair = [*whole, {"Sequence": {"id": "B", "type_id": 1}}, *([around[1]] if around[1] else [])]
    return {"type": "TemplateProcessing", "single": whole, "pair": pair, "special_tokens": special}


def _sentencepiece(keys: Mapping[str, Any], texts: list[str], types: list[int], special: Mapping[str, int]) -> bytes:
    """The protocol buffer of a SentencePiece model."""
    scores = np.asarray(keys.get("scores", np.zeros(len(texts))), np.float32)
    data = bytearray()
    for text, score, kind in zip(texts, scores, types, strict=True):
        piece = _bytes_field(1, text.replace(" ", SPACE).encode("utf-8", "surrogatepass"))
        piece += _tag(2, 5) + struct.pack("<f", score)
        data += _bytes_field(1, piece + (b"" if kind == NORMAL else _int_field(3, kind)))
    is_bpe = keys.get("model") == "llama"
    unknown = types.index(UNKNOWN) if UNKNOWN in types else special.get("unk", -1)
    trainer = _int_field(3, BPE if is_bpe else UNIGRAM) + _int_field(4, len(texts)) + _int_field(35, int(BYTE in types))
    ids = {"unk": unknown, "bos": special.get("bos", -1), "eos": special.get("eos", -1), "pad": special.get("pad", -1)}
    trainer += b"".join(_int_field(40 + at, id) for at, id in enumerate(ids.values()))
    normalizer = _bytes_field(1, b"identity" if is_bpe else b"nmt_nfkc")
    charsmap = keys.get("precompiled_charsmap")
    if charsmap is not None:
        normalizer += _bytes_field(2, np.asarray(charsmap).astype(np.uint8).tobytes())
    normalizer += _int_field(3, int(bool(keys.get("add_space_prefix", True))))
    normalizer += _int_field(4, int(bool(keys.get("remove_extra_whitespaces", not is_bpe))))
    return bytes(data + _bytes_field(2, trainer) + _bytes_field(3, normalizer))


def _tag(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint(value: int) -> bytes:
    return bytes(_digits(value % (1 << 64)))


def _digits(value: int) -> Iterator[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value


def _int_field(number: int, value: int) -> bytes:
    return _tag(number, 0) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(value)) + value
