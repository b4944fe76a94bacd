"""Groups of fields that several requests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...formats.loaders import PROGRAMS
from ...request_fields import option, request
from ..common.arguments import Pattern, Size, TypeName
from ..common.progress import OnProgress


@request
class CheckpointOptions:
    """How a checkpoint's configuration is read."""

    architecture: str | None = option(
        "Read a checkpoint as this architecture of config.json: a relative of one that is not known.",
        default=None,
        metavar="NAME",
        key="convert.architecture",
    )
    allow_lossy_config: bool = option(
        "Leave out settings of a checkpoint that a GGUF cannot say, instead of refusing it: each is a warning.",
        default=False,
        key="convert.allow_lossy_config",
    )


@request
class SourceOptions(CheckpointOptions):
    """How a source is read. What `open_source` takes has its names, see `planning.reading_of`."""

    mla_layout: str | None = option(
        "Matrices of DeepSeek's latent attention, of a checkpoint.",
        default=None,
        choices=("ik", "mainline", "legacy"),
        shown="the recipe's, else ik",
        key="convert.mla_layout",
    )
    mtp: bool | None = option(
        "Keep draft layers (multi-token prediction), or leave them out.",
        default=None,
        shown="keep; not of DeepSeek-V3 in the ik layout, since ik_llama.cpp does not load them",
        key="convert.mtp",
    )
    vocab: bool = option(
        "Write no vocabulary. Otherwise a checkpoint without a tokenizer is refused: nothing could run its GGUF.",
        doc="False: the file has no vocabulary; else a checkpoint without a tokenizer is an error: nothing could run the file.",
        default=True,
        key="convert.vocab",
    )
    lora: str | Path | Sequence[str | Path] = option(
        "Merge a LoRA adapter into the weights, a GGUF or (into a checkpoint) a folder of peft; several add up.",
        default=(),
        metavar="FILE[=SCALE]",
        key="convert.lora",
        travel="adapters",
    )
    program: str | None = option(
        "Make only what this program loads: its types, its layout of latent attention, its fallbacks.",
        default=None,
        flags="--for",
        choices=PROGRAMS,
        key="quantize.for",
    )


@request
class TargetOptions:
    """The target of a search for types, and the types it chooses from."""

    target_size: Size | None = option(
        "The file's size to stay below (180G, 20GiB).", default=None, kind="size", key="quantize.target_size", one_of="target"
    )
    target_bpw: float | None = option(
        "Bits per weight to stay below, over all tensors.",
        default=None,
        metavar="BITS",
        key="quantize.target_bpw",
        one_of="target",
    )
    max_kld: float | None = option(
        "The smallest file with at most this KL divergence.",
        default=None,
        metavar="NATS",
        key="quantize.max_kld",
        one_of="target",
    )
    types: str | Sequence[TypeName] | None = option(
        "Types to choose from; `default` stands for the usual ones.",
        default=None,
        kind="names",
        metavar="T,T,...",
        shown="default",
        key="search.types",
        travel="no",
    )


@request
class Measuring:
    """What a search for types measures."""

    text: str | Path | None = option(
        "Text to measure sensitivity on.", default=None, kind="text", flags="-f --file", key="search.text"
    )
    n_ctx: int | None = option(
        "Window in tokens.", default=None, flags="-c --ctx-size", least=4, most=2**31 - 1, shown="512", key="search.ctx"
    )
    chunks: int | None = option("Windows of the text to read.", default=None, least=1, shown="8", key="search.chunks")
    repacked: bool = option(
        "Interleaved types (_R4, _R8) where there are such, but for --gpu tensors.", default=False, key="search.repacked"
    )
    gpu: Pattern | None = option("Tensors for a GPU: their rows stay plain.", default=None, kind="regex", key="search.gpu")
    gpu_size: Size | None = option(
        "A budget of their own for --gpu tensors, within the target.", default=None, kind="size", key="search.gpu_size"
    )
    rows: int = option("Rows per tensor that errors come from.", default=64, least=8, key="search.rows")
    seed: int = option("Picks the rows.", default=0, least=0, key="search.seed")
    measurements: int | None = option(
        "Groups of tensors whose sensitivity is measured one by one: each tensor, or roles by bands of layers.",
        default=None,
        least=1,
        shown="128",
        key="search.measurements",
    )
    refine: int | None = option("Rounds of measuring around the result.", default=None, least=0, shown="0", key="search.refine")


@request
class Weighting:
    """What weighs the errors of types."""

    imatrix: str | Path | None = option("Importance matrix, GGUF or .dat.", default=None, kind="file", travel="file")
    covariance: str | Path | None = option(
        "Covariances of inputs (`ggufmill imatrix --covariance`): a smaller loss.",
        doc="File of covariances of the matrices' inputs (`ggufmill imatrix --covariance`): codes, and with more effort "
        "scales, are chosen for a small error of the products instead of the weights.",
        default=None,
        kind="file",
        key="quantize.covariance",
        travel="file",
    )
    curvature: str | Path | None = option(
        "Use both sides' second moments (`ggufmill imatrix --curvature`): the smallest loss, instead of --covariance.",
        doc="File of covariances of inputs and second moments of gradients at outputs (`ggufmill imatrix --curvature`): rows "
        "are encoded together, for a small change of the model's predictions. Takes the place of `covariance`.",
        default=None,
        kind="file",
        key="quantize.curvature",
        travel="file",
    )
    effort: int | None = option(
        "How much is searched with --covariance or --curvature: 0 and 1 codes, 2 and 3 scales too.",
        default=None,
        least=0,
        most=3,
        shown="the recipe's, else 1",
        key="quantize.effort",
    )


def moments_of(asked: Weighting) -> str | Path | None:
    """The file of second moments, of inputs alone or of both sides. Raises UsageError for both."""
    if asked.curvature is not None and asked.covariance is not None:
        raise UsageError("--curvature has the covariance of inputs in its file: leave out --covariance")
    return asked.covariance if asked.curvature is None else asked.curvature


@request
class Splits:
    """How the output is cut into files."""

    split_max_size: Size | None = option(
        "Split the output into files of at most this size (50G).",
        default=None,
        kind="size",
        key="quantize.split_max_size",
        one_of="split",
    )
    split_max_tensors: int | None = option("Split after this many tensors.", default=None, least=1)
    tensor_first_split: bool = option(
        "Write no tensors to the first file of a split, only the metadata.",
        doc="False: the first file of a split holds the metadata only.",
        default=True,
    )


@request
class CheckpointOutput:
    """What `convert` and `quantize` alone can be asked for when they write: of checkpoints, and with a cluster."""

    allow_nonfinite: bool = option("Write 0 for weights that are NaN or infinite, and count them.", default=False)
    remote: bool = option(
        "Read the weights of an hf: repository as they are needed, without downloading its files.", default=False
    )
    delete_source_shards: bool = option(
        "DELETE each file of the checkpoint once all its tensors are written.", default=False, travel="no"
    )
    metadata: str | Path | None = option(
        'Metadata to set: {"general.author": "...", ...}. --override-kv beats it.',
        default=None,
        kind="file",
        metavar="FILE.json",
        travel="file",
    )
    override_kv: Mapping[str, Any] | None = option(
        "Set metadata; TYPE is int, float, bool or str.",
        doc="Metadata to set: keys and values.",
        default=None,
        kind="override",
        metavar="KEY=TYPE:VALUE",
    )
    partial_requant: bool = option(
        "Keep the files of a split that are there already, and write those that are not.", default=False, travel="no"
    )
    cluster: str | None = option(
        "Share the work out to dask workers: tcp://HOST:PORT, a scheduler file, or local:N.",
        default=None,
        metavar="ADDRESS",
        travel="no",
    )
    cluster_output: str | None = option(
        "Whether workers write into OUT's folder, which all machines share, or send what they make.",
        default=None,
        choices=("shared", "collect"),
        shown="shared",
        travel="no",
    )


@request
class Output:
    """How a plan is carried out, whatever verb made it."""

    verify: bool = option(
        "Read a sample of every tensor back, decode it and compare it with the source.", default=False, travel="no"
    )
    manifest: bool = option(
        "Write OUT.manifest: sha256 of every tensor, for `ggufmill hash --check`. A split's has its first file's name.",
        default=False,
        travel="no",
    )
    dry_run: bool = option("Show the plan with exact sizes; write nothing.", default=False, travel="no")
    resume: bool = option("Resume an interrupted job.", default=False, travel="no")
    force: bool = option("Replace an existing output.", default=False, travel="no")
    threads: int | None = option(
        "Worker threads.", default=None, flags="-t --threads", least=1, shown="all processors", travel="no"
    )
    progress: OnProgress | bool | None = option(
        "Called with each `Progress` report; True: a bar. See pipeline/common/progress.py.",
        default=None,
        in_cli=False,
        travel="no",
    )
