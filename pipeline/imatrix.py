"""`ggufmill imatrix`: importance matrices are computed, shown, compared, merged and converted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..data_classes import dataclass
from ..errors import UsageError
from ..imatrix import Imatrix, load
from ..imatrix.calibration import Calibration, cut_windows
from ..imatrix.collect_state import load_state, state_path
from ..imatrix.coverage import LayerCoverage, coverage_json, covered_layers, remarks, usual_gaps
from ..imatrix.files import LEGACY_CHUNK
from ..imatrix.statistics import ImatrixComparison, Similarity, TensorStatistics, compare_imatrices, statistics
from ..imatrix.statistics import layer_similarity as similarities
from ..imatrix.texts import TABLE_SUFFIXES, CalibrationText, check_texts, read_segments
from ..jobs.lock import output_lock
from ..recipes import BUNDLED, bundled_text
from ..runtime import Model
from ..runtime.evaluate.perplexity import Perplexity
from .cluster.models import model_address
from .cluster.windows import collecting_on
from .collecting.collection import N_CTX, collection_of, moments_path, options_of
from .collecting.forecast import CollectionForecast, forecast_collection
from .collecting.moments import check_covariance
from .collecting.outputs import already_collected, check_outputs
from .collecting.own_text import WINDOWS as OWN_WINDOWS
from .collecting.own_text import parse_texts, provide_own_text
from .common.arguments import Size, as_bytes, as_paths, check_new, read_template, refuse_inputs, refuse_unused
from .common.memory import PROGRAM, warn_over
from .common.messages import note, warn
from .common.models import note_micro_batch, open_model, opened_source, pop_checkpoint_options, window_settings
from .common.progress import reporting
from .common.shown import shown
from .reports.style import check_picture
from .requests.imatrix import ImatrixRequest, ShowRequest
from .requests.running import settings_of
from .requests.verb import verb

_ENTRY = 12  # bytes of a number of an entry that is worked on: in float32 and in float64


@shown
@dataclass(frozen=True)
class ImatrixResult:
    """An importance matrix, and what it covers of the model.

    imatrix  entries: name -> (sums float32 [matrices, columns], counts int64 [matrices]); what is in in_file added
    figures  perplexity of the text; None with dry_run, and for a call that was finished before (resume)
    layers   coverage of each layer: weight tensors without data, experts with few tokens or none
    path     the file that it was written to; plot: the picture; covariance: the file of covariances
    forecast what the call takes; only with dry_run, which leaves imatrix and layers empty
    """

    imatrix: Imatrix
    figures: Perplexity | None
    layers: list[LayerCoverage]
    path: Path | None = None
    plot: Path | None = None
    covariance: Path | None = None
    forecast: CollectionForecast | None = None

    @property
    def remarks(self) -> list[str]:
        """What the coverage means for quantising, for people."""
        return remarks(self.layers)

    def as_json(self) -> dict[str, Any]:
        """What --json prints: path, entries and chunks (how many), plot, covariance, starved_experts, sparse_experts, coverage,
        remarks, and the figures of the perplexity. With dry_run path, covariance and those of the forecast."""
        if self.forecast is not None:
            return {"path": str(self.path) if self.path else None, **self.forecast.as_json()}
        counts = {"entries": len(self.imatrix.entries), "chunks": self.imatrix.chunk_count}
        files = {"path": str(self.path) if self.path else None, **counts, "plot": str(self.plot) if self.plot else None}
        files |= {"covariance": str(self.covariance)} if self.covariance is not None else {}
        figures = self.figures.as_json() if self.figures is not None else {"finished_before": True}
        return {**files, **coverage_json(self.imatrix, self.layers), **figures, "chunks": counts["chunks"]}


@verb(ImatrixRequest)
def compute_imatrix(request: ImatrixRequest) -> ImatrixResult:
    """Runs calibration texts through a model, and sums up the squares of what goes into each weight, by column and expert.

    Returns an `ImatrixResult`. Raises PlanError for texts that cannot be read or are too short, or outputs that exist,
    UsageError for arguments that have nothing to act on, MillError for activations that are not finite.

    Example:
        >>> from ggufmill import compute_imatrix
        >>> from ggufmill.recipes import FOLDER
        >>> result = compute_imatrix(FOLDER / "demo", FOLDER / "demo" / "calibration.txt", n_ctx=64, chunks=2)
        >>> sums, counts = result.imatrix.entries["blk.1.ffn_up_exps.weight"]
        >>> sums.shape, int(counts.sum())
        ((8, 256), 256)
    """
    model, text, settings = request.model, request.text, settings_of(request, "n_ctx")
    given_texts = [text] if isinstance(text, str | Path) else text or [BUNDLED]
    out = Path(request.out) if request.out is not None else None
    own = Path(f"{out}.self.jsonl") if out is not None else Path("self.jsonl")
    texts = parse_texts(given_texts, own)
    writes = any(one.path == own for one in texts)
    if not writes:
        refuse_unused(request, "-f self", "text_seed")
    elif out is None:
        raise UsageError("-f self keeps the text that the model writes next to the output: give that (-o)")
    check_texts(texts)
    if not any(one.path.suffix in TABLE_SUFFIXES for one in texts):
        refuse_unused(request, "a .jsonl or .parquet file (-f)", "column", "template")
    option = "--covariance" if request.curvature is None else "--curvature"
    if request.curvature is None:
        refuse_unused(request, "--curvature", "curvature_rows", "curvature_seed")
    elif request.covariance is not None:
        raise UsageError("--curvature writes the covariances of inputs too: leave out --covariance")
    if moments_path(request) is None:
        refuse_unused(request, "--covariance or --curvature", "covariance_experts", "covariance_bits", "memory")
    if request.plot is not None:
        check_picture(Path(request.plot))
    path, added, window = out, as_paths(request.in_file), request.n_ctx or N_CTX
    checkpoint_options = pop_checkpoint_options(settings)
    source = opened_source(model, checkpoint_options)
    inputs = [*source.files, *(one.path for one in texts), *added]
    replaces = request.force or request.dry_run
    check_outputs(path, request.plot, inputs, request.resume, replaces)
    covariance_path = check_covariance(
        moments_path(request), path, inputs, request.resume, replaces, has_more=bool(added), option=option
    )
    state = load_state(state_path(path)) if path is not None and request.resume and state_path(path).exists() else None
    before = [load(part).fit(source, str(part)) for part in added]
    opened = open_model(model if isinstance(model, Model) else source, window_settings(model, window, settings))
    options_of(request).check(opened)
    note_micro_batch(window, settings)
    if not text:
        note("without -f, the bundled calibration text is read (prose, code, mathematics, chats; 35 languages)")
    note(f"reading {', '.join(str(one.path) for one in texts)}", detail=True)
    if writes and request.dry_run and not own.exists():  # as much of another text takes as long
        texts = [replace(one, path=bundled_text()) if one.path == own else one for one in texts]
    elif writes:
        count = (request.from_chunk or 0) + (request.chunks or OWN_WINDOWS)
        with reporting(request.progress) as report:
            provide_own_text(opened, own, count * window, request.text_seed or 0, report)
    windows = _windows(request, opened, texts, window)
    unread = [one.path.name for one in texts if one.path.name not in windows.datasets]
    warn([f"nothing of {name} is in the windows that are read" for name in unread])
    collection = collection_of(request, opened, windows)
    if request.dry_run:
        forecast = forecast_collection(opened, windows, path, collection.options, collection.moments)
        return ImatrixResult(Imatrix(), None, [], path, None, covariance_path, forecast)
    if request.resume and state is None and not request.force:
        merged = already_collected(path, covariance_path, windows, before)
        if merged is not None:
            return ImatrixResult(merged, None, covered_layers(merged, source), path, None, covariance_path)
    elsewhere = None
    if request.cluster is not None:
        there = model_address(model, opened, {"n_ctx": window, **checkpoint_options, **settings})
        memory = as_bytes(request.memory)
        elsewhere = collecting_on(
            request.cluster, there, opened, windows, collection.options, covariance=collection.moments, memory=memory
        )
    with output_lock(path) if path is not None else nullcontext():
        try:
            with reporting(request.progress) as report:
                imatrix, figures = collection.run(report, state, elsewhere)
        except KeyboardInterrupt:
            if path is None or not state_path(path).exists():
                raise
            done = load_state(state_path(path)).done
            raise KeyboardInterrupt(
                f"{done} windows are kept in {state_path(path)}; the same command with --resume continues"
            ) from None
        imatrix = imatrix.merge(*before)
        if path is not None:
            collection.write(imatrix)
            warn([*figures.notes, *(f"{path} does not keep {lost}" for lost in imatrix.not_stored(path.suffix))])
    layers = covered_layers(imatrix, source)
    if request.plot is not None:
        from .reports.imatrix_plots import plot_coverage

        plot_coverage(imatrix, source, path.name if path is not None else source.path, Path(request.plot))
    result = ImatrixResult(
        imatrix, figures, layers, path, Path(request.plot) if request.plot is not None else None, covariance_path
    )
    warn(result.remarks)
    if usual := usual_gaps(result.layers):
        note(usual, detail=True)
    return result


def _windows(request: ImatrixRequest, model: Model, texts: Sequence[CalibrationText], n_ctx: int) -> Calibration:
    """The windows to run. No more of the texts is read than these take; a window may be left over of each weight."""
    chunks, first = request.chunks, request.from_chunk or 0
    tokens = None if chunks is None else (first + chunks + len({one.weight for one in texts})) * n_ctx
    template = read_template(request.template)
    segments = read_segments(model, texts, column=request.column, template=template, max_tokens=tokens)
    return cut_windows(model, segments, n_ctx, chunks=chunks, from_chunk=first)


@shown
@dataclass(frozen=True)
class MergedImatrix:
    """An importance matrix that was made of others. path: where it is; lost: what its format does not keep, in words."""

    imatrix: Imatrix
    path: Path
    lost: list[str]

    def as_json(self) -> dict[str, Any]:
        """What --json prints: path, entries and chunks (how many), lost."""
        entries, chunks = len(self.imatrix.entries), self.imatrix.chunk_count
        return {"path": str(self.path), "entries": entries, "chunks": chunks, "lost": self.lost}


def merge_imatrix(
    files: Sequence[str | Path], out: str | Path, *, force: bool = False, memory: Size | None = None
) -> MergedImatrix:
    """Adds up the sums and counts of importance matrices of one model, in either format.

    files   GGUF or legacy .dat; out: the file to write, .dat for the legacy format; force: an existing one is replaced
    memory  bytes, or a size such as '1G', that it may take beside the files; a warning says where that cannot be

    Returns a `MergedImatrix`. Raises FormatError for a file that is no imatrix, MillError for files of different models.

    Example:
        >>> from ggufmill import compute_imatrix, merge_imatrix
        >>> from ggufmill.recipes import FOLDER
        >>> demo, text = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"
        >>> _ = compute_imatrix(demo, text, "one.imatrix", n_ctx=64, chunks=1, force=True)
        >>> _ = compute_imatrix(demo, text, "two.imatrix", n_ctx=64, chunks=1, from_chunk=1, force=True)
        >>> merge_imatrix(["one.imatrix", "two.imatrix"], "both.imatrix", force=True).imatrix.chunk_count
        2
    """
    parts, out = [load(path, is_mapped=True) for path in files], Path(out)
    refuse_inputs([out], as_paths(files))
    check_new(out, force)
    warn_over(_taken(parts, is_merged=True), as_bytes(memory), "merging", "files of parts of the model take less")
    imatrix = parts[0].merge(*parts[1:])
    result = MergedImatrix(imatrix, out, imatrix.not_stored(out.suffix))
    imatrix.save(out)
    warn([f"{out} does not keep {lost}" for lost in result.lost])
    return result


def convert_imatrix(file: str | Path, out: str | Path, *, force: bool = False) -> MergedImatrix:
    """Writes an importance matrix in the other format, GGUF or legacy (out ends in .dat). Returns and raises as
    `merge_imatrix`."""
    result = merge_imatrix([file], out, force=force)
    with open(file, "rb") as opened:
        is_legacy = opened.read(4) != b"GGUF"
    if is_legacy and result.path.suffix != ".dat":
        warn([f"{file} did not keep how many tokens each expert saw: in {out} all have its windows x {LEGACY_CHUNK}"])
    return result


def _taken(parts: Sequence[Imatrix], is_merged: bool = False) -> int:
    """Bytes beside the files: float64 of an entry of each, and of one that is merged all entries."""
    sizes = {name: sums.size for one in parts for name, (sums, _) in one.entries.items()}
    kept = sum(sizes.values()) if is_merged else 0
    return PROGRAM + 4 * kept + _ENTRY * (1 if is_merged else len(parts)) * max(sizes.values(), default=0)


@shown
@dataclass(frozen=True)
class ImatrixStatistics:
    """Statistics of an importance matrix, and how another one differs.

    entries     a `TensorStatistics` for each
    similarity  cosine of each tensor with the same one of the layer before, if it was asked for
    other       the file that it was compared with; comparison: how that one differs
    """

    imatrix: Imatrix
    entries: list[TensorStatistics]
    similarity: list[Similarity] | None = None
    other: Path | None = None
    comparison: ImatrixComparison | None = None

    def as_json(self) -> dict[str, Any]:
        """What --json prints: datasets, chunks, chunk_size, entries; layer_similarity and comparison if they were asked for."""
        imatrix = self.imatrix
        value: dict[str, Any] = {"datasets": imatrix.datasets, "chunks": imatrix.chunk_count, "chunk_size": imatrix.chunk_size}
        value["entries"] = [asdict(entry) for entry in self.entries]
        if self.similarity is not None:
            value["layer_similarity"] = [asdict(entry) for entry in self.similarity]
        if self.comparison is not None:
            value["comparison"] = {"file": str(self.other), **asdict(self.comparison)}
        return value


@verb(ShowRequest)
def show_imatrix(request: ShowRequest) -> ImatrixStatistics:
    """Statistics of an importance matrix, and with another one how the two differ.

    Returns an `ImatrixStatistics`. Raises FormatError for a file that is no imatrix.

    Example:
        >>> from ggufmill import compute_imatrix, show_imatrix
        >>> from ggufmill.recipes import FOLDER
        >>> demo, text = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"
        >>> _ = compute_imatrix(demo, text, "demo.imatrix", n_ctx=64, chunks=1, force=True)
        >>> show_imatrix("demo.imatrix").entries[0].name
        'blk.0.attn_k_b.weight'
    """
    path, second_path = Path(request.file), Path(request.other) if request.other is not None else None
    if request.plot is not None:
        check_picture(Path(request.plot))
        refuse_inputs([Path(request.plot)], [path, *([second_path] if second_path else [])])
    imatrix, second = load(path, True), load(second_path, True) if second_path is not None else None
    needed = _taken([one for one in (imatrix, second) if one is not None])
    warn_over(needed, as_bytes(request.memory), "the largest entry", "there is no way to take less")
    result = ImatrixStatistics(
        imatrix,
        statistics(imatrix, request.top),
        similarities(imatrix) if request.layer_similarity else None,
        second_path,
        compare_imatrices(imatrix, second) if second is not None else None,
    )
    if request.plot is not None:
        from .reports.imatrix_plots import plot_imatrix_comparison, plot_statistics

        if result.comparison is not None and second_path is not None:
            plot_imatrix_comparison(result.comparison, f"{path.name} and {second_path.name}", Path(request.plot))
        else:
            plot_statistics(result.entries, result.similarity or [], path.name, Path(request.plot))
    return result
