"""Imports of the product, read from its sources: no circle between modules, and no import up the table of rooms.

Imports within functions and for type checkers count too: they tie modules together for a reader as much as others do.
"""

import ast
import importlib.util
import re
from functools import cache
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parent.parent
# From the top (docs/architecture.md); "" is the package itself, whose functions are those of pipeline.
ROOMS = ("__main__", "cli", "", "pipeline", "imatrix", "runtime", "convert", "quantize", "repack", "jobs", "formats", "simd",
         "operating_system", "recipes", "request_fields", "data_classes", "errors", "version")  # fmt: skip


def _modules() -> dict[str, Path]:
    """The product's modules, without "ggufmill." -> files."""
    files = [ROOT / "__init__.py", *(ROOT / f"{room}.py" for room in ROOMS)]
    files += [file for room in ROOMS if room for file in sorted((ROOT / room).rglob("*.py"))]
    names = {file: file.relative_to(ROOT).with_suffix("").parts for file in files if file.is_file()}
    return {".".join(parts).removesuffix("__init__").rstrip("."): file for file, parts in names.items()}


def _imported(module: str, file: Path, modules: dict[str, Path]) -> set[str]:
    """The modules that a module imports names from, anywhere in its source."""
    package = [part for part in (module if file.name == "__init__.py" else module.rpartition(".")[0]).split(".") if part]
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name.removeprefix("ggufmill.") for each in node.names if each.name.startswith("ggufmill.")}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            path = [*base, *(node.module or "").split(".")] if node.level else (node.module or "").split(".")
            if not node.level and path[0] != "ggufmill":
                continue
            target = ".".join(part for part in (path if node.level else path[1:]) if part)
            for name in node.names:
                inner = f"{target}.{name.name}".lstrip(".")
                found.add(inner if inner in modules else target)
    assert found <= modules.keys(), f"{module} imports {found - modules.keys()}"
    return found - {module}


@cache  # not when the module is imported: every process of pytest-xdist imports it
def _imports() -> dict[str, set[str]]:
    modules = _modules()
    return {module: _imported(module, file, modules) for module, file in modules.items()}


def _circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of several modules (Tarjan 1972)."""
    numbers, lowest, stack, circles, numbering = dict[str, int](), dict[str, int](), list[str](), list[list[str]](), count()

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = next(numbering)
        stack.append(module)
        for other in sorted(imports[module]):
            if other not in numbers:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == numbers[module]:
            component = stack[stack.index(module) :]
            del stack[-len(component) :]
            if len(component) > 1:
                circles.append(sorted(component))

    for module in imports:
        if module not in numbers:
            visit(module)
    return circles


def _room(module: str) -> int:
    return ROOMS.index(module.partition(".")[0])


def test_modules_import_each_other_in_no_circle():
    imports = _imports()
    circles = _circles(imports)
    assert not circles, "\n".join(f"{a} imports {sorted(imports[a] & set(circle))}" for circle in circles for a in circle)


def test_imports_only_go_down_the_table_of_rooms():
    up = [
        f"{module} imports {other}" for module, others in _imports().items() for other in others if _room(other) < _room(module)
    ]
    assert up == []


def test_circles_are_found():
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}) == [["a", "b", "c"]]
    assert _circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []


def test_a_class_name_has_one_meaning():
    found: dict[str, list[str]] = {}
    for module, file in _modules().items():
        for name in re.findall(r"^class ([^_]\w*)", file.read_text("utf-8"), re.MULTILINE):
            found.setdefault(name, []).append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_what_a_package_imports_when_it_is_asked_for_is_no_module_of_it():
    """Else the package's attribute of that name is the module, once it is imported, and not what was asked for."""
    packages = {name: file for name, file in _modules().items() if file.name == "__init__.py"}
    lazy = [name for name, file in packages.items() if "def __getattr__" in file.read_text("utf-8")]
    assert len(lazy) >= 4
    for package in (importlib.import_module(f"ggufmill.{name}".rstrip(".")) for name in lazy):
        for name in package.__all__:
            is_module = importlib.util.find_spec(f"{package.__name__}.{name}") is not None
            assert not is_module, f"{package.__name__}.{name}"
