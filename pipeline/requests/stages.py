"""What stages of a recipe can be asked for that their verb has not, or that are no verbs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...request_fields import option, request


@request
class SourceRequest:
    model: str = option("Read this checkpoint's folder, GGUF, or hf:OWNER/NAME of the Hub.", default="", key="source.model")
    revision: str | None = option("Read this revision of hf:OWNER/NAME.", default=None, shown="main", key="source.revision")
    working: str | None = option("Run a copy of the source in this type.", default=None, key="source.working")


@request
class GivenImatrixRequest:
    file: str | Path | None = option(
        "Take this importance matrix instead of computing one.", default=None, kind="file", key="imatrix.file"
    )


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


@request
class ReportRequest:
    base_model: str | None = option("Name this model as the one it was made from.", default=None, key="report.base_model")
    quantized_by: str | None = option("Name this as who quantised it.", default=None, key="report.quantized_by")
    license: str | None = option("Name this licence.", default=None, key="report.license")
