"""`ggufmill warm-up` compiles kernels before they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..formats import TYPES
from .command import Verb
from .display.console import call
from .options import flags
from .options.types import MODEL, Listed

if TYPE_CHECKING:
    from ..pipeline.warm_up import WarmUpResult


@click.command(cls=Verb)
@click.argument("model", type=MODEL, required=False)
@click.option(
    "--types", type=Listed(TYPES.find, "a tensor type"), default=(), help="Codecs of these types, separated by commas."
)
@flags.threads
@flags.reading
@flags.as_json
def command(model: Any, as_json: bool, **options: Any) -> None:
    """Compile the kernels that MODEL needs for prompts and generation, and the codecs of --types.

    Kernels are compiled when they are first needed, and kept on disk. This does it beforehand, for instance while an image of a
    container is built. What is compiled already is not compiled again. MODEL is read once.

    \b
    Examples:
      ggufmill warm-up --types q4_K,q6_K,iq4_k_r4
      ggufmill warm-up model.gguf
    """
    from ..pipeline.warm_up import warm_up

    call(warm_up, model, show=_text, as_json=as_json, **options)


def _text(result: WarmUpResult) -> str:
    ready = [*result.types, *([result.model] if result.model else [])]
    return f"{', '.join(ready)}: {result.kernels} kernels compiled in {result.seconds:.1f} s"
