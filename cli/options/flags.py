"""Options that several verbs share; the parameter of each is the keyword argument of the library's function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click

from .sections import GENERAL, SectionedOption

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


as_json = click.option(
    "--json", "as_json", cls=SectionedOption, section=GENERAL, is_flag=True, help="Print one JSON object on stdout."
)
force = click.option("--force", is_flag=True, help="Replace an existing output.")
