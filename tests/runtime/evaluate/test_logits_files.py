"""Files of a baseline's predictions: llama-perplexity's and our own."""

import dataclasses
import io
import math
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufmill import convert_model
from ggufmill import perplexity as score_file
from ggufmill.formats import FormatError
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.baseline import ModelBaseline
from ggufmill.runtime.evaluate.logits_file import LogitsFileWriter
from ggufmill.runtime.evaluate.open_logits import open_logits
from ggufmill.runtime.evaluate.perplexity import cut_windows, perplexities, perplexity
from ggufmill.runtime.evaluate.top_logits import TopLogitsWriter

N_CTX = 20
DEMO, TEXT = FOLDER / "demo", FOLDER / "demo" / "heldout.txt"
GOLDEN = Path(__file__).parents[2] / "data" / "llama-perplexity.kld"


@pytest.fixture(scope="module")
def worse(tiny):
    """The same model with noise on one tensor."""
    tensor = tiny.tensors["blk.0.ffn_up.weight"]
    rows = tensor.read(0, tensor.n_rows) + np.random.default_rng(1).normal(0, 0.1, (48, 32)).astype(np.float32)
    changed = dataclasses.replace(tensor, read=lambda start, stop: rows[start:stop])
    return dataclasses.replace(tiny, tensors=tiny.tensors | {tensor.name: changed})


@pytest.fixture(scope="module")
def stored(tiny, tokens, tmp_path_factory):
    """Files of the model's predictions: one of llama-perplexity's format, and with 1, 8 and all tokens of each prediction."""
    folder, model, files = tmp_path_factory.mktemp("logits"), load_model(tiny), {}
    windows = cut_windows(model, tokens, N_CTX, None)
    for k in (None, 1, 8, model.n_vocab):
        files[k] = folder / f"{k}.kld"
        with files[k].open("wb") as file:
            writer = (
                LogitsFileWriter(file, model.n_vocab, windows)
                if k is None
                else TopLogitsWriter(file, model.n_vocab, windows, k, {"path": "tiny"})
            )
            perplexities([model], windows.ravel(), N_CTX, on_logits=writer.add)
    return files


def written(logits, tokens):
    file = io.BytesIO()
    LogitsFileWriter(file, logits.shape[1], tokens).add(logits)
    return file.getvalue()


def test_the_format_is_llama_perplexitys(tmp_path):
    """Read by hand, as llama.cpp's tools/perplexity lays it out; an odd vocabulary is filled up."""
    random = np.random.default_rng(2)
    logits = (6 * random.standard_normal((3, 7))).astype(np.float32)
    logits[1, 3] = -1000
    logits[2] = 1.5
    data = written(logits, np.arange(8)[None] % 7)
    assert data[:8] == b"_logits_"
    assert struct.unpack_from("<3i", data, 8) == (8, 7, 1)
    assert struct.unpack_from("<8i", data, 20) == (0, 1, 2, 3, 4, 5, 6, 0)
    assert len(data) == 20 + 4 * 8 + 3 * 2 * (8 + 4)
    for i, row in enumerate(logits):
        scale, lowest, *codes = struct.unpack_from("<2f7H", data, 52 + 24 * i)
        exact = row - row.max() - math.log(np.exp(row.astype(np.float64) - row.max()).sum())
        near = exact > exact.max() - 16
        assert np.abs(scale * np.array(codes) + lowest - exact)[near].max() < 16 / 65535 / 2 * 1.01 + 2e-6
        assert all(code == 0 for code, is_near in zip(codes, near, strict=True) if not is_near)
    path = tmp_path / "a.kld"
    path.write_bytes(data)
    file = open_logits(path)
    assert (file.n_ctx, file.n_vocab, file.tokens.tolist()) == (8, 7, [[0, 1, 2, 3, 4, 5, 6, 0]])


def test_a_stored_baseline_gives_the_figures_of_the_model(tiny, worse, tokens, stored):
    models = [load_model(worse), load_model(tiny)]
    live = perplexities(models, tokens, N_CTX, baseline=ModelBaseline(load_model(tiny)))
    read = perplexities(models, tokens, N_CTX, baseline=open_logits(stored[None]))
    assert live[0].kld_mean > 1e-3
    for one, other in zip(live, read, strict=True):
        assert other.kld_mean == pytest.approx(one.kld_mean, abs=1e-6)
        assert other.kld_error == pytest.approx(one.kld_error, rel=1e-3, abs=1e-6)
        assert other.baseline_perplexity == pytest.approx(one.baseline_perplexity, rel=1e-4)
        assert other.perplexity == one.perplexity
        assert other.top1_agreement == pytest.approx(one.top1_agreement, abs=2)
        assert other.kld_missing is None
    assert perplexity(models[0], tokens, N_CTX, baseline=open_logits(stored[None])).kld_mean == read[0].kld_mean


def test_models_together_have_the_figures_that_each_has_alone(tiny, worse, tokens):
    models = [load_model(worse), load_model(tiny)]
    together = perplexities(models, tokens, N_CTX, baseline=ModelBaseline(load_model(tiny)))
    for model, result in zip(models, together, strict=True):
        alone = perplexity(model, tokens, N_CTX, baseline=load_model(tiny))
        assert dataclasses.replace(alone, tokens_per_second=0) == dataclasses.replace(result, tokens_per_second=0)


def test_most_probable_tokens_give_a_lower_bound_and_what_it_lacks(tiny, worse, tokens, stored):
    model = load_model(worse)
    live = perplexity(model, tokens, N_CTX, baseline=load_model(tiny))
    results = {k: perplexity(model, tokens, N_CTX, baseline=open_logits(stored[k])) for k in (1, 8, load_model(tiny).n_vocab)}
    one, eight, every = results.values()
    assert 0 < one.kld_mean < eight.kld_mean < live.kld_mean
    assert every.kld_mean == pytest.approx(live.kld_mean, abs=1e-6)
    assert every.kld_missing == pytest.approx(0, abs=1e-7)
    assert eight.kld_missing == pytest.approx(live.kld_mean - eight.kld_mean, rel=0.5)
    for result in results.values():
        assert result.top1_agreement == live.top1_agreement
        assert result.baseline_perplexity == pytest.approx(live.baseline_perplexity, rel=1e-6)
        assert result.delta_p_rms == pytest.approx(live.delta_p_rms, rel=1e-4)
    assert open_logits(stored[8]).about == {"path": "tiny"}
    assert stored[8].stat().st_size < stored[None].stat().st_size


@pytest.mark.parametrize("k", [None, 8])
def test_files_that_are_cut_short_or_too_long(stored, tmp_path, k):
    data, path = stored[k].read_bytes(), tmp_path / "cut.kld"
    for size in (8, 15, 30, 200, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match=r"cut\.kld: the file (is cut short|ends within its header)"):
            open_logits(path)
    path.write_bytes(data + b"x")
    with pytest.raises(FormatError, match=r"1 bytes follow the last"):
        open_logits(path)
    path.write_bytes(data[:7])
    assert open_logits(path) is None


@pytest.mark.parametrize("k", [None, 8])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_never_crash(tiny, stored, tmp_path, k, data):
    """They are refused, or (in a file without checksums) read as other probabilities."""
    content = bytearray(stored[k].read_bytes())
    at = data.draw(st.one_of(st.integers(0, 60), st.integers(0, len(content) - 4)))
    content[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    changed = bytes(content) != stored[k].read_bytes()
    path = tmp_path / "damaged.kld"
    path.write_bytes(content)
    try:
        file = open_logits(path)
        if file is None:
            return
        rows = [file.window(i).block(slice(0, file.scored)) for i in range(len(file.tokens))]
    except FormatError:
        return
    assert len(rows) == 10
    assert k is None or not changed


def test_probabilities_that_do_not_add_up_are_named(tiny, tokens, stored, tmp_path):
    content = bytearray(stored[None].read_bytes())
    content[-200:] = b"\xff" * 200
    path = tmp_path / "damaged.kld"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"damaged\.kld: .*window 10"):
        perplexity(load_model(tiny), tokens, N_CTX, baseline=open_logits(path))


def test_a_file_that_llama_perplexity_wrote():
    """Of the demo model as f32: -f heldout.txt -c 8 -b 8 --chunks 1 --kl-divergence-base; its perplexity was 337.2079."""
    result = score_file(DEMO, TEXT, chunks=1, kl_divergence=GOLDEN)
    assert result.n_ctx == 8
    assert result.baseline_perplexity == pytest.approx(337.2079, rel=2e-4)
    assert result.perplexity == pytest.approx(337.2079, rel=2e-3)
    assert result.kld_mean == pytest.approx(0, abs=1e-4)
    assert result.top1_agreement == 100


def test_exchange_with_llama_perplexity(tmp_path):
    """Both ways with the program itself, where it is installed."""
    program = shutil.which("llama-perplexity")
    if program is None:
        pytest.skip("llama-perplexity is not installed")
    model, text = tmp_path / "demo.gguf", tmp_path / "text.txt"
    convert_model(DEMO, model, outtype="f32", mla_layout="mainline")
    text.write_text(TEXT.read_text("utf-8")[:20000])

    def run(*arguments):
        done = subprocess.run([program, "-m", model, "-c", "64", "-b", "64", *arguments], capture_output=True, text=True)
        return done.stdout + done.stderr

    ours, theirs = tmp_path / "ours.kld", tmp_path / "theirs.kld"
    run("-f", text, "--chunks", "4", "--kl-divergence-base", theirs)
    own = score_file(model, text, n_ctx=64, chunks=4, kl_divergence_base=ours)
    assert open_logits(ours).tokens.tolist() == open_logits(theirs).tokens.tolist()
    read = score_file(model, kl_divergence=theirs)
    assert read.kld_mean == pytest.approx(0, abs=1e-4)
    assert read.baseline_perplexity == pytest.approx(own.perplexity, rel=1e-3)
    report = run("--kl-divergence-base", ours, "--kl-divergence")
    assert "KL divergence statistics" in report, report[-2000:]
    assert float(re.search(r"Mean PPL\(base\) +: +([\d.]+)", report)[1]) == pytest.approx(own.perplexity, rel=1e-4)
    assert float(re.search(r"Mean +KLD: +(-?[\d.]+)", report)[1]) == pytest.approx(0, abs=1e-4)
