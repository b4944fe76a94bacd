"""The imatrix stage of a run: an importance matrix, and second moments beside it if the recipe asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...formats import TensorType
from ...imatrix.calibration import Calibration, cut_windows
from ...imatrix.collect_state import state_path
from ...imatrix.covariance.job import observed_inputs
from ...quantize.codec_kernels import compile_codecs_in_background
from ...quantize.covariance.source import Covariances
from ...runtime import Model
from ..cluster.models import model_address
from ..cluster.windows import collecting_on
from ..collecting.collection import collection_of, curvature_options, moments_path
from ..collecting.moments import expected_covariances
from ..common.progress import OnProgress
from ..requests.imatrix import ImatrixRequest
from ..requests.recipe import GivenRecipe, merged
from ..requests.run import RunRequest
from .folder import RunFolder
from .text import StageText


def imatrix_request(model: str | Path, folder: RunFolder, request: RunRequest, given: GivenRecipe) -> ImatrixRequest:
    """What [imatrix] of a recipe asks for; the files are in the folder of results unless it names them."""
    asked = merged(ImatrixRequest(model, out=folder.imatrix, cluster=request.cluster, force=request.force), given)
    files = {"covariance": folder.covariance, "curvature": folder.curvature}
    return replace(asked, **{name: path for name, path in files.items() if getattr(asked, name) is True})


def windows_of(model: Model, text: StageText) -> Calibration:
    """The windows of a text that the stage reads."""
    return cut_windows(model, text.segments, text.n_ctx, chunks=text.chunks)


def compute(
    request: ImatrixRequest,
    model: Model,
    text: StageText,
    types: Iterable[TensorType],
    report: OnProgress,
    reading: Mapping[str, Any],
) -> dict[str, Any]:
    """Writes what the request collects; returns the stage's result. An interrupted one is resumed.

    types: those that are encoded afterwards, whose codecs are compiled in the meantime; reading: how workers open the model,
    arguments of `open_source`.
    """
    assert request.out is not None
    if request.force:
        state_path(Path(request.out)).unlink(missing_ok=True)
    collection = collection_of(request, model, windows_of(model, text))
    elsewhere = None
    if request.cluster is not None:
        there = model_address(model, model, {}, reading)
        windows, moments = collection.windows, collection.moments
        elsewhere = collecting_on(request.cluster, there, model, windows, collection.options, covariance=moments)
    compile_codecs_in_background(((each, True) for each in types), urgent=False)
    imatrix, figures = collection.run(report, collection.interrupted(), elsewhere)
    collection.write(imatrix)
    return {"chunks": imatrix.chunk_count, "perplexity": figures.perplexity, "starved": imatrix.unseen_experts()}


def expected(model: Model, text: StageText, request: ImatrixRequest, effort: int) -> Covariances:
    """What is known of covariances before they are collected: for a plan that is made before any work."""
    path = moments_path(request)
    assert path is not None
    inputs = observed_inputs(model, request.covariance_experts, curvature_options(request))
    return expected_covariances(model, inputs, windows_of(model, text), path, effort)
