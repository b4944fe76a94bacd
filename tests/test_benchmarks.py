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
