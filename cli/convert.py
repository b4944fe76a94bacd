"""`ggufmill convert` makes a GGUF of a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from .command import Verb
from .display.console import call
from .display.plans import written_text
from .options import flags
from .options.types import OUT, Source

OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0", "mxfp4")  # of quantize.recipes.recipe, which takes long to import


@click.command(cls=Verb)
@click.argument("model", type=Source(file_okay=False))
@click.argument("out", type=OUT)
@click.option(
    "--base",
    type=Source(file_okay=False),
    help="Of an adapter: the model that it changes, whose config.json is read. [default: where adapter_config.json says]",
)
@click.option(
    "--mmproj", is_flag=True, help="Convert the vision and audio towers and their projectors, as llama.cpp's projector file."
)
@click.option(
    "--outtype",
    type=click.Choice(OUTTYPES, case_sensitive=False),
    default="auto",
    show_default=True,
    help="auto: f16 for an f16 checkpoint, else bf16; weights that are stored in mxfp4 or nvfp4 stay in it, symmetric int4 in "
    "groups of 32 (Kimi-K2-Thinking) becomes q4_0, both without loss; mxfp4: all experts.",
)
@click.option(
    "--symmetric-q40",
    is_flag=True,
    help="Weights stored in symmetric int4 with groups of 32 become q4_0 without loss, whatever --outtype; refused if inexact.",
)
@flags.mla_layout
@flags.mtp
@flags.vocab
@flags.reading
@flags.program
@flags.lora
@flags.allow_nonfinite
@flags.remote
@flags.delete_source_shards
@flags.metadata
@flags.split_max_size
@flags.split_max_tensors
@flags.tensor_first_split
@flags.partial_requant
@flags.cluster
@flags.cluster_output
@flags.writing
def command(model: Any, out: Any, as_json: bool, **options: Any) -> None:
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

    call(convert_model, model, out, show=written_text, as_json=as_json, **options)
