"""`ggufmill inspect` shows what is in a file, or what the processor can do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..formats.loaders import PROGRAMS
from ..pipeline.common.messages import gib, printable
from .command import Verb
from .display.console import call, table
from .options import flags

if TYPE_CHECKING:
    from ..pipeline.inspect import InspectResult, ProcessorSummary

_WIDTH = 80  # of a value


class _Gguf(click.Path):
    """A file that exists; a folder is answered with what shows a checkpoint."""

    def __init__(self) -> None:
        super().__init__(exists=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if Path(os.fsdecode(path)).is_dir():
            text = "`ggufmill convert FOLDER OUT.gguf --dry-run` shows the tensors of a checkpoint"
            self.fail(f"{value} is a directory; {text}", param, ctx)
        return path


@click.command(cls=Verb)
@click.argument("file", type=_Gguf(), required=False)
@click.option("--check", is_flag=True, help="Decode every tensor and count NaN and infinite values.")
@click.option("--checksums", is_flag=True, help="xxh3-64 of every tensor's bytes.")
@click.option("--arrays", is_flag=True, help="Long arrays in full in --json; else their first values and their length.")
@click.option(
    "--for",
    "program",
    type=click.Choice(PROGRAMS, case_sensitive=False),
    help="Whether this program loads the file, as far as is known; exit code 1 if not.",
)
@click.option("--cpu", is_flag=True, help="Without FILE: what the processor can do, and what kernels make use of.")
@flags.as_json
def command(file: Any, arrays: bool, cpu: bool, as_json: bool, **options: Any) -> None:
    """Metadata, tensors, types and sizes of a GGUF file (give any shard of a split one). Unknown types are shown by number.

    \b
    Examples:
      ggufmill inspect model.gguf
      ggufmill inspect model-00001-of-00009.gguf --check --json
      ggufmill inspect model.gguf --json --arrays
      ggufmill inspect model.gguf --for llama.cpp
      ggufmill inspect --cpu
    """
    if (file is None) != cpu:
        raise click.UsageError("give a FILE, or --cpu without one")
    from ..pipeline.inspect import inspect_model, inspect_processor

    if cpu:
        call(inspect_processor, show=_processor_text, as_json=as_json, bars=False)
        return
    call(inspect_model, file, show=_text, as_json=as_json, arrays=arrays and as_json, **options)


def _text(result: InspectResult) -> str:
    metadata = [(printable(key), _short(value)) for key, value in result.metadata.items()]
    extra = [key for key in ("xxh3", "nonfinite") if key in (result.tensors or [{}])[0]]
    tensors = [
        (printable(t["name"]), " x ".join(map(str, t["shape"])), t["type"], t["nbytes"], *(t[key] for key in extra))
        for t in result.tensors
    ]
    histogram = [(name, entry["tensors"], gib(entry["nbytes"])) for name, entry in result.types.items()]
    shards = f" in {len(result.files)} files" if len(result.files) > 1 else ""
    return "\n\n".join(
        [
            table(("key", "value"), metadata),
            table(("tensor", "shape", "type", "bytes", *extra), tensors),
            table(("type", "tensors", "size"), histogram),
            f"{len(tensors)} tensors, {gib(result.total_bytes)}, {result.bits_per_weight:.3f} bits per weight{shards}",
            *(f"note: {note}" for note in result.notes),
        ]
    )


def _processor_text(summary: ProcessorSummary) -> str:
    level = summary.level + (" (as GGUFMILL_CPU asks for)" if summary.pretended else "")
    rows = [
        ("processor", f"{summary.processor} ({summary.architecture})"),
        ("levels it can execute", ", ".join(summary.levels)),
        ("level in use", level),
        ("vector registers", f"{summary.vector_bits} bits"),
        *summary.instructions.items(),
        ("compiled kernels", printable(summary.kernels)),
    ]
    return table(("what", "which"), rows)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"[{value['length']:,}] {', '.join(repr(v) for v in value['first'][:5])}, ..."
    text = printable(str(value)[: _WIDTH + 1])
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
