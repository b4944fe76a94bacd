"""The files of a tokenizer -> the tokenizer.* metadata of a GGUF.

tokenizer.json comes first (see `tokenizer_json`). Without one, or if its kind is not supported, tekken.json, tiktoken's file,
SentencePiece's, GPT-2's vocab.json with merges.txt, or a vocab.txt is read, in this order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...formats import FormatError
from ...formats.file_range import read_text
from ...formats.metadata_values import CONTROL, NORMAL, USER_DEFINED
from ...formats.string_array import StringArray
from ..config import Config, read_json
from . import byte_level_bpe, sentencepiece, tekken, tiktoken, tokenizer_json, wordpiece
from .token_list import AddedTokens, read_added_tokens, token_list

_MAX_NAME = 200  # characters of a template's name, which becomes part of a metadata key


def chat_templates(folder: Path, settings: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The key tokenizer.chat_template, and those of named templates: from chat_template.jinja, or else tokenizer_config.json
    (settings), which has one text or a list of named ones.

    Malformed templates are left out with a note, since a model can be used without.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return {"tokenizer.chat_template": read_text(path)}
        except OSError as error:
            notes.append(f"{path.name} cannot be read ({error.strerror or error}) and is left out")
        except UnicodeDecodeError:
            notes.append(f"{path.name} is not UTF-8 text and is left out")
    setting = settings.get("chat_template")
    if setting is None:
        return {}
    if isinstance(setting, str):
        return {"tokenizer.chat_template": setting}
    if not isinstance(setting, list):
        notes.append("the chat_template of tokenizer_config.json is neither a text nor a list of named ones and is left out")
        return {}
    templates: dict[str, str] = {}
    for entry in setting:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if isinstance(name, str) and 0 < len(name) <= _MAX_NAME and isinstance(text, str):
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


# name in tokenizer_config.json (NAME_token) and config.json (NAME_token_id) -> metadata key; the misspelling is GGUF's
SPECIAL_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "cls": "cls_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
_USUAL_PADDING = 4096  # rows without a token at most, of published models
NO_VOCABULARY = {"tokenizer.ggml.model": "no_vocab"}  # the keys of a file without one
# Tokens that end a turn; the first that the model may generate becomes eot_token_id.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<|EOT|>", "<|END_OF_TURN_TOKEN|>")
_TURN_ENDS += ("[|endofturn|]",)


def read_vocabulary(folder: Path, config: Config, vocab_size: int, is_needed: bool = False) -> tuple[dict[str, Any], list[str]]:
    """(tokenizer.* metadata for vocab_size tokens, notes). Ids without a token become unused ones named [PADn].

    Without any supported file, the keys are NO_VOCABULARY and a note says so. Raises FormatError for malformed files, and
    without any if a vocabulary is needed; for one that has far fewer tokens than the model rows.
    """
    notes: list[str] = []
    path, settings = folder / "tokenizer.json", _tokenizer_config(folder)
    keys: dict[str, Any] | None = None
    if path.exists():
        tokenizer = read_json(path)
        try:
            keys = tokenizer_json.model_keys(tokenizer, vocab_size, notes)
            if keys is not None:
                enclosing = tokenizer_json.enclosing_tokens(tokenizer)
                keys = _with_special_tokens(keys, enclosing, settings, config, notes)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, RecursionError) as error:
            raise FormatError(f"{path}: not a tokenizer of the usual form ({type(error).__name__}: {error})") from None
    if keys is None:
        keys = _from_other_files(folder, settings, config, vocab_size, notes)
    if keys is None:
        problem = "tokenizer.json is of an unknown kind" if path.exists() else "there is no tokenizer.json"
        if is_needed:
            raise FormatError(
                f"{folder} has no tokenizer that can be read ({problem}), and nothing runs a GGUF without a vocabulary: "
                "add the model's tokenizer files, or give --no-vocab ([convert] vocab = false)"
            )
        note = f"{problem}: the GGUF will have no vocabulary, without which no program can run it on text"
        return dict(NO_VOCABULARY), [note]
    _check_size(folder, keys["tokens"], notes)
    templates = chat_templates(folder, settings, notes)
    keys |= _end_of_turn(keys, config, templates)
    metadata = {f"tokenizer.ggml.{key}": StringArray.of(value) if type(value) is list else value for key, value in keys.items()}
    return metadata | templates, notes


def _check_size(folder: Path, tokens: list[str], notes: list[str]) -> None:
    """Raises FormatError for a tokenizer with far fewer tokens than the model has rows; notes one with fewer than usual."""
    missing = sum(token == f"[PAD{i}]" for i, token in enumerate(tokens))
    if missing <= _USUAL_PADDING:
        return
    counts = f"its tokenizer has {len(tokens) - missing:,} tokens, and config.json says vocab_size {len(tokens):,}"
    if missing > len(tokens) // 4:
        raise FormatError(f"{folder}: {counts}: put the model's own files there, or leave them out (--no-vocab)")
    notes.append(f"{counts}: {missing:,} rows have no token; they are never generated")


def _from_other_files(
    folder: Path, settings: dict[str, Any], config: Config, vocab_size: int, notes: list[str]
) -> dict[str, Any] | None:
    """Keys without tokenizer.ggml. from the first supported file other than tokenizer.json; None without one."""
    added = read_added_tokens(settings)
    if (folder / tekken.FILE).is_file():
        keys = tekken.model_keys(folder / tekken.FILE, vocab_size, notes)
        settings = tekken.SPECIAL_TOKENS | {"add_bos_token": True, "add_eos_token": False} | settings
        return _with_special_tokens(keys, (None, None), settings, config, notes)
    for name in tiktoken.FILES:
        if (folder / name).is_file() and tiktoken.is_ranks_file(folder / name):
            keys = _from_tiktoken(folder / name, config, added, vocab_size, notes)
            return _with_special_tokens(keys, (None, None), tiktoken.SPECIAL_TOKENS.get(name, {}) | settings, config, notes)
    for name in sentencepiece.FILES:
        if (folder / name).is_file():
            return _from_sentencepiece(folder / name, settings, config, added, vocab_size, notes)
    if byte_level_bpe.has_files(folder):
        return _from_merges(folder, settings, config, added, vocab_size, notes)
    if (folder / "vocab.txt").is_file():
        if settings.get("do_lower_case") is False:
            notes.append(wordpiece.CASE_NOTE)
        keys = wordpiece.model_keys(wordpiece.read_words(folder / "vocab.txt"), added, vocab_size, notes)
        return _with_special_tokens(keys, ("[CLS]", None), wordpiece.SPECIAL_TOKENS | settings, config, notes)
    return None


def _from_tiktoken(path: Path, config: Config, added: AddedTokens, vocab_size: int, notes: list[str]) -> dict[str, Any]:
    spell = byte_level_bpe.to_characters
    ranks = tiktoken.read_ranks(path)
    own = enumerate(tiktoken.ADDED_TOKENS.get(path.name, ()), len(ranks))
    added = {id: (text, True) for id, text in own if id < vocab_size} | added
    if path.name in tiktoken.NORMALISED:
        notes += tokenizer_json.unsupported_steps("normalizer", [{"type": "NFC"}])
    texts, types = token_list({rank: (spell(token), NORMAL) for token, rank in ranks.items()}, added, vocab_size, notes)
    model_type = str(config.get("model_type", ""))
    pre = next((pre for prefix, pre in tiktoken.PRE_TOKENIZERS.items() if model_type.startswith(prefix)), None)
    if pre is None:
        notes.append(f"{path.name} does not say how words of model_type {model_type!r} are cut: token ids may differ")
    keys = {"model": "gpt2", "pre": pre or "default", "tokens": texts, "token_type": np.array(types, np.int32)}
    return keys | {"merges": [f"{spell(left)} {spell(right)}" for left, right in tiktoken.merges(ranks)]}


def _from_sentencepiece(
    path: Path, settings: dict[str, Any], config: Config, added: AddedTokens, vocab_size: int, notes: list[str]
) -> dict[str, Any]:
    model = sentencepiece.read_model(path)
    is_bpe = model.model_type == sentencepiece.BPE
    if is_bpe and model.charsmap:
        notes.append(f"the normalisation in {path.name} has no counterpart in GGUF: text is taken as it stands")
    keys = sentencepiece.model_keys(model, added, vocab_size, notes)
    texts = keys["tokens"]
    special = {f"{name}_token": texts[id] for name, id in model.special_ids.items() if 0 <= id < len(texts)}
    enclosing = (special.get("bos_token") if is_bpe else None, None if is_bpe else special.get("eos_token"))
    return _with_special_tokens(keys, enclosing, special | settings, config, notes)


def _from_merges(
    folder: Path, settings: dict[str, Any], config: Config, added: AddedTokens, vocab_size: int, notes: list[str]
) -> dict[str, Any]:
    vocab, model_type = byte_level_bpe.read_vocab(folder), str(config.get("model_type", ""))
    pre = byte_level_bpe.pre_tokenizer_name(settings, model_type)
    if pre is None:
        file = byte_level_bpe.FILES[1]
        notes.append(f"{file} does not say how words of model_type {model_type!r} are cut; taken as by GPT-2")
    if pre == "qwen2":
        notes += tokenizer_json.unsupported_steps("normalizer", [{"type": "NFC"}])
    if settings.get("add_prefix_space") is True:
        notes.append("the tokenizer sets a space before a text; readers of GGUF do not: token ids may differ")
    settings = byte_level_bpe.default_special_tokens(pre, vocab) | settings
    special, more = byte_level_bpe.special_texts(settings), byte_level_bpe.read_added_tokens(folder)
    more_added = {id: (text, text in special) for text, id in (vocab | more).items() if text in special or text in more}
    texts, types = token_list({id: (text, NORMAL) for text, id in vocab.items()}, more_added | added, vocab_size, notes)
    keys = {"model": "gpt2", "pre": pre or "gpt-2", "tokens": texts, "token_type": np.array(types, np.int32)}
    keys["merges"] = byte_level_bpe.read_merges(folder)
    return _with_special_tokens(keys, (None, None), settings, config, notes)


def _with_special_tokens(
    keys: dict[str, Any],
    enclosing: tuple[str | None, str | None],
    settings: dict[str, Any],
    config: Config,
    notes: list[str],
) -> dict[str, Any]:
    """The keys with those of special tokens. enclosing: tokens that the tokenizer puts before and after a text, if known."""
    texts = keys["tokens"]
    ids = _special_ids(texts, settings, config, notes)
    last = enclosing[1]
    if last in texts and "eos" in ids and texts[ids["eos"]] != last and keys["model"] != "bert":
        # What ends a text is another token than what ends a turn (Qwen 3 Embedding).
        keys["eot_token_id"] = np.uint32(ids["eos"])
        ids["eos"] = texts.index(last)
    keys |= {SPECIAL_KEYS[name]: np.uint32(id) for name, id in ids.items()}
    for name, token in zip(("bos", "eos"), enclosing, strict=True):
        setting = settings.get(f"add_{name}_token")
        is_added = name in ids and token == texts[ids[name]]
        keys[f"add_{name}_token"] = setting if isinstance(setting, bool) else is_added
    if keys["model"] == "bert":
        keys |= {"add_bos_token": True, "add_sep_token": True}
        keys.pop("add_eos_token")
    return keys


def _special_ids(texts: list[str], settings: dict[str, Any], config: Config, notes: list[str]) -> dict[str, int]:
    """Name in SPECIAL_KEYS -> token id, for those that tokenizer_config.json or else config.json names."""
    id_of = {text: id for id, text in enumerate(texts)}
    ids: dict[str, int] = {}
    for name in SPECIAL_KEYS:
        setting = settings.get(f"{name}_token")
        text = setting.get("content") if isinstance(setting, dict) else setting
        id = id_of.get(text) if isinstance(text, str) else None
        if id is None:
            id = config.get(f"{name}_token_id")
            id = id[0] if isinstance(id, list) and id else id
        if type(id) is int and 0 <= id < len(texts):
            ids[name] = id
        elif id is not None or isinstance(text, str):
            notes.append(f"the {name} token {text if id is None else id!r} is none of the {len(texts)} tokens and is left out")
    return ids


def _end_of_turn(keys: dict[str, Any], config: Config, templates: dict[str, Any]) -> dict[str, Any]:
    """eot_token_id: a token known to end turns that config.json's eos_token_id or the chat template uses."""
    eos, template = config.get("eos_token_id"), str(templates.get("tokenizer.chat_template", ""))
    eos_ids = eos if isinstance(eos, list) else [eos]
    types = keys["token_type"]
    ids = {text: id for id, text in enumerate(keys["tokens"]) if text in _TURN_ENDS and types[id] in (CONTROL, USER_DEFINED)}
    used = (ids[text] for text in _TURN_ENDS if text in ids and (ids[text] in eos_ids or text in template))
    id = next(used, None)
    return {} if id is None else {"eot_token_id": np.uint32(id)}


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; either may be missing."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            settings |= read_json(folder / name)
    return settings
