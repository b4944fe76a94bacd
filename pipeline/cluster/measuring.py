"""What a search for a recipe measures, shared out to workers: errors of types on a tensor, divergences of choices of types."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from ...data_classes import dataclass
from ...errors import MillError
from ...formats import TYPES, TensorType
from ...quantize.planning import importance_digest
from ...quantize.search.row_sample import sample_rows
from ..common.covariance import load_covariances
from ..common.importance import load_importance
from ..requests.groups import moments_of, reading_of
from .connection import Cluster, open_cluster
from .models import SourceAddress, address_of, hashable, source_here, worker_threads
from .ordered_map import results_of

if TYPE_CHECKING:
    from ...runtime.evaluate.sensitivity import Divergence, Reference
    from ..planning import Quantization
    from ..recipe_search.options import SearchOptions
    from .sent_files import SentFile


@dataclass(frozen=True)
class SearchInputs:
    """What is measured, so that a worker can open it.

    imatrix, covariance  files; importance_digest: of the importance data; effort: of encoding with the covariance
    curvature            whether tensors are encoded with the curvature of that file too
    rows, seed           of the samples that errors are measured on
    placement            (name, value) of settings of `load_model` that say on which devices of a worker models run
    """

    source: SourceAddress
    imatrix: str | SentFile | None
    importance_digest: str
    covariance: str | SentFile | None
    effort: int
    rows: int
    seed: int
    placement: tuple[tuple[str, Any], ...] = ()
    curvature: bool = False


@dataclass(frozen=True)
class MeasuringText:
    """The windows that divergences are measured on."""

    tokens: tuple[int, ...] = field(repr=False)
    n_ctx: int
    chunks: int


@dataclass(frozen=True)
class _Errors:
    """A piece: the relative errors of types on a tensor."""

    inputs: SearchInputs
    tensor: str
    types: tuple[str, ...]

    def __str__(self) -> str:
        return self.tensor


@dataclass(frozen=True)
class _Divergence:
    """A piece: the divergence of the model with some tensors quantised."""

    inputs: SearchInputs
    text: MeasuringText
    types: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"the divergence with {self.types[0][0]} as {self.types[0][1]}"


class SearchWorkers:
    """The workers of a cluster, as a search asks for measurements; results come in the order of what was asked for."""

    def __init__(self, cluster: Cluster, inputs: SearchInputs):
        self._cluster, self._inputs = cluster, inputs

    def errors(
        self, options: Mapping[str, Sequence[TensorType]], known: Mapping[str, Mapping[str, float]]
    ) -> Generator[tuple[str, dict[str, float]], None, None]:
        """As `relative_errors`."""
        missing = {name: [t.name for t in types if t.name not in known.get(name, {})] for name, types in options.items()}
        pieces = (_Errors(self._inputs, name, tuple(types)) for name, types in missing.items() if types)
        measured = results_of(self._cluster, _measure_errors, pieces)
        try:
            for name, types in options.items():
                errors = {**known.get(name, {}), **(next(measured) if missing[name] else {})}
                yield name, {t.name: errors[t.name] for t in types}
        finally:
            measured.close()

    def divergences(
        self, choices: Sequence[Mapping[str, TensorType]], text: MeasuringText
    ) -> Generator[Divergence, None, None]:
        """The divergence of each choice of types."""
        named = (tuple((name, t.name) for name, t in types.items()) for types in choices)
        return results_of(self._cluster, _measure_divergence, (_Divergence(self._inputs, text, types) for types in named))


@contextmanager
def search_workers(address: str | None, job: Quantization, options: SearchOptions) -> Iterator[SearchWorkers | None]:
    """The workers of a cluster, which is left with the context; without an address None. job: what types are searched for."""
    if address is None:
        yield None
        return
    request = job.request
    where = address_of(request.source, job.source, **reading_of(request), remote=request.remote)
    with open_cluster(address) as cluster:
        sent = [cluster.send(path) if path is not None else None for path in (request.imatrix, moments_of(request))]
        digest, sample = importance_digest(job.importance), (options.rows, options.seed)
        fixed = hashable(options.placement)
        yield SearchWorkers(
            cluster, SearchInputs(where, sent[0], digest, sent[1], job.effort, *sample, fixed, request.curvature is not None)
        )


class _Measuring:
    """The inputs of a search on a worker."""

    def __init__(self, inputs: SearchInputs):
        self.inputs = inputs
        with source_here(inputs.source) as source:
            self.source = source
        from .sent_files import path_here

        imatrix, covariance = (path_here(f) if f is not None else None for f in (inputs.imatrix, inputs.covariance))
        self.importance = load_importance(imatrix, source) if imatrix is not None else None
        if importance_digest(self.importance) != inputs.importance_digest:
            raise MillError(f"{imatrix} is another importance matrix here than where the search was started")
        self.covariances = None
        if covariance is not None:
            self.covariances = load_covariances(covariance, source, inputs.effort, curvature=inputs.curvature)
        self._text: MeasuringText | None = None

    def errors(self, tensor: str, types: Sequence[str]) -> dict[str, float]:
        sample = sample_rows(self.source.tensors[tensor], self.importance, self.inputs.rows, self.inputs.seed, self.covariances)
        return sample.errors([TYPES[name] for name in types])

    def divergence(self, text: MeasuringText, types: Mapping[str, TensorType]) -> Divergence:
        if self._text != text:
            self._text = text
            self.__dict__.pop("_reference", None)
        return self._reference.with_types(types, self.importance, self.covariances)

    @cached_property
    def _reference(self) -> Reference:
        from ...runtime.evaluate.sensitivity import Reference

        assert self._text is not None
        text = self._text
        settings = {"threads": worker_threads(), **dict(self.inputs.placement)}
        return Reference(self.source, text.tokens, text.n_ctx, text.chunks, exact=True, **settings)


_opening, _running = Lock(), Lock()
_opened: dict[SearchInputs, _Measuring] = {}


def _measuring(inputs: SearchInputs) -> _Measuring:
    with _opening:
        if inputs not in _opened:
            _opened.clear()  # a worker is at one search at a time
            _opened[inputs] = _Measuring(inputs)
        return _opened[inputs]


def _measure_errors(piece: _Errors) -> dict[str, float]:
    """Runs on a worker."""
    return _measuring(piece.inputs).errors(piece.tensor, piece.types)


def _measure_divergence(piece: _Divergence) -> Divergence:
    """Runs on a worker; one at a time, with all of its threads."""
    measuring = _measuring(piece.inputs)
    with _running:
        return measuring.divergence(piece.text, {name: TYPES[type] for name, type in piece.types})
