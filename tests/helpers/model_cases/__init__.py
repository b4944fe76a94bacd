"""Tiny random models of transformers: one module per family of architectures. Each has

CASES                case -> (class of transformers, without ForCausalLM if it ends so, config besides COMMON[, MLA layout])
BEYOND_LLAMA_CPP     case -> what llama.cpp does otherwise, or not at all
COARSE_IN_LLAMA_CPP  case -> tolerance of llama.cpp's logits where it computes with less
IN_LLAMA_CPP         case -> changes of the config for the comparison with llama.cpp
"""

from . import decoders, gpt, newest, odd, recurrent, relatives

MODULES = (decoders, gpt, newest, recurrent, relatives, odd)


def merged(table: str) -> dict:
    """The rows of one table of all modules."""
    return {case: row for module in MODULES for case, row in getattr(module, table, {}).items()}


CASES = merged("CASES")
BEYOND_LLAMA_CPP = merged("BEYOND_LLAMA_CPP")
COARSE_IN_LLAMA_CPP = merged("COARSE_IN_LLAMA_CPP")
IN_LLAMA_CPP = merged("IN_LLAMA_CPP")
