"""`ggufmill generate` continues a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..pipeline.console import speeds
from .options import flags
from .options.sampling import sampling_options
from .options.settings import load_to_generate, run_options


@click.command(short_help="Continue a prompt")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-p", "--prompt", required=True, help="Text to continue.")
@click.option(
    "-n",
    "--n-predict",
    type=click.IntRange(-1),
    default=128,
    show_default=True,
    help="Tokens at most; -1: no limit.",
)
@sampling_options
@run_options()
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")
@flags.as_json
def command(
    model: Path,
    prompt: str,
    n_predict: int,
    ignore_eos: bool,
    as_json: bool,
    sampling: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Continue a prompt with MODEL (a GGUF or a Hugging Face folder). Timings go to stderr.

    Example: ggufmill generate model.gguf -p "I believe the meaning of life is" -n 64 --seed 1
    """
    import json

    from ..convert import open_source
    from ..runtime.generation.generate import generate, warm_up

    loaded = load_to_generate(open_source(model), settings)
    warm_up(loaded)
    running = generate(loaded, prompt, n_predict=n_predict, ignore_eos=ignore_eos, **sampling)
    pieces = []
    if not as_json:
        click.echo(prompt.encode("utf-8", "surrogateescape"), nl=False)  # its bytes as they were given
    for piece in running:
        pieces.append(piece)
        if not as_json:
            click.echo(piece, nl=False)
    timings = running.timings
    if as_json:
        summary = {
            "prompt": prompt,
            "text": "".join(pieces),
            "tokens": running.tokens,
            "reason": running.reason,
            "prompt_tokens": timings.prompt_tokens,
            "prompt_per_second": timings.prompt_per_second,
            "generated_per_second": timings.generated_per_second,
        }
        click.echo(json.dumps(summary))
        return
    click.echo()
    click.echo(f"\n{speeds(timings)}; ended by {running.reason}", err=True)
