"""GGUF metadata that all architectures share: general.* and the hyperparameters.

Key names and value types are those of the GGUF specification (ggml-org/ggml docs/gguf.md) and of `gguf.constants.Keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import FormatError
from .config import FLOAT32_MAX, Config, read_json
from .rope import RopeConfig

# metadata key without the architecture -> key of config.json; all are required
HPARAMS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
# key of generation_config.json -> (key under general.sampling, its type), as convert_hf_to_gguf.py writes them (gguf.Metadata)
SAMPLING: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "sequence": ("sequence", str),
    "top_k": ("top_k", np.int32),
    "top_p": ("top_p", np.float32),
    "min_p": ("min_p", np.float32),
    "xtc_probability": ("xtc_probability", np.float32),
    "xtc_threshold": ("xtc_threshold", np.float32),
    "temperature": ("temp", np.float32),
    "penalty_last_n": ("penalty_last_n", np.int32),
    "penalty_repeat": ("penalty_repeat", np.float32),
    "mirostat": ("mirostat", np.int32),
    "mirostat_tau": ("mirostat_tau", np.float32),
    "mirostat_eta": ("mirostat_eta", np.float32),
}
RMS_NORM = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")  # metadata key and key of config.json


def hparam_keys(
    architecture: str,
    config: Config,
    rope: RopeConfig,
    other: Mapping[str, str] | None = None,
    norm: tuple[str, str] = RMS_NORM,
) -> dict[str, Any]:
    """The keys that every architecture has. Raises FormatError if config.json lacks one.

    other: keys in addition to those of HPARAMS, or with another key of config.json; norm: the keys of the norms' epsilon.
    """
    sources = HPARAMS | dict(other or {})
    keys: dict[str, Any] = {f"{architecture}.{key}": np.uint32(config.integer(source)) for key, source in sources.items()}
    keys[f"{architecture}.{norm[0]}"] = np.float32(config.number(norm[1], positive=True))
    keys[f"{architecture}.rope.freq_base"] = np.float32(rope.theta)
    return keys


def uint32_keys(architecture: str, values: Mapping[str, int]) -> dict[str, Any]:
    """The values as uint32, under keys that start with the architecture."""
    return {f"{architecture}.{key}": np.uint32(value) for key, value in values.items()}


def general_keys(architecture: str, folder: Path, config: Config) -> dict[str, Any]:
    """The general.* keys that do not depend on how the file will be quantised."""
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": _model_name(folder, config),
    }


def sampling_keys(folder: Path, notes: list[str]) -> dict[str, Any]:
    """The general.sampling.* keys, which programs take as defaults, from generation_config.json; none without the file.

    A file or a value that cannot be used is noted and passed over: the model is complete without it.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = read_json(path)
    except FormatError as error:
        notes.append(f"no sampling settings are taken over: {error}")
        return {}
    keys: dict[str, Any] = {}
    for source, (key, make) in SAMPLING.items():
        value = values.get(source)
        if value is None:
            continue
        if _fits(value, make):
            keys[f"general.sampling.{key}"] = make(value)
        else:
            notes.append(f"{path}: {source} is {value!r:.60}, which general.sampling.{key} cannot hold; it is left out")
    return keys


def _fits(value: object, make: Callable[[Any], Any]) -> bool:
    """Whether a value of JSON can be stored as this type without a change of its meaning."""
    if make is str:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if make is np.int32:
        return value == int(value) and -(1 << 31) <= value < 1 << 31 if abs(value) < FLOAT32_MAX else False
    return abs(value) <= FLOAT32_MAX


def _model_name(folder: Path, config: Config) -> str:
    """The folder's name; for a snapshot in the hub's cache (models--ORG--NAME/snapshots/HASH) the repository's."""
    folder = folder.resolve()
    for part in (folder, *folder.parents):
        if part.name.startswith("models--"):
            return part.name.split("--")[-1]
    stored = config.get("_name_or_path")
    return folder.name or (Path(stored).name if isinstance(stored, str) else "") or "model"


def size_label(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """'8.0B', or '256x20B' for 256 experts with 20 B parameters in one expert and everything that is shared (as llama.cpp).

    shapes: tensor name -> ne shape. attn_k_b and attn_v_b do not count where attn_kv_b, which contains them, is there too.
    """
    duplicates = (".attn_k_b.", ".attn_v_b.") if any(".attn_kv_b." in name for name in shapes) else ()
    in_experts = _n_elements(s for n, s in shapes.items() if "_exps." in n)
    shared = _n_elements(s for n, s in shapes.items() if "_exps." not in n and not any(d in n for d in duplicates))
    n_experts = max((s[-1] for n, s in shapes.items() if "_exps." in n), default=0)
    return f"{n_experts}x{_with_unit(shared + in_experts // n_experts)}" if n_experts else _with_unit(shared)


def _n_elements(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in shapes)


def _with_unit(count: int) -> str:
    """At least two digits: 17.9 B gives '18B', 8.03 B '8.0B', 2.6 M '2.6M'."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
    unit, name = next((u for u in units if count >= 0.9995 * u[0]), units[-1])
    value = count / unit
    return f"{value:.0f}{name}" if value >= 9.95 else f"{value:.1f}{name}"
