"""Options that several verbs share; the parameter of each is the keyword argument of the library's function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ...formats.loaders import PROGRAMS
from .types import FILE, SIZE, Override

Decorator = Callable[[Callable], Callable]


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, in this order in the help."""
    return lambda command: functools.reduce(lambda function, option: option(function), reversed(options), command)


def gathered(
    options: Sequence[Decorator], names: Sequence[str], keyword: str, make: Callable[[dict[str, Any]], Any]
) -> Decorator:
    """A decorator that adds options to a command, which gets make(values by name) as the one keyword argument `keyword`.

    names: of the keywords that click makes of these options.
    """

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def called(**given: Any) -> Any:
            values = {name: given.pop(name) for name in names}
            return command(**given, **{keyword: make(values)})

        return together(*options)(called)

    return decorate


as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
force = click.option("--force", is_flag=True, help="Replace an existing output.")
resume = click.option("--resume", is_flag=True, help="Resume an interrupted job.")
dry_run = click.option("--dry-run", is_flag=True, help="Show the plan with exact sizes; write nothing.")
threads = click.option("-t", "--threads", type=click.IntRange(1), help="Worker threads. [default: all processors]")

# of every verb that writes model files
writing = together(
    click.option(
        "--verify", is_flag=True, help="Read a sample of every tensor back, decode it and compare it with the source."
    ),
    click.option(
        "--manifest",
        is_flag=True,
        help="Write OUT.manifest: sha256 of every tensor, for `ggufmill hash --check`. A split's has its first file's name.",
    ),
    dry_run,
    resume,
    force,
    threads,
    as_json,
)
cluster_output = click.option(
    "--cluster-output",
    type=click.Choice(["shared", "collect"]),
    help="Whether workers write into OUT's folder, which all machines share, or send what they make. [default: shared]",
)
allow_nonfinite = click.option(
    "--allow-nonfinite", is_flag=True, help="Write 0 for weights that are NaN or infinite, and count them."
)
split_max_size = click.option(
    "--split-max-size", type=SIZE, metavar="SIZE", help="Split the output into files of at most this size (50G)."
)
split_max_tensors = click.option("--split-max-tensors", type=click.IntRange(1), help="Split after this many tensors.")
tensor_first_split = click.option(
    "--no-tensor-first-split",
    "tensor_first_split",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Write no tensors to the first file of a split, only the metadata.",
)
keep_split = click.option("--keep-split", is_flag=True, help="Write as many files as the source has, with the same tensors.")
only_shards = click.option(
    "--only-shards",
    metavar="N-M,...",
    help="Write only these files of the split, counted from 1: machines that share nothing divide a job.",
)
partial_requant = click.option(
    "--partial-requant", is_flag=True, help="Keep the files of a split that are there already, and write those that are not."
)
remote = click.option(
    "--remote", is_flag=True, help="Read the weights of an hf: repository as they are needed, without downloading its files."
)
delete_source_shards = click.option(
    "--delete-source-shards", is_flag=True, help="DELETE each file of the checkpoint once all its tensors are written."
)
imatrix = click.option("--imatrix", type=FILE, help="Importance matrix, GGUF or .dat.")
covariance = together(
    click.option("--covariance", type=FILE, help="Covariances of inputs (`ggufmill imatrix --covariance`): a smaller loss."),
    click.option(
        "--effort",
        type=click.IntRange(0, 3),
        help="How much is searched with --covariance: 0 and 1 codes, 2 and 3 scales too. [default: the recipe's, else 1]",
    ),
)
mla_layout = click.option(
    "--mla-layout",
    type=click.Choice(["ik", "mainline", "legacy"]),
    help="Matrices of DeepSeek's latent attention, of a checkpoint. [default: the recipe's, else ik]",
)
program = click.option(
    "--for",
    "program",
    type=click.Choice(PROGRAMS, case_sensitive=False),
    help="Make only what this program loads: its types, its layout of latent attention, its fallbacks.",
)
reading = together(
    click.option(
        "--architecture",
        metavar="NAME",
        help="Read a checkpoint as this architecture of config.json: a relative of one that is not known.",
    ),
    click.option(
        "--allow-lossy-config",
        is_flag=True,
        help="Leave out settings of a checkpoint that a GGUF cannot say, instead of refusing it: each is a warning.",
    ),
)
lora = click.option(
    "--lora",
    multiple=True,
    metavar="FILE[=SCALE]",
    help="Merge a LoRA adapter into the weights, a GGUF or (into a checkpoint) a folder of peft; several add up.",
)
mtp = click.option(
    "--mtp/--no-mtp",
    default=None,
    help="Keep draft layers (multi-token prediction), or leave them out. [default: keep; not of DeepSeek-V3 in the ik layout, "
    "since ik_llama.cpp does not load them]",
)
vocab = click.option(
    "--no-vocab",
    "vocab",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Write no vocabulary. Otherwise a checkpoint without a tokenizer is refused: nothing could run its GGUF.",
)
cluster = click.option(
    "--cluster", metavar="ADDRESS", help="Share the work out to dask workers: tcp://HOST:PORT, a scheduler file, or local:N."
)
chunks = click.option("--chunks", type=click.IntRange(1), help="Read only this many windows.")
target = together(
    click.option("--target-size", type=SIZE, metavar="SIZE", help="The file's size to stay below (180G, 20GiB)."),
    click.option("--target-bpw", type=float, metavar="BITS", help="Bits per weight to stay below, over all tensors."),
    click.option("--max-kld", type=float, metavar="NATS", help="The smallest file with at most this KL divergence."),
)
types = click.option(
    "--types", metavar="T,T,...", help="Types to choose from; `default` stands for the usual ones. [default: default]"
)
metadata = together(
    click.option(
        "--metadata",
        type=FILE,
        metavar="FILE.json",
        help='Metadata to set: {"general.author": "...", ...}. --override-kv beats it.',
    ),
    click.option(
        "--override-kv",
        type=Override(),
        multiple=True,
        metavar="KEY=TYPE:VALUE",
        callback=lambda ctx, param, pairs: dict(pairs),
        help="Set metadata; TYPE is int, float, bool or str.",
    ),
)


def _check_plot(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    from ...pipeline.reports.style import check_picture

    if path is not None:
        check_picture(path)
    return path


def plot(content: str) -> Decorator:
    """--plot PNG, checked before any work. content: what the picture shows."""
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--plot", type=path, metavar="PNG", callback=_check_plot, help=f"Draw {content} to this file.")
