"""The last stage of a run: the result measured against its source in a finer type."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..convert import open_source
from ..formats import TYPES, PlanError, TensorSource
from ..jobs.plan import Plan
from ..quantize.gguf_source import simulate_quantization
from ..quantize.planning import plan_quantize
from ..runtime import Model, load_model
from ..runtime.evaluate.compare import compare
from ..runtime.evaluate.perplexity import Perplexity, perplexity
from ..runtime.generation.generate import generate
from .console import chunk_progress
from .stage_text import Words


class Validation:
    """What [validate] of a recipe asks for. wanted: the values of that table; words: its text.

    The baseline is what a file of that type would hold: the source's weights rounded to it, without the file.
    """

    def __init__(self, where: str, wanted: dict[str, Any], words: Words, source: TensorSource, allow_nonfinite: bool):
        self.where, self.wanted, self.words, self.source = f"{where}, [validate]", wanted, words, source
        self.name, self.prompt = wanted.get("baseline", "bf16"), wanted.get("prompt", "")
        self.length: int = wanted.get("n", 64)
        try:
            replaced: list[tuple[str, int]] | None = [] if allow_nonfinite else None
            self.baseline = plan_quantize(source, "baseline.gguf", type=TYPES[self.name], nonfinite_counts=replaced)
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
        return self.words.digest, self.words.n_ctx, self.words.chunks, self.name, self.prompt, self.length

    def measure(self, plan: Plan) -> dict[str, Any]:
        """Perplexity of baseline and result with the divergence between them, errors of the layers, and a text from each."""
        words, name = self.words, self.name
        models = {
            name: load_model(simulate_quantization(self.source, self.baseline)),
            "result": load_model(open_source(plan.files[0].path)),
        }
        running: dict[str, list[float | None]] = {"perplexity": [], "baseline_perplexity": [], "kld_mean": []}
        with chunk_progress("validate") as progress:

            def on_chunk(so_far: Perplexity, total: int) -> None:
                progress(so_far, total)
                for figure, values in running.items():
                    values.append(getattr(so_far, figure))

            result = perplexity(
                models["result"],
                words.tokens,
                n_ctx=words.n_ctx,
                chunks=words.chunks,
                on_chunk=on_chunk,
                baseline=models[name],
            )
        base = self.baseline
        found: dict[str, Any] = {"baseline": name, "baseline_bytes": base.total_bytes, "dataset": words.path.name}
        found |= {"baseline_bits": base.bits_per_weight, **result.as_json(), "running": running}
        layers = compare(models[name], models["result"], words.tokens, words.n_ctx, chunks=1, weights=None)
        found["layers"] = [asdict(layer) for layer in layers.layers]
        if self.prompt:
            found["texts"] = {
                label: generate(model, self.prompt, n_predict=self.length, temp=0).text() for label, model in models.items()
            }
        return found

    def failures(self, figures: dict[str, Any]) -> list[str]:
        """What exceeds the limits that the recipe sets."""
        return [
            f"{figure} is {figures[figure]:.4f}, the recipe allows {limit} = {self.wanted[limit]}"
            for limit, figure in (("max_ppl_ratio", "ratio"), ("max_kld", "kld_mean"))
            if limit in self.wanted and not figures[figure] <= self.wanted[limit]
        ]
