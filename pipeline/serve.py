"""`ggufmill serve`: a model for OpenAI's clients, over HTTP."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError, installation
from .common.arguments import read_template
from .common.models import open_generating_model
from .requests.generate import ServeRequest, sampling_of
from .requests.running import settings_of
from .requests.verb import verb

MIB = 1 << 20


@verb(ServeRequest)
def serve_model(request: ServeRequest) -> None:
    """Serves a model to OpenAI's clients, with a page to chat at the same address, until Ctrl-C or `stop` is set.

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
        raise UsageError(f"serving needs starlette and uvicorn ({error}): {installation('starlette')}") from None
    from ..runtime.serve.security_middleware import is_loopback

    if request.api_key is not None and not request.api_key.strip():
        raise UsageError("the API key is empty (--api-key, GGUFMILL_API_KEY): give one, or unset it")
    if not is_loopback(request.host) and request.api_key is None and not request.no_key:
        raise UsageError(f"{request.host} lets other machines in: --api-key asks them for a key, --no-key does not")
    text = read_template(request.template)
    opened = open_generating_model(request.model, settings_of(request))
    limits = {"n_predict": request.n_predict, "draft_max": request.draft_max}
    serve(
        opened,
        request.host,
        request.port,
        max_queue=request.max_queue,
        max_connections=request.max_connections,
        warm_up=not request.no_warmup,
        on_ready=request.on_ready,
        on_end=request.on_end,
        on_refused=request.on_refused,
        stop=request.stop,
        hosts=tuple(request.allow_host),
        template=text,
        alias=request.alias,
        api_key=request.api_key,
        max_body=request.max_body * MIB,
        metrics=request.metrics,
        slot_save_path=None if request.slot_save_path is None else Path(request.slot_save_path),
        options=limits | sampling_of(request, opened),
    )
