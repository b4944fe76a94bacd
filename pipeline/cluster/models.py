"""Models on the workers: opened there from the path that they have everywhere, and kept for the next piece."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Any

from ...convert import open_source
from ...errors import FormatError, MillError
from ...formats import TensorSource
from ...runtime import Model, Settings, load_model
from ..common.arguments import as_adapters
from ..common.models import ModelLike

_MOST_MODELS = 2  # that a process keeps: a model and its baseline


@dataclass(frozen=True)
class SourceAddress:
    """Where a worker finds a model, and by what it knows that it is the same one.

    path     absolute, or hf:OWNER/NAME
    digest   see `source_digest`
    options  (name, value) of `open_source`
    """

    path: str
    digest: str
    options: tuple[tuple[str, Any], ...] = ()

    def open(self) -> TensorSource:
        """Raises MillError where this machine has no such model, or another one."""
        try:
            source = open_source(self.path, **dict(self.options))
        except FormatError as error:
            raise MillError(f"{error} (every worker needs the model at this path)") from None
        if source_digest(source) != self.digest:
            raise MillError(f"{self.path} is another model here than where the job was started")
        return source


@dataclass(frozen=True)
class ModelAddress:
    """A model as it is to be run. settings: (name, value) of `load_model`; threads: if there is none, those of the worker."""

    source: SourceAddress
    settings: tuple[tuple[str, Any], ...] = ()


def address_of(model: ModelLike, source: TensorSource, **options: Any) -> SourceAddress:
    """How workers open the model that is `source` here. options: of `open_source`, None for the usual ones."""
    path = str(source.path if isinstance(model, Model | TensorSource) else model)
    here, given = Path(path), tuple((name, value) for name, value in sorted(options.items()) if value is not None)
    return SourceAddress(str(here.resolve()) if here.exists() else path, source_digest(source), given)


def model_address(model: ModelLike, opened: Model, settings: Mapping[str, Any], mla_layout: str | None = None) -> ModelAddress:
    """How workers open a model that is open here. settings: as for `open_model`; those of a model that was given loaded are its
    own, but for the threads."""
    if isinstance(model, Model):
        usual = Settings()
        chosen = {field.name: getattr(opened.settings, field.name) for field in fields(Settings) if field.name != "threads"}
        settings = {name: value for name, value in chosen.items() if value != getattr(usual, name)}
    fixed = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    if fixed.get("lora"):  # FILE or FILE=SCALE: the scale follows the last part of the path
        fixed["lora"] = tuple(str(Path(adapter).absolute()) for adapter in as_adapters(fixed["lora"]))
    source = address_of(model, opened.stored, mla_layout=mla_layout, architecture=fixed.pop("architecture", None))
    return ModelAddress(source, tuple(sorted(fixed.items())))


def source_digest(source: TensorSource) -> str:
    """Of the names, shapes and types of all tensors and the sizes of files, not of their times: copies are the same."""
    digest = hashlib.sha256()
    for t in source.tensors.values():
        digest.update(f"{t.name}\0{t.shape}\0{t.source_type}\n".encode("utf-8", "surrogateescape"))
    digest.update(repr(sorted((path.name, path.stat().st_size) for path in source.files if path.exists())).encode())
    return digest.hexdigest()[:32]


_lock = Lock()
_models: dict[ModelAddress, Model] = {}
_sources: dict[SourceAddress, TensorSource] = {}


@contextmanager
def models_here(*addresses: ModelAddress) -> Iterator[list[Model]]:
    """Runs on a worker: these models, for this thread alone. A model computes with all threads that the worker has, so pieces
    that another thread has taken wait."""
    with _lock:
        for address in addresses:
            if address not in _models:
                for old in list(_models)[: len(_models) - _MOST_MODELS + 1]:
                    if old not in addresses:
                        del _models[old]
                _models[address] = load_model(
                    _source_here(address.source), **{"threads": worker_threads(), **dict(address.settings)}
                )
        yield [_models[address] for address in addresses]


@contextmanager
def source_here(address: SourceAddress) -> Iterator[TensorSource]:
    """Runs on a worker: the tensors of a model."""
    with _lock:
        source = _source_here(address)
    yield source


def _source_here(address: SourceAddress) -> TensorSource:
    if address not in _sources:
        while len(_sources) >= _MOST_MODELS:
            del _sources[next(iter(_sources))]
        _sources[address] = address.open()
    return _sources[address]


def worker_threads() -> int:
    """Runs on a worker: how many threads it has."""
    from distributed import get_worker

    return get_worker().state.nthreads
