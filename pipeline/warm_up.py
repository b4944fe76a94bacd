"""`ggufmill warm-up`: kernels are compiled before they are needed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from ..formats import TYPES, TensorType
from ..operating_system.process import low_priority
from ..quantize import can_encode, codecs, decode, encode
from ..simd.compile.compile_time import compiled_kernels, compiling_for, waiting_for_compilation
from ..simd.compile.kernel_cache import is_marked_compiled, mark_compiled
from .common.arguments import as_type
from .common.models import ModelLike, model_name, open_model
from .common.progress import OnProgress, Stage, reporting
from .common.shown import shown
from .requests.running import WarmUpRequest
from .requests.verb import verb

_PASSES = (33, 4, 1)  # tokens: as for a prompt, for several requests at once, for generation
_COLUMNS = 512


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
                _compile_codec(tensor_type)
                stage.advance(1, tensor_type.name)
        if request.model is not None:
            given = {
                "threads": request.threads,
                "architecture": request.architecture,
                "allow_lossy_config": request.allow_lossy_config or None,
            }
            _compile_model(request.model, {name: value for name, value in given.items() if value is not None}, report)
    names = tuple(tensor_type.name for tensor_type in wanted)
    name = model_name(request.model) if request.model is not None else None
    return WarmUpResult(names, name, compiled_kernels() - before, time.monotonic() - started)


def _compile_codec(tensor_type: TensorType) -> None:
    """Encodes and decodes a few rows, with importance and without."""
    if not can_encode(tensor_type):
        return
    columns = lcm(_COLUMNS, tensor_type.block)
    x = np.random.default_rng(0).standard_normal((tensor_type.rows, columns), np.float32)
    for importance in (np.ones(columns, np.float32), None):
        decode(encode(x, tensor_type.name, importance), tensor_type.name, columns)
    mark_compiled(_codec_source(tensor_type), tensor_type.name)


def _compile_model(model: ModelLike, settings: dict[str, Any], report: OnProgress) -> None:
    opened = open_model(model, settings)
    stage = Stage(report, "model", len(_PASSES), "pass")
    session = opened.session(sum(_PASSES))
    for count in _PASSES:
        session.feed([0] * count)
        stage.advance(1)


@contextmanager
def codecs_in_background(types: Iterable[TensorType]) -> Iterator[subprocess.Popen | None]:
    """Within this, another process of low priority compiles the codecs of those types whose kernels are not on disk.

    The end of the context waits for it: what comes then would have to compile them itself. After an error it is stopped. Yields
    the process; None if there is nothing to compile, or if it cannot be started.
    """
    names = ",".join(sorted({tensor_type.name for tensor_type in types if _is_missing(tensor_type)}))
    command = low_priority([sys.executable, "-m", __name__.partition(".")[0], "warm-up", "--types", names])
    try:
        silent = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent) if names else None
    except OSError:
        process = None
    try:
        yield process
    except BaseException:
        if process is not None:
            process.terminate()
        raise
    finally:
        if process is not None:
            with compiling_for(names.replace(",", ", ")), waiting_for_compilation():
                process.wait()


def _is_missing(tensor_type: TensorType) -> bool:
    """Whether the kernels of a type's codec were never compiled by `warm_up`."""
    return can_encode(tensor_type) and not is_marked_compiled(_codec_source(tensor_type), tensor_type.name)


def _codec_source(tensor_type: TensorType) -> Path:
    """The module of a type's codec; of an interleaved type, its plain twin's."""
    codec = tensor_type.codec or TYPES.plain(tensor_type).codec
    assert codec is not None
    return Path(codecs.__path__[0], *codec.split(".")).with_suffix(".py")
