"""`ggufmill quantize` writes a model in other types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..quantize.recipes.type_selection import ROLES
from .command import Verb
from .display.console import call
from .display.plans import written_text
from .options import flags
from .options.types import FILE, FILE_TYPE, TYPE, Output, Source

_role_types = flags.together(
    *(
        click.option(
            f"--{role.replace('_', '-')}-type", type=TYPE, help=f"Type of tensors with {part} in their name; rules beat it."
        )
        for role, part in ROLES
    )
)


class _OutputBeforeType(Output):
    """An output that is not named like a type: llama-quantize takes a type without an output."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ..formats import TYPES
        from ..quantize.recipes.mixes import file_type_name

        if isinstance(value, str) and (value in TYPES or value.upper() == "COPY" or file_type_name(value) is not None):
            self.fail(f"{value!r} is a type; the name of the output comes before it", param, ctx)
        return super().convert(value, param, ctx)


class _QuantizeVerb(Verb):
    """The command `quantize`: its help ends with the names of all types, and it answers a last argument that is a number of
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

        with formatter.section("File types (a mix of types, as llama-quantize makes it)"):
            formatter.write_text(" ".join(name for name in file_types() if can_encode(default_type(name))))
        with formatter.section("Tensor types (in rules, in options, and with --pure)"):
            formatter.write_text(" ".join(name for name in TYPES if can_encode(TYPES[name])))


@click.command(cls=_QuantizeVerb)
@click.argument("source", type=Source())
@click.argument("out", type=_OutputBeforeType(path_type=Path))
@click.argument("type", type=FILE_TYPE, required=False)
@click.option(
    "--recipe", metavar="FILE", help="Recipe of `regex=type` rules (text or TOML), or the name of one that comes along."
)
@click.option(
    "--custom-q", "custom_q", multiple=True, metavar="RULES", help="Rules on the command line: regex=type,regex=type,..."
)
@flags.imatrix
@flags.covariance
@flags.target
@flags.types
@click.option("--calibration", type=FILE, help="Text to measure the tensors' sensitivity on, for --target-size and its like.")
@click.option("--token-embedding-type", type=TYPE, help="Type of token_embd.weight; beats the rules.")
@click.option("--output-tensor-type", type=TYPE, help="Type of output.weight; beats the rules.")
@click.option("--ffn-gate-inp-type", type=TYPE, help="Type of the routers ffn_gate_inp, which otherwise stay f32.")
@_role_types
@click.option("--pure", is_flag=True, help="Every weight becomes TYPE; mix and rules are left aside.")
@click.option("--leave-output-tensor", is_flag=True, help="Copy output.weight as it is.")
@click.option("--extra-output-tensor", type=TYPE, help="Write a copy of the output matrix of this type beside it.")
@click.option("--prune-layers", metavar="LAYERS", help="Leave these layers out, for example 20,22-25; the others move up.")
@click.option("--include-weights", multiple=True, metavar="TEXT", help="Use imatrix entries with TEXT in their name only.")
@click.option("--exclude-weights", multiple=True, metavar="TEXT", help="Leave imatrix entries with TEXT in their name aside.")
@click.option("--allow-requantize", is_flag=True, help="Allow quantising what is quantised already.")
@click.option("--ignore-imatrix-rules", is_flag=True, help="Allow types that should not be made without an imatrix.")
@click.option("--hide-imatrix", is_flag=True, help="Do not name the imatrix in the file.")
@click.option("--strict", is_flag=True, help="Make every warning an error before any work.")
@flags.allow_nonfinite
@flags.remote
@flags.delete_source_shards
@flags.metadata
@flags.mla_layout
@flags.mtp
@flags.vocab
@flags.reading
@flags.program
@flags.lora
@flags.split_max_size
@flags.split_max_tensors
@flags.tensor_first_split
@flags.keep_split
@flags.only_shards
@flags.partial_requant
@click.option(
    "--device",
    metavar="NAME",
    help="Device of torch that encodes k-quants and IQK types: cuda, cuda:1, xpu, mps, cpu, auto; or none. [default: none]",
)
@click.option("--no-timing", is_flag=True, help="With --dry-run: do not time this machine's encoders.")
@flags.cluster
@flags.cluster_output
@flags.writing
def command(source: Any, out: Any, type: Any, as_json: bool, **options: Any) -> None:
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

    call(quantize_model, source, out, type, show=written_text, as_json=as_json, **options)
