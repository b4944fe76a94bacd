"""llama-server's routes for several models: which there are, loading and unloading them; and requests on their way to one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ....version import __version__
from ..model_folder import ModelFile
from ..requests.checks import JsonObject, invalid
from ..requests.field_limits import MODEL
from ..requests.json_body import check_fields, load_body
from ..requests.request_body import READ, ReadBody, read_bytes
from ..responses import json_response
from ..served_models import ServedModels
from ..server_settings import ServerSettings
from ..service import MAX_PROMPT_TOKENS
from ..work_threads import SHORT
from .openai import model_object

_Read = Callable[[Request], Awaitable[ReadBody]]
_Handler = Callable[[Request], Awaitable[Response]]


class _ForModel:
    """An ASGI application for a route that each model has: the request goes to the model that it names in the field `model`, or
    in the parameter of that name."""

    def __init__(self, models: ServedModels, number: int, read: _Read, otherwise: _Handler | None = None):
        """number: of the route among those of a model; otherwise: answers a request for GET that names no model."""
        self._models, self._number, self._read, self._otherwise = models, number, read, otherwise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        name, autoload = request.query_params.get("model"), request.query_params.get("autoload")
        if request.method == "POST":
            scope[READ] = body = await self._read(request)
            name = _name_in(body) or name
        elif name is None and self._otherwise is not None:
            await (await self._otherwise(request))(scope, receive, send)
            return
        wanted = self._models.autoload if autoload is None else autoload in ("1", "true")
        async with self._models.use(request, name, wanted) as model:
            await model.routes[self._number].app(scope, receive, send)


def models_routes(models: ServedModels, routes_of_model: Sequence[Route], settings: ServerSettings) -> list[Route]:
    """The routes of a server of several models. routes_of_model: those of any of them, in the order of `ServedModel.routes`."""

    async def read(request: Request) -> ReadBody:
        data = await read_bytes(request, settings.max_body, settings.body_seconds)
        if not data:
            return ReadBody(data)
        most = max([MAX_PROMPT_TOKENS, *(file.n_ctx for file in models.files.values())])  # the model has its own limit
        if len(data) <= SHORT:
            return ReadBody(data, load_body(data, most))
        return ReadBody(data, await models.threads.run(load_body, data, most, kind="json"))

    def shown(file: ModelFile) -> JsonObject:
        service, failure, status = models.service_of(file.name), models.failure(file), models.status(file.name)
        failed = {"failed": True, "error": failure} if failure and status == "unloaded" else {}
        model: JsonObject = {"id": file.name, "object": "model", "created": file.changed, "owned_by": "ggufmill"}
        model |= {"aliases": list(file.aliases), "tags": [], "path": file.aliases[0], "size": file.nbytes}
        model |= {"status": {"value": status, **failed}}
        model["architecture"] = {"input_modalities": ["text"], "output_modalities": ["text"]}
        return model | ({"meta": model_object(service)["meta"]} if service is not None else {})

    async def all_models(request: Request) -> Response:
        return json_response({"object": "list", "data": [shown(file) for file in (await models.refresh()).values()]})

    async def one_model(request: Request) -> Response:
        return json_response(shown(await models.find(request.path_params["name"])))

    async def named(request: Request) -> ModelFile:
        return await models.find(_name_in(await read(request)))

    async def load(request: Request) -> Response:
        models.load(await named(request))
        return json_response({"success": True})

    async def unload(request: Request) -> Response:
        models.unload(await named(request))
        return json_response({"success": True})

    async def health(request: Request) -> Response:
        n_loaded = sum(models.status(name) == "loaded" for name in models.files)
        return json_response({"status": "ok", "models": len(models.files), "models_loaded": n_loaded})

    async def props(request: Request) -> Response:
        return json_response(
            {
                "role": "router",
                "max_instances": models.most,
                "models_autoload": models.autoload,
                "model_alias": "ggufmill",
                "model_path": "none",
                "default_generation_settings": {"params": {}, "n_ctx": 0},
                "build_info": f"ggufmill {__version__}",
            }
        )

    own = [
        *(Route(f"{version}/models", all_models, methods=["GET"]) for version in ("/v1", "")),
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
        Route("/models/load", load, methods=["POST"]),
        Route("/models/unload", unload, methods=["POST"]),
        *(Route(f"{version}/health", health, methods=["GET"]) for version in ("/v1", "")),
    ]
    paths = {route.path for route in own}
    return own + [
        Route(route.path, _ForModel(models, i, read, props if route.path == "/props" else None), methods=route.methods)
        for i, route in enumerate(routes_of_model)
        if route.path not in paths
    ]


def _name_in(body: ReadBody) -> str | None:
    """The model that a request names in its body, if it does. Raises RequestError for what is no name."""
    name = check_fields({"model": (body.loaded or {}).get("model")}, MODEL, 0)["model"]
    if name is not None and not isinstance(name, str):
        raise invalid("model", "the name of a model", name)
    return name
