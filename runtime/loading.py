"""Opening a model: its weights, its graph, what computes it and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..convert.hub.fetch import is_repository
from ..convert.source import open_source
from ..formats import TensorSource
from ..operating_system.memory import free_bytes
from ..quantize import gguf_source
from ..simd.workers import Workers
from .adapters import with_adapters
from .backends import Executable
from .backends.cpu.executable import compile_graph
from .backends.cpu.runtime_repack import repack_source
from .backends.cpu.weights import WeightStore
from .graph import Graph
from .graph.rounding import rounded
from .hparams import HParams
from .model import Model
from .models.architectures import build_graph
from .placement.device_placement import device_compiler, place_model
from .placement.thread_placement import place_threads
from .settings import check_latent, settings_from

_DECODED_BYTES = 4 << 30
_STREAMED_BATCH = 32768  # tokens per visit of a layer whose weights are copied to a device for it


def load_model(path_or_source: str | Path | TensorSource, **settings: Any) -> Model:
    """Opens a model for inference: a GGUF file (any shard of a split one), a checkpoint folder, hf:OWNER/NAME, or a source that
    `convert.open_source` opened.

    settings: fields of `Settings` by name. Weights are read when they are first needed. Raises PlanError for an architecture or
    setting that is not known, FormatError when tensors or metadata keys are missing or do not fit together.
    """
    chosen = settings_from({"batch": _STREAMED_BATCH, **settings} if settings.get("device_memory") is not None else settings)
    stored = path_or_source if isinstance(path_or_source, TensorSource) else _open(path_or_source)
    source = with_adapters(stored, chosen.lora)
    hparams = HParams(source.metadata, source.path)
    check_latent(settings, hparams)
    packed_bytes = 0
    placed, placement_notes = place_model(source, chosen)
    placement = place_threads(chosen.threads, chosen.cpus, chosen.numa)
    workers = Workers(placement.threads, placement.places)
    if chosen.repack:
        with workers.placed():
            source, packed_bytes = repack_source(source, workers, None if placed is None else placed.on_host)
    cache_bytes = decoded_bytes(free_bytes()) if chosen.cache_bytes is None else chosen.cache_bytes
    store = WeightStore(source, cache_bytes, exact=chosen.exact, workers=workers, fast=bool(chosen.fast))
    graph, notes = build_graph(source, chosen.n_ctx), [*placement.notes, *placement_notes]
    graph = rounded(graph) if chosen.round_activations else graph

    def compile_for_cpu(graph: Graph) -> Executable:
        return compile_graph(graph, store, chosen)

    compile_any = compile_for_cpu
    if placed is not None:
        compile_any = device_compiler(placed, source, store, chosen)
    return Model(source, compile_any(graph), chosen, stored, packed_bytes, notes, compile_any, placed)


def _open(path: str | Path) -> TensorSource:
    """A GGUF whatever its name is, else what `open_source` takes."""
    return open_source(path) if is_repository(path) or Path(path).is_dir() else gguf_source(path)


def decoded_bytes(free: int | None) -> int:
    """What decoded weights may take by default: 4 GiB, but no more than a quarter of the memory that is free. The rest is for
    activations, and for the model's file, which the system keeps in memory as far as it can."""
    return _DECODED_BYTES if free is None else min(_DECODED_BYTES, free // 4)
