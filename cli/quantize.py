"""`ggufmill quantize` writes a model in other types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..pipeline.requests.quantize import QuantizeRequest
from .command import Verb
from .display.console import call
from .display.plans import written_text
from .options.fields import options_of
from .options.sections import HELP_ALL, shows_all
from .options.types import OutputPath

_COMMON = "Q8_0, Q6_K, Q5_K_M, Q4_K_M, IQ4_XS, IQ4_K, Q3_K_M, IQ3_K, IQ2_M, IQ2_KS"


class _OutputBeforeType(OutputPath):
    """An output that is not named like a type: llama-quantize takes a type without an output."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ..formats import TYPES
        from ..quantize.recipes.mixes import file_type_name

        if isinstance(value, str) and (value in TYPES or value.upper() == "COPY" or file_type_name(value) is not None):
            self.fail(f"{value!r} is a type; the name of the output comes before it", param, ctx)
        return super().convert(value, param, ctx)


class _QuantizeVerb(Verb):
    """The command `quantize`: its help ends with the names of types, and it answers a last argument that is a number of
    threads."""

    allow_extra_args = True  # they are refused here

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        extra = super().parse_args(ctx, args)
        if len(extra) == 1 and extra[0].isdecimal():
            ctx.fail(f"{extra[0]} is one argument too many; a number of threads is given by -t {extra[0]}")
        if extra:
            ctx.fail(f"got unexpected extra arguments ({' '.join(extra)})")
        return extra

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ..formats import TYPES
        from ..quantize import can_encode
        from ..quantize.recipes.mixes import default_type, file_types

        if not shows_all(ctx):
            formatter.write_paragraph()
            formatter.write_text(
                f"File types are {_COMMON} and others; `ggufmill quantize {HELP_ALL}` lists them and all types."
            )
            return
        with formatter.section("File types (a mix of types, as llama-quantize makes it)"):
            formatter.write_text(" ".join(name for name in file_types() if can_encode(default_type(name))))
        with formatter.section("Tensor types (in rules, in options, and with --pure)"):
            formatter.write_text(" ".join(name for name in TYPES if can_encode(TYPES[name])))


@click.command(cls=_QuantizeVerb)
@options_of(QuantizeRequest, out=_OutputBeforeType(path_type=Path))
def command(**options: Any) -> None:
    """Quantise SOURCE (a GGUF, a Hugging Face folder or hf:OWNER/NAME: fp8 and bf16 are decoded on the fly) to OUT.

    TYPE is for tensors that no rule takes: a file type such as Q4_K_M or IQ4_K (or its number), which gives some tensors a
    finer type as llama-quantize does, or with --pure a type for all. The first matching rule wins; a rule is searched for
    anywhere in the name. What a TOML recipe says under [quantize] and [convert] counts where the command line does not.

    With --target-size, --target-bpw or --max-kld the types of tensors that no rule takes are searched for, as `ggufmill
    search` does it; the recipe that comes of it is kept in OUT.recipe.txt.

    \b
    Examples:
      ggufmill quantize model-bf16.gguf out.gguf Q4_K_M
      ggufmill quantize DeepSeek-V3/ out.gguf --recipe deepseek-v3-iq4_k_r4.txt --imatrix v3.imatrix --dry-run
      ggufmill quantize Qwen3/ out.gguf iq4_k --custom-q "ffn_down=iq5_k,attn_.*=q8_0"
      ggufmill quantize Qwen3/ out.gguf iq3_k --imatrix qwen3.imatrix --covariance qwen3.cov --effort 2
      ggufmill quantize Qwen3/ out.gguf iq4_k --imatrix qwen3.imatrix --device cuda
      ggufmill quantize DeepSeek-V3/ out.gguf --recipe my.txt --split-max-size 50G --only-shards 3-7
      ggufmill quantize Qwen3/ out.gguf --target-size 12G --imatrix qwen3.imatrix --calibration calibration.txt
      ggufmill quantize DeepSeek-V3/ out.gguf --recipe deepseek-v3-iq4_k_r4.txt --cluster tcp://node1:8786
    """
    from ..pipeline.quantize import quantize_model

    call(quantize_model, show=written_text, **options)
