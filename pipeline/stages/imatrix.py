"""The imatrix stage of a run: an importance matrix, and covariances beside it if the recipe asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...formats import TensorType
from ...imatrix.calibration import Calibration, TextSegment, cut_windows
from ...imatrix.collect import CollectOptions, collect
from ...imatrix.covariance.inputs import covariance_inputs
from ...imatrix.covariance.job import CurvatureOptions
from ...quantize.covariance.source import CollectedInput, Covariances, PreparedCache
from ...quantize.recipes.recipe import Recipe
from ...runtime import Model
from ...runtime.evaluate.perplexity import Perplexity
from ..cluster.covariance import SharedCovariance
from ..cluster.windows import collecting_on
from ..common.messages import perplexity_text
from ..common.progress import WINDOWS, OnProgress, Stage
from ..covariance import begin_covariance, finish_covariance, plan_covariance
from ..warm_up import codecs_in_background
from .folder import RunFolder
from .text import StageText


def _windows(model: Model, text: StageText) -> Calibration:
    return cut_windows(model, [TextSegment(text.tokens.tolist(), 1, [(text.path.name, 0)])], text.n_ctx, chunks=text.chunks)


def compute(
    model: Model,
    text: StageText,
    path: Path,
    covariance: Path | None,
    types: Iterable[TensorType],
    report: OnProgress,
    *,
    curvature: bool = False,
    nextn: bool = False,
    cluster: str | None = None,
    reading: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the importance matrix, and the file of covariances unless that is None; returns the stage's result.

    curvature: with second moments of gradients in that file. nextn: with data for the draft layers. types: those that are
    encoded afterwards, whose codecs are compiled in the meantime. cluster: its workers run the windows; reading: how they open
    the model, arguments of `open_source`.
    """
    windows, stage, on_cluster = _windows(model, text), Stage(report, "imatrix", unit=WINDOWS), cluster is not None
    job = None
    if covariance is not None:
        more = {"experts": True, "curvature": CurvatureOptions()} if curvature else {}
        job = begin_covariance(
            plan_covariance(model, windows, covariance, on_cluster=on_cluster, **more), on_cluster=on_cluster
        )
    passes = len(job.passes) if job is not None else 1
    options = CollectOptions(nextn=nextn, head_inputs=covariance is not None)
    elsewhere = collecting_on(cluster, model, model, windows, options, {}, reading, covariance=job)
    with codecs_in_background(types), elsewhere as run_batches:
        shared = run_batches if isinstance(run_batches, SharedCovariance) else None

        def on_chunk(so_far: Perplexity, total: int) -> None:
            reached = shared.reached if shared is not None else (so_far.chunks, total * passes)
            stage.reach(*reached, perplexity_text(so_far.perplexity))

        collector = job.collector if job is not None and shared is None else None
        given = {"covariance": collector, "elsewhere": run_batches}
        imatrix, figures = collect(model, windows, options=options, on_chunk=on_chunk, **given)
        if job is not None:
            finish_covariance(job, shared, 0, stage)
            job.finish()
    imatrix.save(path)
    return {"chunks": imatrix.chunk_count, "perplexity": figures.perplexity, "starved": imatrix.unseen_experts()}


def covariance_to_write(recipe: Recipe, base: Path, folder: RunFolder) -> Path | None:
    """The file that [imatrix] covariance or curvature of a recipe names, relative to `base`, or the folder's; None: none is
    collected."""
    table = recipe.stages.get("imatrix", {})
    for value, usual in ((table.get("covariance"), folder.covariance), (table.get("curvature"), folder.curvature)):
        if value:
            return base / value if isinstance(value, str) else usual
    return None


def expected_covariances(model: Model, text: StageText, path: Path, effort: int, experts: bool = False) -> Covariances:
    """What is known of covariances before they are collected: for a plan that is made before any work. experts: those of the
    inputs of down matrices too, of each as many as of all together, at the most."""
    windows = _windows(model, text)
    tokens = windows.windows.size
    inputs = {name: one for one in covariance_inputs(model.graph, experts) for name in one.tensors}

    def input_of(name: str) -> CollectedInput | None:
        one = inputs.get(name)
        return CollectedInput(one.columns, np.full(one.matrices, tokens)) if one is not None else None

    metadata = {
        "quantize.covariance.file": path.name,
        "quantize.covariance.dataset": ", ".join(windows.datasets),
        "quantize.covariance.entries_count": np.int32(len(inputs)),
        "quantize.covariance.chunks_count": np.int32(len(windows.windows)),
    }
    return Covariances(input_of, PreparedCache(lambda name, matrix: None), "", metadata, effort)
