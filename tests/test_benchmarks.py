"""The scripts of benchmarks/, which no other test runs."""

import ast
import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

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


def built_rival(folder, commit="8337e4cd"):
    """A folder with the files that are looked for in a build."""
    (folder / "bin").mkdir()
    for name in ("llama-bench", "llama-quantize", "libggml.so"):
        (folder / "bin" / name).write_text(name)
    (folder / "llama-config.cmake").write_text(f"set(LLAMA_BUILD_COMMIT {commit})\nset(LLAMA_BUILD_NUMBER 1)\n")
    return folder


def test_the_page_of_all_gives_its_scripts_options_that_they_have(tmp_path, monkeypatch):
    """With a rival and without one, quick or not: jobs.py had another one, and an hour was lost."""
    monkeypatch.syspath_prepend(str(FOLDER))
    page, given = importlib.import_module("all"), []
    monkeypatch.setattr(page.Settings, "script", lambda self, name, *options, **_: given.append((name, options)) or "{}")
    monkeypatch.setattr(page, "write_slice", lambda *_, **__: 0)
    for rival in (page.Rival.of(None), page.Rival.of(built_rival(tmp_path))):
        for quick in (False, True):
            for part in page.PARTS.values():
                part.measure(page.Settings(tmp_path, tmp_path, rival, [1, 2], quick), tmp_path / "a.json")
    assert {name for name, _ in given} == {"codecs", "runtime", "gemv", "jobs"}
    for name, options in given:
        text = SCRIPTS[f"{name}.py"].read_text("utf-8")
        for option in options:
            if isinstance(option, str) and option.startswith("--"):
                assert f'"{option}"' in text, (name, option)


def test_the_page_of_all_has_no_figures_of_other_options(tmp_path, monkeypatch):
    """Results are kept for the same commit, rival and options alone; the page says which these are."""
    monkeypatch.syspath_prepend(str(FOLDER))
    page, measured = importlib.import_module("all"), []

    def measure(settings, file):
        measured.append(settings.threads)
        assert not file.exists()  # scripts would add to it
        file.write_text('{"rows": []}')

    monkeypatch.setattr(page, "PARTS", {"gemv": page.Part("Products", measure, lambda report: "a table")})
    monkeypatch.setattr(page, "peaks", lambda: {"bytes": 1e9, "floats": 1e9})
    monkeypatch.setattr(page.runtime, "bandwidth", lambda threads: 1e9)
    rival = built_rival(tmp_path)

    def run(*options):
        before, arguments = len(measured), ["--out", str(tmp_path / "out"), *options]
        result = CliRunner().invoke(page.main, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        return len(measured) - before, result.output

    count, text = run("--rival", str(rival))
    assert count == 1
    assert "- rival: bin/llama-bench, commit 8337e4cd, xxh3:" in text
    assert str(tmp_path) not in text
    assert run("--rival", str(rival))[0] == 0
    assert run("--rival", str(rival), "--fresh")[0] == 1
    for options in ((), ("--threads", "1"), ("--quick",)):
        count, text = run(*options)
        assert count == 1
        assert "rival:" not in text
    monkeypatch.setattr(page, "_revision", lambda: "0.1.0, commit 1234")
    count, text = run("--quick")
    assert count == 1
    assert "- ggufmill 0.1.0, commit 1234; numba" in text


def test_the_page_of_all_goes_on_with_a_part_that_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    page, found = importlib.import_module("all"), []

    def measure(settings, file):
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        file.write_text(json.dumps({"rows": [*rows, 1]}))
        found.append(len(rows))
        if len(found) == 1:
            raise InterruptedError

    monkeypatch.setattr(page, "PARTS", {"gemv": page.Part("Products", measure, lambda report: str(report["rows"]))})
    monkeypatch.setattr(page, "_machine", lambda *_: "")

    def run(*options):
        return CliRunner().invoke(page.main, ["--out", str(tmp_path), *options])

    assert isinstance(run().exception, InterruptedError)
    assert "[1, 1]" in run().output
    assert "[1, 1]" in run().output
    assert found == [0, 1]
    assert "[1]" in run("--threads", "1").output
    assert found == [0, 1, 0]
