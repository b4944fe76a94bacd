"""`ggufmill split`: one GGUF file is cut into several."""

from __future__ import annotations

from pathlib import Path

from ..formats import open_gguf
from ..jobs.plan import plan_copy
from ..quantize.gguf_source import gguf_source
from .common.arguments import Size, as_bytes
from .common.progress import OnProgress, reporting
from .writing.write_model import WriteResult, write_model
from .writing.write_options import WriteOptions

DEFAULT_TENSORS = 128  # per file, as gguf-split


def split_model(
    source: str | Path,
    out: str | Path,
    *,
    split_max_size: Size | None = None,
    split_max_tensors: int | None = None,
    tensor_first_split: bool = True,
    verify: bool = False,
    manifest: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    force: bool = False,
    threads: int | None = None,
    progress: OnProgress | bool | None = None,
) -> WriteResult:
    """Cuts a GGUF file into OUT-00001-of-0000N.gguf, with names and metadata as gguf-split has them.

    source              a GGUF file, or any shard of a split one
    out                 the name before the number; .gguf at its end is left out
    split_max_size      bytes per whole file at most, a number or a text such as '50G'
    split_max_tensors   tensors per file at most; without either limit 128
    tensor_first_split  False: the first file holds the metadata only
    verify, manifest, dry_run, resume, force, threads, progress
                        as for `convert_model`; the stage is 'split', in bytes

    Returns a `WriteResult`, whose `files` are the shards. Raises as `convert_model` does.

    Example:
        >>> from ggufmill import convert_model, split_model
        >>> from ggufmill.recipes import FOLDER
        >>> _ = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", force=True)
        >>> [path.name for path in split_model("demo.gguf", "part", split_max_tensors=40, force=True).files]
        ['part-00001-of-00002.gguf', 'part-00002-of-00002.gguf']
    """
    opened = open_gguf(Path(source))
    if split_max_size is None and split_max_tensors is None:
        split_max_tensors = DEFAULT_TENSORS
    plan = plan_copy(
        opened,
        Path(out),
        split_max_size=as_bytes(split_max_size),
        split_max_tensors=split_max_tensors,
        tensor_first_split=tensor_first_split,
    )
    options = WriteOptions(verify, manifest, dry_run, resume, force, threads)
    with reporting(progress) as report:
        return write_model(plan, "split", gguf_source(opened), options, report)
