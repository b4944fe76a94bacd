"""The library as a whole: what it exports, that flags are keyword arguments, that it neither prints nor knows of click."""

import ast
import doctest
import inspect
import pydoc
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

import ggufmill
from ggufmill.pipeline.common.models import CHECKPOINT_OPTIONS
from ggufmill.request_fields import fields_of
from ggufmill.runtime import Sampling, Settings

ROOT = Path(ggufmill.__file__).parent
ROOMS = ("convert", "formats", "imatrix", "jobs", "pipeline", "quantize", "recipes", "repack", "runtime", "simd")
FUNCTIONS = [(verb, name) for verb, entry in ggufmill.VERBS.items() for name in entry.functions]


def sources(word, *rooms):
    """(path, syntax tree) of the modules of these rooms in which a word stands."""
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            if re.search(rf"\b({word})\b", text := path.read_text("utf-8")):
                yield path, ast.parse(text)


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def test_only_the_command_line_imports_click():
    modules = [
        *sources("click", *ROOMS),
        *((ROOT / name, ast.parse((ROOT / name).read_text())) for name in ("__init__.py", "errors.py")),
    ]
    assert [path for path, tree in sources("click", "cli") if "click" in imported(tree)]
    assert [str(path) for path, tree in modules if any(name.split(".")[0] == "click" for name in imported(tree))] == []


def test_no_room_imports_the_command_line():
    for path, tree in sources("cli", *ROOMS):
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.ImportFrom) and node.level and (node.module or "").split(".")[0] == "cli"), path


def test_pipeline_neither_prints_nor_exits():
    for path, tree in sources("print|exit|input", "pipeline"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("print", "sys.exit", "exit", "input"), path


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, ggufmill; print([m for m in ('numpy', 'numba', 'click', 'tqdm', 'ggufmill.pipeline') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# What takes longer to import than verbs take that compute nothing.
HEAVY = (
    *(
        "numba",
        "llvmlite",
        "tokenizers",
        "sentencepiece",
        "gguf",
        "huggingface_hub",
        "jinja2",
        "yaml",
        "matplotlib",
        "torch",
        "tqdm",
        "html",
        "difflib",
    ),
    *(
        "ggufmill.formats.layouts.table",
        "ggufmill.runtime.graph.ops",
        "ggufmill.runtime.models.architectures",
        "ggufmill.runtime.backends",
        "ggufmill.convert.checkpoint_source",
    ),
)


def test_verbs_that_compute_nothing_import_nothing_heavy(models, tmp_path):
    code = f"""
import sys, ggufmill
model, folder = {str(models.q4)!r}, {str(tmp_path)!r}
ggufmill.inspect_model(model)
ggufmill.hash_model(model)
ggufmill.plan_memory(model)
ggufmill.list_recipes()
ggufmill.split_model(model, folder + "/parts", split_max_size="1M")
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_quantising_without_a_target_imports_no_runtime(models, tmp_path):
    code = f"""
import sys, ggufmill
ggufmill.quantize_model({str(models.bf16)!r}, {str(tmp_path / "q.gguf")!r}, "q8_0")
slow = ("ggufmill.runtime.backends", "ggufmill.runtime.models", "distributed")
print([name for name in sys.modules if name.startswith(slow)])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_without_optional_extras():
    """Every module of the library is importable where only the required packages are installed."""
    code = f"""
import sys
for name in ("matplotlib", "starlette", "uvicorn", "llguidance", "prometheus_client", "pyarrow", "dask", "torch", "click"):
    sys.modules[name] = None
import ggufmill
for name in {[name for _, name in FUNCTIONS]!r}:
    getattr(ggufmill, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_shows_the_functions():
    text = pydoc.plain(pydoc.render_doc(ggufmill))
    for _, name in FUNCTIONS:
        assert f"{name}(" in text
    assert set(ggufmill.__all__) <= set(dir(ggufmill))
    with pytest.raises(AttributeError, match="no attribute 'convert_models'"):
        _ = ggufmill.convert_models


def test_type_checkers_see_what_there_is():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    declared = {(node.module, alias.name) for node in block.body for alias in node.names}
    exported = {(getattr(ggufmill, name).__module__.removeprefix("ggufmill."), name) for name in ggufmill.__all__}
    assert declared == exported


@pytest.mark.parametrize(("verb", "name"), FUNCTIONS)
def test_functions_are_typed_and_documented(verb, name):
    function = getattr(ggufmill, name)
    own = "covariance" if name.endswith("_covariance") else ggufmill.module_of(verb)
    assert function.__module__ == f"ggufmill.pipeline.{own}"
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter
    text = inspect.getdoc(function)
    assert text is not None
    for parameter in signature.parameters.values():
        assert parameter.name in text or "Arguments as for" in text or "..." in text or "`merge_imatrix`" in text, parameter


# Functions of a verb that has another one, which takes the others of its flags.
_PARTS = ("inspect_processor", "inspect_checkpoint", "score_tasks")
_OF_TASKS = {f"{kind}{end}" for kind in ("hellaswag", "winogrande", "multiple_choice") for end in ("", "_tasks")}


# Command -> its function, and the parameters that one of the two alone has: of the command what it prints in which form.
COMMANDS = [
    *((verb, [], name) for verb, name in FUNCTIONS if verb not in ("imatrix", "recipes") and name not in _PARTS),
    *(("imatrix", [verb], f"{verb}_imatrix") for verb in ("compute", "show", "merge", "convert")),
    *(("recipes", [verb], f"{verb}_recipe") for verb in ("lint", "explain")),
]
_OF_DISPLAY = {"as_json", "form", "timings"}
_OF_LIBRARY = {"progress", "on_text", "on_ready", "on_end", "on_refused", "command"}
_SETTINGS = {"batch_size": "batch", "ubatch_size": "ubatch", "cache_type_k": "cache_k", "cache_type_v": "cache_v"}
_SETTINGS |= {"flash_attn": "flash", "mla_use": "mla", "attn_max_batch": "attention_bytes", "run_time_repack": "repack"}
_SETTINGS |= {"smart_expert_reduction": "expert_reduction", "parallel": "parallel", "threads": "threads", "n_ctx": "n_ctx"}
_SETTINGS |= {"cpu_mask": "cpus", "cpu_range": "cpus", "ctx_checkpoints": "checkpoints"}


def command_of(verb, words):
    command = import_module(f"ggufmill.cli.{ggufmill.module_of(verb)}").command
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


OF_REQUESTS = [row for row in COMMANDS if hasattr(getattr(ggufmill, row[2]), "request")]


@pytest.mark.parametrize(("verb", "words", "name"), OF_REQUESTS)
def test_fields_are_options_keywords_and_lines_of_the_reference(verb, words, name):
    function, command = getattr(ggufmill, name), command_of(verb, words)
    values, text = command.make_context(verb, [], resilient_parsing=True).params, inspect.getdoc(function)
    options, keywords = {option.name: option for option in command.params}, inspect.signature(function).parameters
    for field in fields_of(function.request):
        keyword, option = keywords[field.name], options.get(field.name)
        assert keyword.default == (keyword.empty if field.is_required else field.default)
        assert re.search(rf"\b{field.name}\b", text)
        assert (option is not None) == field.option.in_cli
        if option is None or field.is_required:
            continue
        default = values[field.name]
        if isinstance(option, click.Argument) or default not in (None, (), {}):
            assert default == field.default or str(default) == field.default or (default, field.default) == (None, ())
        elif field.default not in (None, (), {}, False):  # what is not given is left to the library
            assert field.option.hidden or f"[default: {field.option.shown or field.default}]" in option.help


@pytest.mark.parametrize(("verb", "words", "name"), [row for row in COMMANDS if row not in OF_REQUESTS])
def test_flags_are_keyword_arguments(verb, words, name):
    command = command_of(verb, words)
    parameters = inspect.signature(getattr(ggufmill, name)).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    others = {field for kind in (Settings, Sampling) for field in kind.__dataclass_fields__} if takes_any else set()
    others |= set(CHECKPOINT_OPTIONS) if takes_any else set()
    # Hidden ones are options of llama.cpp that have no effect here.
    exposed = [option for option in command.params if option.expose_value and not getattr(option, "hidden", False)]
    flags = {option.name for option in exposed} - _OF_DISPLAY
    flags -= {"plan": {"tensors"}, "inspect": {"cpu"}, "perplexity": _OF_TASKS}.get(verb, set())
    flags = {_SETTINGS.get(flag, flag) if takes_any and flag not in parameters else flag for flag in flags}
    if verb == "convert":
        flags = flags - {"model"} | {"source"}
    assert flags - others <= parameters.keys()
    named = {p.name for p in parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    assert named - _OF_LIBRARY - {"stop"} <= flags


def documented():
    for verb in dict(FUNCTIONS):
        module = import_module(f"ggufmill.pipeline.{ggufmill.module_of(verb)}")
        yield from doctest.DocTestFinder(recurse=True).find(module, module.__name__)
    yield from doctest.DocTestFinder().find(import_module("ggufmill.pipeline.common.progress"))


@pytest.mark.parametrize("example", [d for d in documented() if d.examples], ids=lambda example: example.name.split(".")[-1])
def test_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example)
    assert result.failed == 0
