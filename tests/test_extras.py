"""Packages that only some work needs: without one, the message names the extra that brings it and what goes with it."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

import ggufmill
from ggufmill.errors import EXTRAS, MillError

ROOT = Path(ggufmill.__file__).parent
NOT_FOR_USERS = {"test", "dev", "oracle", "peer", "docs", "release"}


def draw():
    from ggufmill.pipeline.reports.style import check_picture

    check_picture(Path("a.png"))


def compile_grammar():
    from ggufmill.runtime.generation.grammar import _compile

    _compile(None, "start: /a/", "", False)  # pyright: ignore[reportArgumentType]


def metrics():
    from ggufmill.runtime.serve.metrics import metrics_text

    metrics_text(None)  # pyright: ignore[reportArgumentType]


def read_parquet():
    from ggufmill.imatrix.texts import _parquet

    _parquet()


def connect():
    from ggufmill.pipeline.cluster.connection import open_cluster

    with open_cluster("local:1"):
        pass


def serve():
    ggufmill.serve_model("none.gguf")


def torch():
    from ggufmill.runtime.placement.torch_devices import import_torch

    import_torch("--device")


USES = {
    "cryptography": (connect, "cryptography"),
    "distributed": (connect, "distributed"),
    "llguidance": (compile_grammar, "llguidance"),
    "matplotlib": (draw, "matplotlib.figure"),
    "prometheus-client": (metrics, "prometheus_client"),
    "pyarrow": (read_parquet, "pyarrow.parquet"),
    "starlette": (serve, "starlette"),
    "torch": (torch, "torch"),
    "uvicorn": (serve, "uvicorn"),
}


def test_the_table_is_that_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    found = {
        re.match(r"[\w.-]+", package)[0]: extra
        for extra, packages in extras.items()
        if extra not in NOT_FOR_USERS
        for package in packages
    }
    assert found == EXTRAS
    assert USES.keys() == EXTRAS.keys()


@pytest.mark.parametrize("package", USES)
def test_a_missing_package_is_answered_with_its_extra(monkeypatch, package):
    use, module = USES[package]
    if use is serve:
        for name in list(sys.modules):
            if name.startswith("ggufmill.runtime.serve"):
                monkeypatch.delitem(sys.modules, name)
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MillError, match=re.escape(f"pip install 'ggufmill[{EXTRAS[package]}]'")):
        use()


def test_no_other_advice_on_installing_stands_in_the_program():
    folders = ("cli", "pipeline", "imatrix", "runtime", "convert", "quantize", "repack", "jobs", "formats", "simd")
    texts = {file: file.read_text("utf-8") for folder in folders for file in (ROOT / folder).rglob("*.py")}
    assert [str(file) for file, text in texts.items() if "pip install" in text] == []
