"""`ggufmill split`: one GGUF file is cut into several."""

from __future__ import annotations

from pathlib import Path

from ...formats import open_gguf
from ...jobs.plan import plan_copy
from ...quantize.gguf_source import gguf_source
from ..common.arguments import as_bytes
from ..common.progress import reporting
from ..requests.rewriting import SplitRequest
from ..requests.verb import verb
from ..writing.write_model import WriteResult, write_model
from ..writing.write_options import write_options

DEFAULT_TENSORS = 128  # per file, as gguf-split


@verb(SplitRequest)
def split_model(request: SplitRequest) -> WriteResult:
    """Cuts a GGUF file into OUT-00001-of-0000N.gguf, with names and metadata as gguf-split has them.

    Returns a `WriteResult`, whose `files` are the shards. Raises as `convert_model` does.

    Example:
        >>> from ggufmill import convert_model, split_model
        >>> from ggufmill.recipes import FOLDER
        >>> _ = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", force=True)
        >>> [path.name for path in split_model("demo.gguf", "part", split_max_tensors=40, force=True).files]
        ['part-00001-of-00002.gguf', 'part-00002-of-00002.gguf']
    """
    opened, tensors = open_gguf(Path(request.source)), request.split_max_tensors
    if request.split_max_size is None and tensors is None:
        tensors = DEFAULT_TENSORS
    plan = plan_copy(
        opened,
        Path(request.out),
        split_max_size=as_bytes(request.split_max_size),
        split_max_tensors=tensors,
        tensor_first_split=request.tensor_first_split,
    )
    with reporting(request.progress) as report:
        return write_model(plan, "split", gguf_source(opened), write_options(request), report)
