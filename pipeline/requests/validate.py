"""What the stage `validate` of a recipe can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...request_fields import option, request


@request
class ValidateRequest:
    text: str | Path | None = option("Measure on this text.", default=None, kind="calibration_text", key="validate.text")
    n_ctx: int | None = option("Read windows of this many tokens.", default=None, shown="512", key="validate.ctx")
    chunks: int | None = option("Read only this many windows.", default=None, shown="all", key="validate.chunks")
    from_chunk: int = option("Leave out this many windows at the beginning.", default=0, key="validate.from_chunk")
    baseline: str = option("Compare with the source in this type.", default="bf16", key="validate.baseline")
    prompts: str | Sequence[str] = option("Show what both models make of these prompts.", default=(), key="validate.prompt")
    n_predict: int = option("Generate this many tokens after each prompt.", default=64, key="validate.n")
    stock: Sequence[str] = option("Measure these file types of the source too.", default=(), key="validate.stock")
    mtp: bool = option("Measure each draft layer too.", default=False, key="validate.mtp")
    max_ppl_ratio: float | None = option(
        "Allow at most this many times the baseline's perplexity.", default=None, key="validate.max_ppl_ratio"
    )
    max_kld: float | None = option("Allow at most this KL divergence.", default=None, key="validate.max_kld")
