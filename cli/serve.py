"""`ggufmill serve` offers a model over HTTP."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.requests.generate import ServeRequest
from .command import Verb
from .display.console import speeds_text
from .display.messages import is_quiet, say
from .options.fields import options_of

if TYPE_CHECKING:
    from ..runtime.serve.served_models import ModelEvent
    from ..runtime.serve.server_settings import RefusedRequest
    from ..runtime.serve.tasks import EndEvent


@click.command(cls=Verb)
@options_of(ServeRequest, json=False)
def command(model: Path | None, models: Path | None, **options: Any) -> None:
    """Serve MODEL (a GGUF or a Hugging Face folder), or the models of a folder with --models, to OpenAI's clients, with a page
    to chat at the same address.

    The server has OpenAI's /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings and /v1/models, Anthropic's
    /v1/messages, llama-server's /completion, /embedding, /rerank, /slots, /metrics, /health, /props, /tokenize, /detokenize and
    /apply-template, and /tokenizer_info; answers can be streamed. Sampling options are defaults that a request can change;
    where neither says anything, the file's recommendation counts. The beginning that a prompt shares with an earlier prompt is
    not computed again. Ctrl-C ends the server.

    With --parallel N requests share their steps, which takes less time than one after the other. A text and its probabilities
    depend, to the bit, neither on other requests nor on what is cached (without -dev). Between two steps at most -ub tokens of
    one prompt are read, and never more than 512.

    Functions (tools) can be called if the chat template describes them and this program knows how the model writes calls.
    Reasoning is returned as reasoning_content ("reasoning_format": "none" leaves it in the text).

    With --models DIR each request names a model in the field `model` (for GET: in the parameter), which is the name of a file
    without .gguf, and it is loaded when it is first asked for; /models, /models/load and /models/unload are llama-server's.

    \b
    Examples:
      ggufmill serve model-iq4_k.gguf
      ggufmill serve model.gguf --port 9000 -c 16384 --parallel 2 --alias my-model
      ggufmill serve --models models/ --models-memory 48G -c 16384
      GGUFMILL_API_KEY=... ggufmill serve model.gguf --host 0.0.0.0
    """
    from ..pipeline.common.figures import size_text
    from ..pipeline.serve import serve_model
    from ..runtime.line_limit import LineLimit

    def show_address(address: str) -> None:
        name = (model or models or Path()).resolve().name
        say(f"{name}: listening on {address} (a page to chat; the API is at {address}/v1; Ctrl-C ends it)")

    limit, quiet = LineLimit(), is_quiet()

    def show(line: str) -> None:
        dropped = None if quiet else limit.admit()  # by threads of the server, which do not see the context
        if dropped is not None:
            line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}"
            say(f"({dropped} lines left out)\n{line}" if dropped else line)

    def show_end(end: EndEvent) -> None:
        if end.error is not None:
            show(f"{end.origin} failed: {end.error}")
        elif end.timings.prompt_tokens:
            show(f"{end.origin}: {speeds_text(end.timings)}; ended by {end.reason}")

    def show_model(event: ModelEvent) -> None:
        seconds = f" in {event.seconds:.1f} s, up to {size_text(event.nbytes)} of memory" if event.status == "loaded" else ""
        show(f"{event.name} {event.status}{seconds}{f': {event.error}' if event.error else ''}")

    def show_refused(request: RefusedRequest) -> None:
        show(str(request))

    try:
        serve_model(
            model,
            models=models,
            on_ready=show_address,
            on_end=show_end,
            on_refused=show_refused,
            on_model=show_model,
            **options,
        )
    except KeyboardInterrupt:
        say("ended")
