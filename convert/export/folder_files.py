"""The small files of a checkpoint: config.json, generation_config.json, the tokenizer's, the model card, pooling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...formats import TensorSource
from ..metadata import SAMPLING
from .facts import plain
from .find_config import FoundConfig
from .model_types import model_type
from .sentence_modules import sentence_modules
from .tokenizer_files import tokenizer_files

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CARD_TEXTS = {"license": "license", "license_name": "license.name", "license_link": "license.link", "model_author": "author"}
_CARD_TEXTS |= {"model_name": "name", "model_description": "description", "model_creator": "organization", "version": "version"}
_CARD_LISTS = {"tags": "tags", "language": "languages"}
_CARD_OBJECTS = {"base_model": "base_model", "datasets": "dataset"}
_WITH_PADDING = ("Step3p5ForCausalLM",)  # of which transformers takes no null
_HUB = "https://huggingface.co/"


def folder_files(source: TensorSource, found: FoundConfig, dtype: str) -> dict[str, bytes]:
    """File name -> content, without weights. dtype: F32, F16 or BF16."""
    architecture = found.values["architectures"][0]
    files, special = tokenizer_files(source.metadata)
    ids: dict[str, Any] = {f"{name}_token_id": special.get(name) for name in ("bos", "eos", "pad")}
    if architecture in _WITH_PADDING and ids["pad_token_id"] is None:
        del ids["pad_token_id"]
    turn = source.metadata.get("tokenizer.ggml.eot_token_id")
    if turn is not None and "eos" in special and int(turn) != special["eos"]:
        ids["eos_token_id"] = [special["eos"], int(turn)]
    kind = {"model_type": model_type(architecture), "dtype": _DTYPES[dtype], "torch_dtype": _DTYPES[dtype]}
    files["config.json"] = _json({**kind, **ids, **found.values})
    sampling = {
        name: plain(source.metadata[f"general.sampling.{key}"])
        for name, (key, _) in SAMPLING.items()
        if f"general.sampling.{key}" in source.metadata
    }
    if sampling:
        files["generation_config.json"] = _json({**ids, **sampling})
    card = _card(source.metadata)
    if card:
        files["README.md"] = card
    return files | sentence_modules(source)


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "surrogatepass")


def _card(metadata: Mapping[str, Any]) -> bytes:
    """A model card with what general.* keys say; empty where they say no more than a name."""
    import yaml

    card: dict[str, Any] = {
        name: str(metadata[f"general.{key}"]) for name, key in _CARD_TEXTS.items() if f"general.{key}" in metadata
    }
    card |= {
        name: [str(each) for each in metadata[f"general.{key}"]]
        for name, key in _CARD_LISTS.items()
        if f"general.{key}" in metadata
    }
    for name, key in _CARD_OBJECTS.items():
        count = int(metadata.get(f"general.{key}.count", 0))
        urls = [str(metadata.get(f"general.{key}.{i}.repo_url", "")) for i in range(count)]
        if urls and all(url.startswith(_HUB) for url in urls):
            card[name] = [url.removeprefix(_HUB) for url in urls]
    if not card:
        return b""
    return f"---\n{yaml.safe_dump(card, allow_unicode=True, sort_keys=False)}---\n".encode()
