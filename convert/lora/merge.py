"""Merging adapters: a source whose weights are those of the model with the changes added, in float32, as they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ...formats import FormatError, TensorSource
from ...formats.source import files_stamp
from .adapter import Adapter, AdapterFile, parse_adapter
from .load import with_notes
from .low_rank import LowRank, add_changes, changed_tensor
from .peft_folder import CONFIG, WEIGHTS

RECORD = "ggufmill.lora"


def sum_of_changes(adapters: Sequence[Adapter]) -> dict[str, LowRank]:
    """Name of the tensor -> the change that all adapters make together."""
    parts: dict[str, list[LowRank]] = {}
    for adapter in adapters:
        for name, change in adapter.changes.items():
            parts.setdefault(name, []).append(change)
    return {name: changes[0] if len(changes) == 1 else add_changes(changes) for name, changes in parts.items()}


def merge_adapters(source: TensorSource, adapters: Sequence[Adapter], only: Collection[str] | None = None) -> TensorSource:
    """W + scale * b @ a for every matrix that an adapter changes, or for those named by `only`."""
    if not adapters:
        return source
    changes = {name: change for name, change in sum_of_changes(adapters).items() if only is None or name in only}
    changed = {name: changed_tensor(source.tensors[name], change) for name, change in changes.items()}
    merged = replace(source, tensors={**source.tensors, **changed})
    return with_notes(merged, adapters, identity_with(source, adapters))


def identity_with(source: TensorSource, adapters: Sequence[Adapter]) -> str:
    """A digest of the source and the adapters' files and scales."""
    digest = hashlib.sha256(source.identity.encode())
    for adapter in adapters:
        digest.update(files_stamp(adapter.files))
        digest.update(repr([(name, change.scale) for name, change in adapter.changes.items()]).encode())
    return digest.hexdigest()


def record(files: Sequence[str | Path | AdapterFile]) -> list[str]:
    """What the metadata key `RECORD` says of adapters, FILE or FILE=SCALE each: name, scale, and a digest of the contents."""
    return [_record(file) for file in map(parse_adapter, files)]


def _record(file: AdapterFile) -> str:
    digest = hashlib.sha256()
    for path in [file.path / name for name in (CONFIG, WEIGHTS)] if file.path.is_dir() else [file.path]:
        try:
            with path.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        except OSError as error:
            raise FormatError(f"{path}: {error.strerror or error}") from None
    return f"{AdapterFile(Path(file.path.name), file.scale)} {digest.hexdigest()[:16]}"
