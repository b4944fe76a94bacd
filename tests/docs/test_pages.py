"""The pages: generated parts are current, links lead somewhere, commands and Python examples are real."""

import importlib.util
import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

from ggufmill import VERBS, module_of
from ggufmill.formats import TYPES

ROOT = Path(__file__).parents[2]
SKIPPED = {".venv", ".git", "build", "out", "node_modules", ".pytest_cache"}
PAGES = sorted(p for p in ROOT.rglob("*.md") if not SKIPPED & set(p.relative_to(ROOT).parts))
LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current():
    stale = [path.name for path, text in _generator().pages() if path.read_text("utf-8") != text]
    assert not stale, "run python docs/generate.py"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def _anchors(page):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = FENCE.sub("", page.read_text("utf-8"))
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower().replace("`", "")).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        where = (page.parent / path).resolve() if path else page
        assert where.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in set(_anchors(where)), f"{page}: {target}"


def test_every_type_described_is_in_the_table():
    page = (ROOT / "docs" / "formats" / "layouts.md").read_text("utf-8")
    described = page.partition("## Formats of ik_llama.cpp")[2].partition("## Not read here")[0]
    names = re.findall(r"^\* \*\*(\w+)\*\*", described, re.MULTILINE)
    assert len(names) > 15
    assert [name for name in names if name not in TYPES] == []
    assert not TYPES.by_id(36).is_known  # i2_s, as the page says


def _commands():
    for page in PAGES:
        for language, body in FENCE.findall(page.read_text("utf-8")):
            if language == "sh":
                for line in body.replace("\\\n", " ").splitlines():
                    words = shlex.split(line, comments=True)
                    if words[:1] == ["ggufmill"] and len(words) > 1 and words[1] != "VERB":
                        yield pytest.param(words[1:], id=f"{page.stem}: {line.strip()[:60]}")


@pytest.mark.parametrize("words", list(_commands()))
def test_commands_exist(words):
    """Every flag of every command shown is one that the command has."""
    if words[0].startswith("-"):
        return
    assert words[0] in VERBS
    command, words = import_module(f"ggufmill.cli.{module_of(words[0])}").command, words[1:]
    while isinstance(command, click.Group):
        sub = command.get_command(click.Context(command), words[0]) if words else None
        if sub is not None:
            words = words[1:]
        command = sub or command.commands["compute"]
    flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    used = {word for word in words if re.fullmatch(r"--?[a-z][\w-]*", word)}
    assert used <= flags | {"--help"}, used - flags


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the examples run, one after the other: the demo checkpoint and its texts lie there."""
    out = tmp_path_factory.mktemp("examples")
    (out / "demo").symlink_to(ROOT / "recipes" / "demo")
    return out


@pytest.mark.process
def test_python_examples_run(folder, monkeypatch):
    """The page's examples, in order, in one namespace."""
    monkeypatch.chdir(folder)
    page = (ROOT / "docs" / "python-api.md").read_text("utf-8")
    blocks = [body for language, body in FENCE.findall(page) if language == "python"]
    assert blocks
    namespace = {}
    for body in blocks:
        exec(compile(body, "python-api.md", "exec"), namespace)
