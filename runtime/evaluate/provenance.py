"""Where a measured number comes from: the model's file and what made it, the settings, the text, the program.

Two figures can be compared when the same predictions were scored; what else differs between them is what the comparison shows.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ... import __version__
from ...formats.file_range import HASH_BLOCK_BYTES, read_range
from ..hparams import HParams
from ..model import Model
from .score_statistics import paired_ratio

HEAD_BYTES = 16 << 20  # the header of a GGUF with a large vocabulary, and the first tensors
SAMPLES, SAMPLE_BYTES = 512, 64 << 10  # spread evenly over the rest of a file

_IMATRIX = "quantize.imatrix."
_RECIPE = "ggufmill.recipe"


def file_digest(path: Path, full: bool = False, progress: Callable[[int, str], None] | None = None) -> str:
    """What identifies a file, in hex; the prefix says how it was made.

    'xxh3:' of all bytes, for files of up to HEAD_BYTES + SAMPLES * SAMPLE_BYTES (48 MiB) and with `full`. Else 'sampled:', the
    xxh3 of the size, the first HEAD_BYTES and SAMPLES blocks of SAMPLE_BYTES each at even distances, the last one at the end:
    another quantisation shows in the header and in every block, a flipped bit somewhere may not. progress(bytes, name) is
    called for what was read. Raises FormatError when the file cannot be read.
    """
    size, digest = path.stat().st_size, xxhash.xxh3_64()
    whole = full or size <= HEAD_BYTES + SAMPLES * SAMPLE_BYTES
    if whole:
        spans = [(at, min(HASH_BLOCK_BYTES, size - at)) for at in range(0, size, HASH_BLOCK_BYTES)]
    else:
        digest.update(size.to_bytes(8, "little"))
        starts = np.linspace(HEAD_BYTES, size - SAMPLE_BYTES, SAMPLES).astype(np.int64).tolist()
        spans = [(0, HEAD_BYTES), *((at, SAMPLE_BYTES) for at in starts)]
    for at, nbytes in spans:
        digest.update(read_range(path, at, nbytes).data)
        if progress is not None:
            progress(nbytes, path.name)
    return f"{'xxh3' if whole else 'sampled'}:{digest.hexdigest()}"


def describe_model(model: Model, full: bool = False, progress: Callable[[int, str], None] | None = None) -> dict[str, Any]:
    """The model's files with their digests (see `file_digest`), what its tensors are, and the recipe, imatrix and program
    version that its metadata names; None where it names none."""
    source, metadata = model.source, model.metadata
    sizes = tensor_sizes(model)
    imatrix = {key.removeprefix(_IMATRIX): _plain(v) for key, v in metadata.items() if key.startswith(_IMATRIX)}
    return {
        "path": source.path,
        "architecture": source.architecture,
        "name": _plain(metadata.get("general.name")),
        "files": [
            {"name": path.name, "nbytes": path.stat().st_size, "digest": file_digest(path, full, progress)}
            for path in source.files
        ],
        **sizes,
        "recipe": _plain(metadata.get(_RECIPE)),
        "imatrix": imatrix or None,
        "made_by": _plain(metadata.get("ggufmill.version")),
    }


def tensor_sizes(model: Model) -> dict[str, Any]:
    """parameters, nbytes of all tensors, bits_per_weight, and types: name -> bytes, largest first; as they are in the file."""
    types: dict[str, int] = {}
    parameters = 0
    for tensor in model.stored.tensors.values():
        kind = tensor.stored
        nbytes = kind.nbytes(tensor.shape) if kind is not None and kind.is_known else 2 * tensor.n_elements
        types[tensor.source_type] = types.get(tensor.source_type, 0) + nbytes
        parameters += tensor.n_elements
    total = sum(types.values())
    return {
        "parameters": parameters,
        "nbytes": total,
        "bits_per_weight": 8 * total / parameters if parameters else 0.0,
        "types": dict(sorted(types.items(), key=lambda item: -item[1])),
    }


def describe_settings(model: Model) -> dict[str, Any]:
    """All settings the model runs with; threads and cache types as they are used, mla only where there is latent attention."""
    cache_k, cache_v = model.settings.cache_types
    used = {"threads": model.workers.count, "cache_k": cache_k, "cache_v": cache_v}
    settings = asdict(model.settings) | used
    if not HParams(model.metadata, model.source.path).is_latent:
        del settings["mla"]
    return settings


def describe_text(data: bytes, name: str = "") -> dict[str, Any]:
    """A text by its bytes."""
    return {"name": name, "nbytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}


def describe_program() -> dict[str, Any]:
    """Versions and processor."""
    packages = {name: version(name) for name in ("numpy", "numba")}
    return {"ggufmill": __version__, "python": platform.python_version(), **packages, "cpu": processor()}


def processor() -> str:
    """Its name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def compare_results(ours: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Whether two perplexity results (as JSON) scored the same predictions, and what else sets them apart.

    comparable   the same tokens in the same windows
    obstacles    why not, as lines to read; differences: what differs in model, settings and program: path -> (ours, other)
    ratio        our perplexity over the other's, with its error from the windows' paired losses; only if comparable
    """
    obstacles = [
        f"{what}: {ours.get(key)} here, {other.get(key)} there"
        for what, key in (("context", "n_ctx"), ("windows", "chunks"), ("tokens", "tokens_xxh3"))
        if ours.get(key) is None or ours.get(key) != other.get(key)
    ]
    found: dict[str, Any] = {"comparable": not obstacles, "obstacles": obstacles, "differences": {}}
    for part in ("about", "settings", "program"):
        found["differences"] |= _differences(part, ours.get(part), other.get(part))
    losses, theirs = (result.get("window_losses") or [] for result in (ours, other))
    if not obstacles and losses and len(losses) == len(theirs):
        found["ratio"], found["ratio_error"] = paired_ratio(losses, theirs)
    return found


def _differences(path: str, ours: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    if isinstance(ours, Mapping) and isinstance(other, Mapping):
        found = {}
        for key in [*ours, *(k for k in other if k not in ours)]:
            found |= _differences(f"{path}.{key}", ours.get(key), other.get(key))
        return found
    plain = [list(v) if isinstance(v, tuple) else v for v in (ours, other)]  # JSON has no tuples
    return {} if plain[0] == plain[1] else {path: (ours, other)}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return value.tolist() if isinstance(value, np.ndarray) else value
