"""quantize and convert with --cluster: the bytes of one machine."""

import json

import numpy as np
import pytest

pytest.importorskip("distributed")

from cluster_processes import processes
from hub_server import REPO, serving

import ggufmill
from ggufmill.convert import open_source
from ggufmill.errors import MillError, PlanError, UsageError
from ggufmill.formats.file_range import range_checksum
from ggufmill.jobs.execute import row_chunks
from ggufmill.pipeline.cluster import pieces
from ggufmill.pipeline.cluster.call import ClusterCall
from ggufmill.pipeline.cluster.measuring import SearchWorkers
from ggufmill.pipeline.cluster.ordered_map import run_on_each
from ggufmill.pipeline.cluster.writing import cluster_writer
from ggufmill.pipeline.convert import plan_convert
from ggufmill.pipeline.requests.convert import ConvertRequest
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "q.gguf"
    return ggufmill.quantize_model(DEMO, out, "Q4_K_M", custom_q="ffn_down=q6_k")


@pytest.mark.process
@pytest.mark.parametrize("output", ["shared", "collect"])
def test_same_bytes_as_alone(alone, cluster, output, tmp_path):
    where = "local:2" if output == "shared" else cluster
    result = ggufmill.quantize_model(
        DEMO, tmp_path / "q.gguf", "Q4_K_M", custom_q="ffn_down=q6_k", cluster=where, cluster_output=output
    )
    assert result.files[0].read_bytes() == alone.files[0].read_bytes()
    assert result.checksums == alone.checksums
    assert sum(share.nbytes for share in result.shares) == result.plan.total_bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.gguf"]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "MIN_WEIGHTS", 1 << 16)


@pytest.fixture
def wide(write_checkpoint, tiny_llama, tmp_path):
    """A checkpoint whose matrices have several chunks."""
    config, tensors = tiny_llama(hidden_size=1024, intermediate_size=3072, num_hidden_layers=1, vocab_size=300)
    return write_checkpoint(tmp_path / "wide", config, tensors)


def same_as_alone(verb, tmp_path, source, *arguments, alone=None, **options):
    """The outputs of a verb alone and with options of a cluster are the same; returns the second result."""
    verb(source, tmp_path / "alone" / "q.gguf", *arguments, **(alone or {}))
    result = verb(source, tmp_path / "out" / "q.gguf", *arguments, **(alone or {}), **options)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir() if path.suffix == ".gguf"}
    assert {path.name: path.read_bytes() for path in result.files} == expected
    return result


@pytest.mark.process
def test_tensors_of_several_pieces(cluster, small_pieces, wide, tmp_path):
    result = same_as_alone(ggufmill.quantize_model, tmp_path, wide, "q8_0", cluster=cluster)
    gate = next(o for o in result.plan.outputs if o.name == "blk.0.ffn_gate.weight")
    assert len(list(row_chunks(gate))) == 3
    assert sum(share.pieces for share in result.shares) >= 12
    for o, loc in zip(result.plan.outputs, result.plan.locations, strict=True):
        assert result.checksums[o.name] == range_checksum(result.files[loc.file], loc.offset, o.nbytes)


@pytest.mark.process
def test_split_files_verified_with_a_manifest(cluster, tmp_path):
    options = {"split_max_size": "2M", "outtype": "q8_0"}
    result = same_as_alone(
        ggufmill.convert_model,
        tmp_path,
        DEMO,
        alone=options,
        verify=True,
        manifest=True,
        cluster=cluster,
        cluster_output="collect",
    )
    assert len(result.files) > 2
    assert not result.verification.problems
    assert result.manifest.exists()


def test_weights_that_are_not_finite_are_counted(cluster, write_checkpoint, tiny_llama, tmp_path):
    config, tensors = tiny_llama()
    tensors["model.layers.0.mlp.up_proj.weight"][3, :5] = np.nan
    source = write_checkpoint(tmp_path / "bad", config, tensors)
    result = ggufmill.convert_model(source, tmp_path / "q.gguf", outtype="f16", allow_nonfinite=True, cluster=cluster)
    assert result.replaced == {"blk.0.ffn_up.weight": 5}
    with pytest.raises(MillError, match=r"^worker [ab] at 127\.0\.0\.1: .*blk\.0\.ffn_up\.weight.*--resume"):
        ggufmill.convert_model(source, tmp_path / "r.gguf", outtype="f16", cluster=cluster)


@pytest.mark.process
def test_target_with_a_recipe(cluster, tmp_path, monkeypatch):
    asked = []
    errors = SearchWorkers.errors
    monkeypatch.setattr(SearchWorkers, "errors", lambda workers, *given: (asked.append(workers), errors(workers, *given))[1])
    recipe = tmp_path / "r.toml"
    recipe.write_text("[quantize]\nrules = 'attn_v=q8_0'\ntarget_size = '5M'\n[search]\nrows = 8\n")
    same_as_alone(ggufmill.quantize_model, tmp_path, DEMO, alone={"recipe": recipe}, cluster=cluster)
    assert asked  # workers measured the errors of types


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """A hub with the demo, the scheduler file of a cluster whose worker has a cache of its own, where files have other times,
    and a folder with the caches: near and far."""
    folder = tmp_path_factory.mktemp("far")
    with serving(DEMO) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        with processes(folder) as running:
            running.worker("far", f"import os; os.environ['HF_HOME'] = {str(folder / 'far')!r}")
            running.wait_for_workers(1)
            patch.setenv("HF_HOME", str(folder / "near"))
            patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "near" / "hub"))
            yield hub, str(running.file), folder


def same_tensors(one, two):
    """Whether two GGUF files have the same bytes in all tensors."""
    a, b = (ggufmill.formats.open_gguf(path).tensors for path in (one, two))
    return a.keys() == b.keys() and all(np.array_equal(a[name].data, b[name].data) for name in a)


@pytest.mark.process
def test_repository_is_read_by_ranges(tmp_path, far):
    ggufmill.convert_model(DEMO, tmp_path / "alone.gguf", outtype="q8_0")
    options = {"cluster": far[1], "cluster_output": "collect"}
    result = ggufmill.convert_model(f"hf:{REPO}", tmp_path / "q.gguf", outtype="q8_0", **options)
    assert same_tensors(result.files[0], tmp_path / "alone.gguf")


@pytest.mark.process
def test_run_of_a_repository(tmp_path, far, run_alone):
    """Every stage reads ranges, and no process has the shards."""
    hub, cluster, caches = far
    recipe = tmp_path / "out.toml"
    recipe.write_text(f"[source]\nmodel = 'hf:{REPO}'\n{RUN}")
    result = ggufmill.run_recipe(recipe, tmp_path / "out", cluster=cluster)
    assert same_tensors(result.report["files"][0], run_alone / "small.gguf")
    assert not [path for place in ("near", "far") for path in (caches / place).rglob("*.safetensors")]
    assert all(asked for name, asked, *_ in hub.requests if name.endswith(".safetensors"))


def test_worker_that_makes_another_plan(cluster, tmp_path):
    plan = ggufmill.convert_model(DEMO, tmp_path / "q.gguf", outtype="f32", dry_run=True).plan
    opened = open_source(DEMO)
    request = ConvertRequest(str(DEMO), str(tmp_path / "q.gguf"))
    line = r"^worker [ab] at 127\.0\.0\.1: the plan made there is another"
    with (
        pytest.raises(PlanError, match=line),
        cluster_writer(ClusterCall(cluster, "shared", plan_convert, request), plan, opened),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"cluster_output": "collect"}, "--cluster-output does nothing without --cluster"),
        ({"cluster": "local:2", "threads": 2}, "--threads does nothing with --cluster"),
        ({"cluster": "local:2", "delete_source_shards": True}, "--delete-source-shards cannot be given with --cluster"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, options, line):
    with pytest.raises(UsageError, match=line):
        ggufmill.convert_model(DEMO, tmp_path / "q.gguf", **options)


@pytest.mark.process
def test_command_line_names_machines(cluster, mill, tmp_path):
    code, out, _ = mill("convert", DEMO, tmp_path / "q.gguf", "--cluster", cluster, "--json")
    result = json.loads(out)
    assert code == 0
    assert sum(worker["nbytes"] for worker in result["cluster"]) == result["total_bytes"]
    code, out, _ = mill("convert", DEMO, tmp_path / "p.gguf", "--cluster", cluster)
    assert "at 127.0.0.1" in out
    assert "pieces" in out


RUN = f"""[imatrix]
text = '{DEMO}/calibration.txt'
ctx = 64
chunks = 3
covariance = true
[quantize]
target_bpw = 5.8
effort = 0
rules = 'attn=q8_0'
[search]
types = 'q4_0,q8_0'
rows = 8
"""


@pytest.fixture(scope="module")
def run_alone(tmp_path_factory):
    """The folder of a run of small.toml, beside the recipe, without a cluster."""
    recipe = tmp_path_factory.mktemp("run") / "small.toml"
    recipe.write_text(f"[source]\nmodel = '{DEMO}'\n{RUN}")
    ggufmill.run_recipe(recipe, recipe.with_name("alone"))
    return recipe.with_name("alone")


@pytest.mark.process
def test_run_of_a_recipe(cluster, tmp_path, run_alone):
    """With covariances and a search."""
    ggufmill.run_recipe(run_alone.with_name("small.toml"), tmp_path / "out", cluster=cluster)
    names = [path.name for path in run_alone.iterdir() if path.suffix not in (".json", ".md", ".html", ".lock")]
    assert {name.rpartition(".")[2] for name in names} >= {"gguf", "imatrix", "txt"}
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (run_alone / name).read_bytes(), name


@pytest.fixture
def inputs(tmp_path):
    """A recipe that names covariances beside itself, and an importance matrix, in a folder that workers do not have."""
    folder = tmp_path / "here"
    folder.mkdir()
    text, imatrix, covariance = DEMO / "calibration.txt", folder / "i.imatrix", folder / "i.cov"
    ggufmill.compute_imatrix(DEMO, text, imatrix, covariance=covariance, n_ctx=64, chunks=2)
    recipe = folder / "r.toml"
    recipe.write_text("[quantize]\ntype = 'q5_0'\nrules = 'attn_output=iq4_ks'\ncovariance = 'i.cov'\neffort = 0\n")
    return {"recipe": recipe, "imatrix": imatrix}


@pytest.fixture
def hidden_from_workers(monkeypatch, inputs):
    """The folder of inputs is away while workers open what they are given."""
    folder = inputs["recipe"].parent

    def prepare(*arguments):
        away = folder.rename(folder.with_name("away"))
        try:
            run_on_each(*arguments)
        finally:
            away.rename(folder)

    monkeypatch.setattr("ggufmill.pipeline.cluster.writing.run_on_each", prepare)


@pytest.mark.process
def test_small_inputs_are_sent(cluster, inputs, hidden_from_workers, tmp_path):
    same_as_alone(ggufmill.quantize_model, tmp_path, DEMO, alone=inputs, cluster=cluster)


def test_large_inputs_have_to_be_there(cluster, inputs, hidden_from_workers, tmp_path, monkeypatch):
    monkeypatch.setattr("ggufmill.pipeline.cluster.file_plugin.MAX_SENT_BYTES", 1 << 10)
    line = r"^worker [ab] at 127\.0\.0\.1: \S+/here/i\.(imatrix|cov)\b.*(does not exist|No such file)"
    with pytest.raises(PlanError, match=line):
        ggufmill.quantize_model(DEMO, tmp_path / "q.gguf", **inputs, cluster=cluster)
    assert not (tmp_path / "q.gguf.part").exists()


@pytest.mark.oracle
def test_device_of_workers(cluster, tmp_path):
    pytest.importorskip("torch")
    options = {"alone": {"device": "cpu:0"}, "cluster": cluster}  # by torch, unlike 'cpu'
    same_as_alone(ggufmill.quantize_model, tmp_path, DEMO, "q4_k", **options)


@pytest.mark.oracle
def test_device_that_only_this_machine_has(cluster, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr("ggufmill.pipeline.planning.encoder_device", lambda name: name)
    with pytest.raises(PlanError, match=r"^worker [ab] at 127\.0\.0\.1: --device 'nowhere' is none of cuda"):
        ggufmill.quantize_model(DEMO, tmp_path / "q.gguf", "q4_k", device="nowhere", cluster=cluster)
