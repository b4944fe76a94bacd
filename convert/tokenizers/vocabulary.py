"""The files of a tokenizer -> the tokenizer.* metadata of a GGUF.

Of tokenizer.json two kinds of BPE are known. Byte-level ones become model 'gpt2': tokens, types, merges, and the name of the
rule that cuts words. SentencePiece-like ones (spaces written as U+2581, unknown characters as byte tokens) become model
'llama', whose readers know no merges: they join the neighbours whose joint token has the highest score, so a token's score is
the negative rank of the merge that makes it. Unigram models become 't5', WordPiece 'bert'. Without a tokenizer.json, or with
one of another kind, SentencePiece's own file, tiktoken's, GPT-2's vocab.json with merges.txt, or a vocab.txt is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...formats import FormatError
from ..config import Config, read_json
from . import merges, sentencepiece, tiktoken, wordpiece
from .byte_characters import spelt
from .chat_templates import chat_templates
from .pretokenizers import identify

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # values of tokenizer.ggml.token_type

SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Added tokens that some models do not mark as special, but that only chat templates should produce (llama.cpp's list).
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
# name in tokenizer_config.json (NAME_token) and config.json (NAME_token_id) -> key; the misspelling is GGUF's
_SPECIAL_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "cls": "cls_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}


def read_vocabulary(folder: Path, config: Config, n_vocab: int) -> tuple[dict[str, Any], list[str]]:
    """(tokenizer.* metadata for n_vocab tokens, notes). Token ids without a token become unused ones named [PADn].

    Without any file that is known, the model is 'no_vocab' and a note says so. Raises FormatError for malformed files.
    """
    notes: list[str] = []
    path, settings = folder / "tokenizer.json", _settings(folder)
    found: dict[str, Any] | None = None
    if path.exists():
        tokenizer = read_json(path)
        try:
            found = _from_json(tokenizer, settings, config, n_vocab, notes)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, RecursionError) as error:
            raise FormatError(f"{path}: not a tokenizer of the usual form ({type(error).__name__}: {error})") from None
    if found is None:
        found = _from_other_files(folder, settings, config, n_vocab, notes)
    if found is None:
        problem = "tokenizer.json is of an unknown kind" if path.exists() else "there is no tokenizer.json"
        return {"tokenizer.ggml.model": "no_vocab"}, [f"{problem}: the GGUF will have no vocabulary"]
    templates = chat_templates(folder, settings, notes)
    found |= _end_of_turn(found, config, templates)
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()} | templates, notes


def _from_json(
    tokenizer: dict[str, Any], settings: dict[str, Any], config: Config, n_vocab: int, notes: list[str]
) -> dict[str, Any] | None:
    """Keys after tokenizer.ggml., or None for an unknown kind. Raises what comes of a malformed one."""
    model = tokenizer.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    keys: dict[str, Any]
    if kind == "Unigram":
        steps = [s for key in ("normalizer", "pre_tokenizer") for s in _parts(tokenizer.get(key))]
        pieces = sentencepiece.from_json(tokenizer, steps, notes)
        keys = _of_pieces(pieces, _added(tokenizer), n_vocab, notes)
    elif kind == "WordPiece":
        steps = [s for key in ("normalizer", "pre_tokenizer") for s in _parts(tokenizer.get(key))]
        notes += wordpiece.differences(tokenizer, steps)
        keys = _of_words(tokenizer["model"]["vocab"], _added(tokenizer), n_vocab, notes)
    else:
        kind = _kind(tokenizer)
        if kind is None:
            return None
        texts, types = _tokens(tokenizer, kind, n_vocab, notes)
        pairs = [_pair(merge) for merge in tokenizer["model"].get("merges", [])]
        keys = {"model": kind} | (_byte_level(tokenizer, notes) if kind == "gpt2" else _sentencepiece(tokenizer, notes))
        keys |= {"tokens": texts, "token_type": np.array(types, np.int32)}
        if kind == "gpt2":
            keys["merges"] = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in pairs]
        else:
            keys["scores"] = _scores(texts, types, pairs)
    return _with_specials(keys, _ends(tokenizer), settings, config, notes)


def _from_other_files(
    folder: Path, settings: dict[str, Any], config: Config, n_vocab: int, notes: list[str]
) -> dict[str, Any] | None:
    """As `_from_json`, from the first of the other kinds of files that there is."""
    added = _added(settings)
    for name in tiktoken.FILES:
        if (folder / name).is_file() and tiktoken.is_ranks(folder / name):
            keys = _of_ranks(folder / name, config, added, n_vocab, notes)
            return _with_specials(keys, (None, None), settings, config, notes)
    for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        if (folder / name).is_file():
            model = sentencepiece.read_pieces(folder / name)
            if model.kind == sentencepiece.BPE and model.charsmap:
                notes.append(f"the normalisation in {name} has no counterpart in GGUF: text is taken as it stands")
            keys = _of_pieces(model, added, n_vocab, notes)
            texts = keys["tokens"]
            known = {f"{key}_token": texts[id] for key, id in model.ids.items() if 0 <= id < len(texts)}
            is_bpe = model.kind == sentencepiece.BPE
            ends = (known.get("bos_token") if is_bpe else None, None if is_bpe else known.get("eos_token"))
            return _with_specials(keys, ends, known | settings, config, notes)
    if merges.is_there(folder):
        return _of_merges(folder, settings, config, added, n_vocab, notes)
    if (folder / "vocab.txt").is_file():
        if settings.get("do_lower_case") is False:
            notes.append(wordpiece.CASE)
        keys = _of_words(wordpiece.read_words(folder / "vocab.txt"), added, n_vocab, notes)
        return _with_specials(keys, ("[CLS]", None), wordpiece.USUAL | settings, config, notes)
    return None


Added = dict[int, tuple[str, bool]]  # id -> text, whether it is special


def _added(tokenizer: dict[str, Any]) -> Added:
    """added_tokens of tokenizer.json, or added_tokens_decoder of tokenizer_config.json. Raises ValueError for broken ones."""
    told = tokenizer.get("added_tokens_decoder")
    entries = list(tokenizer.get("added_tokens") or [])
    if isinstance(told, dict):
        entries = [{"id": int(id), **entry} for id, entry in told.items()]
    added: Added = {}
    for entry in entries:
        id, text = entry["id"], entry["content"]
        if not isinstance(text, str) or type(id) is not int:
            raise ValueError(f"the content of added token {id} is {text!r:.40}")
        added[id] = text, bool(entry.get("special"))
    return added


def _laid_out(found: dict[int, tuple[str, int]], added: Added, n_vocab: int, notes: list[str]) -> tuple[list[str], list[int]]:
    """Text and type of each of n_vocab ids; what is added counts before what was found."""
    texts, types = [f"[PAD{i}]" for i in range(n_vocab)], [UNUSED] * n_vocab
    beyond = {id for id in (*found, *added) if not 0 <= id < n_vocab}
    for id, (text, kind) in found.items():
        if id not in beyond:
            texts[id], types[id] = text, kind
    for id, (text, special) in added.items():
        if id in beyond:
            continue
        texts[id] = text
        if types[id] not in (UNKNOWN, BYTE):
            types[id] = CONTROL if special or _LOOKS_SPECIAL.fullmatch(text) else USER_DEFINED
    if beyond:
        notes.append(f"{len(beyond)} tokens of the tokenizer have ids beyond the {n_vocab} of the model and are left out")
    return texts, types


def _of_pieces(model: sentencepiece.PieceModel, added: Added, n_vocab: int, notes: list[str]) -> dict[str, Any]:
    found = {}
    for id, (text, _, kind) in enumerate(model.pieces):
        is_byte = kind == NORMAL and _BYTE_TOKEN.fullmatch(text)
        found[id] = (text, BYTE if is_byte else UNKNOWN if id == model.ids["unk"] else kind)
    texts, types = _laid_out(found, added, n_vocab, notes)
    scores = np.full(n_vocab, min((score for _, score, _ in model.pieces), default=0.0) - 1, np.float32)
    scores[: len(model.pieces)] = [score for _, score, _ in model.pieces[:n_vocab]]
    return model.keys() | {"tokens": texts, "token_type": np.array(types, np.int32), "scores": scores}


def _of_ranks(path: Path, config: Config, added: Added, n_vocab: int, notes: list[str]) -> dict[str, Any]:
    ranks = tiktoken.read_ranks(path)
    texts, types = _laid_out({rank: (spelt(token), NORMAL) for token, rank in ranks.items()}, added, n_vocab, notes)
    model_type = str(config.get("model_type", ""))
    pre = next((pre for family, pre in tiktoken.RULES.items() if model_type.startswith(family)), None)
    if pre is None:
        notes.append(f"{path.name} does not say how words of model_type {model_type!r} are cut: token ids may differ")
    pairs = tiktoken.merges(ranks)
    keys = {"model": "gpt2", "pre": pre or "default", "tokens": texts, "token_type": np.array(types, np.int32)}
    return keys | {"merges": [f"{spelt(left)} {spelt(right)}" for left, right in pairs]}


def _of_merges(
    folder: Path, settings: dict[str, Any], config: Config, added: Added, n_vocab: int, notes: list[str]
) -> dict[str, Any]:
    vocab, model_type = merges.read_vocab(folder), str(config.get("model_type", ""))
    pre = merges.rule(settings, model_type)
    if pre is None:
        notes.append(f"{merges.FILES[1]} does not say how words of model_type {model_type!r} are cut; taken as by GPT-2")
    if pre == "qwen2":
        notes += _unwritten("normalizer", [{"type": "NFC"}])
    if settings.get("add_prefix_space") is True:
        notes.append("the tokenizer sets a space before a text; readers of GGUF do not: token ids may differ")
    settings = merges.usual(pre, vocab) | settings
    special, later = merges.special_texts(settings), merges.read_added(folder)
    more = {id: (text, text in special) for text, id in (vocab | later).items() if text in special or text in later}
    texts, types = _laid_out({id: (text, NORMAL) for text, id in vocab.items()}, more | added, n_vocab, notes)
    keys = {"model": "gpt2", "pre": pre or "gpt-2", "tokens": texts, "token_type": np.array(types, np.int32)}
    keys["merges"] = merges.read_merges(folder)
    return _with_specials(keys, (None, None), settings, config, notes)


def _of_words(vocab: dict[str, int], added: Added, n_vocab: int, notes: list[str]) -> dict[str, Any]:
    special = {text for text, _ in added.values()} | set(wordpiece.USUAL.values())
    found = {}
    for text, id in vocab.items():
        found[id] = (text, CONTROL) if text in special else (wordpiece.gguf_text(text), NORMAL)
    texts, types = _laid_out(found, added, n_vocab, notes)
    return {"model": "bert", "pre": "default", "tokens": texts, "token_type": np.array(types, np.int32)}


def _with_specials(
    keys: dict[str, Any],
    ends: tuple[str | None, str | None],
    settings: dict[str, Any],
    config: Config,
    notes: list[str],
) -> dict[str, Any]:
    """The keys with those of special tokens. ends: the tokens that are set before and after a text, as far as files say."""
    texts = keys["tokens"]
    ids = _special_ids(texts, settings, config, notes)
    keys |= {_SPECIAL_KEYS[name]: np.uint32(id) for name, id in ids.items()}
    for name, found in zip(("bos", "eos"), ends, strict=True):
        told = settings.get(f"add_{name}_token")
        keys[f"add_{name}_token"] = told if isinstance(told, bool) else name in ids and found == texts[ids[name]]
    if keys["model"] == "bert":
        keys |= {"add_bos_token": True, "add_sep_token": True}
        keys.pop("add_eos_token")
    return keys


# Tokens that end a turn; the first that the model may end with becomes the one for it.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<|EOT|>", "<|END_OF_TURN_TOKEN|>")
_TURN_ENDS += ("[|endofturn|]",)


def _end_of_turn(keys: dict[str, Any], config: Config, templates: dict[str, Any]) -> dict[str, Any]:
    """eot_token_id: of a token known to end turns that config.json or the chat template makes use of."""
    eos, template = config.get("eos_token_id"), str(templates.get("tokenizer.chat_template", ""))
    ends = eos if isinstance(eos, list) else [eos]
    types = keys["token_type"]
    ids = {text: id for id, text in enumerate(keys["tokens"]) if text in _TURN_ENDS and types[id] in (CONTROL, USER_DEFINED)}
    found = next((ids[text] for text in _TURN_ENDS if text in ids and (ids[text] in ends or text in template)), None)
    return {} if found is None else {"eot_token_id": np.uint32(found)}


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
    return {"pre": pre}


def _sentencepiece(tokenizer: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    normalizers, pre = list(_parts(tokenizer.get("normalizer"))), list(_parts(tokenizer.get("pre_tokenizer")))
    prefix = any(s.get("type") == "Prepend" and s.get("prepend") == SPACE for s in normalizers)
    for step in pre:
        if step.get("type") == "Metaspace":
            prefix |= step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
    notes += _unwritten("pre-tokenizer", [s for s in pre if s.get("type") != "Metaspace"])
    notes += _unwritten("normalizer", [s for s in normalizers if s.get("type") != "Prepend" and not _writes_spaces(s)])
    return {"pre": "default", "add_space_prefix": prefix}


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
