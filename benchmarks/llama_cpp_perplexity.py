"""Perplexity of GGUF files as llama.cpp computes it, on the windows that `ggufmill perplexity` scores. Needs llama-cpp-python.

    python benchmarks/llama_cpp_perplexity.py heldout.txt q4_K.gguf iq3_s.gguf --chunks 40

Prints a JSON object: file -> perplexity and its standard error. It imports nothing of ggufmill, so that it can run in an
environment of its own.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

N_CTX = 512


def open_model(path: Path, threads: int) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        str(path), n_ctx=N_CTX, n_batch=N_CTX, n_ubatch=N_CTX, n_threads=threads, logits_all=True, verbose=False
    )


def losses(model: llama_cpp.Llama, text: bytes, chunks: int) -> np.ndarray:
    """Of the tokens in the second half of each window, which begins with BOS; float64 [tokens]."""
    tokens, out = np.array(model.tokenize(text, add_bos=True)), []
    for start in range(0, min(chunks, len(tokens) // N_CTX) * N_CTX, N_CTX):
        window = tokens[start : start + N_CTX].copy()
        window[0] = model.token_bos()
        model.reset()
        model.eval(window.tolist())
        logits = np.array(model.scores[N_CTX // 2 : N_CTX - 1], np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        out.append(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), window[N_CTX // 2 + 1 :]])
    return np.concatenate(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--chunks", type=int, default=1 << 30)
    parser.add_argument("-t", "--threads", type=int, default=1)
    args = parser.parse_args()
    results = {}
    for path in args.files:
        each = losses(open_model(path, args.threads), args.text.read_bytes(), args.chunks)
        value = math.exp(each.mean())
        results[path.name] = {
            "perplexity": value,
            "error": value * each.std(ddof=1) / math.sqrt(len(each)),
            "tokens": len(each),
        }
    print(json.dumps({"llama_cpp": llama_cpp.__version__, "files": results}, indent=1))


if __name__ == "__main__":
    main()
