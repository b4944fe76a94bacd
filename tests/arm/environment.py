"""Sets up an aarch64 Python in emulation under build/arm, without root: `python tests/arm/environment.py`.

apt downloads Debian's Python for arm64 and the user-mode emulator of QEMU, with a state and a cache of its own, and they are
unpacked there; pip adds the published aarch64 wheels of the project's dependencies. What is complete already is left as it is.
build/arm/python then runs a program as `python` does. Exit status 3: the packages cannot be downloaded, or there is no apt.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "arm"
PYTHON = "3.11"  # Debian bookworm's
ARM_PACKAGES = [f"python{PYTHON}", "libstdc++6", "libgomp1"]
TEST_WHEELS = ["pytest>=8", "hypothesis>=6.100", "ml_dtypes>=0.5"]
UNAVAILABLE = 3
LAUNCHER = """#!/bin/sh
arm={folder}
export PYTHONHOME=$arm/root/usr PYTHONPATH=$arm/wheels:$arm/package PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
exec $arm/emulator/qemu-aarch64-static -cpu max -L $arm/root $arm/root/usr/bin/python{version} "$@"
"""


def _download(packages: list[str], architecture: str, folder: Path) -> list[Path]:
    """Downloads packages and all that they depend on, as apt would for an empty system -> the .deb files."""
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "install", "--download-only", "--yes", "--no-install-recommends", *packages], check=True)
    return sorted((folder / "archives").glob("*.deb"))


def unpack_python(folder: Path) -> None:
    """Debian's Python and its libraries for arm64, unpacked below `folder`."""
    for package in _download(ARM_PACKAGES, "arm64", folder / "apt"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    shutil.rmtree(folder / "apt")


def unpack_emulator(folder: Path) -> None:
    """The program qemu-aarch64-static in `folder`."""
    for package in _download(["qemu-user-static"], "amd64", folder / "apt"):
        subprocess.run(["dpkg-deb", "--extract", package, folder / "all"], check=True)
    shutil.move(folder / "all" / "usr" / "bin" / "qemu-aarch64-static", folder)
    for name in ("apt", "all"):
        shutil.rmtree(folder / name)


def install_wheels(folder: Path) -> None:
    """The aarch64 wheels of the project's dependencies and of the test tools, installed into `folder`."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--quiet", f"--target={folder}", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", "--implementation=cp", *(f"--abi={abi}" for abi in ("cp311", "abi3", "none"))]
    command += [
        "--platform=manylinux2014_aarch64",
        *(f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28, 31, 34)),
    ]
    subprocess.run([*command, *dependencies, *TEST_WHEELS], check=True)


PARTS: dict[str, Callable[[Path], None]] = {"emulator": unpack_emulator, "root": unpack_python, "wheels": install_wheels}


def prepare() -> None:
    """Makes what is missing of build/arm: the folders of PARTS, `package` with a link to this checkout, and `python`."""
    for name, make in PARTS.items():
        folder, incomplete = FOLDER / name, FOLDER / f"{name}.incomplete"
        if folder.exists():
            continue
        print(f"setting up {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.mkdir(parents=True)
        make(incomplete)
        incomplete.rename(folder)
    package = FOLDER / "package"
    package.mkdir(exist_ok=True)
    if not (package / "ggufmill").exists():
        (package / "ggufmill").symlink_to(ROOT, target_is_directory=True)
    launcher = FOLDER / "python"
    launcher.write_text(LAUNCHER.format(folder=shlex.quote(str(FOLDER)), version=PYTHON), encoding="utf-8")
    launcher.chmod(0o755)


if __name__ == "__main__":
    try:
        prepare()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"aarch64 cannot be tested here: {error}", file=sys.stderr)
        sys.exit(UNAVAILABLE)
