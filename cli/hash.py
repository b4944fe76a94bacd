"""`ggufmill hash` makes digests of files, tensors and layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

import click

from .command import Verb
from .display.console import call
from .options import flags
from .options.types import FILE, OUT_FILE

if TYPE_CHECKING:
    from ..pipeline.hash import HashResult


@click.command(cls=Verb)
@click.argument("file", type=FILE)
@click.option("--xxh64", is_flag=True, help="Use xxh64. [the default]")
@click.option("--sha1", is_flag=True, help="Use sha1.")
@click.option("--sha256", is_flag=True, help="Use sha256.")
@click.option("--all", is_flag=True, help="Use all of these.")
@click.option("--uuid", is_flag=True, help="A UUIDv5 of the file's tensors.")
@click.option("--no-layer", is_flag=True, help="Only the files, not each tensor.")
@click.option("-o", "--output", type=OUT_FILE, help="Write the manifest to this file.")
@click.option("-c", "--check", type=FILE, help="Compare with a manifest.")
@flags.force
@flags.as_json
def command(file: Any, as_json: bool, **options: Any) -> None:
    """Hashes of every tensor of the GGUF FILE and of all its tensors together, in the lines of llama.cpp's gguf-hash.

    Of a split model all shards are hashed, each as a file. --check goes by the strongest hash that the manifest has, unless one
    is named; names are compared without their folder.

    \b
    Examples:
      ggufmill hash model.gguf --all -o model.gguf.manifest
      ggufmill hash model.gguf --check model.gguf.manifest
    """
    from ..pipeline.hash import hash_model

    call(hash_model, file, show=_text, as_json=as_json, **options)


def _text(result: HashResult) -> Iterator[str]:
    verdicts = (f"  -  {verdict}" for verdict in result.verdicts) if result.manifest is not None else repeat("")
    for entry, verdict in zip(result.hashes, verdicts, strict=False):
        yield entry.line() + verdict
