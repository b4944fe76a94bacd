"""The commands of the program, and the options of each."""

import click

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
