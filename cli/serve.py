"""`ggufmill serve` offers a model over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import Verb
from .display.console import speeds_text
from .options.sampling import draft_option, sampling_options, template_option
from .options.settings import run_options
from .options.types import MODEL

if TYPE_CHECKING:
    from ..runtime.serve.app import RefusedRequest
    from ..runtime.serve.tasks import EndEvent


@click.command(cls=Verb)
@click.argument("model", type=MODEL)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Where to listen; 0.0.0.0: for other machines (needs a key or --no-key).",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: any that is free.")
@click.option(
    "--api-key",
    envvar="GGUFMILL_API_KEY",
    show_envvar=True,
    help="Key that clients have to give. Other users of this machine can see arguments, but not the variable.",
)
@click.option("--no-key", is_flag=True, help="Let other machines in without a key.")
@click.option(
    "--allow-host", multiple=True, metavar="NAME", help="A name by which clients call this machine, beside its own; repeatable."
)
@click.option("--alias", help="Name of the model in the API. [default: general.name]")
@template_option
@click.option(
    "-n", "--n-predict", type=click.IntRange(-1), default=-1, show_default=True, help="Tokens per answer; -1: no limit."
)
@click.option(
    "--max-queue", type=click.IntRange(0), default=16, show_default=True, help="Requests that may wait; more get 503."
)
@click.option(
    "--max-body", type=click.IntRange(1), default=8, show_default=True, metavar="MiB", help="Maximum size of a request."
)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Connections open at once; one more ends the one that has kept the server waiting longest, or gets 503.",
)
@click.option("--metrics", is_flag=True, help="Tell at /metrics what the server has done, for Prometheus.")
@click.option(
    "--slot-save-path",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder in which clients save the KV cache of a slot, to go on after a restart (POST /slots/0?action=save, restore).",
)
@click.option("--no-warmup", is_flag=True, help="Do not read a short prompt first.")
@sampling_options
@draft_option
@run_options(parallel=True)
def command(model: Path, settings: dict[str, Any], **options: Any) -> None:
    """Serve MODEL (a GGUF or a Hugging Face folder) to OpenAI's clients, with a page to chat at the same address.

    OpenAI's /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings and /v1/models, Anthropic's /v1/messages, and
    llama-server's /completion, /embedding, /rerank, /slots, /metrics, /health, /props, /tokenize, /detokenize and
    /apply-template, and /tokenizer_info; answers also as streams. Sampling options are defaults that a request can change.
    What a request shares with an earlier one is not computed again. Ctrl-C ends it.

    With --parallel N requests share their steps, which takes less time than one after the other. A text does not depend on its
    neighbours, but for the last bits of probabilities where weights are of types that only checkpoints have. Between two steps
    at most -ub tokens of one prompt are read, and never more than 512.

    Functions (tools) are called where the chat template knows them and the form of its model's calls is known; thoughts become
    reasoning_content ("reasoning_format": "none" leaves them in the text).

    \b
    Examples:
      ggufmill serve model-iq4_k.gguf
      ggufmill serve model.gguf --port 9000 -c 16384 --parallel 2 --alias my-model
      GGUFMILL_API_KEY=... ggufmill serve model.gguf --host 0.0.0.0
    """
    from ..pipeline.serve import serve_model
    from ..runtime.line_limit import LineLimit

    def show_address(address: str) -> None:
        click.echo(f"{model.name}: listening on {address} (Ctrl-C ends it)", err=True)

    limit = LineLimit()

    def show(line: str) -> None:
        dropped = limit.admit()
        if dropped is not None:
            click.echo(f"({dropped} lines left out)\n{line}" if dropped else line, err=True)

    def show_end(end: EndEvent) -> None:
        if end.error is not None:
            show(f"a request failed: {end.error}")
        elif end.timings.prompt_tokens:
            show(f"{speeds_text(end.timings)}; ended by {end.reason}")

    def show_refused(request: RefusedRequest) -> None:
        show(str(request))

    try:
        serve_model(model, on_ready=show_address, on_end=show_end, on_refused=show_refused, **options, **settings)
    except KeyboardInterrupt:
        click.echo("ended", err=True)
