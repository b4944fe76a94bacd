"""Arrays of compiled functions live as long as their addresses are used.

numba frees an array after the statement that names it last. Where only its address is used from then on, other threads may get
the memory meanwhile, and results are wrong once in some thousand runs: `simd.memory.keep_alive(array)` has to follow.
"""

import ast
import re
from pathlib import Path

import pytest

import ggufmill

ROOT = Path(ggufmill.__file__).parent
ROOMS = "simd", "formats", "quantize", "repack", "convert", "imatrix", "runtime"
COMPILED = re.compile(r"kernel|Kernel|jit")
ALLOCATIONS = {"empty", "zeros", "ones", "full", "array", "empty_like", "zeros_like", "ones_like", "arange", "copy"}


def compiled_functions(tree):
    """Functions that a decorator or a call compiles, by the names that this project gives to these."""
    passed = {
        argument.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and COMPILED.search(ast.unparse(call.func))
        for argument in call.args
        if isinstance(argument, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorated = any(COMPILED.search(ast.unparse(decorator)) for decorator in node.decorator_list)
            if decorated or node.name in passed:
                yield node


def names(node):
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def calls_in(statements):
    return [node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Call)]


def array_of(node):
    """The name of the array that an expression is a part of; None if it is none."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def assignments(statement):
    """(name, value) of the assignments of one statement, those inside of it left out."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = zip(target.elts, statement.value.elts, strict=True)
            else:
                pairs = [(target, statement.value)]
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    yield name.id, value
                elif isinstance(name, ast.Tuple) and isinstance(value, ast.Call):  # a helper's results, arrays among them
                    yield from ((part.id, value) for part in name.elts if isinstance(part, ast.Name))


def is_allocation(value):
    return any(isinstance(call.func, ast.Attribute) and call.func.attr in ALLOCATIONS for call in calls_in([value]))


def viewed(value):
    """The array of which a value is a view, which holds the memory as well (a record, `array[0]`, does not)."""
    slices = isinstance(value, ast.Subscript) and any(isinstance(node, ast.Slice) for node in ast.walk(value.slice))
    return array_of(value) if slices else None


def addressed(function):
    """Arrays whose addresses are taken, or of which a record (`record = array[0]`, a place in the array) has a name."""
    fields = {array_of(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    for node in ast.walk(function):
        for name, value in assignments(node):
            if name in fields and isinstance(value, ast.Subscript) and isinstance(value.slice, (ast.Constant, ast.Name)):
                yield array_of(value)
        if isinstance(node, ast.Attribute) and node.attr == "ctypes":
            yield array_of(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "address" and node.args:
            yield array_of(node.args[0])


def freed_too_early(body, taken):
    """(array, line of its last mention) of arrays that these statements allocate, and whose addresses statements after the
    last mention may use: those that call something."""
    born, holders = {}, {}
    for number, statement in enumerate(body):
        for block in ("body", "orelse", "finalbody"):
            yield from freed_too_early(getattr(statement, block, []), taken)
        for name, value in assignments(statement):
            array = holders.get(viewed(value), name if is_allocation(value) else None)
            if array is not None:
                holders[name] = array
                born.setdefault(array, number)
    for array in dict.fromkeys(holders[name] for name in holders if name in taken):
        held = {name for name in holders if holders[name] == array}
        last = max(i for i, statement in enumerate(body) if i == born[array] or held & names(statement))
        if any(ast.unparse(node.func) != "keep_alive" for node in calls_in(body[last + 1 :])):
            yield array, body[last].end_lineno


def modules():
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def test_arrays_outlive_the_use_of_their_addresses():
    found, kernels = [], 0
    for path in modules():
        for function in compiled_functions(ast.parse(path.read_text(encoding="utf-8"))):
            kernels += 1
            early = freed_too_early(function.body, set(addressed(function)))
            found += [f"{path.relative_to(ROOT)}:{line}: {name} of {function.name}" for name, line in early]
    assert kernels > 300
    assert not found, "keep_alive is missing:\n" + "\n".join(found)


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_found(kept):
    source = f"""
@kernel
def f(team):
    words, n = np.empty(4, np.int64), 3
    run(team, words.ctypes.data)
    at = address(words)
    for i in range(n):
        run(team, at + i)
    {"keep_alive(words)" if kept else ""}
"""
    (function,) = compiled_functions(ast.parse(source))
    assert list(freed_too_early(function.body, set(addressed(function)))) == ([] if kept else [("words", 6)])
