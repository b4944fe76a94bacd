"""Options that several verbs share; the parameter of each is the keyword argument of the library's function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click

from ...formats.loaders import PROGRAMS
from .types import SIZE

Decorator = Callable[[Callable], Callable]


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, in this order in the help."""
    return lambda command: functools.reduce(lambda function, option: option(function), reversed(options), command)


def gathered(
    options: Sequence[Decorator], names: Sequence[str], keyword: str, make: Callable[[dict[str, Any]], Any]
) -> Decorator:
    """A decorator that adds options to a command, which gets make(values by name) as the one keyword argument `keyword`.

    names: of the keywords that click makes of these options.
    """

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def called(**given: Any) -> Any:
            values = {name: given.pop(name) for name in names}
            return command(**given, **{keyword: make(values)})

        return together(*options)(called)

    return decorate


as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
force = click.option("--force", is_flag=True, help="Replace an existing output.")
resume = click.option("--resume", is_flag=True, help="Resume an interrupted job.")
dry_run = click.option("--dry-run", is_flag=True, help="Show the plan with exact sizes; write nothing.")
threads = click.option("-t", "--threads", type=click.IntRange(1), help="Worker threads. [default: all processors]")

# of every verb that writes model files
writing = together(
    click.option(
        "--verify", is_flag=True, help="Read a sample of every tensor back, decode it and compare it with the source."
    ),
    click.option(
        "--manifest",
        is_flag=True,
        help="Write OUT.manifest: sha256 of every tensor, for `ggufmill hash --check`. A split's has its first file's name.",
    ),
    dry_run,
    resume,
    force,
    threads,
    as_json,
)
cluster_output = click.option(
    "--cluster-output",
    type=click.Choice(["shared", "collect"]),
    help="Whether workers write into OUT's folder, which all machines share, or send what they make. [default: shared]",
)
allow_nonfinite = click.option(
    "--allow-nonfinite", is_flag=True, help="Write 0 for weights that are NaN or infinite, and count them."
)
split_max_size = click.option(
    "--split-max-size", type=SIZE, metavar="SIZE", help="Split the output into files of at most this size (50G)."
)
tensor_first_split = click.option(
    "--no-tensor-first-split",
    "tensor_first_split",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Write no tensors to the first file of a split, only the metadata.",
)
keep_split = click.option("--keep-split", is_flag=True, help="Write as many files as the source has, with the same tensors.")
program = click.option(
    "--for",
    "program",
    type=click.Choice(PROGRAMS, case_sensitive=False),
    help="Make only what this program loads: its types, its layout of latent attention, its fallbacks.",
)
cluster = click.option(
    "--cluster", metavar="ADDRESS", help="Share the work out to dask workers: tcp://HOST:PORT, a scheduler file, or local:N."
)
