"""Only `operating_system` names operating systems and what only some of them have."""

import ast
import re
from pathlib import Path

import pytest

import ggufmill

ROOT = Path(ggufmill.__file__).parent
OUTSIDE = {"tests", "benchmarks", "docs", "build", "out", "operating_system"}
MODULES = {"fcntl", "resource", "msvcrt", "ctypes", "platform", "posix", "nt", "winreg", "termios", "tty", "pwd", "grp"}
OS = re.compile(
    r"sched_|posix_|p?read(v|at)?$|p?write(v|at)?$|O_DIRECT|O_NOFOLLOW|O_BINARY|name$|uname|fork|register_at|getuid"
)
SIGNALS = {"SIGINT", "SIGTERM"}  # of every system
PATHS = re.compile(r"^/(proc|sys|dev/shm)(/|$)")
SOME = re.compile(rf"\b({'|'.join(MODULES)}|(os|signal|sys)\.)|/(proc|sys|dev/shm)")  # in whatever names any of these


def named(text):
    """What a module names that not every system has."""
    for node in ast.walk(ast.parse(text)) if SOME.search(text) else ():
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] in MODULES:
                yield module
            case ast.Attribute(value=ast.Name(id="os"), attr=attr) if OS.match(attr):
                yield f"os.{attr}"
            case ast.Attribute(value=ast.Name(id="sys"), attr="platform" | "getwindowsversion"):
                yield "sys.platform"
            case ast.Attribute(value=ast.Name(id="signal"), attr=attr) if attr.startswith("SIG") and attr not in SIGNALS:
                if not attr.startswith("SIG_"):
                    yield f"signal.{attr}"
            case ast.Constant(value=str(text)) if PATHS.match(text):
                yield text


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if parts[0] not in OUTSIDE and not any(part.startswith(".") for part in parts):
            yield path


def test_only_one_room_names_operating_systems():
    paths = list(modules())
    assert len(paths) > 250
    names = {str(path.relative_to(ROOT)): list(named(path.read_text("utf-8"))) for path in paths}
    assert {path: used for path, used in names.items() if used} == {}


NOTICED = ("import fcntl", "from ctypes import CDLL", "os.sched_getaffinity(0)", "os.pread(f, 1, 2)", "sys.platform == 'linux'")
NOTICED += ("signal.SIGHUP", "open('/proc/cpuinfo')", "def f():\n    import resource", "os.name == 'nt'")


@pytest.mark.parametrize("text", NOTICED)
def test_names_that_are_noticed(text):
    assert list(named(text))
