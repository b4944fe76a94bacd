"""`ggufmill repack`: rows are interleaved for the CPU, or that is undone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..formats import open_gguf
from ..jobs.patterns import NamePattern
from ..quantize.gguf_source import gguf_source
from ..quantize.planning import check_loads
from ..repack.job import plan_repack
from .common.arguments import Pattern, as_pattern
from .common.progress import OnProgress, reporting
from .writing.write_model import WriteResult, write_model
from .writing.write_options import WriteOptions


def repack_model(
    source: str | Path,
    out: str | Path,
    *,
    pattern: Pattern | Sequence[Pattern] = (),
    undo: bool = False,
    keep_split: bool = False,
    program: str | None = None,
    verify: bool = False,
    manifest: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    force: bool = False,
    threads: int | None = None,
    progress: OnProgress | bool | None = None,
) -> WriteResult:
    """Rewrites a GGUF file with its tensors in the row-interleaved types (_r4, _r8) that CPUs run fastest.

    Only bits move: `undo` gives the same bytes back. Embeddings stay as they are, and so do bf16 tensors that no pattern finds.

    source      a GGUF file, or any shard of a split one
    out         the file to write
    pattern     a regular expression or several: only tensors whose name one of them matches anywhere; (): all
    undo        repacked tensors become their base types again
    keep_split  the output has as many files as the source, with the same tensors
    program     that is to load the file, as for `convert_model`: what it would not load is an error
    verify, manifest, dry_run, resume, force, threads, progress
                as for `convert_model`; the stage is 'repack', in bytes

    Returns a `WriteResult`. Raises as `convert_model` does.

    Example:
        >>> from ggufmill import convert_model, repack_model
        >>> from ggufmill.recipes import FOLDER
        >>> _ = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", force=True)
        >>> result = repack_model("demo.gguf", "demo_r8.gguf", force=True)
        >>> result.plan.histogram()["q8_0_r8"][0] > 0
        True
    """
    patterns = [pattern] if isinstance(pattern, str | re.Pattern | NamePattern) else pattern
    texts = [as_pattern(each, "--pattern").text for each in patterns]
    opened = open_gguf(Path(source))
    plan = plan_repack(opened, Path(out), pattern=texts or None, undo=undo, keep_split=keep_split)
    check_loads(plan, program)
    options = WriteOptions(verify, manifest, dry_run, resume, force, threads)
    with reporting(progress) as report:
        return write_model(plan, "repack", gguf_source(opened), options, report)
