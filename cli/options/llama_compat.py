"""Answers to options and arguments of llama-quantize that are spelled differently here."""

from __future__ import annotations

from typing import Any

import click

from ..command import Verb
from .types import Output

_OPTIONS = {
    "--tensor-type": 'rules are given by --custom-q "REGEX=TYPE,..."',
    "--tensor-type-file": "a file of rules is given by --recipe FILE",
    "--per-layer-token-embedding-type": 'write --custom-q "per_layer_token_embd=TYPE"',
    "--repack": "`ggufmill repack IN OUT` interleaves a file's rows, and a TYPE such as Q4_K_R4 does while quantising",
    "--repack-pattern": "`ggufmill repack IN OUT --pattern REGEX` interleaves rows",
}


class OutputBeforeType(Output):
    """An output that is not named like a type: llama-quantize lets people leave the output away."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ...formats import TYPES
        from ...quantize.recipes.mixes import file_type_name

        if isinstance(value, str) and (value in TYPES or value.upper() == "COPY" or file_type_name(value) is not None):
            self.fail(f"{value!r} is a type; the name of the output comes before it", param, ctx)
        return super().convert(value, param, ctx)


class QuantizeVerb(Verb):
    """The command `quantize`: its help ends with the names of all types, and it refuses options and arguments of llama-quantize
    with what is to be written in their place."""

    allow_extra_args = True  # they are refused here

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            extra = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in _OPTIONS:
                ctx.fail(f"there is no {error.option_name}: {_OPTIONS[error.option_name]}")
            raise
        if len(extra) == 1 and extra[0].isdecimal():
            ctx.fail(f"{extra[0]} is one argument too many; a number of threads is given by -t {extra[0]}")
        if extra:
            ctx.fail(f"got unexpected extra arguments ({' '.join(extra)})")
        return extra

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ...formats import TYPES
        from ...quantize import can_encode
        from ...quantize.recipes.mixes import default_type, file_types

        with formatter.section("File types (a mix of types, as llama-quantize makes it)"):
            formatter.write_text(" ".join(name for name in file_types() if can_encode(default_type(name))))
        with formatter.section("Tensor types (in rules, in options, and with --pure)"):
            formatter.write_text(" ".join(name for name in TYPES if can_encode(TYPES[name])))
