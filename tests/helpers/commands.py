"""The commands of the program, the options of each, and how a test runs one."""

import click
import pytest

from ggufmill.cli import main
from ggufmill.cli.program import group


def commands():
    """Words ('make', 'imatrix compute', ...) -> command, groups too; those of a group before it."""

    def below(command, words):
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                yield from below(command.get_command(click.Context(command), name), [*words, name])
        if words:
            yield " ".join(words), command

    return dict(below(group, []))


COMMANDS = commands()


def exit_code(*arguments):
    """Of the command line, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code
