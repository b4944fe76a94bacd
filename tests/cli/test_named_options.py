"""Options that helps and messages name are there: of the verb that says it, or of one that is named before."""

import ast
import re
from pathlib import Path

import click
import pytest
from commands import COMMANDS

import ggufmill

ROOT = Path(ggufmill.__file__).parent
PROGRAM = {"--help", "--help-all", "--quiet", "--debug", "--version"}
OTHERS = {"--memory-limit", "--embedding", "--reranking"}  # of dask, and of llama.cpp's server
NOT_SAID = {"cli/options/llama_compat.py", "pipeline/reports/html_page.py"}  # names that are translated; CSS
NAMED = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*\b(?!-|: ?#)")
OPTIONS = {}
for words, command in COMMANDS.items():
    options = (option for option in command.params if isinstance(option, click.Option))
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    for verb in {words, words.split()[0]}:
        OPTIONS[verb] = OPTIONS.get(verb, PROGRAM) | names


def unknown(text, verbs):
    """The options in a text that none of these verbs has, nor one that is named before."""
    if "--" not in text:
        return []
    there = OTHERS.union(*(OPTIONS[verb] for verb in verbs))
    found = [] if NAMED.fullmatch(text) else NAMED.finditer(text)  # an option alone is part of a command line
    named = ((match[0], re.findall(r"[a-z-]+", text[: match.start()])) for match in found)
    return [name for name, before in named if name not in there.union(*(OPTIONS.get(word, ()) for word in before))]


@pytest.mark.parametrize("words", COMMANDS)
def test_helps_name_options_of_the_verb(words):
    command = COMMANDS[words]
    for text in [command.help, *(option.help for option in command.params if isinstance(option, click.Option))]:
        assert unknown(text or "", [words] if words != "recipes" else ["recipes", "quantize"]) == []


def modules():
    """Path from the root -> (texts that are no docstrings, paths of the modules that it imports, anywhere in it)."""
    found = {}
    for path in (path for room in ROOT.iterdir() if (room / "__init__.py").exists() for path in room.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] in ("tests", "benchmarks", "docs", "recipes"):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        texts, imported = set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = None  # a docstring
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.ImportFrom) and node.level:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                imported |= {base.with_suffix(".py"), base / "__init__.py"}
                imported |= {base / f"{name.name}.py" for name in node.names}
        found[path] = texts, imported
    return found


def test_messages_name_options_of_a_verb_that_may_say_them():
    """A module's messages are said by the verbs that import it, directly or through others."""
    found, reaching, count = modules(), {}, 0
    for words, command in COMMANDS.items():
        if isinstance(command, click.Group):
            continue
        rest, seen = [ROOT.joinpath(*command.callback.__module__.split(".")[1:]).with_suffix(".py")], set()
        while rest:
            path = rest.pop()
            if path in found and path not in seen:
                seen.add(path)
                reaching.setdefault(path, set()).add(words)
                rest += found[path][1]
    wrong = []
    for path, (texts, _) in found.items():
        if str(path.relative_to(ROOT)) in NOT_SAID:
            continue
        for text in texts:
            count += len(NAMED.findall(text))
            wrong += [(str(path.relative_to(ROOT)), name, text) for name in unknown(text, reaching.get(path, COMMANDS))]
    assert wrong == []
    assert count > 300


def test_it_finds_options_that_are_not_there():
    assert unknown("give --types, or --typos", ["quantize"]) == ["--typos"]
    assert unknown("(--covariance-experts collects them)", ["make"]) == ["--covariance-experts"]
    assert unknown("(imatrix --covariance-experts collects them)", ["make"]) == []
