"""`ggufmill metadata` changes what a file says about its model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...pipeline.common.messages import printable
from ...pipeline.requests.files import MetadataRequest
from ..command import Verb
from ..display.console import call, table
from ..display.metadata import metadata_text, short_text
from ..options.fields import options_of

if TYPE_CHECKING:
    from ...pipeline.files.metadata import MetadataResult

_WIDTH = 40  # of a value
_DONE = {
    "unchanged": "nothing to change",
    "planned": "nothing written (--dry-run)",
    "in place": "header changed in place",
    "rewritten": "written",
}


class _Pair(click.ParamType):
    """LEFT=RIGHT, as two texts."""

    def __init__(self, name: str):
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        left, equals, right = value.partition("=")
        if not left or not equals:
            self.fail(f"{value!r} is not {self.name}", param, ctx)
        return left, right


def _pairs(name: str) -> dict[str, Any]:
    return {"type": _Pair(name), "multiple": True, "callback": lambda ctx, param, pairs: dict(pairs)}


@click.command(cls=Verb)
@options_of(MetadataRequest, set=_pairs("KEY[:TYPE]=VALUE"), set_file=_pairs("KEY=FILE"), rename=_pairs("KEY=NEW"))
def command(**options: Any) -> None:
    """Show the metadata of the GGUF FILE (any shard of a split one), or change it by options. Tensors stay as they are.

    A header that keeps its size, rounded up to the alignment, is changed in place; else a new file is written and takes the
    place of the old one, which needs its size in free disk space. VALUE of an array is JSON. TYPE is uint8 ... uint64, int8 ...
    int64, float32, float64, bool or string, followed by [] for an array; a new key whose VALUE looks like a number needs one.

    \b
    Examples:
      ggufmill metadata model.gguf
      ggufmill metadata model.gguf --set general.name="My model" --remove general.description
      ggufmill metadata model.gguf --set llama.rope.freq_base=1000000 --set-file tokenizer.chat_template=chat.jinja
      ggufmill metadata model.gguf --set my.layers:int32[]=[1,2,3] --rename old.key=new.key -o changed.gguf
    """
    from ...pipeline.files.metadata import edit_metadata

    asked = any(options[name] for name in ("set", "set_file", "remove", "rename"))
    show = _changes_text if asked else lambda result: metadata_text(result.metadata)
    call(edit_metadata, show=show, **options)


def _changes_text(result: MetadataResult) -> str:
    rows = [
        (printable(c.key), _side(c.type_before, c.before), _side(c.type_after, c.after), c.type_after or c.type_before)
        for c in result.changes
    ]
    done = f"{result.file}: {_DONE[result.status]}"
    return f"{table(('key', 'before', 'after', 'type'), rows)}\n\n{done}" if rows else done


def _side(type: str | None, value: Any) -> str:
    return short_text(value, _WIDTH) if type is not None else "-"
