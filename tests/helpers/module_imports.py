"""What each module of the program imports when it is imported itself: other modules of the program, and packages outside it."""

import ast
from functools import cache
from pathlib import Path

import ggufmill

ROOT = Path(ggufmill.__file__).parent
OUTSIDE = {"setup", "tests", "benchmarks", "docs", "build", "out", "recipes"}


@cache
def module_files():
    """Name -> file of every module of the program; __main__ would run it, and setup.py only builds it."""
    files = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] not in OUTSIDE and not parts[0].startswith(".") and parts[-1] not in ("__main__", "setup"):
            files[".".join(("ggufmill", *parts)).removesuffix(".__init__")] = path
    return files


@cache
def needed_packages():
    """Module -> names of the packages outside the program that must be there for it to be imported, directly or not."""
    direct = {name: _imports(name) for name in module_files()}
    needed = {name: {i.partition(".")[0] for i in imports} - {"ggufmill"} for name, imports in direct.items()}
    changed = True
    while changed:
        changed = False
        for name, imports in direct.items():
            more = set().union(*(needed[i] for i in imports if i in needed)) - needed[name]
            needed[name] |= more
            changed |= bool(more)
    return needed


def _imports(name):
    """Modules named by the import statements that run at the import of a module, the packages above each among them."""
    path, found = module_files()[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _statements(ast.parse(path.read_text("utf-8")).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    parents = {n.rpartition(".")[0] for n in (name, *found)} | {".".join(n.split(".")[:2]) for n in found}
    return {n for n in found | parents if n in module_files() or not n.startswith("ggufmill")} - {name, ""}


def _statements(body):
    """Import statements outside functions, those for the type checker and those that may fail left out."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node.orelse)
        elif isinstance(node, ast.Try) and any("ImportError" in ast.unparse(h.type) for h in node.handlers if h.type):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []))
