"""Authorship and licence: from a model card (the YAML front matter of README.md) or a metadata file to general.* keys.

`gguf.Metadata` decides which field becomes which key and how names of base models are split, as for convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import FormatError, PlanError
from ..formats.file_range import check_regular
from .config import FLOAT32_MAX, read_json

_FRONT_MATTER = r"(?ms)\A---[ \t]*\n(.*?)^---[ \t]*$"
_MAX_CHARACTERS, _MAX_NESTING = 1 << 20, 50  # of a front matter; of brackets in it
_TEXT_KEYS = ("name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by", "size_label")
_TEXT_KEYS += ("url", "doi", "uuid", "repo_url", "source.url", "source.doi", "source.uuid", "source.repo_url")
_TEXT_KEYS += ("license", "license.name", "license.link")
_LIST_KEYS = ("tags", "languages")
_OBJECT_LISTS = {"base_model": "base_models", "dataset": "datasets"}  # key -> name in gguf.Metadata
_DERIVED = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version")


def card_metadata(folder: Path, notes: list[str]) -> dict[str, Any]:
    """general.* keys from README.md's front matter: licence, base models, tags, languages, datasets, authors; none without it.

    A card that cannot be read is noted, not an error. general.quantized_by and general.size_label are not taken from it, since
    they are about the GGUF that the card was written for.
    """
    card = _front_matter(folder / "README.md", notes)
    if not card:
        return {}
    from gguf import Metadata

    try:
        metadata = Metadata.apply_metadata_heuristic(Metadata(), card, None, None, 0)
        fields = {
            name: getattr(metadata, name.replace(".", "_")) for name in (*_TEXT_KEYS, *_LIST_KEYS, *_OBJECT_LISTS.values())
        }
        fields.pop("quantized_by")
        fields.pop("size_label")
        return _keys(fields)
    except Exception as error:  # anything may be in a card that gguf does not expect
        notes.append(f"the model card {folder / 'README.md'} is left aside: {error!r:.200}")
        return {}


def file_metadata(path: Path) -> dict[str, Any]:
    """Metadata from a JSON object: keys such as 'general.name', as for convert_hf_to_gguf.py --metadata, or any others.

    Strings and booleans stay as they are, integers become uint32 (int64 if they do not fit), other numbers float32, lists of
    strings or numbers arrays. general.base_models and general.datasets are lists of objects with name, author, version,
    organization, description, url, doi, uuid, repo_url. Raises FormatError, and PlanError for keys that follow from the model.
    """
    values = read_json(path)
    out: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    object_lists = {f"general.{name}": name for name in _OBJECT_LISTS.values()}
    texts = {f"general.{name}": name for name in (*_TEXT_KEYS, *_LIST_KEYS)}
    for key, value in values.items():
        if key in _DERIVED or key.startswith("split."):
            raise PlanError(f"{path}: {key} follows from the model; it cannot be set")
        if key in object_lists:
            if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
                raise FormatError(f"{path}: {key} has to be a list of objects")
            fields[object_lists[key]] = value
        elif key in texts:
            fields[texts[key]] = value
        else:
            out[key] = _value(path, key, value)
    try:
        return out | _keys(fields)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path}: {error}") from None


def _front_matter(path: Path, notes: list[str]) -> dict[str, Any]:
    check_regular(path)
    try:
        with path.open(encoding="utf-8") as file:
            match = re.match(_FRONT_MATTER, file.read(_MAX_CHARACTERS))
        if match is None:
            return {}
        import yaml  # takes longer than looking for a card

        # Cards have the language no (Norwegian), which YAML reads as false, and tabs, which it does not allow.
        text = re.sub(r"^([ \t]*- )no$", r'\1"no"', match[1], flags=re.MULTILINE).replace("\t", "  ")
        card = yaml.load(text, _loader())
    except FileNotFoundError:
        return {}
    except Exception as error:  # YAMLError, and anything that a constructor raises (`!!bool x`)
        notes.append(f"the model card {path} is left aside: {' '.join(f'{error}'.split())[:200] or type(error).__name__}")
        return {}
    return card if isinstance(card, dict) else {}


def _loader() -> Any:
    """yaml's safe loader without aliases (ten lines of which can expand to more than the memory) and with limited nesting of
    brackets (which takes quadratic time)."""
    import yaml

    class LimitedLoader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it has aliases (*name)")
            return super().compose_node(parent, index)

        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level > _MAX_NESTING:
                raise yaml.YAMLError(f"it has more than {_MAX_NESTING} brackets within each other")
            super().fetch_flow_collection_start(TokenClass)

    return LimitedLoader


def _keys(fields: dict[str, Any]) -> dict[str, Any]:
    """general.* keys of the fields that are not None. Raises TypeError for a value that is not a string or list of strings."""
    out: dict[str, Any] = {}
    for name in _TEXT_KEYS:
        value = fields.get(name)
        if value is not None:
            out[f"general.{name}"] = ",".join(_texts(name, value)) if isinstance(value, list) else _text(name, value)
    for key, name in _OBJECT_LISTS.items():
        entries = fields.get(name)
        if entries is None:
            continue
        out[f"general.{key}.count"] = np.uint32(len(entries))
        for i, entry in enumerate(entries):
            for field in ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url"):
                if entry.get(field) is not None:
                    out[f"general.{key}.{i}.{field}"] = _text(f"{name}: {field}", entry[field])
    for name in _LIST_KEYS:
        if fields.get(name) is not None:
            value = fields[name]
            out[f"general.{name}"] = _texts(name, value if isinstance(value, list) else [value])
    return out


def _text(name: str, value: Any) -> str:
    if isinstance(value, (dict, list)):
        raise TypeError(f"{name} is {json.dumps(value)[:60]}; a text is needed")
    text = value if isinstance(value, str) else str(value)
    text.encode("utf-8")  # raises UnicodeEncodeError for lone surrogates
    return text


def _texts(name: str, values: list[Any]) -> list[str]:
    return [_text(name, value) for value in values]


def _value(path: Path, key: str, value: Any) -> Any:
    """The value in the type that it has in a GGUF. Raises FormatError for one without such a type."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return np.uint32(value) if 0 <= value < 1 << 32 else np.int64(value)
    if isinstance(value, float) and abs(value) <= FLOAT32_MAX:
        return np.float32(value)
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return value
    if isinstance(value, list) and value and all(type(v) is bool for v in value):
        return np.array(value, bool)
    if isinstance(value, list) and value and all(type(v) in (int, float) and abs(v) <= FLOAT32_MAX for v in value):
        return np.array(value, np.int32 if all(type(v) is int and abs(v) < 1 << 31 for v in value) else np.float32)
    raise FormatError(f"{path}: {key} is {json.dumps(value)[:60]}, which GGUF cannot hold")
