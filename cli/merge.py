"""`ggufmill merge` makes one file of shards."""

from __future__ import annotations

from pathlib import Path

import click

from ..formats import PlanError
from ..pipeline.job_options import Job
from ..pipeline.write_model import finish
from .options import flags
from .options.job import job_options


@click.command(short_help="Make one GGUF of several files")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=flags.OUT)
@job_options
def command(source: Path, out: Path, job: Job) -> None:
    """Join the shards of a split GGUF (give any of them as SOURCE) to the one file OUT.

    Missing shards are refused. The tensors are the same, byte by byte, and keys of the split are left out, so that merging what
    `split` has cut gives the file it was.

    \b
    Examples:
      ggufmill merge model-00001-of-00009.gguf model.gguf
      ggufmill merge model-00001-of-00009.gguf model.gguf --verify --manifest
    """
    from ..formats import open_gguf
    from ..formats.gguf import SPLIT_NAME
    from ..jobs.copy_tensors import plan_copy
    from ..quantize.gguf_source import gguf_source

    opened = open_gguf(source)
    if not SPLIT_NAME.match(source.name):
        raise PlanError(f"{source} is one file already; give a shard, whose name ends in -00001-of-0000N.gguf")
    finish(plan_copy(opened, out), "merge", gguf_source(opened), job)
