from __future__ import annotations

from pathlib import Path

import click

from ..formats import PlanError
from . import flags
from .writing import show_plan, write


@click.command(short_help="Make one GGUF of several files")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@flags.dry_run
@flags.resume
@flags.force
@flags.threads
@flags.as_json
def command(source: Path, out: Path, dry_run: bool, resume: bool, force: bool, threads: int | None, as_json: bool) -> None:
    """Join the shards of a split GGUF (give any of them as SOURCE) to the one file OUT.

    Missing shards are refused. The tensors are the same, byte by byte, and keys of the split are left out, so that merging what
    `split` has cut gives the file it was.

    \b
    Example:
      ggufmill merge model-00001-of-00009.gguf model.gguf
    """
    from ..formats import open_gguf
    from ..formats.copying import plan_copy

    opened = open_gguf(source)
    if opened.n_splits < 2:
        raise PlanError(f"{source} is one file already; give a shard, whose name ends in -00001-of-0000N.gguf")
    plan = plan_copy(opened, out)
    if dry_run:
        show_plan(plan, as_json)
    else:
        write(plan, "merge", opened.paths, threads=threads, resume=resume, force=force, as_json=as_json)
