"""The last stage of a run: the result measured against its source in a finer type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ...convert import open_source
from ...formats import TYPES, PlanError, TensorSource
from ...jobs.plan import Plan
from ...quantize.gguf_source import simulate_quantization
from ...quantize.importance import Importance
from ...quantize.planning import plan_quantize
from ...quantize.recipes.mixes import file_type_name
from ...runtime import Model, load_model
from ...runtime.evaluate.baseline import ModelBaseline
from ...runtime.evaluate.compare import compare
from ...runtime.evaluate.perplexity import Perplexity, perplexities, perplexity
from ...runtime.generation.generate import generate
from ..common.progress import WINDOWS, OnProgress, Stage
from ..judging.verdict import NoiseFloor
from ..requests.stages import ValidateRequest
from .text import StageText

_RUNNING = ("perplexity", "error", "baseline_perplexity", "ratio_error", "kld_mean", "kld_error")  # kept after each window
FLOOR_WINDOWS = 8  # that the noise floor is measured on: of it only the order of magnitude counts
_LIMITS = {"max_ppl_ratio": "ratio", "max_kld": "kld_mean"}  # keys of [validate] -> figures


class Validation:
    """What [validate] of a recipe asks for.

    The baseline is what a file of that type would hold: the source's weights rounded to it, without the file.

    recipe: the recipe's name, for messages; text: the one that is asked for; running: gives what runs in place of the source,
    and then is the baseline. Raises PlanError for a baseline that cannot be made.
    """

    def __init__(
        self,
        recipe: str,
        asked: ValidateRequest,
        text: StageText,
        source: TensorSource,
        allow_nonfinite: bool,
        running: Callable[[], TensorSource] | None = None,
    ):
        self.where, self.asked, self.text, self.source = f"{recipe}, [validate]", asked, text, source
        self.running = running
        prompts = [asked.prompts] if isinstance(asked.prompts, str) else asked.prompts
        self.prompts = [prompt for prompt in prompts if prompt]
        self.stock: list[str] = [name for one in asked.stock if (name := file_type_name(one)) is not None]
        try:
            kind = TYPES[asked.baseline]
            self.baseline_plan = plan_quantize(source, "baseline.gguf", type=kind, allow_nonfinite=allow_nonfinite)
        except PlanError as error:
            raise PlanError(f"{self.where} baseline: {error}") from None

    def check(self, model: Model) -> None:
        """Raises PlanError for a prompt that the model cannot hold."""
        for prompt in self.prompts:
            length = len(model.tokenizer.encode(prompt, parse_special=True))
            if length > model.n_ctx:
                raise PlanError(f"{self.where} prompt: it has {length} tokens, the model holds {model.n_ctx}")

    @property
    def settings(self) -> tuple[object, ...]:
        """All that decides the figures, beside the two models."""
        return (*self.measuring, self.prompts, self.asked.n_predict)

    @property
    def measuring(self) -> tuple[object, ...]:
        """What of that decides the figures of stock mixes."""
        return self.text.digest, self.text.n_ctx, self.text.chunks, self.asked.baseline, self.asked.mtp

    @property
    def windows(self) -> int:
        """That are read of the text."""
        count = len(self.text.tokens) // self.text.n_ctx
        return count if self.text.chunks is None else min(count, self.text.chunks)

    def measure(self, plans: Sequence[Plan], report: OnProgress) -> list[dict[str, Any]]:
        """Measures each plan's file: perplexity of baseline and result with the divergence between them, errors of the layers,
        and texts from each. The baseline reads the text once for all.

        Returns the figures of `Perplexity` with running values, layers and texts, as JSON.
        """
        baseline, results = self._baseline(), [load_model(open_source(plan.files[0].path)) for plan in plans]
        measured = self._figures(baseline, results, Stage(report, "validate", self.windows, WINDOWS))
        floor = self._noise_floor(baseline, report)
        layers = Stage(report, "layers", len(results), WINDOWS)
        for result, figures in zip(results, measured, strict=True):
            figures["noise_floor"] = asdict(floor)
            with layers.watching(baseline):
                found = compare(baseline, result, self.text.tokens, self.text.n_ctx, chunks=1, weights=None).layers
            layers.advance()
            figures["layers"] = [asdict(layer) for layer in found]
        told = self._texts([baseline, *results], report)
        for own_texts, figures in zip(told[1:], measured, strict=True):
            each = zip(self.prompts, told[0], own_texts, strict=True)
            figures["texts"] = [{"prompt": prompt, "baseline": base, "result": own} for prompt, base, own in each]
        return measured

    def measure_stock(self, names: Sequence[str], importance: Importance | None, report: OnProgress) -> list[dict[str, Any]]:
        """The figures of file types of the source as they would be written, without a file: label, file_bytes, bits_per_weight
        and `validation`, as JSON."""
        given: dict[str, Any] = {"importance": importance, "ignore_imatrix_rules": True}
        plans = [plan_quantize(self.source, "stock.gguf", type=name, **given) for name in names]
        models = [load_model(simulate_quantization(self.source, plan)) for plan in plans]
        measured = self._figures(self._baseline(), models, Stage(report, "stock mixes", self.windows, WINDOWS))
        return [
            {"label": name, "file_bytes": plan.file_bytes, "bits_per_weight": plan.bits_per_weight, "validation": figures}
            for name, plan, figures in zip(names, plans, measured, strict=True)
        ]

    def baseline_source(self) -> TensorSource:
        """What is compared with."""
        return self.running() if self.running is not None else simulate_quantization(self.source, self.baseline_plan)

    def _baseline(self, **settings: bool) -> Model:
        return load_model(self.baseline_source(), **settings)

    def _figures(self, baseline: Model, results: Sequence[Model], stage: Stage) -> list[dict[str, Any]]:
        """The figures of each result, with their values after each window."""
        text, base = self.text, self.baseline_plan
        running: list[dict[str, list[float | None]]] = [{figure: [] for figure in _RUNNING} for _ in results]

        def on_chunk(so_far: list[Perplexity], total: int) -> None:
            stage.reach(so_far[0].chunks, total, f"perplexity {so_far[0].perplexity:.4f}")
            for one, values in zip(so_far, running, strict=True):
                for figure in _RUNNING:
                    values[figure].append(getattr(one, figure))

        of_text = text.tokens, text.n_ctx, text.chunks
        with stage.watching(baseline, *results):
            figures = perplexities(results, *of_text, on_chunk, ModelBaseline(baseline), self.asked.mtp)
        about = {"baseline": self.asked.baseline, "baseline_bytes": base.file_bytes, "dataset": text.name}
        about["baseline_bits"] = base.bits_per_weight
        return [about | one.as_json() | {"running": values} for one, values in zip(figures, running, strict=True)]

    def _noise_floor(self, baseline: Model, report: OnProgress) -> NoiseFloor:
        """On the first windows of the text."""
        text, rounded = self.text, self._baseline(round_activations=True)
        chunks = min(self.windows, FLOOR_WINDOWS)
        stage = Stage(report, "noise floor", chunks, WINDOWS)
        with stage.watching(baseline, rounded):
            figures = perplexity(
                rounded,
                text.tokens,
                text.n_ctx,
                chunks,
                lambda so_far, _: stage.reach(so_far.chunks),
                baseline=baseline,
            )
        return NoiseFloor.of(figures.as_json())

    def _texts(self, models: Sequence[Model], report: OnProgress) -> list[list[str]]:
        """What each model writes after each prompt."""
        if not self.prompts:
            return [[] for _ in models]
        stage = Stage(report, "texts", len(models) * len(self.prompts), "text")

        def text(model: Model, prompt: str) -> str:
            running, pieces = generate(model, prompt, n_predict=self.asked.n_predict, temp=0), []
            for piece in running:
                pieces.append(piece)
                stage.within(min(1.0, len(running.tokens) / max(1, self.asked.n_predict)))
            stage.advance()
            return "".join(pieces)

        return [[text(model, prompt) for prompt in self.prompts] for model in models]

    @property
    def limits(self) -> dict[str, float]:
        """The recipe's limits that there are, by their names there."""
        return {name: limit for name in _LIMITS if (limit := getattr(self.asked, name)) is not None}

    def failures(self, figures: dict[str, Any]) -> list[str]:
        """The figures that exceed the recipe's limits, in words."""
        return [
            f"{_LIMITS[name]} is {figures[_LIMITS[name]]:.4f}, the recipe allows {name} = {limit}"
            for name, limit in self.limits.items()
            if not figures[_LIMITS[name]] <= limit
        ]
