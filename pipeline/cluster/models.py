"""Models on the workers: opened there from the path that they have everywhere, and kept for the next piece."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ...convert import open_source
from ...data_classes import dataclass
from ...errors import FormatError, MillError
from ...formats import TensorSource
from ...runtime import Model, Settings, load_model
from ..common.arguments import as_adapters
from ..common.models import ModelLike, pop_checkpoint_options

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
        if source_digest(source, dict(self.options)) != self.digest:
            raise MillError(
                f"{self.path} is another model here than where the job was started (other weights, shapes or files)"
            )
        return source


@dataclass(frozen=True)
class ModelAddress:
    """A model as it is to be run. settings: (name, value) of `load_model`; threads: if there is none, those of the worker."""

    source: SourceAddress
    settings: tuple[tuple[str, Any], ...] = ()


def address_of(model: ModelLike, source: TensorSource, **options: Any) -> SourceAddress:
    """How workers open the model that is `source` here. options: of `open_source`, None for the usual ones."""
    path = str(source.path if isinstance(model, Model | TensorSource) else model)
    here, given = Path(path), {name: value for name, value in options.items() if value is not None}
    if given.get("lora"):  # FILE or FILE=SCALE: the scale follows the last part of the path
        given["lora"] = tuple(str(Path(adapter).absolute()) for adapter in as_adapters(given["lora"]))
    return SourceAddress(str(here.resolve()) if here.exists() else path, source_digest(source, given), hashable(given))


def model_address(
    model: ModelLike, opened: Model, settings: Mapping[str, Any], checkpoint_options: Mapping[str, Any] | None = None
) -> ModelAddress:
    """How workers open a model that is open here. settings: as for `open_model`; those of a model that was given loaded are its
    own, but for the threads; checkpoint_options: further arguments of `open_source`."""
    if isinstance(model, Model):
        usual = Settings()
        chosen = {field.name: getattr(opened.settings, field.name) for field in fields(Settings) if field.name != "threads"}
        settings = {name: value for name, value in chosen.items() if value != getattr(usual, name)}
    fixed = dict(settings)
    if fixed.get("lora"):  # FILE or FILE=SCALE: the scale follows the last part of the path
        fixed["lora"] = tuple(str(Path(adapter).absolute()) for adapter in as_adapters(fixed["lora"]))
    source = address_of(model, opened.stored, **{**pop_checkpoint_options(fixed), **(checkpoint_options or {})})
    return ModelAddress(source, hashable(fixed))


def hashable(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Settings as (name, value), sorted, with lists as tuples."""
    return tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in sorted(settings.items()))


def source_digest(source: TensorSource, options: Mapping[str, Any]) -> str:
    """A digest of the names, shapes and types of all tensors, the sizes of files, and two rows of each tensor, but not of paths
    and times: copies have the same. options: of `open_source`.

    Models that differ in all weights of a tensor, or in most, differ here; one that differs in other rows alone does not. A
    repository that is read remotely is known by the hashes that the hub has of its files.
    """
    digest = hashlib.sha256()
    if options.get("remote"):
        digest.update(source.identity.encode())
    for t in source.tensors.values():
        digest.update(f"{t.name}\0{t.shape}\0{t.source_type}\n".encode("utf-8", "surrogateescape"))
        for row in () if options.get("remote") else sorted({t.n_rows // 4, 3 * t.n_rows // 4}):
            digest.update(np.ascontiguousarray((t.raw or t.read)(row, row + 1)).data)
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
