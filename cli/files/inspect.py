"""`ggufmill inspect` shows what is in a file or a checkpoint, or what the processor can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...pipeline.common.figures import bits_per_weight_text, bits_text, file_text, size_text
from ...pipeline.common.messages import printable
from ...pipeline.requests.files import InspectRequest
from ..command import Verb
from ..display.console import call, table
from ..display.metadata import metadata_text
from ..options.fields import options_of
from ..options.types import SourceName

if TYPE_CHECKING:
    from ...pipeline.common.checkpoints import CheckpointSummary
    from ...pipeline.files.inspect import InspectResult, ProcessorSummary


@click.command(cls=Verb)
@options_of(InspectRequest, file={"type": SourceName(), "required": False})
@click.option(
    "--cpu", is_flag=True, help="Show the processor's instruction sets and which of them kernels use; this needs no FILE."
)
def command(file: Any, arrays: bool, cpu: bool, as_json: bool, **options: Any) -> None:
    """Show metadata, tensors, types and sizes of a GGUF file (give any shard of a split one).

    Each tensor is shown with the rule that gave it its type, from the recipe in the file or of a stock mix, where that can be
    told. A type that is not known is shown by its number. For a checkpoint (a folder or hf:OWNER/NAME), config.json and the
    tensors as they are stored are shown, and whether `convert` takes it; no weights are downloaded.

    \b
    Examples:
      ggufmill inspect model.gguf
      ggufmill inspect model-00001-of-00009.gguf --check --json
      ggufmill inspect model.gguf --tensors 'blk\\.0\\.'
      ggufmill inspect model.gguf --json --arrays
      ggufmill inspect model.gguf --for llama.cpp
      ggufmill inspect hf:Qwen/Qwen3-8B
      ggufmill inspect --cpu
    """
    if (file is None) != cpu:
        raise click.UsageError("give a FILE, or --cpu without one")
    from ...convert.hub.fetch import is_repository
    from ...pipeline.common.arguments import refuse_given
    from ...pipeline.files.inspect import inspect_checkpoint, inspect_model, inspect_processor

    if cpu:
        call(inspect_processor, show=_processor_text, as_json=as_json, bars=False)
    elif is_repository(file) or file.is_dir():
        refuse_given({**{f"--{name}": value for name, value in options.items()}, "--arrays": arrays}, "a GGUF")
        call(inspect_checkpoint, file, show=_checkpoint_text, as_json=as_json, bars=False)
    else:
        call(inspect_model, file, show=_text, as_json=as_json, arrays=arrays and as_json, **options)


def _checkpoint_text(result: CheckpointSummary) -> str:
    def row(t: dict[str, Any]) -> tuple[object, ...]:
        return (printable(t["name"]), " x ".join(map(str, t["shape"])), t["type"], t["nbytes"], printable(t["file"]))

    histogram = [(name, entry["tensors"], size_text(entry["nbytes"])) for name, entry in result.types.items()]
    verdict = f"converts to {result.gguf_architecture}" if not result.problem else f"does not convert: {result.problem}"
    return "\n\n".join(
        [
            metadata_text(result.config),
            table(("tensor", "shape", "type", "bytes", "file"), result.tensors, row),
            table(("type", "tensors", "size"), histogram),
            f"{result.architecture}: {len(result.tensors)} tensors, {result.parameters:,} parameters, "
            f"{size_text(result.total_bytes)}",
            verdict,
            *(f"note: {note}" for note in result.notes),
        ]
    )


def _text(result: InspectResult) -> str:
    extra = [key for key in ("xxh3", "nonfinite") if key in (result.tensors or [{}])[0]]

    def row(t: dict[str, Any]) -> tuple[object, ...]:
        rule = f"{t['rule'] or ''}{' (' + t['note'] + ')' if t['note'] else ''}"
        shape = " x ".join(map(str, t["shape"]))
        return (
            printable(t["name"]),
            shape,
            t["type"],
            bits_text(t["bits"]),
            t["nbytes"],
            *(t[key] for key in extra),
            printable(rule),
        )

    tensors = table(("tensor", "shape", "type", "bits", "bytes", *extra, "rule"), result.tensors, row)
    if len(result.tensors) < result.n_tensors:
        shown = sum(t["nbytes"] for t in result.tensors), sum(t["n_elements"] for t in result.tensors)
        share = f"{size_text(shown[0])}, {bits_per_weight_text(8 * shown[0] / shown[1])}"
        return f"{tensors}\n\n{len(result.tensors):,} of {result.n_tensors:,} tensors, {share}"
    histogram = [(name, entry["tensors"], size_text(entry["nbytes"])) for name, entry in result.types.items()]
    files = file_text(result.file_bytes, len(result.files))
    return "\n\n".join(
        [
            metadata_text(result.metadata),
            tensors,
            table(("type", "tensors", "size"), histogram),
            f"{len(result.tensors):,} tensors, {bits_per_weight_text(result.bits_per_weight)}, {files}",
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
