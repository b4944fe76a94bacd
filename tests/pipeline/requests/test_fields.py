"""Fields of a request: options of a command, keywords of a function, lines of its docstring."""

import dataclasses
import inspect
import pickle
from collections.abc import Sequence

import click
import pytest
from click.testing import CliRunner

from ggufmill.cli.options.fields import options_of
from ggufmill.pipeline.requests.verb import verb
from ggufmill.request_fields import argument, fields_of, option, request, values_of, words_of
from ggufmill.runtime.settings import CacheTypes


@request
class Group:
    size: "int | str | None" = option("The size.", default=None, kind="size", shown="all")
    names: Sequence[str] = option("Names.", default=())
    keep: bool = option("Keep nothing.", default=True)
    maybe: bool | None = option("Perhaps.", default=None)


@request
class Sample(Group):
    model: str = argument("The model.", metavar="MODEL", kw_only=False)
    kind: str = option("What kind.", default="a", choices=("a", "b"), flags="-k --kind")
    n: int = option("How many.", default=3, least=1)
    quiet: bool = option("Say nothing.", default=False)
    back: object = option("Called.", default=None, in_cli=False)


@verb(Sample)
def sample(request: Sample) -> Sample:
    """Samples.

    Returns the request.
    """
    return request


def run(*words):
    seen = {}

    @click.command()
    @options_of(Sample)
    def command(**options):
        seen.update(options)

    result = CliRunner().invoke(command, words)
    return seen if result.exit_code == 0 else result.output


def test_options():
    usual = {"kind": "a", "n": 3, "quiet": False, "size": None, "names": (), "keep": True, "maybe": None, "as_json": False}
    assert run("m") == {"model": "m", **usual}
    given = run(
        "m", "-k", "B", "--n", "4", "--quiet", "--size", "2K", "--names", "x", "--names", "y", "--no-keep", "--no-maybe"
    )
    changed = {"kind": "b", "n": 4, "quiet": True, "size": 2000, "names": ("x", "y"), "keep": False, "maybe": False}
    assert given == {"model": "m", **usual, **changed}
    assert "'--n': 0 is not in the range" in run("m", "--n", "0")
    assert "'c' is not one of 'a', 'b'" in run("m", "--kind", "c")
    assert "Missing argument 'MODEL'" in run()


def test_help_shows_own_fields_first_and_defaults():
    shown = " ".join(CliRunner().invoke(options_of(Sample)(click.command()(print)), ["--help"]).output.split())
    assert [f.name for f in fields_of(Sample)][:2] == ["model", "kind"]
    for part in (
        "-k, --kind [a|b] What kind. [default: a]",
        "--size SIZE The size. [default: all]",
        "--no-keep",
        "--maybe / --no-maybe",
    ):
        assert part in shown
    assert "--back" not in shown


def test_a_function_has_the_fields_as_arguments():
    made = sample("m", n=4, names=["x"])
    assert made == Sample("m", n=4, names=["x"])
    assert pickle.loads(pickle.dumps(made)) == made
    assert values_of(made, Group) == {"size": None, "names": ["x"], "keep": True, "maybe": None}
    signature = inspect.signature(sample)
    assert list(signature.parameters)[:3] == ["model", "kind", "n"]
    assert signature.parameters["n"].default == 3
    with pytest.raises(TypeError, match=r"sample\(\) got an unexpected keyword argument 'm'"):
        sample("m", m=1)
    with pytest.raises(TypeError, match=r"sample\(\) missing a required argument: 'model'"):
        sample()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.n = 5


def test_the_docstring_describes_each_field():
    lines = inspect.getdoc(sample).splitlines()
    assert lines[0] == "Samples."
    assert "kind                  What kind. One of a, b." in lines
    assert "size                  The size. Default: all." in lines
    assert lines.index("Returns the request.") == len(lines) - 1


def test_options_as_words():
    given = {"size": 2000, "names": ("x", "y"), "keep": False, "maybe": True}
    words = ["--size", "2000B", "--names", "x", "--names", "y", "--no-keep", "--maybe"]
    assert words_of(Group, given) == words
    assert words_of(Group, {}) == []
    cache = {"cache_k_first": ("q8_0", 2), "k_cache_hadamard": False, "v_cache_hadamard": True}
    assert words_of(CacheTypes, cache) == ["-ctk-first", "q8_0,2", "-no-khad", "-vhad"]
    again = run("m", *words)
    assert {name: again[name] for name in given} == given
