"""What reading windows of a text with models takes: memory, and seconds on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...runtime import Model
from ...runtime.backends import CACHED_BYTES
from ...runtime.evaluate.divergence import BLOCK_BYTES
from ...runtime.evaluate.logits_file import scored
from ...runtime.evaluate.perplexity import windows_together
from ...runtime.timing import head_seconds, layers_seconds
from .forecast import Forecast, free_space, interpreting
from .memory import warn_over

# Anonymous memory of a program that has loaded a model: its modules, and for each token of the vocabulary; and its kernels when
# it has run.
_LOADED, _TOKEN, _KERNELS = 60 << 20, 370, 40 << 20
_TOKENISING = 1250  # in the place of _TOKEN, while a text is made tokens, which is before a pass
_STARTING, _TOKEN_STARTING = 1.25, 4e-6  # the same of seconds of the processor, where `interpreting` is 1
TORCH_BYTES, TORCH_STARTING = (
    320 << 20,
    2.0,
)  # what torch 2.14 adds to both: 262 MiB as it is imported, the rest in its first products


def loaded_bytes(models: Sequence[Model]) -> int:
    """Bytes of a program that has loaded these models, beside their files."""
    return _LOADED + sum(_TOKEN * model.n_embeddings + model.packed_bytes for model in models)


def started_bytes(models: Sequence[Model]) -> int:
    """Bytes of a program that has run these models, beside their files and what a pass takes."""
    return loaded_bytes(models) + _KERNELS + sum(model.executable.weight_bytes() for model in models)


def tokenising_bytes(models: Sequence[Model]) -> int:
    """Bytes of a program that has loaded these models while a text is made tokens."""
    return loaded_bytes(models) + (_TOKENISING - _TOKEN) * max(model.n_embeddings for model in models)


def start_seconds(models: Sequence[Model]) -> float:
    """Of the processor, until the first window runs."""
    return interpreting() * (_STARTING + sum(_TOKEN_STARTING * model.n_embeddings for model in models))


def reading_memory(models: Sequence[Model], n_ctx: int, together: int, baseline: Model | None = None) -> int | None:
    """Bytes that are no file's, at the most, while these models, and a baseline, score windows, so many together: the results
    of all are kept until they are scored, a block of logits of each at a time; and small passes, by each model. None: not
    known."""
    running = [*models, *([baseline] if baseline is not None else [])]
    passes = [nbytes for model in running if (nbytes := model.windows_bytes(together, n_ctx)) is not None]
    if len(passes) < len(running):
        return None
    stay = sorted(nbytes for nbytes in passes if nbytes <= CACHED_BYTES)[: len(running) - 1]
    kept = sum(4 * together * n_ctx * model.graph.n_embd for model in running[1:])
    blocks = logits_bytes(models[0], n_ctx, is_compared=baseline is not None)
    return max(tokenising_bytes(running), started_bytes(running) + kept + sum(stay) + max(blocks, *passes))


def logits_bytes(model: Model, n_ctx: int, *, is_compared: bool) -> int:
    """Bytes of the logits that are scored at a time; is_compared: with those of a baseline."""
    block = min(BLOCK_BYTES, 4 * model.n_vocab * scored(n_ctx))
    return block * (3 if is_compared else 1)


def most_together(
    models: Sequence[Model], n_ctx: int, windows: int, baseline: Model | None = None, memory: int | None = None
) -> int:
    """How many windows run in one pass: as many as fit into the first model's batch and into so many bytes, but one at least,
    with a warning where that takes more."""
    together = min(windows, windows_together(models[0], n_ctx))
    while memory is not None and (taken := reading_memory(models, n_ctx, together, baseline)) is not None and taken > memory:
        if together == 1:
            warn_over(taken, memory, f"a window of {n_ctx} tokens", "smaller ones (-c) take less")
            break
        together -= 1
    return together


def reading_forecast(
    seconds: Mapping[str, float], memory: int | None, models: Sequence[Model], folder: Path, nbytes: int = 0
) -> Forecast:
    """seconds: of each step, without the start of the program; nbytes: that are written to a folder."""
    threads = models[0].workers.count
    parts = {"start": start_seconds(models) / threads, **seconds}
    return Forecast(nbytes, free_space(folder), parts, memory=memory, threads=threads)


def reading_seconds(model: Model, tokens: int, n_ctx: int, against: Model | None = None, *, is_scored: bool = True) -> float:
    """Of reading a text of so many tokens in windows of n_ctx, and of scoring it. against: a baseline whose outputs are there,
    and are compared with."""
    head = head_seconds(model, tokens // n_ctx * scored(n_ctx), against) if is_scored and model.has_head else 0.0
    return (layers_seconds(model, tokens, n_ctx) + head) / model.workers.count
