"""The help: sentences with a verb, options under headings, rare ones in --help-all alone."""

import importlib
import pkgutil
import re

import click
import pytest
from commands import COMMANDS

from ggufmill import VERBS
from ggufmill.cli.options.sections import sections_of, show_all
from ggufmill.cli.options.types import SIZE, SIZES
from ggufmill.pipeline import requests
from ggufmill.request_fields import fields_of

# What a help begins with: "Write this file", "Use this many threads".
IMPERATIVES = frozenset(
    re.findall(
        r"\w+",
        """
    Accept Add Allow Apply Assume Cache Call Check Choose Chat Collect Compare Compile Compute Continue Convert
    Copy Count Cut DELETE Decode Divide Do Draw Embed Encode End Exclude Exit Explain Find Fit Follow Generate
    Give Go Hash Ignore Interleave Join Judge Keep Lay Leave Let List Listen Make Measure Merge Multiply Name Only
    Penalise Pick Place Plan Pool Print Put Quantise Raise Read Reduce Refuse Remove Repack Repeat Replace Report Resume
    Reverse Rewrite Rotate Round Run Sample Save Say Score Search Send Serve Set Share Show Simulate Skip Spend Split Start
    Store Subtract Take Talk Time Tune Turn Use Weigh Write
    """,
    )
)
MOST = 34  # options of a verb's --help: two screens


def _first(text):
    return re.match(r"\w*", text)[0]


def request_classes():
    modules = [importlib.import_module(f"{requests.__name__}.{m.name}") for m in pkgutil.iter_modules(requests.__path__)]
    return {cls for module in modules for name, cls in vars(module).items() if name.endswith("Request")}


def test_each_option_of_a_request_says_in_a_sentence_what_it_does():
    """A help begins with a verb and ends as a sentence does. Arguments are described by what they are ("A GGUF file")."""
    wrong = {
        f"{cls.__name__}.{field.name}": field.option.help
        for cls in request_classes()
        for field in fields_of(cls)
        if not field.option.is_argument
        and (_first(field.option.help) not in IMPERATIVES or not re.search(r"[.\]]$", field.option.help))
    }
    assert wrong == {}


@pytest.mark.parametrize("words", COMMANDS)
def test_each_command_and_option_says_in_a_sentence_what_it_does(words):
    command = COMMANDS[words]
    texts = [command.help, *([command.short_help] if command.short_help else [])]
    texts += [option.help for option in command.get_params(click.Context(command)) if isinstance(option, click.Option)]
    assert [text for text in texts if _first(text) not in IMPERATIVES] == []


def test_each_line_of_the_list_of_verbs_begins_with_a_verb():
    assert [verb.summary for verb in VERBS.values() if _first(verb.summary) not in IMPERATIVES] == []


@pytest.mark.parametrize("words", COMMANDS)
def test_help_is_short_and_help_all_has_every_option(words):
    command = COMMANDS[words]

    def shown(all):
        context = click.Context(command, info_name=words)
        if all:
            show_all(context)
        sections = sections_of(command.get_params(context), context)
        return sections, [names for rows in sections.values() for names, _ in rows]

    (sections, usual), (_, every) = shown(False), shown(True)
    visible = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    assert len(usual) <= MOST
    assert set(usual) <= set(every)
    assert len(every) >= len(visible)
    assert isinstance(command, click.Group) or list(sections)[-1] == "General"


@pytest.mark.parametrize(
    ("verb", "first", "headings"),
    [
        ("serve", "--models", ["Options", "Sampling", "Model and threads", "Cache of keys and values", "Devices", "General"]),
        (
            "evaluate",
            "-f, --file",
            ["Options", "Model and threads", "Cache of keys and values", "Devices", "Questions", "General"],
        ),
        (
            "quantize",
            "--recipe",
            ["Types of tensors", "Importance of weights", "Search for types", "Source", "Output", "Devices", "General"],
        ),
    ],
)
def test_own_options_come_first_and_others_under_headings(mill, verb, first, headings):
    code, out, _ = mill(verb, "--help")
    assert code == 0
    assert re.findall(r"^(\w[\w ]+):$", out, re.MULTILINE) == headings
    assert re.search(r"^  (-.*?)  ", out.partition(f"\n{headings[0]}:\n")[2])[1].startswith(first)
    rare = {"serve": "--max-queue", "evaluate": "--numa", "quantize": "--attn-v-type"}[verb]
    assert rare not in out
    assert f"`ggufmill {verb} --help-all` shows all" in out.replace("\n", " ")
    code, out, _ = mill(verb, "--help-all")
    assert code == 0
    assert rare in out


def sizes():
    found = []
    for words, command in COMMANDS.items():
        found += [(words, o.opts[0]) for o in command.params if isinstance(o, click.Option) and o.type in (SIZE, SIZES)]
    return found


@pytest.mark.parametrize(("words", "option"), sizes())
def test_a_few_bytes_are_no_size(mill, words, option):
    """Of every option that takes a size: 3.2 is answered with a unit, and does not stand for 3 bytes."""
    code, _, err = mill(*words.split(), option, "3.2")
    assert code == 2
    assert "3.2 is a number of bytes, for a size in other units write 3.2GiB or 3.2MiB" in err
