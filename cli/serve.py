"""`ggufmill serve` offers a model over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..pipeline.console import speeds
from .options.sampling import sampling_options, template_option
from .options.settings import load_to_generate, run_options


@click.command(short_help="OpenAI-compatible server and a page to chat")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 lets other machines in (use --api-key)."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: any that is free.")
@click.option(
    "--api-key",
    envvar="GGUFMILL_API_KEY",
    show_envvar=True,
    help="Key that clients have to give. Other users of this machine can see arguments, but not the variable.",
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
    "--max-body", type=click.IntRange(1), default=8, show_default=True, metavar="MiB", help="Most that a request may bring."
)
@click.option("--no-warmup", is_flag=True, help="Do not read a short prompt first.")
@sampling_options
@run_options(parallel=True)
def command(
    model: Path,
    host: str,
    port: int,
    api_key: str | None,
    alias: str | None,
    template: str | None,
    n_predict: int,
    max_queue: int,
    max_body: int,
    no_warmup: bool,
    sampling: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Serve MODEL (a GGUF or a Hugging Face folder) to OpenAI's clients, with a page to chat at the same address.

    /v1/chat/completions, /v1/completions (both also as streams), /v1/models, /health, /props, /tokenize, /detokenize and
    /apply-template. Sampling options are defaults that a request can change. What a request shares with an earlier one is not
    computed again. Ctrl-C ends it.

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
    try:
        from ..runtime.serve import serve
    except ImportError as error:
        raise click.UsageError(f"serving needs starlette and uvicorn ({error}): pip install starlette uvicorn") from None
    from ..convert import open_source
    from ..runtime.serve.engine import End
    from ..runtime.serve.security_middleware import is_loopback

    loaded = load_to_generate(open_source(model), settings)
    if not is_loopback(host) and not api_key:
        click.echo(f"warning: {host} lets every machine of the network use the model; --api-key asks for a key", err=True)

    def ready(address: str) -> None:
        click.echo(f"{model.name}: listening on {address} (Ctrl-C ends it)", err=True)

    def ended(end: End) -> None:
        if end.error is not None:
            click.echo(f"a request failed: {end.error}", err=True)
        elif end.timings.prompt_tokens:
            click.echo(f"{speeds(end.timings)}; ended by {end.reason}", err=True)

    try:
        serve(
            loaded,
            host,
            port,
            waiting=max_queue,
            warm_up=not no_warmup,
            on_ready=ready,
            on_end=ended,
            template=template,
            alias=alias,
            api_key=api_key,
            max_body=max_body << 20,
            options={"n_predict": n_predict, **sampling},
        )
    except KeyboardInterrupt:
        click.echo("ended", err=True)
