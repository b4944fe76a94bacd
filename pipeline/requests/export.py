"""What `export` can be asked for."""

from __future__ import annotations

from pathlib import Path

from ...request_fields import argument, option, request
from ..common.arguments import Size
from ..common.progress import OnProgress

OUTTYPES = ("auto", "f32", "f16", "bf16")


@request
class ExportRequest:
    source: str | Path = argument("A GGUF file, or any shard of a split one.", kind="source", kw_only=False)
    out: str | Path = argument("The folder to write: a new one, or an empty one.", kind="out", kw_only=False)
    outtype: str = option(
        "Store weights in this type. auto: the one that the GGUF has most of them in, bf16 for a quantised one.",
        default="auto",
        choices=OUTTYPES,
    )
    max_shard_size: Size = option("Write safetensors files of at most this size.", default="5G", metavar="SIZE")
    dry_run: bool = option("Only say what would be written.", default=False)
    progress: OnProgress | bool | None = option(
        "Call this with each `Progress` report, in numbers; True shows a bar.", default=None, in_cli=False
    )
