"""`ggufmill tune`: norms and scales of a quantised file come nearer to the predictions of the model that it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..data_classes import dataclass
from ..errors import PlanError
from ..formats import GGUFFile, open_gguf
from ..imatrix.calibration import cut_windows
from ..imatrix.texts import CalibrationText, parse_text, read_segments
from ..jobs.outputs import OutputKind, Outputs, Produce
from ..jobs.plan import Plan, make_plan
from ..operating_system.processors import available_cpus
from ..quantize.gguf_source import gguf_source
from ..quantize.tensor_outputs import TUNED
from ..recipes import BUNDLED
from ..runtime import Model, load_model
from ..runtime.placement.torch_devices import import_torch
from .common.arguments import refuse_inputs
from .common.encoder_device import computing_device
from .common.progress import reporting
from .common.shown import shown
from .requests.tune import TuneRequest
from .requests.verb import verb
from .tuning.tuning import DATASET, Tuning
from .writing.write_model import WriteResult, write_model
from .writing.write_options import write_options

N_CTX = 512  # tokens of a window


@shown
@dataclass
class TuneResult(WriteResult):
    """What became of tuning.

    divergences  mean KL divergence on the windows that judge: of the file as it was, and after each time through the text; the
                 least is the one that was written. Empty with dry_run, and of a job that was finished before
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
    the memory. An interrupted call is continued by `resume`, to the same bytes.

    Returns a `TuneResult`. Raises PlanError for what stands in the way before any work.
    """
    import_torch("tune")
    texts = [parse_text(str(text)) for text in _several(request.text) or (BUNDLED,)]
    opened, threads = open_gguf(Path(request.source)), request.threads or available_cpus()
    inputs = [text.path for text in texts]
    refuse_inputs([Path(request.out)], [*opened.paths, *inputs])
    original, model = load_model(request.original, threads=threads, exact=True), load_model(opened.path, threads=threads)
    windows = _windows(original, texts, request.chunks)
    device = computing_device(request.device)
    tuning = Tuning(original, windows, request.epochs, request.norms_only, threads, device)
    weights = tuning.weights_of(model)
    plan = _plan(opened, set(weights.changes), request, texts)
    tuning.describe(model, weights)
    del weights, model
    with reporting(request.progress) as report:
        options = replace(write_options(request), tuning=tuning)
        result = write_model(plan, "copy", gguf_source(opened), options, report, inputs=inputs)
    return TuneResult(**vars(result), divergences=tuning.divergences, tuned=tuning.tuned)


def _several(texts: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [texts] if isinstance(texts, str | Path) else texts


def _windows(original: Model, texts: Sequence[CalibrationText], chunks: int) -> np.ndarray:
    """As many windows of each text, one after the other. Raises PlanError for a text that is too short for any."""
    n_ctx, parts = min(N_CTX, original.graph.n_ctx_train or N_CTX), []
    for number, text in enumerate(texts):
        share = chunks * (number + 1) // len(texts) - chunks * number // len(texts)
        segments = read_segments(original, [text], max_tokens=(share + 1) * n_ctx)
        parts.append(cut_windows(original, segments, n_ctx, chunks=share).windows)
    return np.concatenate(parts)


def _plan(opened: GGUFFile, tunable: set[str], request: TuneRequest, texts: Sequence[CalibrationText]) -> Plan:
    """The plan of the copy. tunable: names of the tensors that may become others."""

    def produce(name: str, kind: OutputKind) -> Produce:
        return opened.tensors[name].read

    outputs = Outputs(produce)
    for info in opened.tensors.values():
        if not info.type.is_known:
            raise PlanError(f"{info.path}: tensor {info.name} is of unknown {info.type.name}; it cannot be copied")
        outputs.add(info.name, OutputKind(info.shape, info.type.name, info.type, TUNED if info.name in tunable else "kept"))
    numbers = {path: number for number, path in enumerate(opened.paths)}
    if request.keep_split and len(numbers) < 2:
        raise PlanError(f"{opened.path} is one file, so there is no split to keep")
    shards = {info.name: numbers[info.path] for info in opened.tensors.values()} if request.keep_split else None
    names = ", ".join(text.path.name for text in texts)
    asked = f"{request.original} {[str(text.path) for text in texts]} {request.chunks} {request.epochs} {request.norms_only}"
    metadata = {**opened.metadata, DATASET: names}
    return make_plan(outputs, metadata, request.out, identity=f"{opened.identity} tuned {asked}", shards=shards)
