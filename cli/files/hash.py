"""`ggufmill hash` makes digests of files, tensors and layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

import click

from ...pipeline.requests.files import HashRequest
from ..command import Verb
from ..display.console import call
from ..options.fields import options_of

if TYPE_CHECKING:
    from ...pipeline.files.hash import HashResult


@click.command(cls=Verb)
@options_of(HashRequest)
def command(**options: Any) -> None:
    """Hash every tensor of the GGUF FILE and all its tensors together, in the lines of llama.cpp's gguf-hash.

    Of a split model all shards are hashed, each as a file. --check goes by the strongest hash that the manifest has, unless one
    is named; names are compared without their folder.

    \b
    Examples:
      ggufmill hash model.gguf --all -o model.gguf.manifest
      ggufmill hash model.gguf --check model.gguf.manifest
    """
    from ...pipeline.files.hash import hash_model

    call(hash_model, show=_text, **options)


def _text(result: HashResult) -> Iterator[str]:
    verdicts = (f"  -  {verdict}" for verdict in result.verdicts) if result.manifest is not None else repeat("")
    for entry, verdict in zip(result.hashes, verdicts, strict=False):
        yield entry.line() + verdict
