"""What `make` can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from ...request_fields import argument, option, request
from ...runtime.settings import CacheTypes
from ..common.arguments import Size
from ..common.progress import OnProgress
from .groups import AllowedTypes, SourceOptions

EFFORTS = 4  # the largest


@request
class Room:
    """What the file has to fit into."""

    section: ClassVar[str] = "Size"

    fit: Size | None = option(
        "Make a file of at most this size (20G, 20GiB).", default=None, kind="size", shown="what fits this machine"
    )
    ram: Size | None = option(
        "Make weights, cache and buffers fit into this much memory of the machine.", default=None, kind="size", metavar="SIZE"
    )
    vram: Size | Sequence[Size] = option(
        "Fit them into this much memory of each GPU too (24GiB,24GiB); the rest is for the processor.",
        default=(),
        kind="sizes",
        metavar="SIZE,...",
    )
    n_ctx: int = option(
        "Leave room for a context of this many tokens.", default=32768, flags="-c --ctx-size", least=1, most=2**31 - 1
    )


@request
class MakeRequest(Room, CacheTypes, AllowedTypes, SourceOptions):
    model: str | Path = argument("A checkpoint's folder, hf:OWNER/NAME or a GGUF file.", kind="source", kw_only=False)
    out: str | Path | None = option(
        "Write the results to this folder.",
        default=None,
        flags="-o --out",
        kind="folder",
        shown="out/NAME-BITSbpw",
        kw_only=False,
    )
    effort: int = option(
        "Spend this much effort: 0 does not run the model, 1 computes an importance matrix, 2 covariances, 3 and 4 curvature "
        "(where torch is installed); 4 also encodes in the order of the model. Each reads more text and tries more types than "
        "the one before.",
        default=2,
        least=0,
        most=EFFORTS,
    )
    tune: bool = option(
        "Tune norms and scales of the file to the model's predictions, at the end of --effort 4.",
        default=False,
    )
    text: str | Path | Sequence[str | Path] = option(
        "Read this text to calibrate on: text, .jsonl or .parquet; may be given several times. `self`: the model writes one.",
        doc="PATH or PATH:WEIGHT, or several, to calibrate on: text, .jsonl or .parquet; 'self': the model writes one.",
        default=(),
        flags="-f --file",
        kind="weighted_texts",
        metavar="PATH[:WEIGHT]",
        shown="the text that comes with the program",
    )
    heldout: str | Path | None = option(
        "Judge the result on this text.",
        default=None,
        kind="text",
        shown="the last quarter of a single -f, which is left out there",
    )
    force: bool = option("Repeat every stage, also those that are finished.", default=False)
    dry_run: bool = option("Show sizes, times and the expected KL divergence; write nothing.", default=False)
    threads: int | None = option(
        "Use this many worker threads.", default=None, flags="-t --threads", least=1, shown="all processors"
    )
    cluster: str | None = option(
        "Divide the work among dask workers: tcp://HOST:PORT, a scheduler file, or local:N.", default=None, metavar="ADDRESS"
    )
    progress: OnProgress | bool | None = option("Call this with the reports of `run_recipe`.", default=None, in_cli=False)
