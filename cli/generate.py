"""`ggufmill generate` continues a prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.requests.generate import GenerateRequest
from .command import Verb
from .display.console import speeds_text
from .display.messages import say
from .options.fields import options_of

if TYPE_CHECKING:
    from ..pipeline.common.progress import Progress


@click.command(cls=Verb)
@options_of(GenerateRequest)
def command(model: Any, prompt: str, as_json: bool, **options: Any) -> None:
    """Continue a prompt with MODEL (a GGUF or a Hugging Face folder). Timings go to stderr.

    Where the file recommends how to sample (general.sampling.*), that takes the place of the defaults of options.

    \b
    Examples:
      ggufmill generate model.gguf -p "I believe the meaning of life is" -n 64 --seed 1
      ggufmill generate model.gguf -p "Once upon a time" --device cuda -ot exps=CPU
      ggufmill generate model.gguf -p "A person, as JSON: " --json-schema '{"type": "object", "required": ["name"]}'
    """
    from ..pipeline.generate import generate_text

    def show_prompt(progress: Progress) -> None:
        if progress.done == 0 and not as_json:
            click.echo(prompt.encode("utf-8", "surrogateescape"), nl=False)  # its bytes as they were given

    def show_text(piece: str) -> None:
        if not as_json:
            click.echo(piece, nl=False)

    result = generate_text(model, prompt, on_text=show_text, progress=show_prompt, **options)
    if as_json:
        click.echo(json.dumps(result.as_json()))
        return
    click.echo()
    say(f"\n{speeds_text(result.timings)}; ended by {result.reason}")
