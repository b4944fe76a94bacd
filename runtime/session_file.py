"""Sessions in files: tokens and KV cache of a sequence, to continue after a restart without reading the prompt again."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..formats import MillError, PlanError, TensorSource
from ..formats.file_range import check_regular
from ..jobs.atomic_write import write_bytes
from .backends.cpu.kv_cache import KVCache
from .cache_layout import rows_text
from .evaluate.provenance import file_digest
from .session import Session

_FORMAT = "ggufmill session 2"
_FORMATS = ("ggufmill session 1", _FORMAT)  # the first says nothing of the cache, whose rows are not rotated


def save_session(session: Session, path: Path) -> int:
    """Writes a session, with a checksum and a digest of its model; returns the bytes written.

    Raises PlanError where the cache is on a device, MillError when the file cannot be written.
    """
    session.drop_unknown()
    length = session.cache.length
    numbers = {"tokens": np.array(session.tokens[:length], np.int64), "n_read": np.array([min(session.n_read, length)])}
    arrays = numbers | _cache(session).dump()
    metadata = {"format": _FORMAT, "model": _model_digest(session.model.source), "xxh3": _checksum(arrays)}
    metadata["cache"] = rows_text(_cache(session).layers)
    data = save(arrays, metadata)
    write_bytes(path, data)
    return len(data)


def is_saved_session(path: Path) -> bool:
    """Whether a file, and no link to one, says that it is a session of `save_session`; whether it can be restored is not looked
    at."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with safe_open(path, "np") as file:
            return (file.metadata() or {}).get("format") in _FORMATS
    except (OSError, SafetensorError):
        return False


def restore_session(session: Session, path: Path) -> int:
    """Gives a session the tokens and the cache that a file holds; returns the file's bytes.

    Raises MillError for a file that is damaged, of another kind, model or settings of the cache, or that does not fit; the
    session is then as it was. PlanError where the cache is on a device.
    """
    cache = _cache(session)
    check_regular(path)
    try:
        size = path.stat().st_size
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") not in _FORMATS:
                raise MillError(f"{path} is not a saved session")
            if metadata.get("model") != _model_digest(session.model.source):
                raise MillError(f"{path} was saved with another model")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError) as error:
        raise MillError(f"{path} cannot be read as a saved session: {getattr(error, 'strerror', None) or error}") from None
    if metadata.get("xxh3") != _checksum(arrays):
        raise MillError(f"{path} is damaged: its checksum is wrong")
    tokens, n_read = arrays.pop("tokens").tolist(), arrays.pop("n_read", np.zeros(1, np.int64))  # older files lack it
    if len(tokens) > session.n_ctx:
        raise MillError(f"{path} has {len(tokens)} tokens, and the context holds {session.n_ctx}")
    is_rotated = any(part.rotation for layer in cache.layers for part in layer.rows.values())
    is_same = metadata["cache"] == rows_text(cache.layers) if "cache" in metadata else not is_rotated
    if not is_same or not cache.load(arrays, len(tokens)):
        raise MillError(f"{path} was saved with other types or another rotation of the KV cache, or another -mla")
    session.tokens, session.drafter = tokens, None
    session.n_read = min(int(n_read[0]), len(tokens))
    return size


def _cache(session: Session) -> KVCache:
    if not isinstance(session.cache, KVCache):
        raise PlanError("sessions whose cache is on a device cannot be saved or restored")
    return session.cache


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    digest = xxhash.xxh3_64()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} {arrays[name].dtype}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _model_digest(source: TensorSource) -> str:
    """A digest of a model's files, as `file_digest` reads them, and of what its tensors are."""
    digest = xxhash.xxh3_64()
    for path in source.files:
        digest.update(file_digest(Path(path)).encode())
    for name, tensor in source.tensors.items():
        digest.update(f"{name} {tensor.shape} {tensor.source_type}".encode())
    return digest.hexdigest()
