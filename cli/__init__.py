"""The command line. Little is imported here: until `main` runs, Ctrl-C shows a traceback."""

from __future__ import annotations

import sys

# verb -> one line for `ggufmill --help`; the module of the same name has the command
VERBS = {
    "convert": "Hugging Face checkpoint to GGUF",
    "imatrix": "Compute, show and merge importance matrices",
    "quantize": "Quantise a GGUF or a checkpoint by recipe",
    "search": "Find the best recipe of a given size",
    "plan": "What goes where: RAM, GPUs, KV cache, buffers",
    "repack": "Interleave rows (_R4, _R8) or undo it",
    "perplexity": "Perplexity and KL divergence on a text",
    "compare": "Errors of layers and weights between two models",
    "bench": "Speed of prompts and of generation",
    "sweep-bench": "Speed over the depth of the context",
    "generate": "Continue a prompt",
    "chat": "Talk with a model in the terminal",
    "serve": "OpenAI-compatible server and a page to chat",
    "inspect": "Show what a model file holds",
    "split": "Cut a GGUF into several files",
    "merge": "Make one GGUF of several files",
    "hash": "Hash tensors and files, or check them",
    "recipes": "List, show, check and explain recipes",
    "run": "Every stage a recipe names, ending in a report",
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. Exit codes: 0 done, 1 the work failed, 2 wrong usage.

    A verb that can go on after Ctrl-C says so in the KeyboardInterrupt it raises: KeyboardInterrupt("--resume goes on ...").
    """
    try:
        from .program import run
    except KeyboardInterrupt:
        print("ggufmill: interrupted", file=sys.stderr)
        sys.exit(1)
    run(arguments)
