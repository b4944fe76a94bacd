"""`ggufmill merge`: the shards of a split GGUF become one file."""

from __future__ import annotations

from pathlib import Path

from ..formats import PlanError, open_gguf
from ..formats.gguf import SPLIT_NAME
from ..jobs.plan import plan_copy
from ..quantize.gguf_source import gguf_source
from .common.progress import OnProgress, reporting
from .writing.write_model import WriteOptions, WriteResult, write_model


def merge_model(
    source: str | Path,
    out: str | Path,
    *,
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
    source = Path(source)
    opened = open_gguf(source)
    if not SPLIT_NAME.match(source.name):
        raise PlanError(f"{source} is one file already; give a shard, whose name ends in -00001-of-0000N.gguf")
    options = WriteOptions(verify, manifest, dry_run, resume, force, threads)
    with reporting(progress) as report:
        return write_model(plan_copy(opened, Path(out)), "merge", gguf_source(opened), options, report)
