"""Options of llama.cpp's and ik_llama.cpp's programs: taken as they are meant, noted as without effect, or answered with what
to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import click


class LlamaOption(NamedTuple):
    """An option of llama.cpp's programs.

    names     the option's names there
    n_values  values that follow it
    here      the option, or the first or last argument (names that it may have), that means the same; '' if there is none
    reason    without `here`: why it has no effect, which is a note ('': no note), or how it is written, which is an error
    is_error  that `reason` is an error
    verb      the only verb for which this holds; '' for all
    """

    names: str
    n_values: int = 0
    here: str = ""
    reason: str = ""
    is_error: bool = False
    verb: str = ""


def _refused(names: str, reason: str, verb: str = "") -> LlamaOption:
    return LlamaOption(names, 0, "", reason, True, verb)


_OF_FILE = "it belongs to the file: ggufmill metadata FILE --set KEY=VALUE"
_TABLE = (
    LlamaOption("-m --model", 1, "model models file"),
    LlamaOption("-o --output --outfile", 1, "out"),
    LlamaOption("--chat-template --chat-template-file", 1, "--template"),
    LlamaOption("-a", 1, "--alias"),
    LlamaOption("--predict", 1, "--n-predict"),
    LlamaOption("-fmoe --fused-moe"),  # always so; else -fmoe would be read as -f moe
    LlamaOption("--jinja", reason="chat templates are always Jinja"),
    LlamaOption("--mmap --no-mmap", reason="files are mapped, and read as they are used"),
    LlamaOption("--mlock", reason="weights are not locked into memory"),
    LlamaOption("-cb --cont-batching", reason="it is always so"),
    LlamaOption("--slots --webui --embedding --embeddings --rerank --reranking", reason="it is always there"),
    LlamaOption("--no-context-shift --swa-full -kvu --kv-unified", reason="it is always so"),
    LlamaOption("-no-cnv --no-conversation --simple-io --color --log-disable", reason="there is nothing to switch off"),
    LlamaOption("-v --verbose", reason="ggufmill --debug shows the trace of an error"),
    LlamaOption("--no-warmup", reason="nothing is warmed up here"),
    LlamaOption("-tb --threads-batch", 1, reason="there is one number of threads, -t"),
    LlamaOption("--threads-http", 1, reason="the server has one thread for connections"),
    _refused("-hf -hfr --hf-repo", "ggufmill convert hf:OWNER/NAME OUT.gguf makes a file of it first"),
    _refused("-i -cnv --conversation --interactive", "ggufmill chat MODEL talks"),
    _refused("-sys --system-prompt", "ggufmill chat MODEL has --system"),
    _refused("--mmproj --image --audio", "only text goes in; convert --mmproj makes the projector for llama.cpp"),
    _refused("-md --model-draft", "drafts come from a model's own draft layers, --draft-max"),
    _refused("--api-key-file", "GGUFMILL_API_KEY holds the key"),
    _refused("--ssl-key-file --ssl-cert-file", "a proxy in front of the server does that"),
    _refused("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --override-kv", _OF_FILE),
    _refused("-sm --split-mode", "layers are split over devices, -ts and -ot"),
    _refused("--tensor-type", 'rules are given by --custom-q "REGEX=TYPE,..."', "quantize"),
    _refused("--tensor-type-file", "a file of rules is given by --recipe FILE", "quantize"),
    _refused("--per-layer-token-embedding-type", 'write --custom-q "per_layer_token_embd=TYPE"', "quantize"),
    _refused(
        "--repack",
        "`ggufmill repack IN OUT` interleaves a file's rows, and a TYPE such as Q4_K_R4 does while quantising",
        "quantize",
    ),
    _refused("--repack-pattern", "`ggufmill repack IN OUT --pattern REGEX` interleaves rows", "quantize"),
)


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
    others = {name: one for one in _TABLE if one.verb in ("", ctx.info_name) for name in one.names.split()}
    arguments = [parameter.human_readable_name.lower() for parameter in command.params if isinstance(parameter, click.Argument)]
    first, kept, last = list[str](), list[str](), list[str]()
    i = 0
    while i < len(args) and args[i] != "--":
        name, equals, value = args[i].partition("=")
        n = 1
        if name in options:
            option = options[name]
            n += 0 if equals or option.is_flag or option.count else option.nargs
        elif (other := others.get(name)) is not None and i + other.n_values * (not equals) < len(args):
            n += other.n_values * (not equals)
            values = [value] if equals else list(args[i + 1 : i + n])
            if arguments[:1] and arguments[0] in other.here.split():
                first += values
            elif arguments[1:] and arguments[-1] == other.here:
                last += values
            elif other.here in options:
                kept += [other.here, *values]
            elif other.here:
                kept += args[i : i + n]
            elif other.is_error:
                raise click.UsageError(f"{name} is not an option here: {other.reason}", ctx)
            elif other.reason and "--quiet" not in args:
                click.echo(f"note: {name} has no effect here: {other.reason}", err=True)
            i += n
            continue
        kept += args[i : i + n]
        i += n
    return [*first, *kept, *last, *args[i:]]
