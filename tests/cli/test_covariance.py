"""Covariances as a user collects, interrupts, shows and merges them."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from commands import exit_code

from ggufmill.formats import open_gguf
from ggufmill.imatrix.covariance import open_covariance
from ggufmill.operating_system.process import low_priority
from ggufmill.recipes import FOLDER

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
SHORT = ("-c", 128, "-b", 256, "-t", 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files of a run over twelve windows."""
    folder = tmp_path_factory.mktemp("covariance")
    job = ("imatrix", DEMO, "-f", TEXT, "-o", folder / "a.imatrix", "--covariance", folder / "a.cov", "--chunks", 12, *SHORT)
    assert exit_code(*job) == 0
    return folder


@pytest.mark.process
def test_killed_and_resumed_gives_the_same_bytes(mill, made, tmp_path):
    """SIGKILL once there is something to resume, and again when it goes on."""
    state = tmp_path / "a.cov.state"
    job = ["imatrix", DEMO, "-f", TEXT, "-o", tmp_path / "a.imatrix", "--covariance", tmp_path / "a.cov", "--chunks", 12]
    job += [*SHORT, "--output-frequency", 1]
    seen = None
    for options in ([], ["--resume"]):
        command = [sys.executable, "-m", "ggufmill", *map(str, [*job, *options])]
        process = subprocess.Popen(low_priority(command), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and (not state.exists() or state.stat().st_mtime_ns == seen):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert state.exists(), "it was done before it could be killed"
        seen = state.stat().st_mtime_ns
        assert not (tmp_path / "a.cov").exists()
    code, _, err = mill(*job)
    assert code == 1
    assert "is left from an interrupted run; --resume continues it" in err
    code, _, err = mill(*job, "--resume")
    assert code == 0
    assert "covariance of 33 inputs of 64 to 768 columns: the file takes" in err
    for name in ("a.imatrix", "a.cov"):
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.cov", "a.imatrix"]


def test_show(mill, made):
    code, text, _ = mill("imatrix", "show", made / "a.cov")
    assert code == 0
    assert "12 chunks of 128 tokens, text: calibration.txt" in text
    code, text, _ = mill("imatrix", "show", made / "a.cov", "--json")
    result = json.loads(text)
    assert (result["architecture"], result["chunk_count"], len(result["inputs"])) == ("deepseek2", 12, 33)
    file = open_covariance(made / "a.cov")
    for row in result["inputs"]:
        h = file.covariance_of(row["name"], 0).matrix.astype(np.float64)
        if row["matrices"] > 1:
            continue
        assert row["effective_rank"] == pytest.approx(np.trace(h) ** 2 / np.sum(h * h))
        assert row["diagonal_share"] == pytest.approx(np.sum(np.diagonal(h) ** 2) / np.sum(h * h))
        roots = np.sqrt(np.diagonal(h))
        between = (h / np.outer(roots, roots))[~np.eye(len(h), dtype=bool)]
        assert row["correlation"] == pytest.approx(np.sqrt(np.mean(between**2)))
    code, _, err = mill("imatrix", "show", made / "a.cov", "-lsim")
    assert code == 2
    assert "--layer-similarity" in err
    assert mill("inspect", made / "a.cov")[0] == 0


def test_merged_parts_are_the_covariance_of_all(mill, made, tmp_path):
    """Up to the 16 bits of the parts."""
    parts = []
    for name, options in (("1", ("--chunks", 5)), ("2", ("--from-chunk", 5, "--chunks", 7))):
        parts.append(tmp_path / f"{name}.cov")
        job = ("imatrix", DEMO, "-f", TEXT, "-o", tmp_path / f"{name}.imatrix", "--covariance", parts[-1])
        assert mill(*job, *options, *SHORT)[0] == 0
    code, text, _ = mill("imatrix", "merge", *parts, "-o", tmp_path / "both.cov", "--json")
    assert (code, json.loads(text)["chunks"]) == (0, 12)
    expected, merged = open_covariance(made / "a.cov"), open_covariance(tmp_path / "both.cov")
    assert merged.model == expected.model
    for name, one in expected.inputs.items():
        for matrix in range(one.matrices):
            a, b = expected.covariance_of(name, matrix), merged.covariance_of(name, matrix)
            assert a.tokens == b.tokens
            roots = np.sqrt(a.diagonal)
            assert np.abs(a.matrix - b.matrix).max() <= 0.01 * roots.max() ** 2
            np.testing.assert_allclose(b.diagonal, a.diagonal, rtol=0.01)
    code, _, err = mill("imatrix", "merge", parts[0], tmp_path / "1.imatrix", "-o", tmp_path / "x.cov")
    assert code == 1
    assert "not an imatrix" in err
    assert "exists; use --force" in mill("imatrix", "merge", *parts, "-o", tmp_path / "both.cov")[2]


def test_one_line_for_a_damaged_file(mill, made, tmp_path):
    data = bytearray((made / "a.cov").read_bytes())
    data[len(data) // 2] ^= 4
    (tmp_path / "a.cov").write_bytes(data)
    for job in (("show", tmp_path / "a.cov"), ("merge", tmp_path / "a.cov", made / "a.cov", "-o", tmp_path / "b.cov")):
        code, _, err = mill("imatrix", *job)
        assert code == 1
        assert "is damaged (its checksum differs)" in err
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "b.cov").exists()


RUN = """
[source]
model = "{demo}"
[imatrix]
text = "{demo}/calibration.txt"
ctx = 128
chunks = 6
covariance = true
[quantize]
type = "q3_K"
effort = 0
"""


@pytest.mark.slow
def test_a_run_collects_and_uses_them(mill, tmp_path):
    """Planned before they are there; not collected again when nothing changes; what cannot be asked for is refused."""
    recipe = tmp_path / "small.toml"
    recipe.write_text(RUN.format(demo=DEMO))
    code, _, err = mill("run", recipe, "-o", tmp_path / "out", "-t", 1)
    assert code == 0, err
    assert open_covariance(tmp_path / "out/small.cov").model.chunk_count == 6
    metadata = open_gguf(tmp_path / "out/small.gguf").metadata
    assert metadata["quantize.covariance.file"] == "small.cov"
    assert metadata["quantize.covariance.chunks_count"] == 6
    before = (tmp_path / "out/small.cov").stat().st_mtime_ns
    assert mill("run", recipe, "-o", tmp_path / "out", "-t", 1)[0] == 0
    assert (tmp_path / "out/small.cov").stat().st_mtime_ns == before
    recipe.write_text(RUN.format(demo=DEMO).replace("covariance = true", "covariance = true\ncovariance_experts = true"))
    assert mill("run", recipe, "-o", tmp_path / "out", "-t", 1)[0] == 0
    assert open_covariance(tmp_path / "out/small.cov").input_of("blk.1.ffn_down_exps.weight").matrices == 8
    for old, new, message in (
        ("effort = 0", 'covariance = "a.cov"', "[imatrix] covariance collects what [quantize] covariance reads"),
        ("covariance = true", "", "[quantize] effort needs covariance"),
        ("covariance = true", "covariance = true\ncurvature = true", "[imatrix] curvature collects the covariances too"),
        ("covariance = true\n", "covariance_experts = true\n", "[imatrix] covariance_experts needs covariance = true"),
        ("covariance = true", "covariance = 1", "covariance = 1 has to be true, false or a file to write"),
    ):
        recipe.write_text(RUN.format(demo=DEMO).replace(old, new))
        code, _, err = mill("run", recipe, "-o", tmp_path / "other")
        assert code != 0
        assert message in err
