"""`ggufmill repack` interleaves rows, or takes that back."""

from __future__ import annotations

from typing import Any

import click

from .command import Verb
from .display.console import call
from .display.plans import written_text
from .options import flags
from .options.types import FILE, OUT, REGEX


@click.command(cls=Verb)
@click.argument("source", type=FILE)
@click.argument("out", type=OUT)
@click.option(
    "--pattern",
    type=REGEX,
    multiple=True,
    metavar="REGEX",
    help="Only tensors whose name this matches anywhere; may be given again.",
)
@click.option("--undo", is_flag=True, help="Turn repacked tensors back into their base types.")
@flags.keep_split
@flags.program
@flags.writing
def command(source: Any, out: Any, as_json: bool, **options: Any) -> None:
    """Rewrite the GGUF SOURCE as OUT with its tensors in the row-interleaved types that CPUs run fastest.

    Only bits move: `--undo` gives the same bytes back. Embeddings stay as they are, and so do bf16 tensors that no --pattern
    finds: bf16_r16 serves only processors with bf16 instructions.

    \b
    Examples:
      ggufmill repack model-iq4_k.gguf model-iq4_k_r4.gguf
      ggufmill repack model.gguf out.gguf --pattern "ffn_.*_exps"
    """
    from ..pipeline.repack import repack_model

    call(repack_model, source, out, show=written_text, as_json=as_json, **options)
