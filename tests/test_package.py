"""What a wheel contains: every package, and the data files beside the modules."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
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


def test_the_wheel_holds_every_module_and_data_file(tmp_path):
    """Built from a copy, as a build leaves files in the folder that it is made in."""
    source = tmp_path / "source"
    not_copied = shutil.ignore_patterns(*OUTSIDE, ".*", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=lambda path, names: not_copied(path, names) if Path(path) == ROOT else ())
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = {name for name in wheel.namelist() if name.startswith("ggufmill/")}
    files = [path for folder, _ in _folders() for path in folder.iterdir() if path.is_file() and path.suffix == ".py"]
    listed = [path for name, patterns in _setuptools()["package-data"].items() for path in _data_files(name, patterns)]
    wanted = {f"ggufmill/{path.relative_to(ROOT).as_posix()}" for path in (*files, *listed)} - {"ggufmill/setup.py"}
    assert len(wanted) > 650
    assert (wanted - held, {name for name in held - wanted if not name.endswith(".md")}) == (set(), set())


def _data_files(package, patterns):
    folder = ROOT.joinpath(*package.split(".")[1:])
    return [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]


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
