"""`ggufmill repack` interleaves rows, or takes that back."""

from __future__ import annotations

from typing import Any

import click

from ...pipeline.requests.rewriting import RepackRequest
from ..command import Verb
from ..display.console import call
from ..display.plans import written_text
from ..options.fields import options_of


@click.command(cls=Verb)
@options_of(RepackRequest)
def command(**options: Any) -> None:
    """Rewrite the GGUF SOURCE as OUT with its tensors in the row-interleaved types that CPUs run fastest.

    Only bits move: `--undo` gives the same bytes back. Embeddings stay as they are, and so do bf16 tensors that no --pattern
    finds: bf16_r16 serves only processors with bf16 instructions.

    \b
    Examples:
      ggufmill repack model-iq4_k.gguf model-iq4_k_r4.gguf
      ggufmill repack model.gguf out.gguf --pattern "ffn_.*_exps"
    """
    from ...pipeline.files.repack import repack_model

    call(repack_model, show=written_text, **options)
