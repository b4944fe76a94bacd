"""The script that measures a device runs on the processor; what it finds there is not looked at."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_the_script_measures_every_part(capsys):
    path = Path(__file__).parents[4] / "benchmarks" / "devices.py"
    spec = importlib.util.spec_from_file_location("devices_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sizes = ["--rows", "16", "--columns", "256", "--tokens", "4", "--megabytes", "1", "--encoded", "4096", "--repeats", "1"]
    script.main(["iq4_ks", "q8_0", "--device", "cpu", "--json", *sizes])
    report = json.loads(capsys.readouterr().out)
    assert report["aims"] == {"generation": 0.7, "prompt": 0.5, "encoding": 50.0}
    iq4_ks, q8_0 = report["results"]
    assert iq4_ks["generation"] > 0
    assert iq4_ks["prompt"] > 0
    assert iq4_ks["encoding"] > 0
    assert q8_0["encoding"] is None
