"""`ggufmill split` makes shards of one file."""

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
@flags.split_max_size
@click.option("--split-max-tensors", type=click.IntRange(1), help="Split after this many tensors. [default: 128, or no limit]")
@flags.tensor_first_split
@flags.writing
def command(source: Any, out: Any, as_json: bool, **options: Any) -> None:
    """Cut the GGUF SOURCE (one file, or any shard of a split model) into OUT-00001-of-0000N.gguf.

    Names and metadata are gguf-split's, also where one file takes all; the tensors are the same, byte by byte. --split-max-size
    counts whole files; without it and --split-max-tensors a file takes 128 tensors.

    \b
    Examples:
      ggufmill split model.gguf model --split-max-size 50G
      ggufmill split model.gguf parts/model.gguf --split-max-tensors 100 --no-tensor-first-split
    """
    from ..pipeline.split import split_model

    call(split_model, source, out, show=written_text, as_json=as_json, **options)
