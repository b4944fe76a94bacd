"""Describes the origin of a measured figure as JSON: model files and their metadata, settings, text, program versions.

`compare_results` decides whether two results scored the same predictions, and lists in what else they differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...formats.file_range import HASH_BLOCK_BYTES, read_range
from ...operating_system.processors import processor_name
from ...version import __version__
from ..hparams import HParams
from ..model import Model
from ..placement.stored_sizes import tensor_sizes
from ..settings import CACHE_SETTINGS, PLACEMENT
from .score_statistics import paired_ratio

HEAD_BYTES = 16 << 20  # holds the header of a GGUF with a large vocabulary, and the first tensors
SAMPLES, SAMPLE_BYTES = 512, 64 << 10  # blocks at equal distances in the rest of the file

_IMATRIX = "quantize.imatrix."
_RECIPE = "ggufmill.recipe"


def file_digest(path: Path, full: bool = False, progress: Callable[[int, str], None] | None = None) -> str:
    """The hash of a file as 'METHOD:hex'.

    'xxh3' is the hash of all bytes, for files of up to HEAD_BYTES + SAMPLES * SAMPLE_BYTES (48 MiB) and with `full`. 'sampled'
    is the xxh3 of the size (8 bytes, little endian), the first HEAD_BYTES, and SAMPLES blocks of SAMPLE_BYTES at equal
    distances, the last one at the end of the file: another quantisation changes the header and every block; a single changed
    byte may go unnoticed. progress: called with (bytes, file name) for each range read. Raises FormatError when the file cannot
    be read.
    """
    size, digest = path.stat().st_size, xxhash.xxh3_64()
    hash_all = full or size <= HEAD_BYTES + SAMPLES * SAMPLE_BYTES
    if hash_all:
        ranges = [(start, min(HASH_BLOCK_BYTES, size - start)) for start in range(0, size, HASH_BLOCK_BYTES)]
    else:
        digest.update(size.to_bytes(8, "little"))
        starts = np.linspace(HEAD_BYTES, size - SAMPLE_BYTES, SAMPLES).astype(np.int64).tolist()
        ranges = [(0, HEAD_BYTES), *((start, SAMPLE_BYTES) for start in starts)]
    for start, nbytes in ranges:
        digest.update(read_range(path, start, nbytes).data)
        if progress is not None:
            progress(nbytes, path.name)
    return f"{'xxh3' if hash_all else 'sampled'}:{digest.hexdigest()}"


def describe_model(model: Model, full: bool = False, progress: Callable[[int, str], None] | None = None) -> dict[str, Any]:
    """The model's files with their hashes (`file_digest`), their bytes, the sizes of its tensors (`tensor_sizes`), and the
    recipe, imatrix and program version in its metadata, each None if there is none."""
    source, metadata = model.source, model.metadata
    sizes = tensor_sizes(model.stored)
    imatrix = {key.removeprefix(_IMATRIX): _plain(v) for key, v in metadata.items() if key.startswith(_IMATRIX)}
    return {
        "path": source.path,
        "architecture": source.architecture,
        "name": _plain(metadata.get("general.name")),
        "files": [
            {"name": path.name, "nbytes": path.stat().st_size, "digest": file_digest(path, full, progress)}
            for path in source.files
        ],
        "file_bytes": sum(path.stat().st_size for path in source.files),
        **sizes,
        "recipe": _plain(metadata.get(_RECIPE)),
        "imatrix": imatrix or None,
        "made_by": _plain(metadata.get("ggufmill.version")),
    }


def describe_settings(model: Model) -> dict[str, Any]:
    """The settings of a model, with the number of threads, cache types and rotations in use; mla only for models with latent
    attention, processors, types of single layers and what places weights only if they were chosen."""
    settings = asdict(model.settings) | {"threads": model.workers.count}
    settings["cache_k"], settings["cache_v"] = model.settings.cache_types
    settings["k_cache_hadamard"], settings["v_cache_hadamard"] = model.settings.cache_rotations
    settings["fast"] = bool(settings["fast"])
    if not HParams(model.metadata, model.source.path).is_latent:
        del settings["mla"]
    for name in ("cpus", "numa"):
        if settings[name] is None:
            del settings[name]
    for name in ("lora", "round_activations", *CACHE_SETTINGS, *PLACEMENT):
        if settings[name] in (None, (), False):
            del settings[name]
    if model.device_names:
        settings["device"] = tuple(model.device_names)
    return settings


def describe_text(data: bytes, name: str = "") -> dict[str, Any]:
    """Name, size and xxh3 hash of a text's bytes."""
    return {"name": name, "nbytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}


def describe_program() -> dict[str, Any]:
    """Versions of ggufmill, Python, numpy and numba, and the processor."""
    packages = {name: version(name) for name in ("numpy", "numba")}
    return {"ggufmill": __version__, "python": ".".join(map(str, sys.version_info[:3])), **packages, "cpu": processor_name()}


def compare_results(ours: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Compares two perplexity results, given as JSON.

    comparable           True if both scored the same tokens in the same windows
    obstacles            if not: the reasons, as lines to read
    differences          differences in model, settings and program: path -> (ours, other)
    ratio, ratio_error   our perplexity / the other's, with the standard error of the windows' paired losses; only if comparable
    """
    obstacles = [
        f"{name}: {ours.get(key)} here, {other.get(key)} there"
        for name, key in (("context", "n_ctx"), ("windows", "chunks"), ("tokens", "tokens_xxh3"))
        if ours.get(key) is None or ours.get(key) != other.get(key)
    ]
    result: dict[str, Any] = {"comparable": not obstacles, "obstacles": obstacles, "differences": {}}
    for section in ("about", "settings", "program"):
        result["differences"] |= _differences(section, ours.get(section), other.get(section))
    our_losses, other_losses = (each.get("window_losses") or [] for each in (ours, other))
    if not obstacles and our_losses and len(our_losses) == len(other_losses):
        result["ratio"], result["ratio_error"] = paired_ratio(our_losses, other_losses)
    return result


def _differences(path: str, ours: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """path -> (our value, other value) of all values within two JSON values that differ."""
    if isinstance(ours, Mapping) and isinstance(other, Mapping):
        result = {}
        for key in [*ours, *(k for k in other if k not in ours)]:
            result |= _differences(f"{path}.{key}", ours.get(key), other.get(key))
        return result
    as_lists = [list(v) if isinstance(v, tuple) else v for v in (ours, other)]  # JSON has no tuples
    return {} if as_lists[0] == as_lists[1] else {path: (ours, other)}


def _plain(value: Any) -> Any:
    """A metadata value without numpy types."""
    if isinstance(value, np.generic):
        return value.item()
    return value.tolist() if isinstance(value, np.ndarray) else value
