from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .. import __version__
from . import flags
from .writing import finish

OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0", "mxfp4")  # of convert.outtype, which takes long to import


@click.command(short_help="Hugging Face checkpoint to GGUF")
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--outtype",
    type=click.Choice(OUTTYPES),
    default="auto",
    show_default=True,
    help="auto: f16 for an f16 checkpoint, else bf16, and experts that are stored in mxfp4 stay in it; mxfp4: all experts do.",
)
@click.option("--mla-layout", type=click.Choice(["ik", "mainline", "legacy"]), default="ik", show_default=True)
@flags.allow_nonfinite
@click.option("--override-kv", multiple=True, metavar="KEY=TYPE:VALUE", help="Set metadata; TYPE is int, float, bool or str.")
@flags.split_max_size
@flags.split_max_tensors
@flags.dry_run
@flags.resume
@flags.force
@flags.threads
@flags.as_json
def command(
    model: Path,
    out: Path,
    outtype: str,
    mla_layout: str,
    allow_nonfinite: bool,
    override_kv: tuple[str, ...],
    split_max_size: str | None,
    split_max_tensors: int | None,
    **job: Any,
) -> None:
    """Convert the Hugging Face checkpoint in folder MODEL to the GGUF file OUT.

    fp8 is decoded on the fly, mxfp4 is kept or decoded. Norms, routers and biases are written as f32.

    \b
    Examples:
      ggufmill convert DeepSeek-V3/ v3-bf16.gguf --split-max-size 50G
      ggufmill convert Llama-3.2-1B/ llama.gguf --outtype q8_0 --dry-run
      ggufmill convert gpt-oss-20b/ gpt-oss.gguf --outtype mxfp4
    """
    from ..convert import open_source
    from ..convert.outtype import out_type
    from ..formats.plan import parse_size
    from ..quantize.planning import plan_quantize

    source = open_source(model, mla_layout=mla_layout)
    weights, rules = out_type(source, outtype)
    replaced: list[tuple[str, int]] | None = [] if allow_nonfinite else None
    plan = plan_quantize(
        source,
        out,
        type=weights,
        rules=rules,
        allow_requantize=True,
        override_kv=dict(map(flags.parse_override, override_kv)),
        split_max_size=parse_size(split_max_size) if split_max_size else None,
        split_max_tensors=split_max_tensors,
        nonfinite=replaced,
        version=__version__,
    )
    finish(plan, "convert", source, replaced=replaced, **job)
