"""`ggufmill repack` interleaves rows, or takes that back."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ..pipeline.job_options import Job
from ..pipeline.write_model import finish
from .options import flags
from .options.job import job_options


@click.command(short_help="Interleave rows (_R4, _R8) or undo it")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=flags.OUT)
@click.option(
    "--pattern",
    type=flags.REGEX,
    multiple=True,
    metavar="REGEX",
    help="Only tensors in whose name this is found; may be given again.",
)
@click.option("--undo", is_flag=True, help="Turn repacked tensors back into their base types.")
@flags.keep_split
@job_options
def command(source: Path, out: Path, pattern: tuple[re.Pattern[str], ...], undo: bool, keep_split: bool, job: Job) -> None:
    """Rewrite the GGUF SOURCE as OUT with its tensors in the row-interleaved types that CPUs run fastest.

    Only bits move: `--undo` gives the same bytes back. Embeddings stay as they are, and so do bf16 tensors that no --pattern
    finds: bf16_r16 serves only processors with bf16 instructions.

    \b
    Examples:
      ggufmill repack model-iq4_k.gguf model-iq4_k_r4.gguf
      ggufmill repack model.gguf out.gguf --pattern "ffn_.*_exps"
    """
    from ..formats import open_gguf
    from ..quantize.gguf_source import gguf_source
    from ..repack.job import plan_repack

    opened = open_gguf(source)
    patterns = [p.pattern for p in pattern] or None
    plan = plan_repack(opened, out, pattern=patterns, undo=undo, keep_split=keep_split)
    finish(plan, "repack", gguf_source(opened), job)
