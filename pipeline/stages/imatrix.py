"""The imatrix stage of a run: an importance matrix, and covariances beside it if the recipe asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...formats import TensorType
from ...imatrix.calibration import Calibration, cut_windows
from ...imatrix.collect import CollectOptions, collect
from ...imatrix.covariance.inputs import covariance_inputs
from ...imatrix.covariance.job import CurvatureOptions
from ...quantize.codec_kernels import compile_codecs_in_background
from ...quantize.covariance.source import CollectedInput, Covariances, PreparedCache
from ...quantize.recipes.recipe import Recipe
from ...runtime import Model
from ...runtime.evaluate.perplexity import Perplexity
from ..cluster.covariance import SharedCovariance
from ..cluster.windows import collecting_on
from ..common.messages import perplexity_text
from ..common.progress import WINDOWS, OnProgress, Stage
from ..covariance import begin_covariance, finish_covariance, plan_covariance
from .folder import RunFolder
from .text import StageText


def _windows(model: Model, text: StageText) -> Calibration:
    return cut_windows(model, text.segments, text.n_ctx, chunks=text.chunks)


class Moments(NamedTuple):
    """The file of second moments that a run collects; curvature: of outputs too."""

    path: Path
    curvature: bool


def compute(
    model: Model,
    text: StageText,
    path: Path,
    moments: Moments | None,
    types: Iterable[TensorType],
    report: OnProgress,
    *,
    nextn: bool = False,
    cluster: str | None = None,
    reading: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the importance matrix, and the file of second moments if there is to be one; returns the stage's result.

    nextn: with data for the draft layers. types: those that are encoded afterwards, whose codecs are compiled in the meantime.
    cluster: its workers run the windows; reading: how they open the model, arguments of `open_source`.
    """
    windows, on_cluster = _windows(model, text), cluster is not None
    job = None
    if moments is not None:
        curvature = CurvatureOptions() if moments.curvature else None
        planned = plan_covariance(model, windows, moments.path, moments.curvature, on_cluster=on_cluster, curvature=curvature)
        job = begin_covariance(planned, on_cluster=on_cluster)
    passes = len(job.passes) if job is not None else 1
    stage = Stage(report, "imatrix", passes * len(windows.windows), WINDOWS)
    options = CollectOptions(nextn=nextn, head_inputs=moments is not None)
    elsewhere = collecting_on(cluster, model, model, windows, options, {}, reading, covariance=job)
    compile_codecs_in_background(types, urgent=False)
    with elsewhere as run_batches:
        shared = run_batches if isinstance(run_batches, SharedCovariance) else None

        def on_chunk(so_far: Perplexity, total: int) -> None:
            reached = shared.reached if shared is not None else (so_far.chunks, total * passes)
            stage.reach(*reached, perplexity_text(so_far.perplexity))

        collector = job.collector if job is not None and shared is None else None
        given = {"covariance": collector, "elsewhere": run_batches}
        model.on_windows = stage.within
        imatrix, figures = collect(model, windows, options=options, on_chunk=on_chunk, **given)
        if job is not None:
            finish_covariance(job, shared, 0, stage)
            job.finish()
        model.on_windows = None
    imatrix.save(path)
    return {"chunks": imatrix.chunk_count, "perplexity": figures.perplexity, "starved": imatrix.unseen_experts()}


def moments_to_write(recipe: Recipe, base: Path, folder: RunFolder) -> Moments | None:
    """The file that [imatrix] covariance or curvature of a recipe names, relative to `base`, or the folder's; None: none is
    collected."""
    for key, path in (("covariance", folder.covariance), ("curvature", folder.curvature)):
        value = recipe.stages.get("imatrix", {}).get(key, False)
        if value:
            return Moments(base / value if isinstance(value, str) else path, key == "curvature")
    return None


def expected_covariances(model: Model, text: StageText, moments: Moments, effort: int) -> Covariances:
    """What is known of covariances before they are collected: for a plan that is made before any work."""
    windows = _windows(model, text)
    tokens = windows.windows.size
    inputs = {name: one for one in covariance_inputs(model.graph, moments.curvature) for name in one.tensors}

    def input_of(name: str) -> CollectedInput | None:
        one = inputs.get(name)
        return CollectedInput(one.columns, np.full(one.matrices, tokens)) if one is not None else None

    metadata = {
        "quantize.covariance.file": moments.path.name,
        "quantize.covariance.dataset": ", ".join(windows.datasets),
        "quantize.covariance.entries_count": np.int32(len(inputs)),
        "quantize.covariance.chunks_count": np.int32(len(windows.windows)),
    }
    return Covariances(input_of, PreparedCache(lambda name, matrix: None), "", metadata, effort)
