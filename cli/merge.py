"""`ggufmill merge` makes one file of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from .command import Verb
from .display.console import call
from .display.plans import written_text
from .options import flags
from .options.types import OUT


@click.command(cls=Verb)
@click.argument("source", type=click.Path(dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.argument("out", type=OUT)
@click.option(
    "--delete-splits",
    "--delete-source-shards",
    "delete_source_shards",
    is_flag=True,
    help="DELETE each file of the split once all its tensors are written.",
)
@flags.writing
def command(source: Any, out: Any, as_json: bool, **options: Any) -> None:
    """Join the shards of a split GGUF (give any of them as SOURCE, or all) to the one file OUT.

    Missing shards are refused. The tensors are the same, byte by byte, and keys of the split are left out, so that merging what
    `split` has cut gives the file it was.

    \b
    Examples:
      ggufmill merge model-00001-of-00009.gguf model.gguf
      ggufmill merge model-*.gguf model.gguf --verify --manifest
      ggufmill merge model-00001-of-00009.gguf model.gguf --delete-splits
    """
    from ..formats.gguf import split_paths
    from ..pipeline.merge import merge_model

    shards = split_paths(source[0])
    if others := [path for path in source[1:] if path.resolve() not in {shard.resolve() for shard in shards}]:
        problem = f"is no shard of the model that {source[0]} belongs to" if others[0].exists() else "does not exist"
        raise UsageError(f"{others[0]} {problem}")
    call(merge_model, source[0], out, show=written_text, as_json=as_json, **options)
