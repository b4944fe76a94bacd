"""Quantising with a file of covariances: the whole way, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ggufmill import compute_imatrix, quantize_model
from ggufmill.convert import open_source
from ggufmill.errors import MillError, UsageError
from ggufmill.formats import TYPES, open_gguf
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.pipeline.writing.forecast import forecast
from ggufmill.quantize.covariance import timing
from ggufmill.recipes import FOLDER


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("covariance")
    imatrix, covariance = folder / "demo.imatrix", folder / "demo.cov"
    text = FOLDER / "demo" / "calibration.txt"
    compute_imatrix(FOLDER / "demo", text, imatrix, chunks=2, covariance=covariance)
    return folder, imatrix, covariance


def test_quantize(files):
    folder, imatrix, covariance = files
    common = {"imatrix": imatrix, "custom_q": "blk.*attn_(q_a|output)=iq4_ks", "force": True}
    without = quantize_model(FOLDER / "demo", folder / "without.gguf", "q8_0", **common)
    result = quantize_model(FOLDER / "demo", folder / "out.gguf", "q8_0", covariance=covariance, effort=0, **common)
    changed = {name for name, checksum in result.checksums.items() if checksum != without.checksums[name]}
    assert {f"blk.{layer}.attn_{part}.weight" for layer in range(3) for part in ("q_a", "output")} <= changed
    assert not any("norm" in name for name in changed)
    metadata = open_gguf(folder / "out.gguf").metadata
    assert metadata["quantize.covariance.file"] == "demo.cov"
    assert metadata["quantize.covariance.effort"] == 0
    assert metadata["quantize.covariance.tensors_count"] > 6
    assert any("down_exps.weight" in line and "none was collected" in line for line in result.plan.warnings)
    assert "quantize.covariance.file" not in open_gguf(folder / "without.gguf").metadata


def test_a_dry_run_says_the_time(files, monkeypatch):
    _, imatrix, covariance = files
    monkeypatch.setattr(timing, "_WIDTHS", (256, 512))
    given = {"imatrix": imatrix, "covariance": covariance, "effort": 0, "dry_run": True}
    seconds = quantize_model(FOLDER / "demo", "out.gguf", "q8_0", custom_q="attn_output=q4_0", **given).forecast.seconds
    assert {"q4_0", "q8_0", timing.PREPARING} <= seconds.keys()
    assert all(0 < each < 60 for each in seconds.values())


def test_rows_that_are_encoded_together_take_more():
    """Of a run of 1,024 rows of 14,336 columns each thread has several copies."""

    source = open_source(FOLDER / "demo")

    def said(cuts, nbytes):
        rows = lambda start, stop: np.zeros((stop - start, 0), np.uint8)  # noqa: E731
        output = Output("a", (14336, 2048), "f32", TYPES["q4_K"], "", rows, cuts=cuts)
        plan = replace(make_plan([output], {}, "out.gguf"), covariance_bytes=nbytes)
        return forecast(plan, source, threads=4).memory

    alone, chunk = said((), 1 << 30), round((1 << 20) * (18 + 3 * 4.5 / 8))  # encoded; three of them packed
    assert alone - said((), 0) == (1 << 30) + (12 << 20) + 4 * ((30 << 20) - chunk)  # and what prepares them
    assert said((0, 1024), 1 << 30) - alone == 4 * (24 * 1024 * 14336 - (30 << 20))
    assert said((0, 16, 32), 0) == said((), 0)


def test_recipe_names_it(files):
    folder, _, covariance = files
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[quantize]\ntype = "q8_0"\ncovariance = "{covariance.name}"\neffort = 0\n')
    result = quantize_model(FOLDER / "demo", folder / "by-recipe.gguf", recipe=recipe, dry_run=True, no_timing=True)
    assert result.plan.metadata["quantize.covariance.effort"] == 0
    recipe.write_text('[quantize]\ntype = "q8_0"\ncovariance = "missing.cov"\n')
    with pytest.raises(MillError, match=r"\[quantize\] covariance: .*missing.cov does not exist"):
        quantize_model(FOLDER / "demo", folder / "x.gguf", recipe=recipe, dry_run=True)
    recipe.write_text('[quantize]\ntype = "q8_0"\neffort = 2\n')
    with pytest.raises(MillError, match="effort needs covariance"):
        quantize_model(FOLDER / "demo", folder / "x.gguf", recipe=recipe, dry_run=True)


def test_refused(files, tmp_path):
    _, imatrix, covariance = files
    with pytest.raises(UsageError, match="--effort"):
        quantize_model(FOLDER / "demo", tmp_path / "x.gguf", "q8_0", effort=2)
    with pytest.raises(UsageError, match="--effort 5: it is a whole number from 0 to 4"):
        quantize_model(FOLDER / "demo", tmp_path / "x.gguf", "q8_0", covariance=covariance, effort=5)
    with pytest.raises(MillError, match="--strict: the covariance is not used for .*down_exps.weight and 2 more: none was"):
        quantize_model(FOLDER / "demo", tmp_path / "x.gguf", "q8_0", imatrix=imatrix, covariance=covariance, strict=True)
    with pytest.raises(MillError):
        quantize_model(FOLDER / "demo", tmp_path / "x.gguf", "q8_0", covariance=imatrix)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_experts_and_covariances_will_see(tmp_path):
    """Half as many tokens as columns are wanted; an expert sees its share of the text's."""
    text = FOLDER / "demo" / "calibration.txt"
    job = {"out": tmp_path / "a.imatrix", "covariance": tmp_path / "a.cov", "covariance_experts": True, "n_ctx": 64}

    def seen(chunks):
        forecast = compute_imatrix(FOLDER / "demo", text, **job, chunks=chunks, dry_run=True).forecast
        return forecast.experts, forecast.covariance.seen

    experts, few = seen(2)
    assert (experts.experts, experts.used, experts.tokens, experts.wanted) == (8, 2, 32, 32)
    assert (few.too_few, few.tokens, few.wanted, few.windows) == (4, 128, 512, 8)  # 256 columns of an expert, one of four
    assert "4 of 36 covariances" in few.remark
    assert "512 tokens, 8 windows" in few.remark
    assert seen(8)[1].remark == ""
