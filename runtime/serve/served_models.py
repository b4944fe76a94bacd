"""Models of a folder that are loaded when requests ask for them, and unloaded for others when memory is needed.

All of it but loading and unloading happens on the event loop. One task loads, one model at a time, in the order in which models
were asked for. Where there is no room, the model that was used least recently has to go: at once if no request is at work with
it, else it gets no new requests until those have ended; whoever asks for it meanwhile waits for it to be loaded again, after
the one that it made room for. So no request is cut off, and none waits for ever.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import NamedTuple, TypeVar

from starlette.requests import Request
from starlette.routing import Route

from ...data_classes import dataclass
from ...formats import MillError
from ...operating_system.memory import trim_free_memory
from .engine import Busy
from .model_folder import ModelFile, ModelFolder
from .requests.checks import RequestError
from .responses import as_request_error, wait_for_disconnect
from .service import Service
from .work_threads import WorkThreads

T = TypeVar("T")
_SHOWN = 8  # names of models in an error


class ModelEvent(NamedTuple):
    """What has become of a model: 'loaded' after so many seconds, taking up to `nbytes` of memory; 'unloaded'; or 'failed'."""

    name: str
    status: str
    seconds: float = 0.0
    nbytes: int = 0
    error: str = ""


@dataclass(eq=False)
class ServedModel:
    """A model that is loaded, or asked for.

    n_requests  that are at work with it or wait for it
    ready       has a result when it is loaded, else the exception
    nbytes      of memory that it may take; 0: not known yet
    kept        it is to be loaded even if no request waits for it
    """

    file: ModelFile
    ready: asyncio.Future[None]
    service: Service | None = None
    routes: list[Route] = field(default_factory=list)
    n_requests: int = 0
    last_used: int = 0
    nbytes: int = 0
    kept: bool = False

    @property
    def is_loaded(self) -> bool:
        return self.service is not None


class ServedModels:
    """The models of a folder. Its methods are for the event loop's thread, but for `stop`."""

    def __init__(
        self,
        folder: ModelFolder,
        threads: WorkThreads,
        *,
        load: Callable[[Path, str], tuple[Service, list[Route]]],
        needed: Callable[[Path], int],
        memory: int,
        is_strict: bool = False,
        most: int = 4,
        autoload: bool = True,
        max_waiting: int = 16,
        on_event: Callable[[ModelEvent], None] | None = None,
    ):
        """
        load         opens a model under a name: what serves it, and its routes
        needed       bytes of memory that it will take
        memory       bytes that all may take together; is_strict: a model that alone takes more is refused, else it is loaded
                     alone
        most         models that are loaded at once; 0: no limit
        autoload     requests load the model that they name
        max_waiting  requests that may wait for models to be loaded
        on_event     called with what has become of models
        """
        self.folder, self.threads, self.most, self.autoload = folder, threads, most, autoload
        self.files = folder.models()
        self._load_file, self._needed, self._memory, self._is_strict = load, needed, memory, is_strict
        self._max_waiting, self._on_event = max_waiting, on_event
        self._models: dict[str, ServedModel] = {}
        self._leaving: list[ServedModel] = []
        self._failed: dict[str, tuple[ModelFile, Exception]] = {}
        self._changed, self._clock, self._is_open = asyncio.Event(), itertools.count(1), True
        self._loop: asyncio.AbstractEventLoop | None = None

    # Finding models

    async def refresh(self) -> dict[str, ModelFile]:
        """The models that the folder has now. Raises RequestError."""
        try:
            self.files = await self.threads.run(self.folder.models, kind="files")
        except MillError as error:
            raise as_request_error(error) from None
        for name, model in list(self._models.items()):
            if self.files.get(name) != model.file and model.ready.done():  # replaced, or gone
                self._leave(model)
        return self.files

    async def find(self, name: str | None) -> ModelFile:
        """The model of that name; None: the only one. Raises RequestError."""
        found = self._named(name)
        if found is None or not self.folder.is_current(found):
            await self.refresh()
            found = self._named(name)
        if found is not None:
            return found
        names = list(self.files)
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        there_are = f"GET /models lists them: {shown}" if names else f"there are no models in {self.folder.path.name}"
        if name is None:
            message = f"the request has to name a model in the field (for GET: in the parameter) model; {there_are}"
            raise RequestError(message, param="model", code="missing_model")
        raise RequestError(f"there is no model {name[:100]!r}; {there_are}", "model", "model_not_found", 404)

    def _named(self, name: str | None) -> ModelFile | None:
        if name is None:
            return next(iter(self.files.values())) if len(self.files) == 1 else None
        by_alias = (file for file in self.files.values() if name in file.aliases)
        return self.files.get(name) or next(by_alias, None)

    def status(self, name: str) -> str:
        """unloaded, loading or loaded."""
        model = self._models.get(name)
        if model is None:
            return "loaded" if any(each.file.name == name for each in self._leaving) else "unloaded"
        return "loaded" if model.is_loaded else "loading"

    def service_of(self, name: str) -> Service | None:
        """What serves a model that is loaded."""
        model = self._models.get(name)
        return model.service if model is not None else None

    def failure(self, file: ModelFile) -> str:
        """Why a model could not be loaded the last time, or cannot be read; '': nothing is known against it."""
        failed = self._failed.get(file.name)
        known = str(failed[1]) if failed is not None and failed[0] == file else ""
        return self._shown(file.problem or known)

    def _shown(self, text: str) -> str:
        """A text for clients, which need not know where the folder is."""
        return text.replace(f"{self.folder.path}{os.sep}", "")

    # Using models

    @asynccontextmanager
    async def use(self, request: Request, name: str | None, autoload: bool) -> AsyncIterator[ServedModel]:
        """A model, which stays loaded meanwhile; it is loaded first if need be. Raises RequestError."""
        file = await self.find(name)
        if file.name not in self._models:
            if not autoload:
                message = f"{file.name} is not loaded: POST /models/load loads it"
                raise RequestError(message, param="model", code="model_not_loaded")
            if failure := self.failure(file):  # until its file has changed, or /models/load is asked for it
                raise _load_error(failure)
        model = self._want(file)
        model.n_requests += 1
        try:
            if not model.ready.done():
                await self._until_ready(request, model)
            if (error := model.ready.exception()) is not None:
                raise as_request_error(error) if isinstance(error, Busy) else _load_error(self._shown(str(error)))
            yield model
        finally:
            model.n_requests -= 1
            model.last_used = next(self._clock)
            self._changed.set()

    def load(self, file: ModelFile) -> None:
        """Has a model loaded, soon. Raises RequestError."""
        self._failed.pop(file.name, None)
        self._want(file).kept = True

    def unload(self, file: ModelFile) -> None:
        """Has a model unloaded, when the requests that are at work with it have ended. Raises RequestError if it is not
        loaded."""
        model = self._models.get(file.name)
        if model is None:
            raise RequestError(f"{file.name} is not loaded", param="model", code="model_not_loaded")
        if model.is_loaded:
            self._leave(model)
        else:  # those who wait for it get an error
            self._fail(model, Busy(f"{file.name} is not loaded any more: it was unloaded meanwhile"))

    def _want(self, file: ModelFile) -> ServedModel:
        if not self._is_open:
            raise as_request_error(Busy("the server is shutting down"))
        model = self._models.get(file.name)
        if model is not None and model.file != file and model.is_loaded:
            self._leave(model)
            model = None
        if model is None or not model.is_loaded:
            n_waiting = sum(each.n_requests or each.kept for each in self._models.values() if not each.is_loaded)
            if n_waiting >= self._max_waiting + 1:
                raise as_request_error(Busy(f"{n_waiting} requests wait for models to be loaded; try again later"))
        if model is None:
            model = self._models[file.name] = ServedModel(file, asyncio.get_running_loop().create_future())
            self._changed.set()
        return model

    async def _until_ready(self, request: Request, model: ServedModel) -> None:
        gone = asyncio.create_task(wait_for_disconnect(request))
        try:
            await asyncio.wait({model.ready, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not model.ready.done():
                raise RequestError("the client is gone", status=499)
        finally:
            gone.cancel()

    # Loading and unloading

    async def run(self) -> None:
        """Loads and unloads models until it is cancelled or `stop` is called; then ends all engines."""
        self._loop = asyncio.get_running_loop()
        try:
            while self._is_open:
                self._changed.clear()
                for model in [each for each in self._leaving if not each.n_requests]:
                    await self._unload(model)
                wanted = self._next_wanted()
                if wanted is not None and await self._has_room(wanted):
                    await self._load(wanted)
                    continue
                await self._changed.wait()
        finally:
            self._is_open = False
            for model in list(self._models.values()):
                if not model.is_loaded:
                    self._fail(model, Busy("the server is shutting down"))
            for model in (*self._models.values(), *self._leaving):
                if model.service is not None:  # its routes stay, for requests that still get an error from the engine
                    await _in_thread(model.service.engine.close)

    def stop(self) -> None:
        """Ends all requests and accepts no more; returns at once. May be called from any thread, and by a signal handler."""
        self._is_open = False
        for model in (*self._models.values(), *self._leaving):
            if model.service is not None:
                model.service.engine.stop()
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._changed.set)

    def _next_wanted(self) -> ServedModel | None:
        for model in [each for each in self._models.values() if not each.is_loaded]:
            if model.n_requests or model.kept:
                return model
            del self._models[model.file.name]  # all who waited for it have gone
        return None

    async def _has_room(self, wanted: ServedModel) -> bool:
        """Whether a model can be loaded now; if not, one that is loaded has to go, or the model cannot be loaded at all."""
        try:
            wanted.nbytes = wanted.nbytes or await _in_thread(lambda: self._needed(wanted.file.path))
            if self._is_strict and wanted.nbytes > self._memory:
                needs, may = wanted.nbytes / (1 << 20), self._memory / (1 << 20)
                raise MillError(f"{wanted.file.name} takes up to {needs:,.0f} MiB of memory, and {may:,.0f} MiB are allowed")
        except Exception as error:
            self._fail(wanted, error)
            self._changed.set()
            return False
        if self._models.get(wanted.file.name) is not wanted:  # it was unloaded meanwhile
            self._changed.set()
            return False
        loaded = [each for each in self._models.values() if each.is_loaded]
        held = [*loaded, *self._leaving]
        total = sum(each.nbytes for each in held) + wanted.nbytes
        if not held or (total <= self._memory and (not self.most or len(held) < self.most)):
            return True
        if not self._leaving:
            self._leave(min(loaded, key=lambda each: (bool(each.n_requests), each.last_used)))
        return False

    async def _load(self, wanted: ServedModel) -> None:
        start, file = time.monotonic(), wanted.file
        try:
            service, routes = await _in_thread(lambda: self._load_file(file.path, file.name))
        except Exception as error:
            self._fail(wanted, error)
            return
        wanted.service, wanted.routes, wanted.last_used = service, routes, next(self._clock)
        if self._models.get(file.name) is not wanted:  # unloaded meanwhile
            self._leaving.append(wanted)
            return
        wanted.ready.set_result(None)
        self._report(ModelEvent(file.name, "loaded", time.monotonic() - start, wanted.nbytes))

    def _fail(self, model: ServedModel, error: Exception) -> None:
        if self._models.get(model.file.name) is model:
            del self._models[model.file.name]
        if not isinstance(error, Busy):
            if not isinstance(error, MillError):
                error = MillError(f"{model.file.name} cannot be loaded: {type(error).__name__}: {error}")
            self._failed[model.file.name] = model.file, error
            self._report(ModelEvent(model.file.name, "failed", error=str(error)))
        if not model.ready.done():
            model.ready.set_exception(error)
            model.ready.exception()  # nobody may wait for it

    def _leave(self, model: ServedModel) -> None:
        """A loaded model gets no new requests, and is unloaded when its last one has ended."""
        del self._models[model.file.name]
        self._leaving.append(model)
        self._changed.set()

    async def _unload(self, model: ServedModel) -> None:
        services, model.service, model.routes = [model.service], None, []

        def close() -> None:
            if (service := services.pop()) is not None:
                service.engine.close()
                service.model.release()
            del service  # the last reference
            gc.collect()  # its parts refer to each other
            trim_free_memory()

        await _in_thread(close)
        self._leaving.remove(model)
        self._report(ModelEvent(model.file.name, "unloaded"))

    def _report(self, event: ModelEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)


def _load_error(failure: str) -> RequestError:
    return RequestError(failure, param="model", code="model_not_loadable", status=500)


async def _in_thread(function: Callable[[], T]) -> T:
    """The result of a function that may take minutes, in a thread that does not keep the program from ending."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[T] = loop.create_future()

    def finish(set_outcome: Callable[..., None], outcome: object) -> None:
        if not done.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            call = done.set_result, context.run(function)
        except BaseException as error:
            call = done.set_exception, error
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(finish, *call)

    threading.Thread(target=run, name="ggufmill-models", daemon=True).start()
    return await done
