"""Curvature of latent attention in one layout, used for a file in another."""

import numpy as np
import pytest

pytest.importorskip("torch")
from ggufmill import compute_imatrix, convert_model, quantize_model
from ggufmill.convert import open_source
from ggufmill.errors import MillError
from ggufmill.formats.loaders import MLA_LAYOUTS
from ggufmill.pipeline.common.covariance import load_covariances
from ggufmill.recipes import FOLDER

pytestmark = pytest.mark.oracle
DEMO = FOLDER / "demo"


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    folder, files = tmp_path_factory.mktemp("layouts"), {}
    for layout in MLA_LAYOUTS:
        out, curvature = folder / f"{layout}.gguf", folder / f"{layout}.curv"
        convert_model(DEMO, out, outtype="bf16", mla_layout=layout)
        options = {"n_ctx": 64, "chunks": 8, "progress": False}
        compute_imatrix(out, DEMO / "calibration.txt", folder / "i", curvature=curvature, **options, force=True)
        files[layout] = out, curvature
    return files


@pytest.mark.parametrize(("name", "rows"), [("blk.1.attn_k_b.weight", 256), ("blk.1.attn_v_b.weight", 64)])
def test_each_head_has_its_own_rows_of_one_matrix(layouts, name, rows):
    """The gradients of ik_llama.cpp's one matrix are those of mainline's, head by head."""
    (_, one), (path, stack) = layouts["ik"], layouts["mainline"]
    source = open_source(path)
    with_one, with_stack = (
        load_covariances(each, source, 1, curvature=True).gradients(source.tensors[name]) for each in (one, stack)
    )
    assert with_one is not None
    assert with_stack is not None
    assert with_one.blocks == with_stack.blocks
    assert np.array_equal(with_one.tokens, with_stack.tokens)
    for head in range(4):
        ours, theirs = (each.gradient_of(head, 0).matrix for each in (with_one, with_stack))
        assert ours.shape == (rows, rows)
        assert np.abs(ours - theirs).max() < 0.02 * np.abs(theirs).max()


def test_a_file_is_encoded_with_that_of_the_other_layout(layouts, tmp_path):
    given = {"custom_q": r"attn_[kv]_b=q4_0", "curvature": layouts["ik"][1], "effort": 0}
    result = quantize_model(layouts["mainline"][0], tmp_path / "a.gguf", **given, dry_run=True)
    assert {o.type.name for o in result.plan.outputs if o.name.endswith(("attn_k_b.weight", "attn_v_b.weight"))} == {"q4_0"}


def test_inputs_of_single_heads_do_not_serve_one_matrix(layouts, tmp_path):
    with pytest.raises(MillError, match=r"for each of 4 heads, which .* has in one matrix: collect it from this layout"):
        quantize_model(layouts["ik"][0], tmp_path / "a.gguf", custom_q="attn=q4_0", curvature=layouts["mainline"][1])


@pytest.mark.parametrize(
    ("layout", "collected", "unknown"),
    [
        ("legacy", "legacy", None),  # in the order of the model too
        ("legacy", "ik", None),
        ("legacy", "mainline", "blk.0.attn_kv_b.weight and 3 more"),
        ("ik", "legacy", "blk.0.attn_k_b.weight and 7 more"),
        ("mainline", "legacy", "blk.0.attn_k_b.weight and 7 more"),
    ],
)
def test_kv_b_alone(layouts, tmp_path, caplog, layout, collected, unknown):
    """Older files have no k_b and v_b: what is known of kv_b serves wherever it is, and one line names what it cannot serve."""
    caplog.set_level("WARNING", "ggufmill")
    options = {"sequential": DEMO / "calibration.txt", "sequential_chunks": 1} if layout == collected else {}
    given = {"custom_q": "attn_.*_b=q4_0", "curvature": layouts[collected][1], "effort": 0, "progress": False}
    quantize_model(layouts[layout][0], tmp_path / "a.gguf", **given, **options)
    said = [line for line in caplog.messages if "attn_k" in line]
    assert [line.partition(" is not used for ")[2].partition(":")[0] for line in said] == ([unknown] if unknown else []), said
    assert all(line.endswith("none was collected") for line in said)
