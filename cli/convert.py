"""`ggufmill convert` makes a GGUF of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..formats import TYPES
from ..pipeline.job_options import Job
from ..pipeline.write_model import finish, finished_before
from .options import flags
from .options.job import job_options

OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0", "mxfp4")  # as in quantize.recipes.recipe, which takes long to import


@click.command(short_help="Hugging Face checkpoint to GGUF")
@click.argument("model", type=flags.SourceName(file_okay=False))
@click.argument("out", type=flags.OUT)
@click.option(
    "--outtype",
    type=click.Choice(OUTTYPES),
    default="auto",
    show_default=True,
    help="auto: f16 for an f16 checkpoint, else bf16, and experts that are stored in mxfp4 stay in it; mxfp4: all experts do.",
)
@flags.mla_layout
@flags.allow_nonfinite
@flags.remote
@flags.delete_source_shards
@flags.metadata
@flags.split_max_size
@flags.split_max_tensors
@flags.tensor_first_split
@flags.partial_requant
@job_options
def command(
    model: Path | str,
    out: Path,
    outtype: str,
    mla_layout: str | None,
    allow_nonfinite: bool,
    remote: bool,
    override_kv: dict[str, Any],
    split_max_size: int | None,
    split_max_tensors: int | None,
    tensor_first_split: bool,
    delete_source_shards: bool,
    partial_requant: bool,
    job: Job,
) -> None:
    """Convert the Hugging Face checkpoint MODEL, a folder or hf:OWNER/NAME[@REVISION], to the GGUF file OUT.

    fp8 is decoded on the fly, mxfp4 is kept or decoded. Norms, routers and biases are written as f32. A repository is
    downloaded into the hub's cache (HF_HOME; a token in HF_TOKEN), for --dry-run its headers only. Licence, authors, base model
    and tags come from its model card.

    \b
    Examples:
      ggufmill convert DeepSeek-V3/ v3-bf16.gguf --split-max-size 50G
      ggufmill convert Llama-3.2-1B/ llama.gguf --outtype q8_0 --dry-run
      ggufmill convert gpt-oss-20b/ gpt-oss.gguf --outtype mxfp4
      ggufmill convert hf:Qwen/Qwen3-8B@main qwen3.gguf --remote
    """
    from ..convert import open_source
    from ..convert.outtype import out_type
    from ..quantize.planning import plan_quantize

    named = TYPES[outtype] if outtype not in ("auto", "mxfp4") else None
    if delete_source_shards and finished_before(model, out, mla_layout, job, named, ""):
        return
    is_remote = remote or (job.dry_run and isinstance(model, str))
    source = open_source(model, mla_layout=mla_layout, remote=is_remote)
    weights, rules = out_type(source, outtype)
    replaced: list[tuple[str, int]] | None = [] if allow_nonfinite else None
    plan = plan_quantize(
        source,
        out,
        type=weights,
        rules=rules,
        allow_requantize=True,
        override_kv=override_kv,
        split_max_size=split_max_size,
        split_max_tensors=split_max_tensors,
        tensor_first_split=tensor_first_split,
        nonfinite_counts=replaced,
        version=__version__,
    )
    finish(
        plan,
        "convert",
        source,
        job,
        replaced=replaced,
        delete_source_shards=delete_source_shards,
        partial_requant=partial_requant,
    )
