"""`ggufmill warm-up`: kernels are compiled before they are needed."""

from __future__ import annotations

import time
from typing import Any

from ..data_classes import dataclass
from ..errors import UsageError
from ..quantize.encode import compile_codec
from ..simd.compile.compile_time import compiled_kernels
from .common.arguments import as_type
from .common.models import ModelLike, model_name, open_model
from .common.progress import OnProgress, Stage, reporting
from .common.shown import shown
from .requests.running import WarmUpRequest, settings_of
from .requests.verb import verb

_PASSES = (33,), (1,), (1, 1)  # tokens of sequences: as for a prompt, for generation, for several requests at once


@shown
@dataclass(frozen=True)
class WarmUpResult:
    """What `warm_up` compiled.

    types    names of the types whose codecs are ready
    model    the model whose kernels are ready; None: none was given
    kernels  how many were compiled; the others had been before
    """

    types: tuple[str, ...]
    model: str | None
    kernels: int
    seconds: float

    def as_json(self) -> dict[str, object]:
        """What --json prints: types, model, kernels, seconds."""
        return {"types": list(self.types), "model": self.model, "kernels": self.kernels, "seconds": self.seconds}


@verb(WarmUpRequest)
def warm_up(request: WarmUpRequest) -> WarmUpResult:
    """Compiles the kernels that a model needs for prompts and generation, and the codecs of types.

    Kernels are compiled when they are first needed, and kept on disk: this does it beforehand, for instance while an image of a
    container is built. What is compiled already is not compiled again.

    Raises UsageError when there is nothing to compile, PlanError for an unknown type.

    Example:
        >>> from ggufmill import warm_up
        >>> warm_up(types=["q4_K", "q4_k_r4"]).types
        ('q4_K', 'q4_k_r4')
    """
    if request.model is None and not request.types:
        raise UsageError("nothing to compile: name a MODEL or --types")
    started, before = time.monotonic(), compiled_kernels()
    wanted = [tensor_type for name in request.types if (tensor_type := as_type(name)) is not None]
    with reporting(request.progress) as report:
        if wanted:
            stage = Stage(report, "codecs", len(wanted), "type")
            for tensor_type in wanted:
                compile_codec(tensor_type.name)
                stage.advance(1, tensor_type.name)
        if request.model is not None:
            _compile_model(request.model, settings_of(request), report)
    names = tuple(tensor_type.name for tensor_type in wanted)
    name = model_name(request.model) if request.model is not None else None
    return WarmUpResult(names, name, compiled_kernels() - before, time.monotonic() - started)


def _compile_model(model: ModelLike, settings: dict[str, Any], report: OnProgress) -> None:
    opened = open_model(model, settings)
    stage = Stage(report, "model", len(_PASSES), "pass")
    for counts in _PASSES:
        opened.feed([(opened.session(count + 1), [0] * count) for count in counts])
        stage.advance(1)
