"""`ggufmill export` makes a Hugging Face checkpoint of a GGUF."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..pipeline.common.figures import size_text
from ..pipeline.requests.export import ExportRequest
from .command import Verb
from .display.console import call
from .options.fields import options_of

if TYPE_CHECKING:
    from ..pipeline.export import ExportResult


@click.command(cls=Verb)
@options_of(ExportRequest)
def command(**options: Any) -> None:
    """Write the GGUF SOURCE as a Hugging Face checkpoint to the folder OUT, for editing, merging and finetuning.

    Names and shapes are those that `convert` reads, config.json is the one that it makes the same metadata of. Quantised
    weights are decoded. What cannot be given back is listed.

    \b
    Examples:
      ggufmill export model-q8_0.gguf model-hf/
      ggufmill export model-00001-of-00003.gguf model-hf/ --outtype f16 --max-shard-size 2G
    """
    from ..pipeline.export import export_model

    call(export_model, show=_text, **options)


def _text(result: ExportResult) -> str:
    done = "can be written" if result.status == "planned" else "written"
    size = f"{result.tensors} tensors, {size_text(result.nbytes)}, mostly {result.dtype}"
    return f"{result.folder}: {done}, {result.architecture}, {size}, {len(result.files)} files"
