"""What the processor can do, what it is asked to pretend, and what kernels make of it: for `ggufmill inspect --cpu`."""

from __future__ import annotations

import os
from typing import Any

from ..operating_system.files import cache_home
from . import host_cpu
from .instructions.dot_products import byte_dots_instruction
from .instructions.permute import byte_lookup_instruction
from .target import VARIABLE, Forms, Target, levels_here, target


def cpu_summary() -> dict[str, Any]:
    """Plain data: processor, architecture, levels it can execute; level in use, whether by GGUFMILL_CPU, and its features;
    the instructions of the operations that have several; the folder of compiled kernels.

    Raises MillError as `target` does.
    """
    used = target()
    return {
        "processor": host_cpu.name(),
        "architecture": used.architecture,
        "levels": levels_here(),
        "level": used.level,
        "pretended": bool(os.environ.get(VARIABLE)),
        "compiled_for": used.cpu,
        "vector_bits": used.vector_bits,
        "features": sorted(used.features),
        "instructions": _instructions(used),
        "kernels": str(cache_home() / "kernels"),
    }


def _instructions(of: Target) -> dict[str, str]:
    """Operation -> instruction."""
    multiply_add: Forms[str] = ((("fma",), f"vfmadd ({of.vector_bits} bits)"), (("neon",), "fmla (128 bits)"), ((), "portable"))
    bf16: Forms[str] = ((("avx512f", "avx512bf16"), "vdpbf16ps (512 bits)"), ((), "as float32"))
    half: Forms[str] = ((("f16c",), "vcvtph2ps"), (("neon",), "fcvtl"), ((), "portable"))
    return {
        "dot products of bytes": byte_dots_instruction(of),
        "look-ups of bytes": byte_lookup_instruction(of),
        "products of float32": of.choose(multiply_add),
        "products of bf16": "tdpbf16ps (tile unit)" if of.has_amx else of.choose(bf16),
        "float16 to float32": of.choose(half),
    }
