"""ggufmill: from a Hugging Face checkpoint to a validated, recipe-quantised, repacked GGUF.

Every verb of the command line is a function here, whose keyword arguments are the verb's flags; `progress=` takes a callback,
and the result is a dataclass with what `--json` prints (`as_json`). What makes a command exit with 1 raises `MillError`.

    import ggufmill

    ggufmill.quantize_model("Qwen3-8B/", "qwen3.gguf", "iq4_k", custom_q="ffn_down=iq5_k")
    ggufmill.perplexity("qwen3.gguf", "wiki.test.raw").perplexity

Beneath them: `ggufmill.formats.open_gguf`, `ggufmill.quantize.encode` and `decode`, `ggufmill.repack.pack` and `unpack`,
`ggufmill.imatrix.load`, `ggufmill.runtime.load_model`.
"""
# ruff: noqa: F401

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from .version import __version__

if TYPE_CHECKING:  # the functions of VERBS, for type checkers
    from .errors import CheckFailed, FormatError, MillError, PlanError, UsageError
    from .pipeline.chat import start_chat
    from .pipeline.convert import convert_model
    from .pipeline.covariance import merge_covariance, show_covariance
    from .pipeline.export import export_model
    from .pipeline.files.convert_endian import convert_endian
    from .pipeline.files.hash import hash_model
    from .pipeline.files.inspect import inspect_checkpoint, inspect_model, inspect_processor
    from .pipeline.files.merge import merge_model
    from .pipeline.files.metadata import edit_metadata
    from .pipeline.files.repack import repack_model
    from .pipeline.files.split import split_model
    from .pipeline.generate import generate_text
    from .pipeline.imatrix import compute_imatrix, convert_imatrix, merge_imatrix, show_imatrix
    from .pipeline.make import make_model
    from .pipeline.measuring.bench import benchmark
    from .pipeline.measuring.compare import compare_models
    from .pipeline.measuring.embed import embed_texts
    from .pipeline.measuring.evaluate import evaluate_models
    from .pipeline.measuring.perplexity import perplexity, score_tasks
    from .pipeline.measuring.sweep_bench import sweep_benchmark
    from .pipeline.plan import plan_memory
    from .pipeline.quantize import quantize_model
    from .pipeline.recipes import explain_recipe, lint_recipe, list_recipes, read_recipe
    from .pipeline.run import run_recipe
    from .pipeline.search import search_recipe
    from .pipeline.serve import serve_model
    from .pipeline.tune import tune_model
    from .pipeline.upload import upload_folder
    from .pipeline.warm_up import warm_up


class _Verb(NamedTuple):
    """A verb of the command line.

    summary: its line in `ggufmill --help`; functions: those of the library that it calls; room: the package within cli/ and
    pipeline/ that its modules are in, if it is none of these themselves.
    """

    summary: str
    functions: tuple[str, ...]
    room: str = ""


# A verb's functions are in the module of its name in pipeline/ (those of covariances in one of their own), its command is in
# the one in cli/: see `module_of`.
VERBS = {
    "make": _Verb("Make the best file of a model that fits", ("make_model",)),
    "convert": _Verb("Convert a Hugging Face checkpoint to GGUF", ("convert_model",)),
    "export": _Verb("Write a GGUF as a Hugging Face checkpoint", ("export_model",)),
    "imatrix": _Verb(
        "Compute, show and merge importance matrices",
        ("compute_imatrix", "show_imatrix", "merge_imatrix", "convert_imatrix", "show_covariance", "merge_covariance"),
    ),
    "quantize": _Verb("Quantise a GGUF or a checkpoint by recipe", ("quantize_model",)),
    "search": _Verb("Find the best recipe of a given size", ("search_recipe",)),
    "plan": _Verb("Plan what goes where: RAM, GPUs, KV cache, buffers", ("plan_memory",)),
    "tune": _Verb("Tune norms and scales of a quantised GGUF", ("tune_model",)),
    "repack": _Verb("Interleave rows (_R4, _R8) or undo it", ("repack_model",), "files"),
    "perplexity": _Verb("Measure perplexity and KL divergence on a text", ("perplexity", "score_tasks"), "measuring"),
    "evaluate": _Verb("Judge many quants: one table, one picture", ("evaluate_models",), "measuring"),
    "compare": _Verb("Compare layers and weights of two models", ("compare_models",), "measuring"),
    "bench": _Verb("Measure the speed of prompts and of generation", ("benchmark",), "measuring"),
    "sweep-bench": _Verb("Measure the speed over the depth of the context", ("sweep_benchmark",), "measuring"),
    "generate": _Verb("Continue a prompt", ("generate_text",)),
    "embed": _Verb("Make vectors of texts and compare them", ("embed_texts",), "measuring"),
    "chat": _Verb("Talk with a model in the terminal", ("start_chat",)),
    "serve": _Verb("Serve a model to OpenAI's clients, with a page to chat", ("serve_model",)),
    "inspect": _Verb("Show what a model file holds", ("inspect_model", "inspect_checkpoint", "inspect_processor"), "files"),
    "metadata": _Verb("Set, remove and rename metadata of a GGUF", ("edit_metadata",), "files"),
    "convert-endian": _Verb("Reverse the byte order of a GGUF, for big-endian machines", ("convert_endian",), "files"),
    "split": _Verb("Cut a GGUF into several files", ("split_model",), "files"),
    "merge": _Verb("Make one GGUF of several files", ("merge_model",), "files"),
    "hash": _Verb("Hash tensors and files, or check them", ("hash_model",), "files"),
    "recipes": _Verb("List, show, check and explain recipes", ("list_recipes", "read_recipe", "lint_recipe", "explain_recipe")),
    "run": _Verb("Run every stage that a recipe names, up to a report", ("run_recipe",)),
    "upload": _Verb("Send a folder of quants to the Hub", ("upload_folder",)),
    "warm-up": _Verb("Compile kernels before they are needed", ("warm_up",)),
    "completion": _Verb("Print a script that completes command lines in a shell", ()),
}


def module_of(verb: str) -> str:
    """Where a verb's modules are beneath cli/ and pipeline/: 'measuring.sweep_bench'."""
    return ".".join(filter(None, (VERBS[verb].room, verb.replace("-", "_"))))


_ERRORS = ("MillError", "PlanError", "FormatError", "UsageError", "CheckFailed")
_MODULES = dict.fromkeys(_ERRORS, ".errors") | {
    function: f".pipeline.{module_of(verb)}" for verb, entry in VERBS.items() for function in entry.functions
}
_MODULES |= dict.fromkeys(("show_covariance", "merge_covariance"), ".pipeline.covariance")
__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports a function when it is first asked for: the program's `--help` needs none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
