"""What a search for types takes: memory, and seconds on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ...formats import TYPES, SourceTensor, TensorType, dims
from ...operating_system.processors import available_cpus
from ...quantize.covariance.matrix.prepared import prepared_bytes
from ...quantize.covariance.refine import triangles_of
from ...quantize.covariance.timing import Encodings
from ...quantize.gguf_source import planned_tensor
from ...quantize.search.row_sample import COUPLED_ROWS, COUPLED_RUNS, RUN_ROWS
from ...quantize.search.type_search import TypeSearch, group_tensors
from ...quantize.timing import encode_speed
from ...runtime import Model, load_model
from ...runtime.evaluate.sensitivity import most_rows_kept
from ...simd.compile.compile_time import compilation_seconds, compiled_kernels
from ..common.forecast import Forecast, Planned, interpreting
from ..common.reading import most_together, reading_forecast, reading_memory, reading_seconds
from ..planning import KEPT_IN_SEARCH
from .search_job import PROBES, SearchJob

# Bytes of the program, and of what a thread has of rows, at the most, and for each weight; seconds of the processor until it
# begins, where `interpreting` is 1.
_STARTED, _PER_THREAD, _ROW_BYTES = 65 << 20, 30 << 20, 28
_STARTING = 0.7
_ENCODED_AGAIN = 5  # times that refining encodes all tensors: the choice, a step up, one down and back, and the new choice


def search_forecast(search: SearchJob, folder: Path) -> Planned:
    """What is left to measure, without what an earlier search has measured. folder: of the recipe."""
    options, threads = search.options, search.options.threads or available_cpus()
    loading_begun, compiled = compilation_seconds(), compiled_kernels()
    seconds = _by_type(search, threads, _samples(search))
    if compiled == compiled_kernels():  # else it was compiling, which the search need not do again
        seconds["kernels"] = (compilation_seconds() - loading_begun) / threads  # of all types, which it loads, too
    rows = max(_ROW_BYTES * _sampled(search, tensor)[0] for tensor in search.tensors.values())
    memory = _STARTED + threads * min(_PER_THREAD, rows) + _prepared_memory(search, threads)
    work = {"tensors": len(search.tensors), "types": len({t.name for types in search.candidates.values() for t in types})}
    if options.text is None:
        parts = {"start": interpreting() * _STARTING / threads, **seconds}
        return Planned(work, Forecast(0, None, parts, memory=memory, threads=threads))
    model = load_model(search.running_source, **search.running_settings)
    tokens, (variant, loading) = options.chunks * options.n_ctx, _variant(search)
    plain, changed = (reading_seconds(each, tokens, options.n_ctx, model) + loading / threads for each in (model, variant))
    groups, probes = _probes(search)
    kinds = sum(map(len, search.candidates.values())) / len(search.candidates)
    steps = round(len(PROBES) * groups * (1 - 1 / kinds))  # of a round: from the smallest type there is none down
    rounds = steps * options.refine + 1 + options.refine
    encoded = sum(_by_type(search, threads, _measured(search, probes)).values())
    if options.refine:
        encoded += _ENCODED_AGAIN * options.refine * sum(_by_type(search, threads, _whole(search)).values())
    seconds = {"errors of types": sum(seconds.values()), "encoding of groups": encoded}
    seconds["reading"] = reading_seconds(model, tokens, options.n_ctx, is_scored=False)
    seconds["reading"] += len(probes) * (plain + (changed - plain) / groups) + rounds * changed
    runs = 1 + len(probes) + rounds
    together = most_together([model], options.n_ctx, options.chunks)
    reading = reading_memory([model], options.n_ctx, together, model)
    if reading is None:
        return Planned(work | {"runs": runs}, reading_forecast(seconds, None, [model], folder))
    kept = 2 * options.chunks * options.n_ctx * model.graph.n_embd  # outputs of the second halves of windows
    largest = max(tensor.n_elements for tensor in search.tensors.values())
    cached = min(4 * largest, model.settings.cache_bytes or (4 << 30))
    rows = min(_encoded_bytes(search) // (1 if options.refine else groups), most_rows_kept())
    more = memory - _STARTED + kept + cached + rows
    return Planned(work | {"runs": runs}, reading_forecast(seconds, reading + more, [model], folder))


def _probes(search: SearchJob) -> tuple[int, list[dict[str, TensorType]]]:
    """Groups of tensors, and types of each measurement of their sensitivities that is not known yet."""
    groups = group_tensors(list(search.tensors), search.options.measurements)
    probes = TypeSearch(search.tensors, search.candidates, {}, groups).probes(PROBES, {})
    return len(groups), [types for _, types in probes if not search.is_measured(types)]


def _measured(
    search: SearchJob, probes: Iterable[Mapping[str, TensorType]]
) -> Iterator[tuple[SourceTensor, TensorType, int, int | None]]:
    for types in probes:
        yield from ((search.tensors[name], kind, search.tensors[name].n_elements, None) for name, kind in types.items())


def _variant(search: SearchJob) -> tuple[Model, float]:
    """The model with all tensors in a type in the middle of theirs, and seconds that loading it takes."""
    chosen = ((search.tensors[name], kinds[len(kinds) // 2]) for name, kinds in search.candidates.items())
    planned = {tensor.name: planned_tensor(tensor, kind, is_decoded=True) for tensor, kind in chosen}
    source = search.running_source
    changed = replace(source, tensors={**source.tensors, **planned}, identity=f"{source.identity} changed")
    begun = time.thread_time()
    return load_model(changed, **search.running_settings), time.thread_time() - begun


def _samples(search: SearchJob) -> Iterator[tuple[SourceTensor, TensorType, int, int | None]]:
    """Tensor, type, weights and matrices of each error that is not known yet."""
    for name, tensor in search.tensors.items():
        weights, matrices = _sampled(search, tensor)
        known = search.measurements.errors.get(name, {})
        yield from ((tensor, kind, weights, matrices) for kind in search.candidates[name] if kind.name not in known)


def _sampled(search: SearchJob, tensor: SourceTensor) -> tuple[int, int]:
    """Weights of the sample of a tensor, and matrices that it has rows of."""
    columns, rows, matrices = dims(tensor.shape)
    is_coupled = search.covariances is not None and search.covariances.row_coupling(tensor) is not None
    run = min(COUPLED_ROWS if is_coupled else RUN_ROWS, rows)
    runs = max(COUPLED_RUNS if is_coupled else 1, search.options.rows // run)
    return min(runs * run, tensor.n_rows) * columns, min(runs, matrices)


def _whole(search: SearchJob) -> Iterator[tuple[SourceTensor, TensorType, int, int | None]]:
    """All weights, as if each tensor were encoded a bit to each of its types."""
    for name, tensor in search.tensors.items():
        kinds = search.candidates[name]
        yield from ((tensor, kind, tensor.n_elements // len(kinds), None) for kind in kinds)


def _encoded_bytes(search: SearchJob) -> int:
    """Of all tensors, as if each had an equal part of each of its types. Refining keeps them, measuring a group those of it."""
    each = ((tensor, search.candidates[name]) for name, tensor in search.tensors.items())
    return sum(sum(kind.nbytes(tensor.shape) for kind in kinds) // len(kinds) for tensor, kinds in each)


def _by_type(
    search: SearchJob, threads: int, parts: Iterator[tuple[SourceTensor, TensorType, int, int | None]]
) -> dict[str, float]:
    """Seconds of encoding, by type."""
    load, plain, seconds = Encodings(search.covariances), Counter[tuple[str, str, bool]](), dict[str, float]()
    weighted = search.weighting.has_importance
    for tensor, kind, weights, matrices in parts:
        plain[kind.name, tensor.source_type, weighted[tensor.name]] += weights - load.add(tensor, kind, weights, matrices)
    for (name, source_type, is_weighted), n in (+plain).items():
        speed = encode_speed(TYPES[name], threads, source_type=source_type, is_weighted=is_weighted)
        seconds[name] = seconds.get(name, 0.0) + n / speed
    for name, more in load.seconds(threads).items():
        seconds[name] = seconds.get(name, 0.0) + more
    return seconds


def _prepared_memory(search: SearchJob, threads: int) -> int:
    """Bytes of the covariances that are kept prepared, and of those that are read meanwhile."""
    covariances = search.covariances
    if covariances is None:
        return 0
    triangles = {triangles_of(kind) for kinds in search.candidates.values() for kind in kinds}
    kept = max(triangles) if len(triangles) == 1 else KEPT_IN_SEARCH
    prepared, reading = dict[object, int](), 0
    for tensor in search.tensors.values():
        collected = covariances.collected(tensor)
        if collected is None:
            continue
        reading = max(reading, collected.nbytes)
        if collected.has_enough_tokens.any():
            each = prepared_bytes(collected.columns, kept)
            prepared |= {covariances.key_of(tensor, i): each for i in range(_sampled(search, tensor)[1])}
    largest = max(prepared.values(), default=0)
    return max(largest, min(sum(prepared.values()), covariances.cache.memory)) + reading
