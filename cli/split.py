"""`ggufmill split` makes shards of one file."""

from __future__ import annotations

from pathlib import Path

import click

from ..pipeline.job_options import Job
from ..pipeline.write_model import finish
from .options import flags
from .options.job import job_options

DEFAULT_TENSORS = 128  # as gguf-split


@click.command(short_help="Cut a GGUF into several files")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=flags.OUT)
@flags.split_max_size
@click.option(
    "--split-max-tensors",
    type=click.IntRange(1),
    help=f"Split after this many tensors. [default: {DEFAULT_TENSORS}, or no limit]",
)
@flags.tensor_first_split
@job_options
def command(
    source: Path,
    out: Path,
    split_max_size: int | None,
    split_max_tensors: int | None,
    tensor_first_split: bool,
    job: Job,
) -> None:
    """Cut the GGUF SOURCE (one file, or any shard of a split model) into OUT-00001-of-0000N.gguf.

    Names and metadata are gguf-split's, also where one file takes all; the tensors are the same, byte by byte. --split-max-size
    counts whole files; without it and --split-max-tensors a file takes 128 tensors.

    \b
    Examples:
      ggufmill split model.gguf model --split-max-size 50G
      ggufmill split model.gguf parts/model.gguf --split-max-tensors 100 --no-tensor-first-split
    """
    from ..formats import open_gguf
    from ..jobs.copy_tensors import plan_copy
    from ..quantize.gguf_source import gguf_source

    opened = open_gguf(source)
    if split_max_size is None and split_max_tensors is None:
        split_max_tensors = DEFAULT_TENSORS
    plan = plan_copy(
        opened,
        out,
        split_max_size=split_max_size,
        split_max_tensors=split_max_tensors,
        tensor_first_split=tensor_first_split,
    )
    finish(plan, "split", gguf_source(opened), job)
