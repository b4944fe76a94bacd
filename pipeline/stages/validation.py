"""The last stage of a run: the result measured against its source in a finer type."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...convert import open_source
from ...formats import TYPES, PlanError, TensorSource
from ...jobs.plan import Plan
from ...quantize.gguf_source import simulate_quantization
from ...quantize.planning import plan_quantize
from ...runtime import Model, load_model
from ...runtime.evaluate.compare import compare
from ...runtime.evaluate.perplexity import Perplexity, perplexity
from ...runtime.generation.generate import generate
from ..common.progress import WINDOWS, OnProgress, Stage
from .text import StageText

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

    def measure(self, plan: Plan, report: OnProgress) -> dict[str, Any]:
        """Perplexity of baseline and result with the divergence between them, errors of the layers, and a text from each.

        plan: of the file to validate. Returns the figures of `Perplexity` with running values, layers and texts, as JSON.
        """
        text = self.text
        models = {
            self.baseline: load_model(simulate_quantization(self.source, self.baseline_plan)),
            "result": load_model(open_source(plan.files[0].path)),
        }
        running: dict[str, list[float | None]] = {"perplexity": [], "baseline_perplexity": [], "kld_mean": []}
        stage = Stage(report, "validate", unit=WINDOWS)

        def on_chunk(so_far: Perplexity, total: int) -> None:
            stage.reach(so_far.chunks, total, f"perplexity {so_far.perplexity:.4f}")
            for figure, values in running.items():
                values.append(getattr(so_far, figure))

        figures = perplexity(
            models["result"],
            text.tokens,
            n_ctx=text.n_ctx,
            chunks=text.chunks,
            on_chunk=on_chunk,
            baseline=models[self.baseline],
            mtp=self.mtp,
        )
        base = self.baseline_plan
        measured: dict[str, Any] = {"baseline": self.baseline, "baseline_bytes": base.total_bytes, "dataset": text.path.name}
        measured |= {"baseline_bits": base.bits_per_weight, **figures.as_json(), "running": running}
        layers = compare(models[self.baseline], models["result"], text.tokens, text.n_ctx, chunks=1, weights=None)
        measured["layers"] = [asdict(layer) for layer in layers.layers]
        if self.prompt:
            measured["texts"] = {
                label: generate(model, self.prompt, n_predict=self.n_predict, temp=0).text() for label, model in models.items()
            }
        return measured

    def failures(self, figures: dict[str, Any]) -> list[str]:
        """The figures that exceed the recipe's limits, in words."""
        return [
            f"{figure} is {figures[figure]:.4f}, the recipe allows {limit} = {self.table[limit]}"
            for limit, figure in _LIMITS
            if limit in self.table and not figures[figure] <= self.table[limit]
        ]
