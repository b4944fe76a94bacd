"""Deleting the shards of a checkpoint as soon as all their tensors are written, for disks that cannot hold both."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from glob import escape
from pathlib import Path
from typing import Any

from ...formats import PlanError, TensorSource, open_gguf
from ...formats.deleted_shards import release, stub
from ...formats.safetensors import local_shards
from ...jobs.plan import Plan
from ..source import describe
from .hub import fetch_repository, is_repository


def finished_without_source(
    source: str | Path, out: Path, mla_layout: str | None = None, expected: Mapping[str, Any] | None = None
) -> Path | None:
    """The first file of the output, if it was made of a checkpoint whose shards were deleted after use, and is whole: there is
    nothing left then to plan from. None if shards are left or a job is, if the output is older than config.json or has other
    tensors than that says, or has not the expected metadata. Raises FormatError as `open_source` and `open_gguf`.
    """
    stem = escape(out.name.removesuffix(".gguf"))
    first = next((p for p in (out, *sorted(out.parent.glob(f"{stem}-00001-of-*.gguf"))) if p.is_file()), None)
    if first is None or any(first.with_name(first.name + left).exists() for left in (".journal", ".part")):
        return None
    folder = fetch_repository(str(source), remote=True).folder if is_repository(source) else Path(source)
    config = folder / "config.json"
    if not config.is_file() or local_shards(folder) or config.stat().st_mtime_ns > first.stat().st_mtime_ns:
        return None
    made, described = open_gguf(first), describe(folder, mla_layout)
    wanted = {"general.architecture": described.architecture, **(expected or {})}
    same = made.tensors.keys() == {w.name for w in described.wanted}
    return first if same and all(made.metadata.get(key) == value for key, value in wanted.items()) else None


class Releaser:
    """Called as tensors are finished (see `execute`): brings them and the journal to disk, and then deletes the shards that
    nothing needs any more. What is needed to resume the job stays beside them (formats/released.py) until `close`.
    """

    def __init__(self, source: TensorSource, plan: Plan, kept: Collection[int] = ()):
        """kept: files of the plan that are there already.

        Raises PlanError for what could not be resumed without its shards, or would not free their space: a source that is no
        folder of shards, one whose planning reads tensors, shards that are links, have another name too or cannot be deleted.
        """
        self._plan = plan
        self._stubs = [stub(path) for path in source.files if path not in source.shards and stub(path).exists()]
        if not source.shards and not self._stubs:
            raise PlanError(f"{source.path}: only the shards of a checkpoint folder can be deleted after use")
        needs: dict[Path, set[str]] = {path: set() for path in source.shards}
        for output, place in zip(plan.outputs, plan.places, strict=True):
            tensor = source.tensors.get(output.name)
            if place.file in kept:
                continue
            for path in needs if tensor is None else tensor.files:
                if path in needs:
                    needs[path].add(output.name)
        self._needs = needs
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

    def needed(self) -> int:
        """Bytes of disk that the job takes at the worst moment, shards that were deleted by then counted as free."""
        folder = self._plan.files[0].path.resolve().parent
        while not folder.exists():
            folder = folder.parent
        device = folder.stat().st_dev
        waiting = {path: set(names) for path, names in self._needs.items()}
        taken = self._plan.file_bytes - self._plan.total_bytes
        worst = taken
        for output in self._plan.outputs:
            taken += output.nbytes
            worst = max(worst, taken)
            for path in [p for p, names in waiting.items() if output.name in names]:
                waiting[path].discard(output.name)
                if not waiting[path] and path.stat().st_dev == device:
                    taken -= path.stat().st_size
        return worst

    def __call__(self, done: Mapping[str, str], sync: Callable[[], None]) -> None:
        ready = [path for path, names in self._needs.items() if names <= done.keys()]
        if not ready:
            return
        sync()
        for path in ready:
            self._shards[path].close()
            del self._needs[path]
            release(path)
            self._stubs.append(stub(path))

    def close(self) -> None:
        """To be called when the output is whole."""
        for path in self._stubs:
            path.unlink(missing_ok=True)
