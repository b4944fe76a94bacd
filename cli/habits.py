"""Options of llama.cpp's and ik_llama.cpp's programs that are written otherwise here, or have nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import click


class Habit(NamedTuple):
    """What an option of theirs is here.

    names     the option's names there
    n_values  values that follow it
    here      the option, or the first or last argument (names that it may have), that means the same; '' if there is none
    says      without `here`: why it has no effect, which is a note, or how it is written, which is an error
    is_error  that `says` is an error
    """

    names: str
    n_values: int = 0
    here: str = ""
    says: str = ""
    is_error: bool = False


def _refused(names: str, says: str, n_values: int = 1) -> Habit:
    return Habit(names, n_values, "", says, True)


_IN_FILE = "it belongs to the file: ggufmill metadata FILE --set KEY=VALUE"
_HABITS = (
    Habit("-m --model", 1, "model models file"),
    Habit("-o --output --outfile", 1, "out"),
    Habit("--chat-template --chat-template-file", 1, "--template"),
    Habit("-a", 1, "--alias"),
    Habit("--predict", 1, "--n-predict"),
    Habit("--jinja", says="chat templates are always Jinja"),
    Habit("--mmap --no-mmap", says="files are mapped, and read as they are used"),
    Habit("--mlock", says="weights are not locked into memory"),
    Habit("-cb --cont-batching", says="it is always so"),
    Habit("--slots --webui --embedding --embeddings --rerank --reranking", says="it is always there"),
    Habit("--no-context-shift --swa-full -kvu --kv-unified", says="it is always so"),
    Habit("-no-cnv --no-conversation --simple-io --color --log-disable", says="there is nothing to switch off"),
    Habit("-v --verbose", says="ggufmill --debug shows the trace of an error"),
    Habit("--no-warmup", says="nothing is warmed up here"),
    Habit("-tb --threads-batch", 1, says="there is one number of threads, -t"),
    Habit("--threads-http", 1, says="the server has one thread for connections"),
    _refused("-hf -hfr --hf-repo", "ggufmill convert hf:OWNER/NAME OUT.gguf makes a file of it first"),
    _refused("-i -cnv --conversation --interactive", "ggufmill chat MODEL talks", 0),
    _refused("-sys --system-prompt", "ggufmill chat MODEL has --system"),
    _refused("--mmproj --image --audio", "only text goes in; convert --mmproj makes the projector for llama.cpp"),
    _refused("-md --model-draft", "drafts come from a model's own draft layers, --draft-max"),
    _refused("--api-key-file", "GGUFMILL_API_KEY holds the key"),
    _refused("--ssl-key-file --ssl-cert-file", "a proxy in front of the server does that"),
    _refused("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --override-kv", _IN_FILE),
    _refused("-sm --split-mode", "layers are split over devices, -ts and -ot"),
)
HABITS = {name: habit for habit in _HABITS for name in habit.names.split()}


def translated(command: click.Command, ctx: click.Context, args: Sequence[str]) -> list[str]:
    """The command line with options of llama.cpp's programs as they are written here.

    Options that the command has itself, and what follows them, stay. What has no effect is a note on stderr. Raises
    click.UsageError for an option that is written otherwise.
    """
    options = {
        name: parameter
        for parameter in command.get_params(ctx)
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    arguments = [str(parameter.name) for parameter in command.params if isinstance(parameter, click.Argument)]
    first, kept, last = list[str](), list[str](), list[str]()
    i = 0
    while i < len(args) and args[i] != "--":
        name, equals, value = args[i].partition("=")
        n = 1
        if name in options:
            option = options[name]
            n += 0 if equals or option.is_flag or option.count else option.nargs
        elif (habit := HABITS.get(name)) is not None and i + habit.n_values * (not equals) < len(args):
            n += habit.n_values * (not equals)
            values = [value] if equals else list(args[i + 1 : i + n])
            if arguments[:1] and arguments[0] in habit.here.split():
                first += values
            elif arguments[1:] and arguments[-1] == habit.here:
                last += values
            elif habit.here in options:
                kept += [habit.here, *values]
            elif habit.here:
                kept += args[i : i + n]
            elif habit.is_error:
                raise click.UsageError(f"{name} is not an option here: {habit.says}", ctx)
            elif "--quiet" not in args:
                click.echo(f"note: {name} has no effect here: {habit.says}", err=True)
            i += n
            continue
        kept += args[i : i + n]
        i += n
    return [*first, *kept, *last, *args[i:]]
