"""Makes a release in build/release: wheels, sdist, bill of materials, manual pages, site; each built, installed and tried.

    python docs/release.py               build and check what is there (`make release`)
    python docs/release.py --version X   first give the version X to the program and to the entry of CHANGELOG.md

There are two wheels: one for every platform, and one for this one, which brings compiled kernels (platform_wheel.py): what a
new user does first is tried with it, and may compile nothing.
Every extra is installed from the wheel into an environment of its own, in which the program plans, converts, quantises and
generates with the bundled demo model, and imports what the extra brings. Needs the extra `release`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

from platform_wheel import LEVELS, make_platform_wheel

from ggufmill.simd.target import VARIABLE, levels_here

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "release"
VERSION_FILE = ROOT / "version.py"
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
# extra -> what shows that it works, run in its environment
EXTRAS = {
    "": [],
    "plot": ["-c", "import matplotlib"],
    "serve": ["-c", "from ggufmill.runtime.serve import app"],
    "parquet": ["-c", "import pyarrow.parquet"],
    "cluster": ["-m", "ggufmill", "convert", "{demo}", "cluster.gguf", "--cluster", "local:1"],
}
# What every environment can do; {demo} is the checkpoint that the package brings.
COMMANDS = [
    ["--version"],
    ["convert", "{demo}", "demo.gguf"],
    ["quantize", "demo.gguf", "demo-q.gguf", "iq4_k", "--dry-run"],
    ["quantize", "demo.gguf", "demo-q.gguf", "q8_0", "--verify"],
    ["inspect", "demo-q.gguf", "--check"],
    ["generate", "demo-q.gguf", "-p", "Once upon a time", "-n", "4"],
]


def main() -> None:
    """Carries out the steps in order; the first that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--version", help="give this version to the program and to CHANGELOG.md first")
    parser.add_argument(
        "--extras", default=",".join(EXTRAS), help="extras that are installed and tried, with commas between them"
    )
    parser.add_argument(
        "--kernels", default="", help="types whose kernels the wheel of the platform brings, commas between; all"
    )
    options = parser.parse_args()
    if options.version:
        set_version(options.version)
    check_metadata()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    run("build", "--outdir", OUT, "--sdist", "--wheel", ROOT)
    wheel, sdist = next(OUT.glob("*.whl")), next(OUT.glob("*.tar.gz"))
    check_contents(wheel, sdist)
    for extra in options.extras.split(","):
        try_wheel(wheel, extra)
    for_platform = platform_wheel(wheel, options.kernels.split(",") if options.kernels else [])
    try_kernels(for_platform)
    bill_of_materials(wheel)
    manual_pages()
    run("sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", OUT / "site")
    for path in sorted(OUT.iterdir()):
        print(f"{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}")


def run(module: str, *arguments: str | Path) -> None:
    """Runs a module of this environment; exits if it fails."""
    command([sys.executable, "-m", module, *map(str, arguments)])


def command(words: list[str], cwd: Path = ROOT) -> None:
    """Runs a command and prints how long it took; exits with what it printed if it fails."""
    start = time.monotonic()
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    shown = " ".join(Path(w).name if w.startswith("/") else w for w in words)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{shown}: exit code {done.returncode}")
    print(f"{time.monotonic() - start:7.1f} s  {shown}", flush=True)


def version() -> str:
    """The version, which stands in version.py alone."""
    match = VERSION.search(VERSION_FILE.read_text("utf-8"))
    assert match is not None
    return match[1]


def set_version(new: str) -> None:
    """Writes the version, and makes the changelog's unreleased entry the one of this version."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", new):
        sys.exit(f"{new} is no version such as 1.2.0 or 1.2.0rc1")
    changes = ROOT / "CHANGELOG.md"
    text = changes.read_text("utf-8")
    if f"## {new} " in text or not re.search(r"## Unreleased\n+\*", text):
        sys.exit(f"CHANGELOG.md has an entry for {new} already, or nothing unreleased")
    dated = f"## Unreleased\n\n## {new} ({datetime.date.today().isoformat()})"
    changes.write_text(text.replace("## Unreleased", dated, 1), "utf-8")
    VERSION_FILE.write_text(VERSION.sub(f'__version__ = "{new}"', VERSION_FILE.read_text("utf-8")), "utf-8")


def check_metadata() -> None:
    """Exits if an extra is not tried here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for_users = set(project["optional-dependencies"]) - {"test", "dev", "oracle", "peer", "docs", "release", "gpu"}
    if for_users != set(EXTRAS) - {""}:
        sys.exit(f"extras without a trial here: {', '.join(sorted(for_users ^ set(EXTRAS) - {''}))}")


def check_contents(wheel: Path, sdist: Path) -> None:
    """Exits unless the wheel holds every file of the package that the repository has, and no tests."""
    import tarfile
    import zipfile

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    outside = ("tests/", "benchmarks/", "docs/", ".")
    wanted = {name for name in tracked if name.endswith((".py", ".html", ".css", ".js", ".npz", ".toml", ".typed"))}
    wanted = {
        f"ggufmill/{name}" for name in wanted if not name.startswith(outside) and name not in ("pyproject.toml", "setup.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("ggufmill/")}
    if missing := sorted(wanted - held):
        sys.exit(f"{wheel.name} lacks {', '.join(missing[:5])}")
    if tests := sorted(name for name in held if name.startswith("ggufmill/tests/")):
        sys.exit(f"{wheel.name} holds {tests[0]}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := sorted({name.removeprefix("ggufmill/") for name in wanted} - names):
        sys.exit(f"{sdist.name} lacks {', '.join(missing[:5])}")


def try_wheel(wheel: Path, extra: str) -> None:
    """Installs the wheel with an extra into an empty environment, and tries it as a user would."""
    folder = OUT / f"try-{extra or 'plain'}"
    python = install(folder, f"ggufmill[{extra}] @ {wheel.as_uri()}" if extra else str(wheel))
    command([python, "-m", "pip", "check", "--disable-pip-version-check"], folder)
    where = "import ggufmill.recipes as r; print(r.FOLDER / 'demo')"
    demo = subprocess.run([python, "-c", where], cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    for words in [EXTRAS[extra]] if extra else [["-m", "ggufmill", *words] for words in COMMANDS]:
        command([python, *(word.format(demo=demo) for word in words)], folder)
    shutil.rmtree(folder)


def install(folder: Path, requirement: str) -> str:
    """Makes an empty environment and installs into it; its interpreter."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    command([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement], folder)
    return python


def platform_wheel(wheel: Path, types: list[str]) -> Path:
    """Makes the wheel that brings compiled kernels, by the package as it will be installed."""
    folder = OUT / "kernels"
    python = install(folder / "environment", str(wheel))
    made = make_platform_wheel(wheel, python, folder / "compiled", types)
    shutil.rmtree(folder)
    print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB")
    return made


def try_kernels(wheel: Path) -> None:
    """Runs the demo from the platform's wheel, with an empty cache, at the levels it is for; exits if anything is compiled."""
    folder = OUT / "try-kernels"
    python = install(folder, str(wheel))
    for level in [level for level in LEVELS if level in levels_here()]:
        environment = os.environ | {VARIABLE: level, "GGUFMILL_CACHE": str(folder / level)}
        words = [python, "-m", "ggufmill", "run", "demo", "-o", str(folder / "out"), "--force"]
        start = time.monotonic()
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode or "compiling" in done.stdout:
            sys.exit(f"{done.stdout}\nrun demo at {level} with the kernels of {wheel.name}: failed, or compiled")
        print(f"{time.monotonic() - start:7.1f} s  run demo, {level}", flush=True)
    shutil.rmtree(folder)


def bill_of_materials(wheel: Path) -> None:
    """Writes the CycloneDX list of what an installation of the program alone consists of."""
    folder, out = OUT / "bill", OUT / f"ggufmill-{version()}.cdx.json"
    python = install(folder, str(wheel))
    command([python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip"], folder)  # of the environment
    run("cyclonedx_py", "environment", "--output-reproducible", "-o", out, python)
    shutil.rmtree(folder)
    names = {component["name"] for component in json.loads(out.read_text("utf-8"))["components"]}
    if not {"ggufmill", "numpy", "numba"} <= names:
        sys.exit(f"{out.name} lists only {', '.join(sorted(names))}")


def manual_pages() -> None:
    """Writes a manual page per command."""
    import click
    from click_man.core import write_man_pages

    from ggufmill import VERBS
    from ggufmill.cli.program import group

    folder = OUT / "man"
    folder.mkdir(parents=True, exist_ok=True)
    context = click.Context(group, info_name="ggufmill")
    group.commands = {verb: command for verb in VERBS if (command := group.get_command(context, verb)) is not None}
    for verb, one in group.commands.items():
        one.short_help = VERBS[verb].summary  # of the line NAME, which else is cut short
    write_man_pages("ggufmill", group, version=version(), target_dir=str(folder))
    if missing := [verb for verb in VERBS if not (folder / f"ggufmill-{verb}.1").is_file()]:
        sys.exit(f"no manual page of {missing[0]}")


if __name__ == "__main__":
    main()
