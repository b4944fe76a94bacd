from __future__ import annotations

from pathlib import Path

import click

from . import flags
from .writing import show_plan, write


@click.command(short_help="Interleave rows (_R4, _R8) or undo it")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--pattern", multiple=True, metavar="REGEX", help="Only tensors in whose name this is found; may be given again.")
@click.option("--undo", is_flag=True, help="Turn repacked tensors back into their base types.")
@flags.keep_split
@flags.verify
@flags.manifest
@flags.dry_run
@flags.resume
@flags.force
@flags.threads
@flags.as_json
def command(
    source: Path,
    out: Path,
    pattern: tuple[str, ...],
    undo: bool,
    keep_split: bool,
    verify: bool,
    manifest: bool,
    dry_run: bool,
    resume: bool,
    force: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Rewrite the GGUF SOURCE as OUT with its tensors in the row-interleaved types that CPUs run fastest.

    Only bits move: `--undo` gives the same bytes back. Embeddings stay as they are.

    \b
    Examples:
      ggufmill repack model-iq4_k.gguf model-iq4_k_r4.gguf
      ggufmill repack model.gguf out.gguf --pattern "ffn_.*_exps"
    """
    from ..formats import open_gguf
    from ..quantize.source import gguf_source
    from ..repack.job import plan_repack

    opened = open_gguf(source)
    plan = plan_repack(opened, out, pattern=pattern or None, undo=undo, keep_split=keep_split)
    if dry_run:
        show_plan(plan, as_json)
    else:
        made_from = gguf_source(opened) if verify else None
        job = {"threads": threads, "resume": resume, "force": force, "as_json": as_json}
        write(plan, "repack", opened.paths, verify=made_from, manifest=manifest, **job)
