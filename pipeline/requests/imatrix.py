"""What `imatrix` can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...request_fields import argument, option, request
from ..common.arguments import Size
from ..common.progress import OnProgress
from .running import RunningModel, window

if TYPE_CHECKING:
    from ..common.models import ModelLike


@request
class ImatrixRequest(RunningModel):
    model: ModelLike = argument(
        "A GGUF file, a checkpoint folder, or what `ggufmill.runtime.load_model` gave.", kind="model", kw_only=False
    )
    text: str | Path | Sequence[str | Path] | None = option(
        "Read this text, .jsonl or .parquet file, or - for standard input; may be given several times. A "
        "token of a:3 counts three times. `bundled` names the text that comes with the program, `self` one that "
        "the model writes.",
        doc="PATH or PATH:WEIGHT, or several: text, .jsonl or .parquet; a token of a:3 counts three times. 'bundled', or "
        "None: the text that comes with the program; 'self': the model writes one, next to `out`.",
        default=None,
        shown="bundled",
        flags="-f --file",
        kind="weighted_texts",
        metavar="PATH[:WEIGHT]",
        key="imatrix.text",
        kw_only=False,
    )
    out: str | Path | None = option(
        "Write this file; a name that ends in .dat selects the legacy format.",
        doc="The file to write, .dat for the legacy format; None: only the result is returned.",
        default=None,
        flags="-o --output",
        kind="out_file",
        kw_only=False,
    )
    text_seed: int | None = option(
        "Draw the text that the model writes (-f self) with this seed.", default=None, least=0, shown="0", rare=True
    )
    column: str | None = option(
        "Read this column of .jsonl and .parquet files.",
        default=None,
        shown="messages, conversations, text or content",
        rare=True,
    )
    template: str | Path | None = option(
        "Use this chat template for conversations.", default=None, metavar="NAME|FILE", shown="the model's own"
    )
    in_file: str | Path | Sequence[str | Path] = option(
        "Add the data of this imatrix; without MODEL these files are merged.", default=(), kind="files"
    )
    n_ctx: int | None = window("512", key="imatrix.ctx")
    chunks: int | None = option("Read only this many windows.", default=None, least=1, shown="all", key="imatrix.chunks")
    from_chunk: int | None = option(
        "Leave out this many windows at the beginning.", default=None, flags="--from-chunk --chunk", least=0, rare=True
    )
    process_output: bool = option(
        "Collect data for the output matrix too (the embeddings, if the model has no other).", default=False
    )
    process_embedding: bool = option(
        "Collect data for token_embd.weight: its rows, as often as the text uses them.", default=False
    )
    nextn: bool = option(
        "Collect data for the draft layers (MTP) too, which are run after the model.",
        default=False,
        key="imatrix.nextn",
        rare=True,
    )
    output_frequency: int | None = option(
        "Save what --resume needs to OUT.state after this many windows; 0 never does.",
        default=None,
        flags="-ofreq --output-frequency",
        least=0,
        shown="10",
        rare=True,
    )
    save_frequency: int | None = option(
        "Write OUT.at_N too after every N windows, at the end of the pass that they are in.", default=None, least=0, rare=True
    )
    covariance: str | Path | None = option(
        "Write the covariances of all inputs to this file too, for `quantize`.",
        default=None,
        kind="out_file",
        metavar="FILE",
        key="imatrix.covariance",
    )
    covariance_experts: bool = option(
        "Collect the covariances of the down matrices of experts too, one for each expert.",
        default=False,
        key="imatrix.covariance_experts",
    )
    curvature: str | Path | None = option(
        "Write the curvature to this file instead: for each matrix (of experts too) the covariance of its inputs and the "
        "second moments of the gradients at its outputs. This needs torch.",
        default=None,
        kind="out_file",
        metavar="FILE",
        key="imatrix.curvature",
    )
    curvature_rows: int | None = option(
        "Collect second moments of the gradients of this many rows of a matrix, at most, with each other.",
        default=None,
        least=1,
        shown="1024",
        rare=True,
    )
    curvature_seed: int | None = option(
        "Draw the labels, which come from the model's own predictions, with this seed.",
        default=None,
        least=0,
        shown="0",
        rare=True,
    )
    covariance_bits: int | None = option(
        "Store each number of the file of covariances in 16 or 32 bits.", default=None, kind="bits", shown="16", rare=True
    )
    memory: Size | None = option(
        "Use this much memory for sums of covariances (with a cluster, of each worker); if it is short, the "
        "text is read in several passes.",
        default=None,
        kind="size",
        shown="half of what is free",
    )
    plot: str | Path | None = option("Draw the coverage to this file, which needs matplotlib.", default=None, kind="plot")
    cluster: str | None = option(
        "Divide the windows among dask workers, with the same sums: tcp://HOST:PORT, a scheduler file, or local:N.",
        default=None,
        metavar="ADDRESS",
    )
    dry_run: bool = option("Show sizes, memory and time; run and write nothing.", default=False)
    resume: bool = option("Resume an interrupted job, which ends in the same bytes.", default=False)
    force: bool = option("Replace an existing output.", default=False)
    progress: OnProgress | bool | None = option(
        "Call this with each `Progress` report; True shows a bar. Stage 'imatrix' in windows, `partial` the "
        "`Perplexity` so far.",
        default=None,
        in_cli=False,
    )


@request
class FilesMemory:
    memory: Size | None = option(
        "Keep to this much memory beside the files, such as 1G; a warning says where that cannot be.",
        default=None,
        kind="size",
        rare=True,
    )


@request
class ShowRequest(FilesMemory):
    file: str | Path = argument("An importance matrix, GGUF or legacy .dat.", kind="file", kw_only=False)
    other: str | Path | None = argument("Another one, to compare with.", default=None, kind="file", kw_only=False)
    top: int = option("Name this many of each tensor's columns, those with the largest sums.", default=5, least=1)
    layer_similarity: bool = option(
        "Show the cosine of each tensor with the same one of the layer before.", default=False, flags="--layer-similarity -lsim"
    )
    plot: str | Path | None = option(
        "Draw a heat map, layers by tensors, to this file, which needs matplotlib.", default=None, kind="plot"
    )
