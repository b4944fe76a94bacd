"""`ggufmill convert-endian` reverses the byte order of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...pipeline.common.figures import size_text
from ...pipeline.requests.files import EndianRequest
from ..command import Verb
from ..display.console import call
from ..options.fields import options_of

if TYPE_CHECKING:
    from ...pipeline.files.convert_endian import EndianResult


@click.command(cls=Verb)
@options_of(EndianRequest)
def command(**options: Any) -> None:
    """Write the GGUF FILE with the bytes of every number reversed: for a big-endian machine (s390x), or from one.

    A little-endian FILE becomes a big-endian OUT, and the reverse; twice gives the same file again. Types: floats, integers,
    q4_0, q4_1, q8_0, q2_K, q4_K, q5_K, q6_K, iq4_nl, tq1_0, tq2_0, mxfp4, nvfp4.

    \b
    Examples:
      ggufmill convert-endian model.gguf model-be.gguf
      ggufmill convert-endian model-be.gguf model.gguf --dry-run
    """
    from ...pipeline.files.convert_endian import convert_endian

    call(convert_endian, show=_text, **options)


def _text(result: EndianResult) -> str:
    done = "can be written" if result.status == "planned" else "written"
    return f"{result.file}: {done}, {result.order}-endian, {result.tensors} tensors, {size_text(result.nbytes)}"
