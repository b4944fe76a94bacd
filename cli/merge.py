"""`ggufmill merge` makes one file of shards."""

from __future__ import annotations

from typing import Any

import click

from .command import Verb
from .display.console import call
from .display.plans import written_text
from .options import flags
from .options.types import FILE, OUT


@click.command(cls=Verb)
@click.argument("source", type=FILE)
@click.argument("out", type=OUT)
@flags.writing
def command(source: Any, out: Any, as_json: bool, **options: Any) -> None:
    """Join the shards of a split GGUF (give any of them as SOURCE) to the one file OUT.

    Missing shards are refused. The tensors are the same, byte by byte, and keys of the split are left out, so that merging what
    `split` has cut gives the file it was.

    \b
    Examples:
      ggufmill merge model-00001-of-00009.gguf model.gguf
      ggufmill merge model-00001-of-00009.gguf model.gguf --verify --manifest
    """
    from ..pipeline.merge import merge_model

    call(merge_model, source, out, show=written_text, as_json=as_json, **options)
