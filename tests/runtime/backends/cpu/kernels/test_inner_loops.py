"""The code of the inner loops for processors that are not at hand: the instructions that have to be in it, and those that mean
that LLVM took vectors apart, called a library or ran out of registers."""

import pytest
from inner_loops import byte_tile_loop, float_panel_loop, float_tile_loop, gemv_loop, unpack_loop

from ggufmill.formats.types import TYPES
from ggufmill.runtime.backends.cpu.kernels.gemv.gemv import gemv
from ggufmill.runtime.backends.cpu.kernels.gemv.integer_steps import has_integer_scales
from ggufmill.simd.target import foreign_target

CALLS = {"bl", "blr"}  # of __extendhfsf2, fmaf, ...
SCALAR = CALLS | {"umov", "smov", "sbfx"}  # lanes that are taken out of vectors
SMULL = {"smull", "smull2", "addp", "sadalp"}
SCALAR_PRODUCTS = {"madd", "smaddl", "umaddl"}


def share_on_stack(loop):
    return sum(instruction.uses_stack for instruction in loop.instructions) / len(loop.instructions)


@pytest.mark.parametrize(
    ("name", "level", "needed", "forbidden"),
    [
        ("q4_0", "neon", SMULL | {"fcvtl", "prfm"}, {"sdot", "mul"}),
        ("q4_0", "neon-dotprod", {"sdot", "fcvtl", "prfm"}, {"eor", "smull", "mul"}),  # codes of 15 need no bias
        ("q8_0", "neon-dotprod", {"sdot", "prfm"}, {"smull", "mul"}),
        ("q8_0", "neon-i8mm", {"sdot"}, {"usdot", "smull", "mul"}),
        ("q4_K", "neon-i8mm", {"usdot", "prfm"}, {"smull"}),
        ("q6_K", "neon-dotprod", {"sdot"}, {"smull"}),
        ("iq4_nl", "neon-dotprod", {"tbl", "sdot"}, {"smull"}),
        ("iq4_nl", "neon", {"tbl"} | SMULL, {"sdot"}),
        ("iq2_k", "neon-dotprod", {"tbl", "sdot", "mla"}, {"sbfx", "umov"}),  # integer scales
        ("iq6_k", "neon-i8mm", {"tbl", "sdot"}, {"smull"}),
        ("iq2_xxs", "neon-dotprod", {"sdot"}, {"smull", "sbfx"}),  # signs from bits
        ("iq2_kt", "neon-i8mm", {"addp", "sdot"}, set()),
        ("mxfp4", "neon-dotprod", {"tbl", "sdot"}, {"smull"}),
        ("f16", "neon", {"fcvtl", "fcvtl2", "fmla", "prfm"}, set()),
        ("bf16", "neon", {"fmla", "prfm"}, set()),
    ],
)
def test_matrix_vector_products(name, level, needed, forbidden):
    loop = gemv_loop(foreign_target(level), name)
    assert needed <= loop.names
    assert not loop.names & (forbidden | CALLS | SCALAR_PRODUCTS)
    assert share_on_stack(loop) < 0.2


AVX2 = foreign_target("avx2")
# Instructions for 256 weights, with some to spare.
SUPERBLOCKS = {
    "q2_K": 82, "q3_K": 113, "q4_K": 94, "q5_K": 120, "q6_K": 106, "iq4_xs": 110, "iq2_k": 83, "iq3_k": 121, "iq4_k": 120,
    "iq5_k": 146, "iq6_k": 206, "iq4_ks": 112, "iq2_ks": 85, "iq5_ks": 136, "iq3_ks": 115, "iq4_kss": 131, "iq2_kl": 116,
}  # fmt: skip
CROSSING = ("vperm", "vinsert", "vextract", "vbroadcasti128")  # halves of registers


@pytest.mark.parametrize(("name", "most"), SUPERBLOCKS.items())
def test_avx2_adds_products_of_superblocks_as_integers(name, most):
    """Scales are brought to their products within halves of registers, and only sums of superblocks become floats."""
    loop = gemv_loop(AVX2, name)
    names = [instruction.name for instruction in loop.instructions]
    assert loop.per(256) <= most
    assert sum(each.startswith(CROSSING) for each in names) <= 4
    assert 2 <= names.count("vcvtdq2ps") <= 3  # of minima, too
    assert not {each for each in names if each.startswith("vpextr")}
    assert share_on_stack(loop) < 0.2


def test_all_superblocks_that_avx2_adds_as_integers_are_counted():
    packed = [name for name in TYPES if (product := gemv(name)) is not None and product.activations]
    assert {name for name in packed if has_integer_scales(name, AVX2)} == SUPERBLOCKS.keys()


@pytest.mark.parametrize(
    ("level", "needed", "forbidden", "most"),
    [
        ("neon", {"smull", "addp", "sadalp"}, {"sdot", "eor"}, 1600),
        ("neon-dotprod", {"sdot", "scvtf", "fmla"}, {"eor", "usdot", "umov"}, 520),  # 256 of the 496 are products
        ("neon-i8mm", {"usmmla", "scvtf", "fmla"}, {"sdot", "usdot", "uzp1", "umov"}, 530),
    ],
)
def test_tiles_of_bytes(level, needed, forbidden, most):
    loop = byte_tile_loop(foreign_target(level), 32, False, 255)
    assert needed <= loop.names
    assert not loop.names & (forbidden | CALLS)
    assert loop.per(4096) < most
    assert share_on_stack(loop) < 0.05


def test_tiles_of_floats_stay_in_registers():
    loop = float_tile_loop(foreign_target("neon"))
    assert "fmla" in loop.names
    assert not loop.names & (CALLS | {"fmul", "fmadd"})
    assert share_on_stack(loop) == 0


@pytest.mark.parametrize("name", ["q8_0", "iq4_xs"])
@pytest.mark.parametrize("level", ["neon", "neon-dotprod", "neon-i8mm"])
def test_unpacking(name, level):
    loop = unpack_loop(foreign_target(level), name)
    assert loop.names & {"fcvt", "fcvtl"}  # one scale, or those of several blocks at a time
    assert not loop.names & SCALAR
    assert share_on_stack(loop) < 0.1
    if name == "iq4_xs":
        assert "tbl" in loop.names


def test_half_floats_are_converted_by_vectors():
    assert {"fcvtl", "fcvtl2"} <= float_panel_loop(foreign_target("neon"), "f16").names
