"""Authorship and licence: from a model card (the YAML at the top of README.md) or a file of metadata, to general.* keys.

Which field becomes which key, and how the names of base models are taken apart, is `gguf.Metadata`'s knowledge, which
convert_hf_to_gguf.py goes by too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import FormatError, PlanError
from .config import LARGEST, read_json

_FRONT = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_LARGEST, _DEEPEST = 1 << 20, 50  # characters of a front matter, brackets within brackets
_TEXTS = ("name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by", "size_label")
_TEXTS += ("url", "doi", "uuid", "repo_url", "source.url", "source.doi", "source.uuid", "source.repo_url")
_TEXTS += ("license", "license.name", "license.link")
_LISTS = ("tags", "languages")
_GROUPS = {"base_model": "base_models", "dataset": "datasets"}  # key -> name in gguf.Metadata, lists of objects
_FIXED = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version")


def card_metadata(folder: Path, notes: list[str]) -> dict[str, Any]:
    """general.* keys that README.md's front matter gives: licence, base models, tags, languages, data sets, authors.

    Nothing without one. What cannot be read is told in notes: a broken card is no reason not to convert a model. It does not
    say who made this GGUF, so that general.quantized_by and general.size_label are not taken from it.
    """
    card = _front_matter(folder / "README.md", notes)
    if not card:
        return {}
    from gguf import Metadata

    try:
        found = Metadata.apply_metadata_heuristic(Metadata(), card, None, None, 0)
        fields = {name: getattr(found, name.replace(".", "_")) for name in (*_TEXTS, *_LISTS, *_GROUPS.values())}
        fields.pop("quantized_by")
        fields.pop("size_label")
        return _keys(fields)
    except Exception as error:  # whatever a card may hold that gguf does not expect
        notes.append(f"the model card {folder / 'README.md'} is left aside: {error!r:.200}")
        return {}


def file_metadata(path: Path) -> dict[str, Any]:
    """Keys from a JSON object: 'general.name': text and so on, as for convert_hf_to_gguf.py --metadata, and any other key.

    Text, true and false stay what they are, whole numbers become uint32 (int64 if they do not fit), others float32, lists of
    texts or numbers arrays. general.base_models and general.datasets are lists of objects with name, author, version,
    organization, description, url, doi, uuid, repo_url. Raises FormatError, and PlanError for a key that follows from the
    weights.
    """
    values = read_json(path)
    out: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    groups = {f"general.{name}": name for name in _GROUPS.values()}
    texts = {f"general.{name}": name for name in (*_TEXTS, *_LISTS)}
    for key, value in values.items():
        if key in _FIXED or key.startswith("split."):
            raise PlanError(f"{path}: {key} follows from the model; it cannot be set")
        if key in groups:
            if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
                raise FormatError(f"{path}: {key} has to be a list of objects")
            fields[groups[key]] = value
        elif key in texts:
            fields[texts[key]] = value
        else:
            out[key] = _value(path, key, value)
    try:
        return out | _keys(fields)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path}: {error}") from None


def _front_matter(path: Path, notes: list[str]) -> dict[str, Any]:
    import yaml

    try:
        with path.open(encoding="utf-8") as file:
            match = _FRONT.match(file.read(_LARGEST))
        if match is None:
            return {}
        # A language 'no' is Norwegian and no falsehood, and a tab is a mistake that cards have.
        text = re.sub(r"^([ \t]*- )no$", r'\1"no"', match[1], flags=re.MULTILINE).replace("\t", "  ")
        card = yaml.load(text, _loader())
    except FileNotFoundError:
        return {}
    except Exception as error:  # yaml's kinds, and whatever its constructors make of `!!bool x`
        notes.append(f"the model card {path} is left aside: {' '.join(f'{error}'.split())[:200] or type(error).__name__}")
        return {}
    return card if isinstance(card, dict) else {}


def _loader() -> Any:
    """yaml's safe loader, without aliases, ten lines of which can stand for more than there is memory, and without brackets
    within brackets, whose reading takes the square of their number."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it has aliases (*name)")
            return super().compose_node(parent, index)

        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level > _DEEPEST:
                raise yaml.YAMLError(f"it has more than {_DEEPEST} brackets within each other")
            super().fetch_flow_collection_start(TokenClass)

    return Loader


def _keys(fields: dict[str, Any]) -> dict[str, Any]:
    """general.* keys of the fields that are not None. Raises TypeError for a value that is no text or list of texts."""
    out: dict[str, Any] = {}
    for name in _TEXTS:
        value = fields.get(name)
        if value is not None:
            out[f"general.{name}"] = ",".join(_texts(name, value)) if isinstance(value, list) else _text(name, value)
    for key, name in _GROUPS.items():
        entries = fields.get(name)
        if entries is None:
            continue
        out[f"general.{key}.count"] = np.uint32(len(entries))
        for i, entry in enumerate(entries):
            for part in ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url"):
                if entry.get(part) is not None:
                    out[f"general.{key}.{i}.{part}"] = _text(f"{name}: {part}", entry[part])
    for name in _LISTS:
        if fields.get(name) is not None:
            value = fields[name]
            out[f"general.{name}"] = _texts(name, value if isinstance(value, list) else [value])
    return out


def _text(name: str, value: Any) -> str:
    if isinstance(value, (dict, list)):
        raise TypeError(f"{name} is {json.dumps(value)[:60]}; a text is needed")
    text = value if isinstance(value, str) else str(value)
    text.encode("utf-8")  # raises UnicodeEncodeError for halves of characters
    return text


def _texts(name: str, values: list[Any]) -> list[str]:
    return [_text(name, value) for value in values]


def _value(path: Path, key: str, value: Any) -> Any:
    """As GGUF can hold it. Raises FormatError for what it cannot."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return np.uint32(value) if 0 <= value < 1 << 32 else np.int64(value)
    if isinstance(value, float) and abs(value) <= LARGEST:
        return np.float32(value)
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return value
    if isinstance(value, list) and value and all(type(v) is bool for v in value):
        return np.array(value, bool)
    if isinstance(value, list) and value and all(type(v) in (int, float) and abs(v) <= LARGEST for v in value):
        return np.array(value, np.int32 if all(type(v) is int and abs(v) < 1 << 31 for v in value) else np.float32)
    raise FormatError(f"{path}: {key} is {json.dumps(value)[:60]}, which GGUF cannot hold")
