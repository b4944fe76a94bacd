"""`ggufmill split` makes shards of one file."""

from __future__ import annotations

from typing import Any

import click

from ...pipeline.requests.rewriting import SplitRequest
from ..command import Verb
from ..display.console import call
from ..display.plans import written_text
from ..options.fields import options_of


@click.command(cls=Verb)
@options_of(SplitRequest)
def command(**options: Any) -> None:
    """Cut the GGUF SOURCE (one file, or any shard of a split model) into OUT-00001-of-0000N.gguf.

    Files have the names and metadata that gguf-split gives them, even if one file takes everything; the tensors are the same,
    byte by byte. --split-max-size limits whole files; without it and --split-max-tensors a file takes 128 tensors.

    \b
    Examples:
      ggufmill split model.gguf model --split-max-size 50G
      ggufmill split model.gguf parts/model.gguf --split-max-tensors 100 --no-tensor-first-split
    """
    from ...pipeline.files.split import split_model

    call(split_model, show=written_text, **options)
