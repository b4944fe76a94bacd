"""`ggufmill tune`: norms and scales of a quantised file come nearer to the predictions of the model that it was made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PlanError
from ..formats import GGUFFile, open_gguf
from ..imatrix.calibration import cut_windows
from ..imatrix.texts import parse_text, read_segments
from ..jobs.outputs import OutputKind, Outputs, Produce
from ..jobs.plan import Plan, make_plan
from ..operating_system.processors import available_cpus
from ..quantize.gguf_source import gguf_source
from ..recipes import BUNDLED
from ..runtime import Model, load_model
from ..runtime.placement.torch_devices import import_torch
from .common.arguments import refuse_inputs
from .common.figures import size_text
from .common.messages import note
from .common.progress import OnProgress, Stage, reporting
from .common.shown import shown
from .requests.tune import TuneRequest
from .requests.verb import verb
from .tuning.descent import descend, judging
from .writing.write_model import WriteResult, write_model
from .writing.write_options import write_options

if TYPE_CHECKING:
    from ..runtime.backends.torch.tunable import TunableWeights

N_CTX = 512  # tokens of a window


@shown
@dataclass
class TuneResult(WriteResult):
    """What became of tuning.

    divergences  mean KL divergence on the windows that judge: of the file as it was, and after each time through the text; the
                 least is the one that was written. Empty with dry_run
    tuned        tensors that are others than in the source
    """

    divergences: list[float] = field(default_factory=list)
    tuned: int = 0

    def json_fields(self) -> dict[str, Any]:
        """What `quantize --json` prints, with `tuning`: divergences, tuned."""
        return super().json_fields() | {"tuning": {"divergences": self.divergences, "tuned": self.tuned}}


@verb(TuneRequest)
def tune_model(request: TuneRequest) -> TuneResult:
    """Tunes what is continuous in a quantised GGUF to the predictions of the model that it was made of: the norms, and the
    scales and minima of blocks. Codes, types and sizes stay.

    The gradient of the KL divergence is taken through the whole model, for the codes as they are. One window of eight only
    judges: of the file as it was and what each time through the text made of it, the one with the least divergence there is
    written, so that it may be the one that was given. Needs torch; the quantised file and the values between layers have to fit
    the memory.

    Returns a `TuneResult`. Raises PlanError for what stands in the way before any work.
    """
    import_torch("tune")
    text = parse_text(str(request.text or BUNDLED)).path
    opened, threads = open_gguf(Path(request.source)), request.threads or available_cpus()
    refuse_inputs([Path(request.out)], [*opened.paths, text])
    original, model = load_model(request.original, threads=threads, exact=True), load_model(opened.path, threads=threads)
    windows = _windows(original, model, text, request.chunks)
    options = write_options(request)
    with reporting(request.progress) as report:
        weights, divergences = _tunable(model, request), []
        parameters = sum(x.size for x in weights.vectors.values()) + sum(t.changes.size for t in weights.matrices.values())
        kept = 4 * windows.size * original.graph.n_embd
        note(
            f"tune: {parameters:,} numbers of {len(weights.vectors)} norms and {len(weights.matrices)} matrices, on "
            f"{len(windows)} windows of {windows.shape[1]} tokens, of which {judging(len(windows)).sum()} judge; what the "
            f"original model makes of them takes {size_text(kept)} of memory"
        )
        if not request.dry_run:
            divergences = _tune(original, model, weights, windows, request.epochs, threads, report)
            _say(divergences)
        plan, tuned = _plan(opened, weights, request, text)
        result = write_model(plan, "tune", gguf_source(opened), options, report, inputs=[text])
    return TuneResult(**vars(result), divergences=divergences, tuned=tuned)


def _windows(original: Model, model: Model, text: Path, chunks: int) -> np.ndarray:
    """Raises PlanError for a text that is too short, and for models that do not fit each other."""
    ours, theirs = model.graph, original.graph
    if (ours.n_vocab, ours.architecture) != (theirs.n_vocab, theirs.architecture):
        raise PlanError(
            f"{model.source.path} is of {ours.architecture} with {ours.n_vocab:,} tokens, {original.source.path} of "
            f"{theirs.architecture} with {theirs.n_vocab:,}: it was not made of that model"
        )
    n_ctx = min(N_CTX, ours.n_ctx_train or N_CTX)
    segments = read_segments(original, [parse_text(str(text))], max_tokens=(chunks + 1) * n_ctx)
    windows = cut_windows(original, segments, n_ctx, chunks=chunks).windows
    if not judging(len(windows)).any():
        raise PlanError(f"{text} fills {len(windows)} windows of {n_ctx} tokens; tuning needs 8, of which one judges")
    return windows


def _tunable(model: Model, request: TuneRequest) -> TunableWeights:
    from ..runtime.backends.torch.tunable import TunableWeights

    weights = TunableWeights(model.stored, model.graph, scales=not request.norms_only)
    if not weights.vectors and not weights.matrices:
        raise PlanError(f"{model.source.path} has nothing to tune: no norms in f32, and no types whose scales are floats")
    return weights


def _tune(
    original: Model, model: Model, weights: TunableWeights, windows: np.ndarray, epochs: int, threads: int, report: OnProgress
) -> list[float]:
    from ..runtime.backends.torch.parameter_gradients import ParameterGradients
    from ..runtime.backends.torch.weights import Weights

    hidden = original.hidden_of_windows(windows)
    exact = Weights(original.stored, {}, exact=True)
    gradients = ParameterGradients(model.graph, weights, original.graph, exact, threads)
    count = epochs * len(windows)
    stage = Stage(report, "tune", count, "window")

    def on_share(share: float) -> None:
        stage.reach(round(share * count))

    return descend(gradients, weights, windows, hidden, epochs, on_share)


def _say(divergences: list[float]) -> None:
    before, best = divergences[0], min(divergences)
    if best == before:
        note(f"tuning did not lower the KL divergence on the windows that judge ({before:.5f}): the weights stay as they were")
    else:
        note(f"KL divergence on the windows that judge: {before:.5f} before, {best:.5f} after tuning")


def _plan(opened: GGUFFile, weights: TunableWeights, request: TuneRequest, text: Path) -> tuple[Plan, int]:
    """The plan of the copy, and how many tensors differ."""
    changed = {name for name, x in weights.vectors.items() if x.any()}
    changed |= {name for name, tuned in weights.matrices.items() if tuned.changes.any()}
    may = changed if not request.dry_run else {*weights.vectors, *weights.matrices}

    def produce(name: str, kind: OutputKind) -> Produce:
        if name not in changed:
            return opened.tensors[name].read
        if name in weights.matrices:
            rows = weights.matrices[name].q
        else:
            rows = weights.numbers(name).astype("<f4").reshape(-1, kind.shape[0]).view(np.uint8)
        return lambda start, stop: rows[start:stop]

    outputs = Outputs(produce)
    for info in opened.tensors.values():
        if not info.type.is_known:
            raise PlanError(f"{info.path}: tensor {info.name} is of unknown {info.type.name}; it cannot be copied")
        outputs.add(info.name, OutputKind(info.shape, info.type.name, info.type, "tuned" if info.name in may else "kept"))
    numbers = {path: number for number, path in enumerate(opened.paths)}
    if request.keep_split and len(numbers) < 2:
        raise PlanError(f"{opened.path} is one file, so there is no split to keep")
    shards = {info.name: numbers[info.path] for info in opened.tensors.values()} if request.keep_split else None
    metadata = {**opened.metadata, "quantize.tuning.dataset": text.name} if may else opened.metadata
    asked = f"{request.original} {text} {request.chunks} {request.epochs} {request.norms_only}"
    return make_plan(outputs, metadata, request.out, identity=f"{opened.identity} tuned {asked}", shards=shards), len(changed)
