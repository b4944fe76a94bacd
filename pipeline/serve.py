"""`ggufmill serve`: a model for OpenAI's clients, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .common.arguments import read_template
from .common.models import ModelLike, open_generating_model
from .generate import split_options

if TYPE_CHECKING:
    from ..runtime.serve.app import RefusedRequest
    from ..runtime.serve.tasks import EndEvent

MIB = 1 << 20


def serve_model(
    model: ModelLike,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    api_key: str | None = None,
    no_key: bool = False,
    allow_host: Sequence[str] = (),
    alias: str | None = None,
    template: str | Path | None = None,
    n_predict: int = -1,
    draft_max: int = 0,
    max_queue: int = 16,
    max_body: int = 8,
    max_connections: int = 256,
    metrics: bool = False,
    slot_save_path: str | Path | None = None,
    no_warmup: bool = False,
    on_ready: Callable[[str], None] | None = None,
    on_end: Callable[[EndEvent], None] | None = None,
    on_refused: Callable[[RefusedRequest], None] | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> None:
    """Serves a model to OpenAI's clients, with a page to chat at the same address, until Ctrl-C or `stop` is set.

    model       as for `generate_text`
    host, port  where to listen; '0.0.0.0' lets other machines in, port 0 takes any that is free
    api_key     asked of clients; needed for an address that other machines reach, unless `no_key`
    allow_host  names of this machine, beside its own, that a request's Host may have
    alias       name of the model in the API; None: its general.name
    template    chat template, as for `start_chat`
    n_predict   tokens of an answer at most; -1: no limit
    draft_max   as for `generate_text`
    max_queue   requests that may wait, more get 503; max_body: MiB of a request at most; max_connections: open at once
    metrics     /metrics tells what the server has done, for Prometheus
    slot_save_path  folder in which clients save the KV cache of a slot, and from which they restore it
    no_warmup   do not read a short prompt first
    on_ready    called with the address when it listens; on_end: called with the `EndEvent` of each answer; on_refused: with
                each `RefusedRequest`
    stop        ends the server when it is set, off the main thread too
    options     of `Sampling`, defaults that a request can change, and settings of `load_model`, as for `generate_text`; with
                `parallel` several requests share their steps

    Raises UsageError without starlette and uvicorn (the extra `serve`), for an empty key, and for an address that other
    machines reach with neither a key nor `no_key`; MillError when the address cannot be had,
    KeyboardInterrupt after Ctrl-C.

    Example:
        >>> import threading
        >>> from ggufmill import serve_model
        >>> from ggufmill.recipes import FOLDER
        >>> end = threading.Event()
        >>> serve_model(FOLDER / "demo", port=0, no_warmup=True, stop=end, on_ready=lambda address: end.set())
    """
    try:
        from ..runtime.serve import serve
    except ImportError as error:
        raise UsageError(f"serving needs starlette and uvicorn ({error}): pip install starlette uvicorn") from None
    from ..runtime.serve.security_middleware import is_loopback

    if api_key is not None and not api_key.strip():
        raise UsageError("the API key is empty (--api-key, GGUFMILL_API_KEY): give one, or unset it")
    if not is_loopback(host) and api_key is None and not no_key:
        raise UsageError(f"{host} lets other machines in: --api-key asks them for a key, --no-key does not")
    sampling, settings = split_options(options)
    text = read_template(template)
    opened = open_generating_model(model, settings)
    serve(
        opened,
        host,
        port,
        max_queue=max_queue,
        max_connections=max_connections,
        warm_up=not no_warmup,
        on_ready=on_ready,
        on_end=on_end,
        on_refused=on_refused,
        stop=stop,
        hosts=tuple(allow_host),
        template=text,
        alias=alias,
        api_key=api_key,
        max_body=max_body * MIB,
        metrics=metrics,
        slot_save_path=None if slot_save_path is None else Path(slot_save_path),
        options={"n_predict": n_predict, "draft_max": draft_max, **sampling},
    )
