"""`ggufmill merge`: the shards of a split GGUF become one file."""

from __future__ import annotations

from pathlib import Path

from ..convert.hub.delete_shards import is_unfinished
from ..formats import PlanError, open_gguf
from ..formats.deleted_shards import record_path
from ..formats.gguf import SPLIT_NAME, split_paths
from ..jobs.plan import plan_copy
from ..quantize.gguf_source import stored_source
from .common.progress import OnProgress, reporting
from .writing.write_model import WriteResult, write_model
from .writing.write_options import WriteOptions


def merge_model(
    source: str | Path,
    out: str | Path,
    *,
    delete_source_shards: bool = False,
    verify: bool = False,
    manifest: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    force: bool = False,
    threads: int | None = None,
    progress: OnProgress | bool | None = None,
) -> WriteResult:
    """Joins the shards of a split GGUF to one file: merging what `split_model` has cut gives the file it was.

    source  any of the shards; all have to be there
    out     the file to write
    delete_source_shards
            DELETES each shard once all its tensors are written and on disk: the disk has to hold the model and a shard, not
            both models
    verify, manifest, dry_run, resume, force, threads, progress
            as for `convert_model`; the stage is 'merge', in bytes

    Returns a `WriteResult`. Raises PlanError for a file that is not split, FormatError for shards that are missing, and as
    `convert_model` does.

    Example:
        >>> from ggufmill import convert_model, merge_model
        >>> from ggufmill.recipes import FOLDER
        >>> split = convert_model(FOLDER / "demo", "parts.gguf", outtype="q8_0", split_max_tensors=40, force=True)
        >>> merge_model(split.files[0], "merged.gguf", force=True).status
        'written'
    """
    source, out = Path(source), Path(out)
    options = WriteOptions(verify, manifest, dry_run, resume, force, threads)
    if delete_source_shards and resume and not (dry_run or force) and _is_merged(source, out):
        return WriteResult("finished before", [out])
    opened = open_gguf(source, deletable=delete_source_shards)
    if not SPLIT_NAME.match(source.name):
        raise PlanError(f"{source} is one file already; give a shard, whose name ends in -00001-of-0000N.gguf")
    with reporting(progress) as report:
        return write_model(
            plan_copy(opened, out),
            "merge",
            stored_source(opened),
            options,
            report,
            delete_source_shards=delete_source_shards,
        )


def _is_merged(source: Path, out: Path) -> bool:
    """Whether a job that deleted all shards was finished; what is left of their records is removed. Raises FormatError for an
    output that is damaged."""
    shards = split_paths(source)
    records = [record_path(path) for path in shards if record_path(path).exists()]
    if any(path.exists() for path in shards) or len(records) == len(shards) or not out.is_file() or is_unfinished(out):
        return False
    open_gguf(out)
    for record in records:
        record.unlink(missing_ok=True)
    return True
