"""What a wheel contains: every package, and the data files beside the modules."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
OUTSIDE = {"tests", "benchmarks", "docs", "build", "out"}
NOT_DATA = {".py", ".md", ".pyc"}


def _setuptools():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]


def _folders():
    """The folders of packages, and their names."""
    for init in ROOT.rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if not parts or (parts[0] not in OUTSIDE and not any(part.startswith(".") for part in parts)):
            yield init.parent, ".".join(("ggufmill", *parts))


def test_every_package_is_listed():
    assert {name for _, name in _folders()} == set(_setuptools()["packages"])


def test_every_package_has_a_readme():
    assert [name for folder, name in _folders() if not (folder / "README.md").is_file()] == []


def test_data_files_beside_modules_are_listed():
    listed = _setuptools()["package-data"]
    for folder, name in _folders():
        if name == "ggufmill":
            continue
        for path in folder.iterdir():
            if path.is_file() and path.suffix not in NOT_DATA:
                assert any(fnmatch(path.name, pattern) for pattern in listed.get(name, [])), path


def test_type_checkers_read_the_annotations():
    assert (ROOT / "py.typed").is_file()
    assert _setuptools()["package-data"]["ggufmill"] == ["py.typed"]


def test_hosted_ci_covers_every_system_and_version():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    runs = {(system, python) for system in matrix["system"] for python in matrix["python"]}
    runs |= {(row["system"], row["python"]) for row in matrix["include"]}
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["requires-python"].removeprefix(">=")
    assert {system for system, python in runs if python == oldest} == {system for system, _ in runs}
    assert {system.partition("-")[0] for system, _ in runs} == {"ubuntu", "macos", "windows"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = [step["run"].split() for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert all(set(words[1:]) <= targets for words in commands if words[0] == "make")
