"""What `convert` can be asked for."""

from __future__ import annotations

from pathlib import Path

from ...request_fields import argument, option, request
from .groups import CheckpointOutput, OutputOptions, SourceOptions, Splits

OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0", "mxfp4")  # of quantize.recipes.recipe, which takes long to import


@request
class ConvertRequest(SourceOptions, CheckpointOutput, Splits, OutputOptions):
    source: str | Path = argument(
        "A checkpoint's folder, or hf:OWNER/NAME[@REVISION], which is downloaded into the hub's cache; or a folder "
        "that peft wrote (adapter_config.json), which becomes an adapter as convert_lora_to_gguf.py makes it.",
        kind="checkpoint",
        metavar="MODEL",
        travel="path",
        kw_only=False,
    )
    out: str | Path = argument("The file to write.", kind="out", travel="path", kw_only=False)
    base: str | Path | None = option(
        "Read config.json of this model, which the adapter changes.",
        default=None,
        kind="checkpoint",
        shown="where adapter_config.json says",
        travel="path",
        rare=True,
    )
    mmproj: bool = option(
        "Convert the vision and audio towers and their projectors, as llama.cpp's projector file.", default=False
    )
    outtype: str = option(
        "Store weights in this type. auto: f16 for an f16 checkpoint, else bf16; weights that are stored in "
        "mxfp4 or nvfp4 stay in it, symmetric int4 in groups of 32 (Kimi-K2-Thinking) becomes q4_0, both "
        "without loss; mxfp4: all experts.",
        default="auto",
        choices=OUTTYPES,
        key="convert.outtype",
    )
    symmetric_q40: bool = option(
        "Make q4_0 of weights stored in symmetric int4 with groups of 32, whatever --outtype says; this is "
        "without loss, and refused where it would not be.",
        default=False,
        rare=True,
    )
