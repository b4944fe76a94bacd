"""The scripts of benchmarks/, which no other test runs."""

import ast
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


NEED_TORCH = {"devices.py"}
SCRIPTS = {path.relative_to(FOLDER).as_posix(): path for path in sorted(FOLDER.rglob("*.py"))}


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=name, marks=pytest.mark.oracle if name in NEED_TORCH else ()) for name, path in SCRIPTS.items()],
)
def test_what_a_script_imports_exists(script):
    for node in ast.walk(ast.parse(script.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ggufmill":
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}"), name.name


def test_the_page_of_all_gives_its_scripts_options_that_they_have(tmp_path, monkeypatch):
    """With a rival and without one, quick or not: jobs.py had another one, and an hour was lost."""
    monkeypatch.syspath_prepend(str(FOLDER))
    page, given = importlib.import_module("all"), []
    monkeypatch.setattr(page.Settings, "script", lambda self, name, *options, **_: given.append((name, options)) or "{}")
    monkeypatch.setattr(page, "write_slice", lambda *_, **__: 0)
    rivals = page.Rival(), page.Rival(*(tmp_path / name for name in ("llama-bench", "llama-quantize", "libggml.so")))
    for rival in rivals:
        for quick in (False, True):
            for part in page.PARTS.values():
                part.measure(page.Settings(tmp_path, tmp_path, rival, [1, 2], quick), tmp_path / "a.json")
    assert {name for name, _ in given} == {"codecs", "runtime", "gemv", "jobs"}
    for name, options in given:
        text = SCRIPTS[f"{name}.py"].read_text("utf-8")
        for option in options:
            if isinstance(option, str) and option.startswith("--"):
                assert f'"{option}"' in text, (name, option)
