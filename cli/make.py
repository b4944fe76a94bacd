"""`ggufmill make`: from a model's name to the best file that fits."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.common.figures import duration, file_text, size_text
from ..pipeline.requests.make import MakeRequest
from .command import Verb
from .display.console import call, table
from .options.fields import options_of
from .run import report_lines

if TYPE_CHECKING:
    from ..pipeline.make import MakeResult


@click.command(cls=Verb)
@options_of(MakeRequest)
def command(**options: Any) -> None:
    """Make the best file of MODEL (a Hugging Face folder, hf:OWNER/NAME or a GGUF) that fits a size or a machine.

    It collects what the effort asks for, searches for the types of the tensors, quantises in one pass, judges the result
    against the original, and writes a report, a model card, checksums, and the TOML recipe with which `ggufmill run` makes the
    same file again. An interrupted call resumes where it was when the same command is given again.

    \b
    Examples:
      ggufmill make Qwen3-8B/ --fit 6G
      ggufmill make hf:Qwen/Qwen3-8B --vram 12G -c 16384 --for llama.cpp
      ggufmill make DeepSeek-V3/ --ram 256G --vram 24G -f chats.jsonl --heldout other.txt --effort 1 --dry-run
    """
    from ..pipeline.make import make_model

    call(make_model, show=_text, **options)


def _text(result: MakeResult) -> str:
    if result.forecast is None:
        file = shlex.quote(result.run.report["files"][0])
        run = [f"run it: ggufmill serve {file} {shlex.join(result.options)}"] if result.options is not None else []
        return "\n\n".join([report_lines(result.run.report), f"again: ggufmill run {shlex.quote(str(result.recipe))}", *run])
    forecast, stages, quant = result.forecast, result.run.stages, result.run.quants[0]
    size = f"{result.recipe.with_suffix('.gguf')}: at most {file_text(quant.most_bytes)}; {result.fit.why}"
    assert result.run.forecast is not None
    rows = [(stage, duration(each.total), size_text(each.memory) if each.memory else "") for stage, each in stages.items()]
    parts = [size, f"collected: {result.data or 'nothing'}"]
    parts.append(table(("stage", "about", "memory"), [*rows, ("together", duration(result.run.forecast.total), "")]))
    low, high = forecast.divergence
    how = "tried without data on two windows" if forecast.is_measured else "a rule of thumb"
    parts.append(f"KL divergence to expect: {low:.2g} to {high:.2g} ({how})")
    disk = replace(result.run.forecast, memory=None, seconds=None)
    return "\n\n".join([*parts, disk.text, result.text.rstrip()])
