"""`ggufmill serve`: a model, or the models of a folder, for OpenAI's clients, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..errors import UsageError, installation
from ..operating_system.memory import total_bytes
from ..quantize import gguf_source
from ..request_fields import values_of
from ..runtime import Model
from ..runtime.placement.device_placement import needed_bytes
from ..runtime.settings import settings_from
from .common.arguments import as_bytes, read_template, refuse_unused
from .common.models import CHECKPOINT_OPTIONS, open_generating_model
from .requests.generate import ServeRequest, sampling_of
from .requests.running import settings_of
from .requests.verb import verb

MIB = 1 << 20
_UNKNOWN = 1 << 62  # bytes of memory, where the system does not say: no limit


@verb(ServeRequest)
def serve_model(request: ServeRequest) -> None:
    """Serves a model, or those of a folder, to OpenAI's clients, with a page to chat at the same address, until Ctrl-C or
    `stop` is set.

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
        from ..runtime.serve import ServerSettings, serve, serve_models
    except ImportError as error:
        raise UsageError(f"serving needs starlette and uvicorn ({error}): {installation('starlette')}") from None
    from ..runtime.serve.security_middleware import is_loopback

    if request.api_key is not None and not request.api_key.strip():
        raise UsageError("the API key is empty (--api-key, GGUFMILL_API_KEY): give one, or unset it")
    if not is_loopback(request.host) and request.api_key is None and not request.no_key:
        raise UsageError(f"{request.host} lets other machines in: --api-key asks them for a key, --no-key does not")
    if (request.model is None) == (request.models is None):
        raise UsageError("serve takes either a MODEL or, with --models DIR, a folder of models")
    names = {field.name for field in fields(ServerSettings)} & values_of(request).keys()
    server = replace(
        ServerSettings(**{name: getattr(request, name) for name in names}),
        hosts=tuple(request.allow_host),
        max_body=request.max_body * MIB,
        template=read_template(request.template),
        slot_save_path=None if request.slot_save_path is None else Path(request.slot_save_path),
        warm_up=not request.no_warmup,
    )
    limits = {"n_predict": request.n_predict, "draft_max": request.draft_max}
    settings = settings_of(request)
    if request.model is not None:
        refuse_unused(request, "--models", "models_max", "models_memory", "models_autoload")
        opened = open_generating_model(request.model, settings)
        options = limits | sampling_of(request, opened)
        serve(opened, server, alias=request.alias, options=options)
        return
    assert request.models is not None
    refuse_unused(request, "MODEL: with --models each has the name of its file", "alias")
    refuse_unused(request, "a checkpoint's folder", *CHECKPOINT_OPTIONS)
    memory = as_bytes(request.models_memory)
    chosen = settings_from(settings)

    def open_file(path: Path) -> tuple[Model, Mapping[str, Any]]:
        opened = open_generating_model(path, settings)
        drafts = {} if opened.draft_heads else {"draft_max": 0}
        return opened, limits | drafts | sampling_of(request, opened)

    def needed(path: Path) -> int:
        return needed_bytes(gguf_source(path), chosen)

    serve_models(
        request.models,
        open_file,
        server,
        needed=needed,
        memory=memory if memory is not None else (total_bytes() or _UNKNOWN) * 9 // 10,
        is_strict=memory is not None,
        most=request.models_max,
        autoload=request.models_autoload,
        on_event=request.on_model,
    )
