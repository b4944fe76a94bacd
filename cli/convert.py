"""`ggufmill convert` makes a GGUF of a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from ..pipeline.requests.convert import OUTTYPES, ConvertRequest
from .command import Verb
from .display.console import call
from .display.plans import written_text
from .options.fields import options_of


class _Outtype(click.Choice):
    """A type that `convert` writes; what only `quantize` writes is answered with its command."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ..formats import TYPES
        from ..quantize.recipes.mixes import file_type_name

        if str(value).lower() not in self.choices and (value in TYPES or file_type_name(str(value)) is not None):
            self.fail(f"{value} is made of a checkpoint by `ggufmill quantize MODEL OUT {value}`, in one pass", param, ctx)
        return super().convert(value, param, ctx)


@click.command(cls=Verb)
@options_of(ConvertRequest, outtype=_Outtype(OUTTYPES, case_sensitive=False))
def command(**options: Any) -> None:
    """Convert the Hugging Face checkpoint MODEL, a folder or hf:OWNER/NAME[@REVISION], to the GGUF file OUT.

    A folder with adapter_config.json (a LoRA adapter that peft saved) becomes a GGUF for --lora of llama.cpp and this program.

    fp8 is decoded on the fly, mxfp4 is kept or decoded. Norms, routers and biases are written as f32. A repository is
    downloaded into the hub's cache (HF_HOME; a token in HF_TOKEN), for --dry-run its headers only. Licence, authors, base model
    and tags come from its model card.

    \b
    Examples:
      ggufmill convert DeepSeek-V3/ v3-bf16.gguf --split-max-size 50G
      ggufmill convert Llama-3.2-1B/ llama.gguf --outtype q8_0 --dry-run
      ggufmill convert gpt-oss-20b/ gpt-oss.gguf --outtype mxfp4
      ggufmill convert hf:Qwen/Qwen3-8B@main qwen3.gguf --remote
      ggufmill convert my-adapter/ adapter.gguf --base Llama-3.2-1B/
      ggufmill convert Qwen3-VL-8B/ mmproj-f16.gguf --mmproj
      ggufmill convert Llama-3.2-1B/ tuned.gguf --lora my-adapter/
    """
    from ..pipeline.convert import convert_model

    call(convert_model, show=written_text, **options)
