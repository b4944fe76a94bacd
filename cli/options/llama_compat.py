"""Options of llama.cpp's and ik_llama.cpp's programs, and of those that are used with Hugging Face's models: taken as they are
meant, noted as without effect, or answered with what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import click


class LlamaOption(NamedTuple):
    """An option of another program.

    names     the option's names there
    n_values  values that follow it
    here      the argument or the option (names that it may have) that means the same; '' if there is none
    reason    without `here`: why it has no effect, which is a note ('': no note), or how it is written, which is an error
    is_error  that `reason` is an error
    verbs     those for which this holds; '' for all
    """

    names: str
    n_values: int = 0
    here: str = ""
    reason: str = ""
    is_error: bool = False
    verbs: str = ""


def _refused(names: str, reason: str, verbs: str = "") -> LlamaOption:
    return LlamaOption(names, 0, "", reason, True, verbs)


_TEXT_VERBS = ("generate", "embed")  # which take texts as further arguments: -p may be left out
_OF_FILE = "it belongs to the file: ggufmill metadata FILE --set KEY=VALUE"
_TABLE = (
    LlamaOption("-m --model", 1, "model models file source"),
    LlamaOption("-o --out --output --outfile", 1, "out --output --out"),
    LlamaOption("--chat-template --chat-template-file", 1, "--template"),
    LlamaOption("-a", 1, "--alias"),
    LlamaOption("-q --type --outtype --format --quantization --quant-type", 1, "type", verbs="quantize"),
    LlamaOption("--type", 1, "--outtype", verbs="convert"),
    LlamaOption("--dtype --torch-dtype", 1, "--outtype", verbs="convert"),
    LlamaOption("--predict --max-tokens --max-new-tokens", 1, "--n-predict"),
    LlamaOption("--temperature", 1, "--temp"),
    LlamaOption("--repetition-penalty", 1, "--repeat-penalty"),
    LlamaOption("--max-model-len --max-seq-len --context-length", 1, "--ctx-size"),
    LlamaOption("--served-model-name", 1, "--alias"),
    LlamaOption("--prompt-file", 1, "--file", verbs="embed"),
    LlamaOption("--resume", reason="the same command always resumes", verbs="run evaluate make search upload"),
    LlamaOption("--trust-remote-code", reason="no code of a repository is run"),
    LlamaOption("-fmoe --fused-moe"),  # always so; else -fmoe would be read as -f moe
    LlamaOption("--jinja", reason="chat templates are always Jinja"),
    LlamaOption("--mmap --no-mmap", reason="files are mapped, and read as they are used"),
    LlamaOption("--mlock", reason="weights are not locked into memory"),
    LlamaOption("-cb --cont-batching", reason="it is always so"),
    LlamaOption("--slots --webui --embedding --embeddings --rerank --reranking", reason="it is always on"),
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
    _refused("--dtype --torch-dtype", "weights keep the types of the file"),
    _refused("--device-map", "layers are put on devices by --device and -ngl"),
    _refused("--revision", "a revision is part of the name: hf:OWNER/NAME@REVISION"),
    _refused("--dataset --calib-data --calibration-dataset", "--calibration FILE names a text", "quantize"),
    _refused(
        "--dataset --calib-data --calibration-dataset",
        "-f FILE names a text, a .jsonl or a .parquet file; data sets of the Hub are downloaded first",
        "imatrix compute perplexity evaluate compare search",
    ),
    _refused("--nsamples --num-samples --num-calibration-samples", "--chunks N reads N windows of the text"),
    _refused(
        "--bits --w-bit --wbits", "the TYPE says it: Q4_K_M, iq3_k, ...; --target-bpw BITS searches for types", "quantize"
    ),
    _refused("--group-size --q-group-size", "each TYPE has its own size of blocks", "quantize"),
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
    """The command line with options of other programs as they are written here.

    Options that the command has itself, and what follows them, stay. What has no effect is a note on stderr. Raises
    click.UsageError for an option that is written otherwise, and for an argument that is missing before one that an
    option gave.
    """
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    kept, named, rest = _sorted(command, ctx, args, arguments)
    places = [words for words, is_argument in kept if is_argument] + [[word] for word in rest if word != "--"]
    text = places[len(arguments) :] if ctx.info_name in _TEXT_VERBS and not any(w[:1] == ["-p"] for w, _ in kept) else []
    if not named and not text:
        return [word for words, _ in kept for word in words] + rest
    options = [word for words, is_argument in kept if not is_argument for word in words]
    options += [word for (each,) in text for word in ("-p", each)]
    return [*options, "--", *_in_order(arguments, [word for (word,) in places[: len(places) - len(text)]], named, ctx)]


def _sorted(
    command: click.Command, ctx: click.Context, args: Sequence[str], arguments: Sequence[click.Argument]
) -> tuple[list[tuple[list[str], bool]], dict[str, list[str]], list[str]]:
    """(words that belong together and whether they are an argument, values of arguments that options gave, what follows --)."""
    options = {
        name: parameter
        for parameter in command.get_params(ctx)
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    held = [one for one in _TABLE if not one.verbs or ctx.info_name in one.verbs.split()]
    others = {name: one for one in sorted(held, key=lambda one: bool(one.verbs)) for name in one.names.split()}
    names = {str(argument.name) for argument in arguments}
    kept, named, i = list[tuple[list[str], bool]](), dict[str, list[str]](), 0
    while i < len(args) and args[i] != "--":
        name, equals, value = args[i].partition("=")
        if name.startswith("--") and name not in options:
            name = name.replace("_", "-")
        n = 1
        if name in options:
            n += 0 if equals else _n_values(options[name], args[i + 1 : i + 2])
            kept.append(([f"{name}{equals}{value}", *args[i + 1 : i + n]], False))
        elif (other := others.get(name)) is not None and i + other.n_values * (not equals) < len(args):
            n += other.n_values * (not equals)
            values = [value] if equals else list(args[i + 1 : i + n])
            known = [here for here in other.here.split() if here in names or here in options]
            if known and known[0] in names:
                named.setdefault(known[0], []).extend(values)
            elif known:
                kept.append(([known[0], *values], False))
            elif other.here:
                kept.append((list(args[i : i + n]), False))
            elif other.is_error:
                raise click.UsageError(f"{name} is not an option here: {other.reason}", ctx)
            elif other.reason and "--quiet" not in args:
                click.echo(f"note: {name} has no effect here: {other.reason}", err=True)
        else:
            kept.append(([args[i]], not args[i].startswith("-") or args[i] == "-"))
        i += n
    return kept, named, list(args[i:])


def _n_values(option: click.Option, following: Sequence[str]) -> int:
    """How many of the following words are an option's values; one that may stand alone takes no other option for its value."""
    if option.is_flag or option.count:
        return 0
    may_stand_alone = getattr(option, "_flag_needs_value", False)  # click's name
    return 0 if may_stand_alone and any(word.startswith("-") for word in following) else option.nargs


def _in_order(
    arguments: Sequence[click.Argument], words: list[str], named: dict[str, list[str]], ctx: click.Context
) -> list[str]:
    """The words of the command line in the order of its arguments, those that options gave among them."""
    free, ordered = [argument for argument in arguments if str(argument.name) not in named], list[str]()
    for argument in arguments:
        if str(argument.name) in named:
            ordered += named[str(argument.name)]
            continue
        free.remove(argument)
        count = len(words) - len(free) if argument.nargs < 0 else argument.nargs
        if not words and argument.required:
            raise click.MissingParameter(ctx=ctx, param=argument)
        ordered, words = ordered + words[:count], words[count:]
    return ordered + words
