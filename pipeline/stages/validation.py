"""The last stage of a run: the result measured against its source in a finer type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...convert import open_source
from ...formats import TYPES, PlanError, TensorSource
from ...jobs.plan import Plan
from ...quantize.gguf_source import simulate_quantization
from ...quantize.planning import plan_quantize
from ...runtime import Model, load_model
from ...runtime.evaluate.baseline import ModelBaseline
from ...runtime.evaluate.compare import compare
from ...runtime.evaluate.perplexity import Perplexity, perplexities
from ...runtime.generation.generate import generate
from ..common.progress import WINDOWS, OnProgress, Stage
from .text import StageText

_RUNNING = ("perplexity", "error", "baseline_perplexity", "ratio_error", "kld_mean", "kld_error")  # kept after each window
_LIMITS = (("max_ppl_ratio", "ratio"), ("max_kld", "kld_mean"))  # keys of [validate] -> figures


class Validation:
    """What [validate] of a recipe asks for.

    The baseline is what a file of that type would hold: the source's weights rounded to it, without the file.

    recipe: the recipe's name, for messages; table: the values of [validate]; text: its text. Raises PlanError for a baseline
    that cannot be made.
    """

    def __init__(self, recipe: str, table: dict[str, Any], text: StageText, source: TensorSource, allow_nonfinite: bool):
        self.where, self.table, self.text, self.source = f"{recipe}, [validate]", table, text, source
        self.baseline, self.prompt = table.get("baseline", "bf16"), table.get("prompt", "")
        self.n_predict: int = table.get("n", 64)
        self.mtp: bool = table.get("mtp", False)
        try:
            replaced: list[tuple[str, int]] | None = [] if allow_nonfinite else None
            self.baseline_plan = plan_quantize(source, "baseline.gguf", type=TYPES[self.baseline], nonfinite_counts=replaced)
        except PlanError as error:
            raise PlanError(f"{self.where} baseline: {error}") from None

    def check(self, model: Model) -> None:
        """Raises PlanError for a prompt that the model cannot hold."""
        length = len(model.tokenizer.encode(self.prompt, parse_special=True))
        if length > model.n_ctx:
            raise PlanError(f"{self.where} prompt: it has {length} tokens, the model holds {model.n_ctx}")

    @property
    def settings(self) -> tuple[object, ...]:
        """All that decides the figures, beside the two models."""
        return self.text.digest, self.text.n_ctx, self.text.chunks, self.baseline, self.prompt, self.n_predict, self.mtp

    def measure(self, plans: Sequence[Plan], report: OnProgress) -> list[dict[str, Any]]:
        """Of each plan's file: perplexity of baseline and result with the divergence between them, errors of the layers, and a
        text from each. The baseline reads the text once for all.

        Returns the figures of `Perplexity` with running values, layers and texts, as JSON.
        """
        text, stage = self.text, Stage(report, "validate", unit=WINDOWS)
        baseline = load_model(simulate_quantization(self.source, self.baseline_plan))
        results = [load_model(open_source(plan.files[0].path)) for plan in plans]
        running: list[dict[str, list[float | None]]] = [{figure: [] for figure in _RUNNING} for _ in plans]

        def on_chunk(so_far: list[Perplexity], total: int) -> None:
            stage.reach(so_far[0].chunks, total, f"perplexity {so_far[0].perplexity:.4f}")
            for one, values in zip(so_far, running, strict=True):
                for figure in _RUNNING:
                    values[figure].append(getattr(one, figure))

        base = ModelBaseline(baseline)
        figures = perplexities(results, text.tokens, text.n_ctx, text.chunks, on_chunk, base, self.mtp)
        base_text = self._text_of(baseline) if self.prompt else ""
        return [
            self._described(one, values, baseline, result, base_text)
            for one, values, result in zip(figures, running, results, strict=True)
        ]

    def _text_of(self, model: Model) -> str:
        return generate(model, self.prompt, n_predict=self.n_predict, temp=0).text()

    def _described(
        self, figures: Perplexity, running: dict[str, list[float | None]], baseline: Model, result: Model, base_text: str
    ) -> dict[str, Any]:
        """The figures of a file with those of its layers, and what both models write."""
        text, base = self.text, self.baseline_plan
        measured: dict[str, Any] = {"baseline": self.baseline, "baseline_bytes": base.total_bytes, "dataset": text.path.name}
        measured |= {"baseline_bits": base.bits_per_weight, **figures.as_json(), "running": running}
        layers = compare(baseline, result, text.tokens, text.n_ctx, chunks=1, weights=None)
        measured["layers"] = [asdict(layer) for layer in layers.layers]
        if self.prompt:
            measured["texts"] = {self.baseline: base_text, "result": self._text_of(result)}
        return measured

    def failures(self, figures: dict[str, Any]) -> list[str]:
        """The figures that exceed the recipe's limits, in words."""
        return [
            f"{figure} is {figures[figure]:.4f}, the recipe allows {limit} = {self.table[limit]}"
            for limit, figure in _LIMITS
            if limit in self.table and not figures[figure] <= self.table[limit]
        ]
