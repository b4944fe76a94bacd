"""`ggufmill warm-up` compiles kernels before they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..formats import TYPES
from ..pipeline.requests.running import WarmUpRequest
from .command import Verb
from .display.console import call
from .options.fields import options_of
from .options.types import Listed

if TYPE_CHECKING:
    from ..pipeline.warm_up import WarmUpResult


@click.command(cls=Verb)
@options_of(WarmUpRequest, types={"type": Listed(TYPES.find, "a tensor type", "TYPE"), "default": ()})
def command(**options: Any) -> None:
    """Compile the kernels that MODEL needs for prompts and generation, and the codecs of --types.

    Kernels are compiled when they are first needed, and kept on disk. This does it beforehand, for instance while an image of a
    container is built. What is compiled already is not compiled again. MODEL is read once.

    \b
    Examples:
      ggufmill warm-up --types q4_K,q6_K,iq4_k_r4
      ggufmill warm-up model.gguf
    """
    from ..pipeline.warm_up import warm_up

    call(warm_up, show=_text, **options)


def _text(result: WarmUpResult) -> str:
    ready = [*result.types, *([result.model] if result.model else [])]
    return f"{', '.join(ready)}: {result.kernels} kernels compiled in {result.seconds:.1f} s"
