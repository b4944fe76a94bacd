"""Options that would do nothing as they are given: they are refused, not passed over."""

from __future__ import annotations

from collections.abc import Mapping

import click
from click.core import ParameterSource


def refuse_idle(needs: Mapping[str, str], there: Mapping[str, bool]) -> None:
    """Raises click.UsageError for an option of the running command that was given without what it needs.

    needs: keyword of an option -> what it needs, in words; there: these words -> whether that is there.
    """
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and name in needs and not there[needs[name]]:
            shown = option.human_readable_name if isinstance(option, click.Argument) else max(option.opts, key=len)
            raise click.UsageError(f"{shown} does nothing without {needs[name]}", context)
