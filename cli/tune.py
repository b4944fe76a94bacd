"""`ggufmill tune` brings a quantised file nearer to its original."""

from __future__ import annotations

from typing import Any

import click

from ..pipeline.requests.tune import TuneRequest
from .command import Verb
from .display.console import call
from .display.plans import written_text
from .options.fields import options_of


@click.command(cls=Verb)
@options_of(TuneRequest)
def command(**options: Any) -> None:
    """Rewrite the quantised GGUF SOURCE as OUT with norms and scales that bring its predictions nearer to those of ORIGINAL.

    Codes, types and sizes stay. One window of eight judges: what is written is never worse there than what was given. Needs
    torch.

    \b
    Examples:
      ggufmill tune model-bf16.gguf model-iq2_k.gguf tuned.gguf -f calibration.txt
      ggufmill tune hf:org/model model-q4_K.gguf tuned.gguf --norms-only
    """
    from ..pipeline.tune import tune_model

    call(tune_model, show=written_text, **options)
