"""Recipes that would take hours or gigabytes to read if the time to read one grew faster than its length."""

import subprocess
import sys

import pytest

from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.shell import rules_from_shell

_SPACES = " " * 3_000_000
# Texts and what reading them ends with.
LONG = {
    "spaces after a word": ("a" + _SPACES, "is not `regex=type`"),
    "spaces before an end": ("a=q8_0" + _SPACES + "b", "is not `regex=type`"),
    "spaces before a comment": ("a=q8_0\n" + _SPACES + "x", "is not `regex=type`"),
    "spaces alone": (_SPACES, ""),
    "here-documents": ("".join(f"<<A{number}\n" for number in range(150_000)), "is not `regex=type`"),
    "here-documents in a line": ("<<A" * 300_000, "is not `regex=type`"),
    "options in a line": ("--custom-q a " * 300_000, "is not `regex=type`"),
    "rules in a line": ("a=q8_0," * 300_000, ""),
}
_READ = """
import sys
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.errors import MillError
try:
    load_recipe(sys.argv[1])
except MillError as error:
    print(str(error)[-100:])
"""


@pytest.mark.slow(keep=["spaces after a word"])
@pytest.mark.parametrize("name", LONG)
def test_long_texts_end(tmp_path, name):
    text, message = LONG[name]
    path = tmp_path / "recipe.txt"
    path.write_text(text)
    ended = subprocess.run([sys.executable, "-c", _READ, path], capture_output=True, text=True, check=True, timeout=120)
    assert message in ended.stdout
    assert bool(message) == bool(ended.stdout)


@pytest.mark.parametrize("text", [".".join("a" * 100_000) + " = 1", "[quantize]\nx = 1\n[" + "a . " * 90_000 + "b]"])
def test_keys_of_many_parts_are_refused(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    ended = subprocess.run([sys.executable, "-c", _READ, path], capture_output=True, text=True, check=True, timeout=120)
    assert "dots; a key of a recipe has one part" in ended.stdout


@pytest.mark.parametrize("text", ["'''\n{}\n'''", '"""\n\\"{}"""', "'{}' # {}", '"\\"{}"'])
def test_dots_in_text_are_no_parts_of_keys(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text("[validate]\ntext = 'a'\nprompt = " + text.replace("{}", "a." * 200))
    assert "a." * 200 in load_recipe(path).stages["validate"]["prompt"]


def test_a_document_ends_at_its_own_word():
    text = "cat <<A\ncat <<B\nB\nAA\nx=q8_0\n A\ncat <<-'C'\ny=q6_K\nC\n"
    assert rules_from_shell(text) == "\ncat <<B\nB\nAA\nx=q8_0\n\n\ny=q6_K\n"


def test_what_follows_a_hash_in_the_line_is_a_comment():
    assert rules_from_shell("# a --custom-q x=q8_0 --custom-q y=q8_0\n --custom-q z=q6_K") == "\nz=q6_K"
