"""`ggufmill merge` makes one file of shards."""

from __future__ import annotations

from typing import Any

import click

from ...errors import UsageError
from ...pipeline.requests.rewriting import MergeRequest
from ..command import Verb
from ..display.console import call
from ..display.plans import written_text
from ..options.fields import options_of


@click.command(cls=Verb)
@options_of(MergeRequest)
def command(**options: Any) -> None:
    """Join the shards of a split GGUF (give any of them as SOURCE, or all) to the one file OUT.

    Missing shards are refused. The tensors are the same, byte by byte, and keys of the split are left out, so that merging what
    `split` has cut gives the file it was.

    \b
    Examples:
      ggufmill merge model-00001-of-00009.gguf model.gguf
      ggufmill merge model-*.gguf model.gguf --verify --manifest
      ggufmill merge model-00001-of-00009.gguf model.gguf --delete-splits
    """
    from ...formats.gguf import split_paths
    from ...pipeline.files.merge import merge_model

    source = options["source"]
    shards = split_paths(source[0])
    if others := [path for path in source[1:] if path.resolve() not in {shard.resolve() for shard in shards}]:
        problem = f"is no shard of the model that {source[0]} belongs to" if others[0].exists() else "does not exist"
        raise UsageError(f"{others[0]} {problem}")
    call(merge_model, show=written_text, **{**options, "source": source[0]})
