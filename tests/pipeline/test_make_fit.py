"""The size that fits a machine, and the options it is run with."""

import pytest

from ggufmill.pipeline.make import _largest
from ggufmill.pipeline.making.fit import find_fit, run_options, working_type
from ggufmill.pipeline.requests.make import MakeRequest
from ggufmill.recipes import FOLDER
from ggufmill.runtime.placement.memory import LayerPlacement, TensorSize, overrides_of, place

GIB = 1 << 30


@pytest.fixture(scope="module")
def deepseek(header_only_deepseek_v3_layers):
    """A function: memory -> (fit, plan in q8_0, source) of DeepSeek-V3, of which eight layers are 65 GB."""
    request = MakeRequest(header_only_deepseek_v3_layers, vocab=False, ram="1T")
    job = _largest(request)
    plan = job.plan()

    def fitted(**memory):
        return find_fit(MakeRequest(header_only_deepseek_v3_layers, **memory), job.source, plan), plan, job.source

    return fitted


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        ({"ram": "24G"}, []),
        ({"ram": "24G", "vram": "12G"}, ["-ngl", "9", "--n-cpu-moe"]),
        ({"ram": "24G", "vram": ("12G", "12G")}, ["-ngl", "9", "--n-cpu-moe"]),
        ({"ram": "48G", "vram": "3G"}, ["-ngl"]),
    ],
)
def test_the_size_that_is_found_fits_with_the_options_that_are_given(deepseek, memory, options):
    fit, plan, source = deepseek(**memory, n_ctx=8192)
    floats = sum(kind.nbytes for _, kind in plan.outputs.entries() if kind.type.name == "f32")
    share = (1 - 1e-6) * (fit.nbytes - floats) / (plan.total_bytes - floats)
    sizes = [
        TensorSize(name, kind.type, kind.nbytes if kind.type.name == "f32" else int(share * kind.nbytes))
        for name, kind in plan.outputs.entries()
    ]
    found = run_options(sizes, source.metadata, fit)
    assert found[:2] == ["-c", "8192"]
    assert found[2 : 2 + len(options)] == options
    layers = int(found[found.index("-ngl") + 1]) if "-ngl" in found else None
    experts = int(found[found.index("--n-cpu-moe") + 1]) if "--n-cpu-moe" in found else 0
    use = type(fit.use)(**{**vars(fit.use), "gpu_layers": layers})
    overrides = overrides_of(LayerPlacement(n_cpu_moe=experts))
    assert place(sizes, source.metadata, use, overrides, fit.capacities).fits
    larger = [TensorSize(each.name, each.type, int(1.01 * each.nbytes)) for each in sizes]
    assert run_options(larger, source.metadata, fit) is None


def test_more_memory_is_a_larger_file(deepseek):
    sizes = [deepseek(ram=f"{n}G", n_ctx=8192)[0].nbytes for n in (12, 24, 48)]
    assert sizes == sorted(set(sizes))
    assert sizes[1] - sizes[0] == pytest.approx(12e9, rel=0.01)


def test_a_copy_runs_where_the_memory_is_too_small(deepseek, monkeypatch):
    from ggufmill.pipeline.making import fit

    _, plan, source = deepseek(fit="10G")
    for total, expected in ((80 * GIB, "q8_0"), (400 * GIB, None), (None, None)):
        monkeypatch.setattr(fit, "total_bytes", lambda total=total: total)
        assert working_type(source, plan) == expected
    demo = _largest(MakeRequest(FOLDER / "demo", fit="5M"))
    assert working_type(demo.source, demo.plan()) is None
