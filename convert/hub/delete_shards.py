"""--delete-source-shards: deleting each shard of a source once its tensors are written, for disks that cannot hold both."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from glob import escape
from pathlib import Path
from typing import Any

from ...formats import PlanError, TensorSource, open_gguf
from ...formats.deleted_shards import delete_shard, deleted_shard_names, record_path
from ...jobs.plan import Plan
from ...jobs.shards import without_files
from ..checkpoint_source import describe
from ..model_spec import ModelSpec
from .fetch import fetch_repository, is_repository


def completed_output(
    source: str | Path, out: Path, mla_layout: str | None = None, expected: Mapping[str, Any] | None = None
) -> Path | None:
    """The first file of a complete output whose source shards were all deleted, so that there is nothing to plan from.

    expected: metadata keys and values that the output must have. None if shards or parts of a job are left, if the output is
    older than config.json, or if it has other tensors or metadata than expected. Records of deleted shards that are left, since
    the job was killed while it removed them, are removed. Raises FormatError as `open_source` and `open_gguf` do.
    """
    stem = escape(out.name.removesuffix(".gguf"))
    first = next((p for p in (out, *sorted(out.parent.glob(f"{stem}-00001-of-*.gguf"))) if p.is_file()), None)
    if first is None or is_unfinished(first):
        return None
    folder = fetch_repository(str(source), remote=True).folder if is_repository(source) else Path(source)
    config = folder / "config.json"
    if not config.is_file() or any(folder.glob("*.safetensors")) or config.stat().st_mtime_ns > first.stat().st_mtime_ns:
        return None
    output, expected_model = open_gguf(first), describe(folder, mla_layout)
    metadata = {"general.architecture": expected_model.architecture, **(expected or {})}
    same_tensors = output.tensors.keys() in _possible_tensors(expected_model, output.tensors.keys())
    if not same_tensors or any(output.metadata.get(key) != value for key, value in metadata.items()):
        return None
    for name in deleted_shard_names(folder):
        record_path(folder / name).unlink(missing_ok=True)
    return first


def is_unfinished(first: Path) -> bool:
    """Whether parts of a job are left that writes a model whose first file this is."""
    return any(first.with_name(first.name + suffix).exists() for suffix in (".journal", ".part"))


def _possible_tensors(model: ModelSpec, names: Collection[str]) -> list[set[str]]:
    """The names of the tensors of a complete output: without draft layers, and with the first ones, with those of `names` that
    are optional."""
    possible = [{tensor.name for tensor in model.tensors}]
    for layer in model.draft.layers if model.draft is not None else ():
        optional = {tensor.name for tensor in layer.optional}.intersection(names)
        possible.append(possible[-1] | {tensor.name for tensor in layer.tensors} | optional)
    return possible


class ShardDeleter:
    """The `on_finished` callback of `execute`: deletes the shards that no pending tensor needs, after syncing the output.

    The records that a resumed job needs stay next to them (see `formats.deleted_shards`) until `close`.
    """

    def __init__(self, source: TensorSource, plan: Plan, existing: Collection[int] = ()):
        """existing: indexes of the plan's files that are complete already.

        Raises PlanError for jobs that could not be resumed without their shards, and for shards whose deletion would free no
        space: a source that is not a folder of shards, one whose planning reads tensors, shards that are links or have another
        hard link, and shards that cannot be deleted.
        """
        self._plan, self._existing = plan, existing
        self._records = [record_path(p) for p in source.files if p not in source.shards and record_path(p).exists()]
        if not source.shards and not self._records:
            raise PlanError(f"{source.path}: only the shards of a checkpoint folder can be deleted after use")
        needs: dict[Path, set[str]] = {path: set() for path in source.shards}
        for output, location in zip(plan.outputs, plan.locations, strict=True):
            tensor = source.tensors.get(output.name)
            if location.file in existing:
                continue
            for path in needs if tensor is None else tensor.files:
                if path in needs:
                    needs[path].add(output.name)
        self._needs = needs  # shard -> names of pending output tensors that are made from it
        self._shards = dict(source.shards)
        for path, shard in self._shards.items():
            if shard.was_read:
                raise PlanError(f"{path}: the plan depends on tensors in it; without this shard the job could not be resumed")
            if path.is_symlink() and path.resolve().parent.name != "blobs":  # as in the hub's cache
                raise PlanError(f"{path} is a link; what it leads to is not deleted")
            if path.stat().st_nlink > 1:
                raise PlanError(f"{path} has another name too (a hard link); deleting it would free nothing")
            if not os.access(path.parent, os.W_OK) or not os.access(path.resolve().parent, os.W_OK):
                raise PlanError(f"{path.parent} cannot be written to, so its shards cannot be deleted")

    def needed_bytes(self) -> int:
        """Disk space that the output takes at most at any moment, less the shards that have been deleted by then."""
        folder = self._plan.files[0].path.resolve().parent
        while not folder.exists():
            folder = folder.parent
        device = folder.stat().st_dev
        pending = {path: set(names) for path, names in self._needs.items()}
        left = without_files(self._plan, self._existing)
        used = left.missing_bytes(self._existing) - left.total_bytes
        peak = used
        for output in left.outputs:
            used += output.nbytes
            peak = max(peak, used)
            for path in [p for p, names in pending.items() if output.name in names]:
                pending[path].discard(output.name)
                if not pending[path] and path.stat().st_dev == device:
                    used -= path.stat().st_size
        return peak

    def __call__(self, done: Mapping[str, str], sync: Callable[[], None]) -> None:
        """done: the complete tensors; sync: brings them and the journal to disk."""
        unneeded = [path for path, names in self._needs.items() if names <= done.keys()]
        if not unneeded:
            return
        sync()
        for path in unneeded:
            header = self._shards[path].header()
            self._shards[path].close()
            del self._needs[path]
            delete_shard(path, header)
            self._records.append(record_path(path))

    def close(self) -> None:
        """Deletes the records; for a complete output."""
        for path in self._records:
            path.unlink(missing_ok=True)
