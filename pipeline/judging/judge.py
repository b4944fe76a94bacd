"""Measures models on the same windows of a text against the same baseline, and keeps the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...errors import FormatError, MillError
from ...formats.file_range import range_checksum, read_range
from ...jobs.atomic_write import atomic_file
from ...runtime import Model
from ...runtime.evaluate.baseline import Baseline, scored_outputs
from ...runtime.evaluate.divergence import ModelPredictions, Predictions
from ...runtime.evaluate.logits_file import StoredPredictions, scored
from ...runtime.evaluate.perplexity import Perplexity, perplexity, with_bos
from ...runtime.evaluate.provenance import describe_model, describe_program, describe_settings
from ..common.baseline import describe_stored
from ..common.messages import note
from ..common.models import CHECKPOINT_OPTIONS, open_model
from ..common.progress import WINDOWS, OnProgress, Stage
from ..common.reading import most_together
from .candidates import StockMix, stock_name
from .results import Result, ResultsFile, result_key

_DIGEST_BYTES = 8  # xxh3 of all before, at the end of the file


class StoredOutputs:
    """A baseline model whose outputs for some windows are in a file, float32 [windows, scored, n_embd]; its head makes logits
    of them."""

    def __init__(self, model: Model, file: Path, n_ctx: int):
        self.model, self._file = model, file
        self._shape = scored(n_ctx), model.graph.n_embd
        self.path, self.n_vocab = model.source.path, model.n_vocab

    def predictions(self, windows: np.ndarray, first: int) -> Sequence[Predictions]:
        rows, width = self._shape
        data = read_range(self._file, 4 * first * rows * width, 4 * len(windows) * rows * width)
        outputs, targets = data.view("<f4").reshape(-1, rows, width), windows[:, windows.shape[1] // 2 + 1 :]
        return [ModelPredictions(self.model, *each) for each in zip(outputs, targets, strict=True)]

    def explain_nonfinite(self, window: np.ndarray) -> MillError:
        return self.model.explain_nonfinite(window)


def are_whole(file: Path, n_windows: int, n_ctx: int, n_embd: int) -> bool:
    """Whether the file is there, and holds what `write_outputs` wrote for so many windows."""
    nbytes = 4 * n_windows * scored(n_ctx) * n_embd
    try:
        if file.stat().st_size != nbytes + _DIGEST_BYTES:
            return False
        return range_checksum(file, 0, nbytes) == read_range(file, nbytes, _DIGEST_BYTES).tobytes().hex()
    except (OSError, FormatError):
        return False


def write_outputs(model: Model, windows: np.ndarray, together: int, file: Path, on_window: Callable[[int], None]) -> None:
    """Runs windows int64 [n, n_ctx], so many in one pass, and writes the outputs that predict their second halves.

    on_window: called with the number of windows done. Raises MillError for outputs that are not finite.
    """
    digest = xxhash.xxh3_64()
    with atomic_file(file) as out:
        for first in range(0, len(windows), together):
            batch = windows[first : first + together]
            for output in scored_outputs(model, batch):
                data = output.astype("<f4").tobytes()
                digest.update(data)
                out.write(data)
            on_window(first + len(batch))
        out.write(digest.digest())


class Judge:
    """Measures one model after the other.

    folder      for the baseline's outputs
    kept        the results
    tokens      int64 [windows, n_ctx], before any of them is replaced by BOS
    against     the baseline: a model, or a file of its predictions
    about_text  what `describe_text` says
    memory      bytes that bound how many windows run in one pass; None: as many as fit into the batch
    """

    def __init__(
        self,
        folder: Path,
        kept: ResultsFile,
        tokens: np.ndarray,
        against: Model | StoredPredictions,
        about_text: dict[str, Any] | None,
        memory: int | None = None,
    ):
        self.folder, self.kept, self.tokens, self.against, self.about_text = folder, kept, tokens, against, about_text
        self._memory = memory
        self.about_baseline = describe_model(against) if isinstance(against, Model) else describe_stored(against)
        self._baseline: Baseline | None = None if isinstance(against, Model) else against

    def measure(self, model: Path | StockMix, settings: dict[str, Any], report: OnProgress) -> Result:
        """The result of a model as it is kept, or measured now. settings: as for `open_model`. Raises MillError for what cannot
        be measured."""
        is_mix = isinstance(model, StockMix)
        if is_mix:
            settings = {name: value for name, value in settings.items() if name not in CHECKPOINT_OPTIONS}
        opened = open_model(model.source if is_mix else model, settings)
        about = describe_model(opened)
        if is_mix:
            about |= {"path": model.path, "files": [], "stock": model.name, "identity": opened.source.identity}
            about["file_bytes"] = model.file_bytes
        stock = model.name if is_mix else stock_name(opened.metadata)
        return self._measured(opened, about, report, stock=stock, is_written=not is_mix)

    def noise_floor(self, settings: dict[str, Any], report: OnProgress) -> Result | None:
        """The result of the baseline with activations rounded to bf16; None where the baseline is a file of predictions."""
        if not isinstance(self.against, Model):
            return None
        given = {name: value for name, value in settings.items() if name not in CHECKPOINT_OPTIONS}
        opened = open_model(self.against.stored, {**given, "round_activations": True})
        return self._measured(opened, self.about_baseline, report, is_noise=True)

    def _measured(
        self,
        opened: Model,
        about: dict[str, Any],
        report: OnProgress,
        *,
        stock: str | None = None,
        is_written: bool = True,
        is_noise: bool = False,
    ) -> Result:
        """about: what `describe_model` says; stock: the file type; is_written: whether there is a file, so that its speed says
        something."""
        key, kept = self._key(opened, about, self.about_baseline["files"]), self.kept.noise if is_noise else self.kept.results
        if key in kept:
            note(f"{about['path']}: measured before ({self.kept.path})", detail=True)
            return {**kept[key], "model": about["path"]}  # maybe of a copy with another name
        baseline = self._opened_baseline(report)
        stage = Stage(report, "noise floor" if is_noise else Path(about["path"]).name, len(self.tokens), WINDOWS)

        def on_chunk(so_far: Perplexity, total: int) -> None:
            stage.reach(so_far.chunks, total, f"KL divergence {so_far.kld_mean or 0:.4f}")

        n_ctx = self.tokens.shape[1]
        base = self.against if isinstance(self.against, Model) else None
        with stage.watching(opened):
            figures = perplexity(
                opened,
                self.tokens.ravel(),
                n_ctx=n_ctx,
                on_chunk=on_chunk,
                baseline=baseline,
                together=most_together([opened], n_ctx, len(self.tokens), base, self._memory),
            ).as_json()
        opened.release()
        if not is_written:
            figures["tokens_per_second"] = None  # its weights are encoded as they are read
        result = {"key": key, "model": about["path"], "stock": stock}
        result |= {"baseline": baseline.path, **figures, "about": about, "baseline_about": self.about_baseline}
        result |= {"settings": describe_settings(opened), "text_digest": self.about_text, "program": describe_program()}
        self.kept.add(key, result, is_noise=is_noise)
        return result

    def _key(self, model: Model, about: dict[str, Any], baseline: list[dict[str, Any]] | None) -> str:
        digest = xxhash.xxh3_64_hexdigest(with_bos(model, self.tokens).tobytes())
        return result_key(about, digest, self.tokens.shape[1], baseline, describe_settings(model))

    def _opened_baseline(self, report: OnProgress) -> Baseline:
        """The file of predictions, or the outputs of the model, which runs if they are not kept."""
        if self._baseline is None:
            model, n_ctx = self.against, self.tokens.shape[1]
            assert isinstance(model, Model)
            windows = with_bos(model, self.tokens)
            file = self.folder / f"baseline-{self._key(model, self.about_baseline, None)[:16]}.outputs"
            if not are_whole(file, len(windows), n_ctx, model.graph.n_embd):
                stage = Stage(report, "baseline", len(windows), WINDOWS)
                together = most_together([model], n_ctx, len(windows), memory=self._memory)
                with stage.watching(model):
                    write_outputs(model, windows, together, file, lambda done: stage.reach(done))
                model.release()  # of what passes take; its head is all that is used from now on
            self._baseline = StoredOutputs(model, file, n_ctx)
        return self._baseline
