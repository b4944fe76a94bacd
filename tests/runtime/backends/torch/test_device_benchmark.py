"""The script that measures a device runs on the processor; what it finds there is not looked at."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.oracle


@pytest.fixture
def script():
    path = Path(__file__).parents[4] / "benchmarks" / "devices.py"
    spec = importlib.util.spec_from_file_location("devices_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SIZES = ["--rows", "16", "--columns", "256", "--tokens", "4", "--megabytes", "1", "--encoded", "4096", "--rounds", "1"]
FEW_TOKENS = ["--prompt", "4", "--generated", "1", "--context", "16", "--chunks", "1"]


def test_the_script_measures_every_part(script, capsys):
    script.main(["iq4_k", "q8_0", "--device", "cpu", "--no-tests", "--json", *SIZES, *FEW_TOKENS])
    report = json.loads(capsys.readouterr().out)
    assert report["aims"] == {"generation": 0.7, "prompt": 0.5, "encoding": 50.0}
    assert report["tests"] is None
    iq4_k, q8_0 = report["results"]
    for part in ("generation", "prompt", "encoding"):
        ratio, rate, reference = (iq4_k[part][name]["median"] for name in ("ratio", "rate", "reference"))
        assert ratio == pytest.approx(rate / reference)  # of one round
    assert q8_0["encoding"] is None
    assert report["copy_bytes_per_second"] > 0
    assert report["bf16_operations_per_second"] > 0
    assert report["whole"]["share"] > 0
    model = report["model"]
    assert model["prompt on device"]["median"] > 0
    assert model["generation on processor"]["median"] > 0
    assert model["top1_agreement"] > 80
    assert model["ratio"] == pytest.approx(1, abs=0.05)


def test_nothing_is_measured_where_tests_fail(script, capsys, monkeypatch):
    monkeypatch.setattr(script, "TESTS", ("tests/no_such_file.py",))
    with pytest.raises(SystemExit, match="tests fail on cpu: nothing is measured"):
        script.main(["q8_0", "--device", "cpu", "--only", "prompt", *SIZES])
    assert capsys.readouterr().out == ""
