"""What attention rounds in whole passes with `fast`. Weights are float32, whose products are the same with it and without."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_models import N_VOCAB, llama

from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu import attention_jobs
from ggufmill.runtime.backends.cpu.kernels.attention.job_parts import parts_of
from ggufmill.runtime.backends.cpu.kernels.gemm.vector_products import has_bf16_dots
from ggufmill.simd.target import levels_here, target

TOKENS = np.random.default_rng(4).integers(0, N_VOCAB, 150)  # more than a block of keys


@pytest.mark.parametrize(("cache", "width"), [("f32", 32), ("f16", 32), ("q8_0", 64)])
def test_prompts_are_rounded_where_there_are_dot_products(cache, width, monkeypatch):
    asked = []  # (generated, rounds) of every layer

    def noted_parts_of(*arguments):
        asked.append((arguments[2], arguments[5]))
        return parts_of(*arguments)

    def model(**settings):
        return load_model(source, threads=1, cache_k=cache, cache_v=cache, **settings)

    monkeypatch.setattr(attention_jobs, "parts_of", noted_parts_of)
    source, has_byte_dots = llama(width=width), target().has_vnni or target().has_avx_vnni
    plain, fast = model(), model(fast=True)
    expected, got = plain.logits(TOKENS), fast.logits(TOKENS)
    assert asked == 2 * [(False, False)] + 2 * [(False, True)]
    assert np.array_equal(expected, got) != {"f32": False, "f16": has_bf16_dots(), "q8_0": has_byte_dots}[cache]
    assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()
    assert np.array_equal(model(fast=True, ubatch=96).logits(TOKENS), got)
    exact = model(exact=True).logits(TOKENS)
    asked.clear()
    assert np.array_equal(model(exact=True, fast=True).logits(TOKENS), exact)
    assert asked == 2 * [(False, False)]
    # Tokens that are generated are not, over whatever is cached: few heads share keys.
    cached = plain.new_cache(len(TOKENS) + 4)
    plain.hidden([(cached, TOKENS)])
    following = [(cached.fork(), TOKENS[:2]), (cached, TOKENS[:2])]
    one, other = (each.hidden([rows], generated=True)[0] for each, rows in zip((plain, fast), following, strict=True))
    assert np.array_equal(one, other)


@pytest.mark.slow
def test_roundings_with_emulated_dot_products(tmp_path):
    """What depends on AVX512-BF16, here and in test_flash.py, on processors without it."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GGUFMILL_CACHE": str(tmp_path)}
    if "avx512-bf16" in levels_here():  # one with a tile unit multiplies weights by that, but rounds no attention
        environment["GGUFMILL_CPU"] = "avx512-bf16"
    tests = [str(here / f"test_{name}.py") for name in ("flash", "attention_jobs")]
    options = ["-p", "bf16_dots_emulation", "-p", "no:cacheprovider", "-k", "round and not emulated", "-q"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *tests], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
