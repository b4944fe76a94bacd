"""`ggufmill completion` prints what makes a shell complete verbs, options and file names."""

from __future__ import annotations

import click

from .command import Verb

_VARIABLE = "_GGUFMILL_COMPLETE"  # click's name for a program called ggufmill


@click.command(cls=Verb)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a script that makes SHELL complete verbs, options, their values and file names of ggufmill.

    \b
    Examples:
      eval "$(ggufmill completion bash)"                             # in ~/.bashrc
      eval "$(ggufmill completion zsh)"                              # in ~/.zshrc
      ggufmill completion fish > ~/.config/fish/completions/ggufmill.fish
    """
    from click.shell_completion import get_completion_class

    from .program import group

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(group, {}, "ggufmill", _VARIABLE).source())
