"""`ggufmill merge`: the shards of a split GGUF become one file."""

from __future__ import annotations

from pathlib import Path

from ...convert.hub.delete_shards import is_unfinished
from ...formats import PlanError, open_gguf
from ...formats.deleted_shards import record_path
from ...formats.gguf import SPLIT_NAME, split_paths
from ...jobs.plan import plan_copy
from ...quantize.gguf_source import stored_source
from ..common.progress import reporting
from ..requests.rewriting import MergeRequest
from ..requests.verb import verb
from ..writing.write_model import WriteResult, write_model
from ..writing.write_options import write_options


@verb(MergeRequest)
def merge_model(request: MergeRequest) -> WriteResult:
    """Joins the shards of a split GGUF to one file: merging what `split_model` has cut gives the file it was.

    Returns a `WriteResult`. Raises PlanError for a file that is not split, FormatError for shards that are missing, and as
    `convert_model` does.

    Example:
        >>> from ggufmill import convert_model, merge_model
        >>> from ggufmill.recipes import FOLDER
        >>> split = convert_model(FOLDER / "demo", "parts.gguf", outtype="q8_0", split_max_tensors=40, force=True)
        >>> merge_model(split.files[0], "merged.gguf", force=True).status
        'written'
    """
    source, out, deleting = Path(request.source), Path(request.out), request.delete_source_shards
    if deleting and request.resume and not (request.dry_run or request.force) and _is_merged(source, out):
        return WriteResult("finished before", [out])
    opened = open_gguf(source, deletable=deleting)
    if not SPLIT_NAME.match(source.name):
        raise PlanError(f"{source} is one file already; give a shard, whose name ends in -00001-of-0000N.gguf")
    with reporting(request.progress) as report:
        return write_model(
            plan_copy(opened, out),
            "merge",
            stored_source(opened),
            write_options(request),
            report,
            delete_source_shards=deleting,
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
