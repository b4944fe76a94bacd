"""Steps of matrix products by themselves, for tests: activations as codes or in blocks, panels of weights, one GEMV."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ggufmill.formats import TYPES
from ggufmill.runtime.backends.cpu.kernels.activations import RUN, quantise_run
from ggufmill.runtime.backends.cpu.kernels.gemm.byte_tiles import PANEL
from ggufmill.runtime.backends.cpu.kernels.gemm.float_panels import AMX_TOKENS, STEP, _fill_blocks, panel_part
from ggufmill.runtime.backends.cpu.kernels.gemv.gemv import ONE_STREAM, Gemv, gemv, run_parts
from ggufmill.runtime.backends.cpu.kernels.gemv_plan import GemvPlan
from ggufmill.simd import team
from ggufmill.simd.memory import aligned_empty, scratch


class ActivationCodes(NamedTuple):
    """codes int8 [n, columns] in -127..127; scales float32 [n, columns / block]; sums int16 [n, columns / 16].

    An activation is about code * scale. The sums are those of the codes, exact.
    """

    codes: np.ndarray
    scales: np.ndarray
    sums: np.ndarray
    block: int


def quantise(x: np.ndarray, block: int) -> ActivationCodes:
    """float32 [n, columns] -> codes, scales and sums. block: 32 or 256, a divisor of columns.

    A block with NaN or infinity gets scale NaN and codes 0, so that it spoils what is computed from it; one whose magnitudes
    are all below 1e-30 gets scale 0. The same bits on every processor.
    """
    x = np.ascontiguousarray(x, np.float32)
    n, columns = x.shape
    codes = np.empty((n, columns), np.int8)
    scales = np.empty((n, columns // block), np.float32)
    sums = np.empty((n, columns // RUN), np.int16)
    quantise_run(x.reshape(-1), block, codes.view(np.uint8).reshape(-1), scales.reshape(-1), sums.reshape(-1))
    return ActivationCodes(codes, scales, sums, block)


def products() -> list[str]:
    """The names of all types that have a matrix-vector product."""
    return [name for name in TYPES if gemv(name) is not None]


def types_of_several(monkeypatch) -> list[str]:
    """Gets the types of which code for several tokens is asked for, from now on."""
    names, several = list[str](), Gemv.several.fget

    def ask(product: Gemv) -> int:
        names.append(product.name)
        return several(product)

    monkeypatch.setattr(Gemv, "several", property(ask))
    return names


def multiply(
    packed: np.ndarray,
    type_name: str,
    activations: ActivationCodes | np.ndarray,
    one_stream: bool = False,
    several: bool = True,
) -> np.ndarray:
    """uint8 [rows, row_bytes] of a type times n tokens -> float32 [n, rows], on one thread.

    activations: quantised with the block that gemv(type_name).activations says, or float32 [n, columns] if that is 0. several:
    whether several tokens are multiplied together.
    """
    product = gemv(type_name)
    if product is None:
        raise ValueError(f"{type_name} has no matrix-vector product")
    arrays = list(activations[:3]) if isinstance(activations, ActivationCodes) else [np.asarray(activations, np.float32)]
    arrays = [np.ascontiguousarray(a) for a in arrays]
    (n, columns), rows = arrays[0].shape, len(packed)
    packed = np.ascontiguousarray(packed)
    out = np.full((n, rows), np.nan, np.float32)
    jobs = np.array([[0, 0, n, 0]], np.int64)
    codes, scales, sums = ([a.ctypes.data for a in arrays] + [0, 0])[:3]
    plan = GemvPlan(product, packed.ctypes.data, 0, packed.shape[1], rows, columns, 1, 1)
    fields = plan.table((codes, scales, sums), out.ctypes.data, rows, jobs.ctypes.data, several=n > 1 and several)
    table = np.array(fields, np.int64)
    table[ONE_STREAM] = one_stream
    run_parts(product.address, table.ctypes.data, 0, 1)
    return out


def round_rows(x: np.ndarray, parts: int = 1, block_tokens: int = AMX_TOKENS) -> np.ndarray:
    """float32 [n, columns] -> bf16 (as uint16), rounded to the nearest, ties to even, in blocks of `block_tokens` tokens and 32
    columns that are filled up with zeros: [n / block_tokens, parts, columns / 32, block_tokens, 32].

    parts: 1, or 2 for what the first rounding left as well, so that the sum of both is x up to 2^-17 of it.
    """
    n, columns = x.shape
    out = aligned_empty((-(-n // block_tokens), parts, -(-columns // STEP), block_tokens, STEP), np.uint16)
    _fill_blocks(True, np.ascontiguousarray(x, np.float32), out)
    return out


def block_rows(x: np.ndarray, block_tokens: int) -> np.ndarray:
    """float32 [n, columns] -> the same in blocks of `block_tokens` tokens and 32 columns, filled up with zeros: [n /
    block_tokens, 1, columns / 32, block_tokens, 32]."""
    n, columns = x.shape
    out = aligned_empty((-(-n // block_tokens), 1, -(-columns // STEP), block_tokens, STEP), np.float32)
    _fill_blocks(None, np.ascontiguousarray(x, np.float32), out)
    return out


def panels_of(packed: np.ndarray, type_name: str, columns: int, bf16: bool) -> np.ndarray:
    """uint8 [rows, row bytes] of a type as for `panel_part` -> panels, float32 [n / 16, columns, 16] or uint16 [n / 16, columns
    / 2, 16, 2], columns filled up to a multiple of 32; valid until this thread calls it again."""
    (rows, row_bytes), padded = packed.shape, -(-columns // STEP) * STEP
    shape = (-(-rows // PANEL), padded // 2, PANEL, 2) if bf16 else (-(-rows // PANEL), padded, PANEL)
    panels = scratch("panels", shape, np.uint16 if bf16 else np.float32)
    packed = np.ascontiguousarray(packed)
    table = np.array([packed.ctypes.data, row_bytes, rows, columns, len(panels), panels.ctypes.data, *[0] * 9], np.int64)
    team.run(0, np.array([(0, panel_part(type_name, bf16).address, table.ctypes.data, 1)], np.int64))
    return panels
