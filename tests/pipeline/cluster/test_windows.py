"""Importance matrices and perplexities of two worker processes: the same bytes and figures as those of one machine."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("distributed")

from ggufmill.convert import open_source
from ggufmill.errors import MillError
from ggufmill.imatrix import load
from ggufmill.pipeline.cluster.models import address_of
from ggufmill.pipeline.imatrix import compute_imatrix
from ggufmill.pipeline.measuring.perplexity import perplexity
from ggufmill.recipes import FOLDER

pytestmark = pytest.mark.process

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"


@pytest.mark.parametrize("workers", ["local:1", "two"])
def test_importance_matrix(tmp_path, cluster, workers):
    options = {"n_ctx": 32, "chunks": 7, "batch": 64, "ubatch": 48, "process_output": True, "process_embedding": True}
    compute_imatrix(DEMO, [f"{TEXT}:3"], tmp_path / "one.gguf", **options)
    where = cluster if workers == "two" else workers
    shared = compute_imatrix(DEMO, [f"{TEXT}:3"], tmp_path / "two.gguf", cluster=where, **options)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    assert shared.figures.chunks == 7


def test_one_machine_goes_on_where_a_cluster_stopped(tmp_path, cluster):
    options = {"n_ctx": 32, "chunks": 8, "batch": 64, "output_frequency": 1}
    whole = compute_imatrix(DEMO, TEXT, tmp_path / "one.gguf", **options)

    def stop(progress):
        if progress.stage == "imatrix" and progress.done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="3 windows are kept"):
        compute_imatrix(DEMO, TEXT, tmp_path / "two.gguf", cluster=cluster, progress=stop, **options)
    resumed = compute_imatrix(DEMO, TEXT, tmp_path / "two.gguf", resume=True, **options)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    assert whole.figures.perplexity == resumed.figures.perplexity


def test_perplexity_and_divergence(models, cluster):
    options = {"n_ctx": 32, "chunks": 9, "batch": 64, "kl_divergence": models.bf16}
    one, two = (dataclasses.asdict(perplexity(models.q4, TEXT, cluster=where, **options)) for where in (None, cluster))
    assert (two["chunks"], two["kld_mean"] > 0) == (9, True)
    assert {**one, "tokens_per_second": 0} == {**two, "tokens_per_second": 0}


def test_a_worker_with_another_model_says_so(tmp_path):
    source = open_source(DEMO)
    here = address_of(DEMO, source)
    assert here.open().tensors.keys() == source.tensors.keys()
    with pytest.raises(MillError, match="another model here"):
        dataclasses.replace(here, digest="0").open()
    with pytest.raises(MillError, match="every worker needs the model at this path"):
        dataclasses.replace(here, path=str(tmp_path / "m.gguf")).open()


def test_a_model_with_other_weights_is_another(write_checkpoint, tiny_llama, tmp_path):
    """Of the same names, shapes and sizes: one tensor of them is another."""
    config, tensors = tiny_llama()
    one = write_checkpoint(tmp_path / "one", config, tensors)
    here = address_of(one, open_source(one))
    assert dataclasses.replace(here, path=str(write_checkpoint(tmp_path / "copy", config, tensors))).open()
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"] + 1
    two = write_checkpoint(tmp_path / "two", config, tensors)
    with pytest.raises(MillError, match=r"two is another model here than where the job was started \(other weights"):
        dataclasses.replace(here, path=str(two)).open()


def test_device(tmp_path, cluster):
    """torch's sums follow its number of threads, which is not the same in a worker."""
    pytest.importorskip("torch")
    options = {"n_ctx": 32, "chunks": 3, "device": ("cpu",)}
    for name, where in (("one", None), ("two", cluster)):
        compute_imatrix(DEMO, TEXT, tmp_path / f"{name}.gguf", cluster=where, **options)
    one, two = (load(tmp_path / f"{name}.gguf").entries for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, (sums, counts) in one.items():
        assert np.array_equal(counts, two[name][1])
        np.testing.assert_allclose(sums, two[name][0], rtol=1e-4, err_msg=name)
