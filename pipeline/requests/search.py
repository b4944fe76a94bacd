"""What `search` can be asked for."""

from __future__ import annotations

from pathlib import Path

from ...request_fields import argument, option, request
from ...runtime.settings import PlacementOptions
from ..common.progress import OnProgress
from .groups import DryRun, Measuring, SourceOptions, TargetOptions, Weighting


@request
class SearchRequest(TargetOptions, Measuring, Weighting, SourceOptions, DryRun, PlacementOptions):
    model: str | Path = argument("A GGUF file, a checkpoint's folder or hf:OWNER/NAME.", kind="source", kw_only=False)
    out: str | Path = argument("The recipe to write.", kind="out_file", kw_only=False)
    strict: bool = option("Refuse a tensor whose errors --covariance or --curvature cannot weight.", default=False)
    rules: str | Path | None = option(
        "Follow the rules of this recipe; types are chosen for the other tensors.",
        default=None,
        kind="name",
        metavar="FILE",
    )
    state: str | Path | None = option(
        "Keep the measurements in this file, which several recipes of one model may share.",
        default=None,
        kind="out_file",
        shown="OUT.state.json",
    )
    threads: int | None = option(
        "Use this many worker threads.", default=None, flags="-t --threads", least=1, shown="all processors"
    )
    cluster: str | None = option(
        "Divide the measurements among dask workers, with the same results: tcp://HOST:PORT, a scheduler file, or local:N.",
        default=None,
        metavar="ADDRESS",
    )
    force: bool = option("Replace an existing output.", default=False)
    command: str = option("Write this about the call to the recipe's header.", default="", in_cli=False)
    progress: OnProgress | bool | None = option(
        "Call this with reports of 'errors of types' in tensors, 'sensitivity' and 'refining' in groups.",
        default=None,
        in_cli=False,
    )
