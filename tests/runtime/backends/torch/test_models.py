"""Encoders on a device of torch, wholly or in part: transformers' numbers come out."""

import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoint_cases import TOLERANCE, convert_case
from encoder_cases import CASES as ENCODERS
from encoder_cases import convert_encoder
from op_graphs import DEVICE, PLACEMENTS

from ggufmill.formats import PlanError
from ggufmill.runtime import load_model

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("case", ENCODERS)
def test_an_encoder_gives_the_outputs_of_transformers(tmp_path, case):
    tokens, expected, _, path = convert_encoder(case, tmp_path)
    for name, rules in PLACEMENTS.items():
        model = load_model(path, device=DEVICE, exact=True, threads=1, **rules)
        (found,) = model.hidden([(model.new_cache(len(tokens)), tokens)])
        assert np.abs(found - expected).max() < TOLERANCE, name


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return convert_case("qwen3moe", tmp_path_factory.mktemp("qwen3moe"))


def runs(model):
    """'host' or the device of each unit of a model's executable, without repetitions."""
    names = ["host" if unit in model.executable.hosts else str(unit[0]) for unit in model.executable._body]
    return [name for i, name in enumerate(names) if not i or name != names[i - 1]]


def test_ops_run_where_their_weights_lie(mixture):
    def placed(**rules):
        return runs(load_model(mixture[2], device=DEVICE, threads=1, **rules))

    layers = len(load_model(mixture[2]).graph.layers)
    assert placed() == ["host", DEVICE]  # embeddings are only looked up
    assert placed(gpu_layers=0) == ["host"]
    assert placed(gpu_layers=1) == ["host", DEVICE, "host"]  # the output comes after the layers
    assert placed(gpu_layers=layers + 1) == ["host", DEVICE]
    assert placed(cpu_moe=True) == ["host", *[DEVICE, "host"] * layers, DEVICE]
    assert placed(n_cpu_moe=1) == ["host", DEVICE, "host", DEVICE]
    assert placed(override_tensor=("blk\\.0\\.=CPU",)) == ["host", DEVICE, "host", DEVICE]  # its attention, with the cache


def test_layers_are_shared_out(mixture):
    tokens, expected, path = mixture
    model = load_model(path, device=("cpu", "cpu"), tensor_split=(1, 2), exact=True)
    placed = model.executable.places.layers
    assert np.abs(model.logits(tokens) - expected).max() < TOLERANCE
    assert len(placed) == model.n_layers + 1


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"device": "tpu"}, "--device 'tpu' is none of"),
        ({"device": "xpu:7"}, "--device xpu:7 does not exist here"),
        ({"device": "cpu", "override_tensor": "exps=CUDA7"}, "there is no CUDA7"),
        ({"device": "cpu", "override_tensor": "exps=GPU"}, "is not `regex=CPU`"),
        ({"device": "cpu", "tensor_split": (1, 2)}, "one share for each of TORCH0"),
        ({"device": "cpu", "main_gpu": 1}, "-mg 1: there are 1 devices"),
        ({"device": 3}, "setting device has to be a text"),
        ({"device": "cpu", "gpu_layers": -1}, "setting gpu_layers has to be 0 or more"),
    ],
)
def test_what_cannot_be_placed_is_named(mixture, rules, words):
    with pytest.raises(PlanError) as error:
        load_model(mixture[2], **rules)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_torch_is_named_where_it_is_missing(mixture, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(PlanError, match=r"--device needs torch .*pip install 'ggufmill\[gpu\]'"):
        load_model(mixture[2], device="cuda")
    load_model(mixture[2])
