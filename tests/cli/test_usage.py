"""What surrounds the verbs: help and its examples, pipes, encodings, odd names, output for programs."""

import json
import os
import re
import shlex
import subprocess
import sys

import click
import pytest

from ggufmill import VERBS
from ggufmill.cli.program import group
from ggufmill.formats.hashes import Hash, read_manifest
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"
ODD = os.fsdecode("a b\nΩ\u2028 \udcff".encode("utf-8", "surrogateescape"))  # a space, line breaks, no ASCII, no UTF-8


def commands():
    """Every command with the words that call it."""
    context = click.Context(group)

    def below(command, words):
        yield words, command
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                yield from below(command.get_command(context, name), f"{words} {name}".strip())

    return list(below(group, ""))


COMMANDS = commands()


def examples():
    for _, command in COMMANDS:
        for line in (command.help or "").splitlines():
            result = re.search(r"(?:^|Example: |\| |=\.\.\. )(ggufmill .*)", line.strip())
            if result:
                yield result[1].partition(" > ")[0]


@pytest.mark.parametrize(("words", "command"), COMMANDS)
def test_every_option_is_explained_and_every_command_has_an_example(words, command):
    for parameter in command.params:
        assert isinstance(parameter, click.Argument) or parameter.help, parameter.opts
    assert f"ggufmill {words}".strip() in command.help.replace("imatrix model", "imatrix compute model")


@pytest.mark.parametrize("line", list(examples()))
def test_the_examples_are_commands(tmp_path, monkeypatch, line):
    """Parsed as they stand, with files of these names there."""
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(line)[1:]
    for word in arguments:
        if word.endswith("/"):
            os.makedirs(word, exist_ok=True)
        elif re.search(r"\.(gguf|txt|imatrix|cov|curv|dat|raw|manifest|kld|json)$", word) and not word.startswith("-"):
            os.makedirs(os.path.dirname(word) or ".", exist_ok=True)
            (tmp_path / word).write_text("")
    command, context = group, None
    while isinstance(command, click.Group):
        if context is not None:
            command.parse_args(context, arguments)
            arguments = [*context._protected_args, *context.args]
        name, arguments = arguments[0], arguments[1:]
        command = command.get_command(click.Context(group), name)
        context = click.Context(command, info_name=name)
    assert command is not None
    command.make_context(name, arguments)


def program(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "ggufmill", *map(str, arguments)], stderr=subprocess.PIPE, **{"text": True, **options}
    )


@pytest.mark.parametrize("arguments", [("recipes", "show", "demo"), ("recipes", "explain", DEMO, "--recipe", "demo", "--json")])
def test_a_closed_pipe_is_no_error(arguments):
    process = program(*arguments, stdout=subprocess.PIPE)
    process.stdout.close()
    err = process.stderr.read()
    process.wait()
    assert err == ""
    assert process.returncode == 1


def test_closed_streams_and_a_full_disk(tmp_path):
    job = f"{shlex.quote(sys.executable)} -m ggufmill convert {shlex.quote(str(DEMO))} a.gguf --force"
    assert subprocess.run(["bash", "-c", f"{job} >&- 2>&-"], cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "a.gguf").exists()
    with open("/dev/full", "w", encoding="utf-8") as full:
        process = program("recipes", "list", stdout=full)
    assert process.communicate()[1] == "ggufmill: input/output: No space left on device\n"
    assert process.returncode == 1


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path):
    """And no colours: neither with NO_COLOR nor without."""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "NO_COLOR": "1", "COLUMNS": "60"}
    process = program("recipes", "lint", "Ω.txt", stdout=subprocess.PIPE, env=environment)
    assert process.communicate() == (
        "",
        "ggufmill: \\u03a9.txt: No such file or directory; `ggufmill recipes list` shows the bundled ones\n",
    )
    process = program("recipes", "list", stdout=subprocess.PIPE, env=environment)
    assert "\x1b" not in "".join(process.communicate())


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A folder of such a name with the demo in it as a GGUF, `m x.gguf`."""
    folder = tmp_path_factory.mktemp("names") / ODD
    folder.mkdir()
    job = [sys.executable, "-m", "ggufmill", "convert", DEMO, folder / "m x.gguf"]
    subprocess.run(job, check=True, capture_output=True)
    return folder


def test_file_names_with_spaces_line_breaks_and_broken_utf8(mill, odd, monkeypatch):
    def done(*arguments):
        code, out, err = mill(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    model, small = odd / "m x.gguf", odd / "q.gguf"
    result = done("quantize", model, small, "q8_0", "--manifest", "--verify", "--force")
    assert result["files"][0]["path"] == str(small)
    assert done("hash", small, "--check", result["manifest"])["bad"] == []
    done("split", small, odd / "part", "--split-max-tensors", 40, "--force")
    done("merge", odd / "part-00001-of-00002.gguf", odd / "whole.gguf", "--force")
    assert (odd / "whole.gguf").read_bytes() == small.read_bytes()
    monkeypatch.setattr(sys, "argv", ["ggufmill", "search", str(model)])  # goes to the recipe's head
    done("search", model, odd / "r.txt", "--target-bpw", 6, "--types", "q4_0,q8_0", "--rows", 8, "--force")
    assert (odd / "r.txt").read_text("utf-8").count("# ggufmill search") == 1
    assert done("recipes", "lint", odd / "r.txt", model)["warnings"] == []
    assert done("inspect", small)["files"] == [str(small)]
    code, _, err = mill("quantize", model, small, "q8_0")
    assert code == 1
    assert err.count("\n") == 1
    assert err.endswith("/q.gguf exists; use --force to replace it\n")


def test_names_in_a_manifest_stay_in_their_line(tmp_path):
    from ggufmill.formats.hashes import escape_line_breaks

    lines = [
        Hash("xxh64", f"{i:016x}", escape_line_breaks(f"{ODD}/m{c}.gguf:a.weight")).line() for i, c in enumerate("\n\r\x85 ")
    ]
    (tmp_path / "m").write_text("\n".join(lines), "utf-8", "surrogateescape")
    assert list(read_manifest(tmp_path / "m").values()) == [f"{i:016x}" for i in range(4)]


def test_no_verb_and_an_unknown_one(mill):
    code, out, err = mill()
    assert code == 2
    assert all(verb in out + err for verb in VERBS)
    code, _, err = mill("frobnicate")
    assert code == 2
    assert err == "ggufmill: there is no verb 'frobnicate' (`ggufmill --help` shows how it is used)\n"


def test_progress_goes_to_stderr_with_rate_and_time(mill, tmp_path):
    code, out, err = mill("convert", DEMO, tmp_path / "a.gguf", "--json")
    assert code == 0
    json.loads(out)
    assert re.search(r"convert: 100%.*17\.9M.*\[\d\d:\d\d<\d\d:\d\d, .*B/s", err)
    assert err.count("\r") < 8  # it is no terminal: a state every ten seconds


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ("model.gguf", "model.gguf cannot be drawn; its name may end in .png, .svg or .pdf"),
        ("a.jpg", "a.jpg cannot be drawn; its name may end in .png, .svg or .pdf"),
        ("none/a.png", "none does not exist, or cannot be"),
    ],
)
@pytest.mark.parametrize("verb", [("compare", DEMO, DEMO), ("sweep-bench", DEMO), ("imatrix", DEMO, "-f", DEMO, "-o", "x")])
def test_a_plot_that_cannot_be_drawn_is_refused_first(mill, tmp_path, monkeypatch, verb, picture, message):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code, _, err = mill(*verb, "--plot", picture)
    assert code == 1
    assert message in err
    assert err.count("\n") == 1
    assert os.listdir(tmp_path) == []
