"""Groups of fields that several requests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...errors import UsageError
from ...formats.loaders import MLA_LAYOUTS, PROGRAMS
from ...request_fields import option, request, values_of
from ..common.arguments import Pattern, Size, TypeName, as_adapters
from ..common.progress import OnProgress


@request
class CheckpointOptions:
    """How a checkpoint's configuration is read."""

    section: ClassVar[str] = "Source"

    architecture: str | None = option(
        "Read a checkpoint as this architecture of config.json: a relative of one that is not known.",
        default=None,
        metavar="NAME",
        key="convert.architecture",
        rare=True,
    )
    allow_lossy_config: bool = option(
        "Leave out settings of a checkpoint that a GGUF has no key for, with a warning for each, instead of "
        "refusing the checkpoint.",
        default=False,
        key="convert.allow_lossy_config",
        rare=True,
    )


@request
class SourceOptions(CheckpointOptions):
    """How a source is read. What `open_source` takes has its names, see `reading_of`."""

    section: ClassVar[str] = "Source"

    mla_layout: str | None = option(
        "Lay out the matrices of latent attention (MLA) of a DeepSeek checkpoint as this program does.",
        default=None,
        choices=MLA_LAYOUTS,
        shown="the recipe's, else ik",
        key="convert.mla_layout",
        rare=True,
    )
    mtp: bool | None = option(
        "Keep draft layers (multi-token prediction), or leave them out.",
        default=None,
        shown="keep; not of DeepSeek-V3 in the ik layout, since ik_llama.cpp does not load them",
        key="convert.mtp",
        rare=True,
    )
    vocab: bool = option(
        "Write no vocabulary. Otherwise a checkpoint without a tokenizer is refused: nothing could run its GGUF.",
        doc="False: the file has no vocabulary; else a checkpoint without a tokenizer is an error: nothing could run the file.",
        default=True,
        key="convert.vocab",
        rare=True,
    )
    lora: str | Path | Sequence[str | Path] = option(
        "Merge a LoRA adapter into the weights: a GGUF, or (into a checkpoint) a folder that peft wrote; may be "
        "given several times.",
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


def reading_of(request: SourceOptions) -> dict[str, Any]:
    """The arguments of `open_source` that a request says: all but the program, which decides types and layout."""
    values = {name: value for name, value in values_of(request, SourceOptions).items() if name != "program"}
    return values | {"lora": as_adapters(request.lora)}


@request
class AllowedTypes:
    """The types that a search chooses from."""

    section: ClassVar[str] = "Search for types"

    types: str | Sequence[TypeName] | None = option(
        "Choose from these types; `default` stands for the usual ones.",
        default=None,
        kind="names",
        metavar="T,T,...",
        shown="default",
        key="search.types",
        travel="no",
        rare=True,
    )


@request
class TargetOptions(AllowedTypes):
    """The target of a search for types, and the types it chooses from."""

    section: ClassVar[str] = "Search for types"

    target_size: Size | None = option(
        "Choose types so that the file stays below this size (180G, 20GiB).",
        default=None,
        kind="size",
        key="quantize.target_size",
        one_of="target",
    )
    target_bpw: float | None = option(
        "Choose types so that the file stays below this many bits per weight, over all tensors.",
        default=None,
        metavar="BITS",
        key="quantize.target_bpw",
        one_of="target",
    )
    max_kld: float | None = option(
        "Choose types for the smallest file with at most this KL divergence.",
        default=None,
        metavar="NATS",
        key="quantize.max_kld",
        one_of="target",
    )


@request
class Measuring:
    """What a search for types measures."""

    section: ClassVar[str] = "Search for types"

    text: str | Path | None = option(
        "Measure sensitivity on this text, or on `bundled`.",
        default=None,
        kind="calibration_text",
        flags="-f --file",
        key="search.text",
    )
    n_ctx: int | None = option(
        "Read the text in windows of this many tokens.",
        default=None,
        flags="-c --ctx-size",
        least=4,
        most=2**31 - 1,
        shown="512",
        key="search.ctx",
    )
    chunks: int | None = option("Read this many windows of the text.", default=None, least=1, shown="8", key="search.chunks")
    repacked: bool = option(
        "Choose interleaved types (_R4, _R8) where they exist, except for --gpu tensors.",
        default=False,
        key="search.repacked",
    )
    gpu: Pattern | None = option(
        "Give these tensors, which a GPU will hold, no interleaved types.", default=None, kind="regex", key="search.gpu"
    )
    gpu_size: Size | None = option(
        "Give --gpu tensors a budget of their own, within the target.",
        default=None,
        kind="size",
        key="search.gpu_size",
        rare=True,
    )
    rows: int = option("Measure errors on this many rows of each tensor.", default=64, least=8, key="search.rows", rare=True)
    seed: int = option("Pick the rows with this seed.", default=0, least=0, key="search.seed", rare=True)
    measurements: int | None = option(
        "Measure the sensitivity of at most this many groups of tensors one by one: of each tensor, or of "
        "roles by bands of layers.",
        default=None,
        least=1,
        shown="128",
        key="search.measurements",
        rare=True,
    )
    refine: int | None = option(
        "Measure around the result in this many further rounds.", default=None, least=0, shown="0", key="search.refine"
    )


@request
class Weighting:
    """What weighs the errors of types."""

    section: ClassVar[str] = "Importance of weights"

    imatrix: str | Path | None = option(
        "Weigh errors by this importance matrix, GGUF or .dat.", default=None, kind="file", travel="file"
    )
    covariance: str | Path | None = option(
        "Reduce the loss with these covariances of inputs (`ggufmill imatrix --covariance` makes them).",
        doc="File of covariances of the matrices' inputs (`ggufmill imatrix --covariance`): codes, and with more effort "
        "scales, are chosen for a small error of the products instead of the weights.",
        default=None,
        kind="file",
        key="quantize.covariance",
        travel="file",
    )
    curvature: str | Path | None = option(
        "Encode rows together by the second moments in this file (`ggufmill imatrix --curvature`), for the smallest loss; it "
        "takes the place of --covariance.",
        doc="Encode rows together, for a small change of the model's predictions, by this file's covariances of inputs and "
        "second moments of gradients at outputs (`ggufmill imatrix --curvature`). It takes the place of `covariance`.",
        default=None,
        kind="file",
        key="quantize.curvature",
        travel="file",
    )
    effort: int | None = option(
        "Spend this much effort on --covariance or --curvature: 0 and 1 optimise codes, 2 and 3 scales too, "
        "4 also encodes in the order of the model.",
        doc="How much is done with `covariance` or `curvature`: 0 and 1 choose codes, 2 and 3 scales too. 4 quantises in the "
        "order of the model, each matrix for what those before it make of a text: that of `sequential`, of the recipe's "
        "importance matrix, or the bundled one. It needs torch. A search does what 3 does.",
        default=None,
        least=0,
        most=4,
        shown="the recipe's, else 1",
        key="quantize.effort",
    )
    memory: Size | None = option(
        "Use this much memory for covariances that are prepared for encoding, such as 12G.",
        default=None,
        kind="size",
        shown="half of what is free",
        rare=True,
    )


@request
class DryRun:
    dry_run: bool = option("Show what it takes, memory, disk space and time; run and write nothing.", default=False)


def moments_of(asked: Weighting) -> str | Path | None:
    """The file of second moments, of inputs alone or of both sides. Raises UsageError for both."""
    if asked.curvature is not None and asked.covariance is not None:
        raise UsageError("--curvature has the covariance of inputs in its file: leave out --covariance")
    return asked.covariance if asked.curvature is None else asked.curvature


@request
class Splits:
    """How the output is cut into files."""

    section: ClassVar[str] = "Output"

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
        rare=True,
    )


@request
class CheckpointOutput:
    """What `convert` and `quantize` alone can be asked for when they write: of checkpoints, and with a cluster."""

    section: ClassVar[str] = "Output"

    allow_nonfinite: bool = option("Write 0 for weights that are NaN or infinite, and count them.", default=False, rare=True)
    remote: bool = option(
        "Read the weights of an hf: repository as they are needed, without downloading its files.", default=False
    )
    delete_source_shards: bool = option(
        "DELETE each file of the checkpoint once all its tensors are written.", default=False, travel="no", rare=True
    )
    metadata: str | Path | None = option(
        'Set the metadata in this file: {"general.author": "...", ...}. --override-kv beats it.',
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
        rare=True,
    )
    partial_requant: bool = option(
        "Keep the files of a split that exist already, and write the others.", default=False, travel="no", rare=True
    )
    cluster: str | None = option(
        "Divide the work among dask workers: tcp://HOST:PORT, a scheduler file, or local:N.",
        default=None,
        metavar="ADDRESS",
        travel="no",
    )
    cluster_output: str | None = option(
        "Let workers write into OUT's folder, which all machines share, or send what they make.",
        default=None,
        choices=("shared", "collect"),
        shown="shared",
        travel="no",
        rare=True,
    )


@request
class OutputOptions:
    """How a plan is carried out, whatever verb made it."""

    section: ClassVar[str] = "Output"

    verify: bool = option(
        "Read a sample of every tensor back, decode it and compare it with the source.", default=False, travel="no"
    )
    manifest: bool = option(
        "Write OUT.manifest: sha256 of every tensor, for `ggufmill hash --check`. The manifest of a split has"
        " the name of its first file.",
        default=False,
        travel="no",
    )
    dry_run: bool = option("Show the plan with exact sizes; write nothing.", default=False, travel="no")
    resume: bool = option("Resume an interrupted job.", default=False, travel="no")
    force: bool = option("Replace an existing output.", default=False, travel="no")
    threads: int | None = option(
        "Use this many worker threads.", default=None, flags="-t --threads", least=1, shown="all processors", travel="no"
    )
    progress: OnProgress | bool | None = option(
        "Call this with each `Progress` report; True shows a bar. See pipeline/common/progress.py.",
        default=None,
        in_cli=False,
        travel="no",
    )
