"""Products as they are made with the tile unit (AMX), on processors without one: its instructions are emulated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import amx_emulation
import numpy as np
from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode
from ggufmill.runtime.backends.cpu.kernels.gemm import gemm

random = np.random.default_rng(0)


def product(name, q, x, rows):
    out, place = np.full((len(x), rows + 5), np.nan, np.float32), 0 if name.startswith("q") else 3
    if name == "rows":
        gemm.multiply_rows(q.view(np.float32), False, gemm.Activations(x), out, place)
        return out[:, place : place + rows]
    plan, program, exact = gemm.plan_gemm(q, TYPES[name], x.shape[1]), gemm.ProductList(1), np.empty((len(x), rows), np.float32)
    assert plan.form.kind == gemm.BF16
    if place == 0:
        out = exact
    program.product(1, plan, program.blocks_of(0, plan.form, gemm.Activations(x)), out, gemm.one_job(len(x)), place)
    program.run(0)
    assert np.isnan(out[:, :place]).all() and np.isnan(out[:, place + rows :]).all()
    return out[:, place : place + rows]


for n, rows, columns in ((1, 16, 32), (7, 48, 90), (33, 80, 1088), (40, 112, 512), (530, 32, 64)):
    x, weights = (random.standard_normal((count, columns)).astype(np.float32) for count in (n, rows))
    for name in ("bf16", "bf16_r16", "q8_0", "q4_K", "q6_K_r4", "rows"):
        stored = TYPES["f32" if name == "rows" else name]
        if not stored.fits(columns) or (name == "bf16_r16" and columns % 32):
            continue
        q = encode(weights, stored.name, np.ones(columns, np.float32))
        out = product(name, q, x, rows)
        double = x.astype(np.float64) @ decode(q, stored.name, columns).astype(np.float64).T
        error = np.sqrt(np.mean((out - double) ** 2) / np.mean(double**2))
        assert error < (1e-5 if name.startswith("bf16") else 5e-3), (name, n, rows, columns, error)
        for cut in {1, n // 3} - {0, n}:
            parts = [product(name, q, part, rows) for part in (x[:cut], x[cut:])]
            assert np.array_equal(np.concatenate(parts), out), (name, n, rows, columns, cut)
"""


@pytest.mark.slow
def test_products_with_emulated_tiles(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GGUFMILL_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
