"""What `tune` can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...request_fields import argument, option, request
from .groups import OutputOptions


@request
class TuneRequest(OutputOptions):
    original: str | Path = argument(
        "The model that was quantised: a GGUF file, a checkpoint's folder or hf:OWNER/NAME.", kind="source", kw_only=False
    )
    source: str | Path = argument("The quantised GGUF, or any shard of a split one.", kind="file", kw_only=False)
    out: str | Path = argument("The file to write.", kind="out", kw_only=False)
    text: str | Path | Sequence[str | Path] = option(
        "Read this text: plain, .jsonl or .parquet; may be given several times, for an equal share each.",
        doc="PATH, or several, to read in equal shares: text, .jsonl or .parquet.",
        default=(),
        flags="-f --file",
        kind="weighted_texts",
        metavar="PATH",
        shown="the text that comes with the program",
    )
    chunks: int = option("Read this many windows of 512 tokens; every eighth judges the others.", default=128, least=8)
    epochs: int = option("Go through the text this many times.", default=2, least=1)
    norms_only: bool = option("Leave the scales of matrices as they are.", default=False)
    device: str | None = option(
        "Compute gradients on this device of torch: cuda, cuda:1, xpu, mps, cpu, auto; or none.",
        default=None,
        metavar="NAME",
        shown="the processor",
        section="Devices",
    )
    keep_split: bool = option("Write as many files as the source has, with the same tensors.", default=False)
