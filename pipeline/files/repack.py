"""`ggufmill repack`: rows are interleaved for the CPU, or that is undone."""

from __future__ import annotations

from pathlib import Path

from ...formats import open_gguf
from ...quantize.gguf_source import gguf_source
from ...quantize.planning import check_loads
from ...repack.job import plan_repack
from ..common.progress import reporting
from ..requests.rewriting import RepackRequest, repack_patterns
from ..requests.verb import verb
from ..writing.write_model import WriteResult, write_model
from ..writing.write_options import write_options


@verb(RepackRequest)
def repack_model(request: RepackRequest) -> WriteResult:
    """Rewrites a GGUF file with its tensors in the row-interleaved types (_r4, _r8) that CPUs run fastest.

    Only bits move: `undo` gives the same bytes back. Embeddings stay as they are, and so do bf16 tensors that no pattern finds.

    Returns a `WriteResult`. Raises as `convert_model` does.

    Example:
        >>> from ggufmill import convert_model, repack_model
        >>> from ggufmill.recipes import FOLDER
        >>> _ = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", force=True)
        >>> result = repack_model("demo.gguf", "demo_r8.gguf", force=True)
        >>> result.plan.histogram()["q8_0_r8"][0] > 0
        True
    """
    opened = open_gguf(Path(request.source))
    plan = plan_repack(
        opened,
        Path(request.out),
        pattern=repack_patterns(request, "--pattern") or None,
        undo=request.undo,
        keep_split=request.keep_split,
    )
    check_loads(plan, request.program)
    with reporting(request.progress) as report:
        return write_model(plan, "repack", gguf_source(opened), write_options(request), report)
