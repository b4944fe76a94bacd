"""Covariance files: what is written is read, and what is damaged is named."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from ggufmill.formats import FormatError, MillError, PlanError, SourceTensor, TensorSource, open_gguf
from ggufmill.imatrix.covariance import is_covariance, open_covariance
from ggufmill.imatrix.covariance.files import Origin
from ggufmill.imatrix.covariance.writer import CovarianceWriter, PlannedInput
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance
from ggufmill.quantize.covariance.matrix.triangles import DTYPES, fold, unfold
from ggufmill.quantize.covariance.row_blocks import RowBlocks, row_blocks

ORIGIN = Origin("llama", "A model", ("a.txt", "b.txt"), 7, 512)
QKV = PlannedInput(("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"), 48, 1)
UP = PlannedInput(("blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_exps.weight"), 64, 1)
DOWN = PlannedInput(("blk.0.ffn_down_exps.weight",), 20, 3)
INPUTS = [QKV, UP, DOWN]


def covariance(columns, seed, tokens=1000):
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((max(columns // 2, 1), columns)) * draw.exponential(1, columns)
    x[:, 0] = 0
    return Covariance((x.T @ x / len(x)).astype(np.float32), tokens)


def written(path, type_name="i16", inputs=INPUTS):
    """A file of random covariances, and these."""
    writer, parts = CovarianceWriter(path, inputs, ORIGIN, type_name), {}
    writer.begin()
    for number, (one, matrix) in enumerate([(each, m) for each in inputs[::-1] for m in range(each.matrices)]):
        parts[one.name, matrix] = covariance(one.columns, number, 1000 + number)
        writer.write(one.name, matrix, parts[one.name, matrix])
    writer.finish()
    return parts


def test_the_name_is_on_disk_when_the_file_is_finished(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        "ggufmill.imatrix.covariance.writer.sync_folder", lambda folder: synced.append((folder / "m.cov").exists())
    )
    written(tmp_path / "m.cov")
    assert synced == [True]


@pytest.mark.parametrize("type_name", ["i16", "f32"])
def test_written_and_read(tmp_path, type_name):
    parts = written(tmp_path / "m.cov", type_name)
    assert [path.name for path in tmp_path.iterdir()] == ["m.cov"]
    file = open_covariance(tmp_path / "m.cov")
    assert file.model == ORIGIN
    assert [(one.tensors, one.columns, one.matrices) for one in file.inputs.values()] == [
        (one.tensors, one.columns, one.matrices) for one in INPUTS
    ]
    for (name, matrix), expected in parts.items():
        for tensor in file.inputs[name].tensors:
            got = file.covariance_of(tensor, matrix)
            assert got.tokens == expected.tokens
            assert np.array_equal(got.matrix, got.matrix.T)
            assert np.array_equal(np.diagonal(got.matrix), np.diagonal(expected.matrix))
            roots = np.sqrt(np.diagonal(expected.matrix))
            most = 0 if type_name == "f32" else 2e-5
            assert (np.abs(got.matrix - expected.matrix) <= most * np.outer(roots, roots)).all()
    same = [file.covariance_of(*each).matrix for each in (("blk.0.attn_k.weight",), ("blk.0.attn_q.weight", 5))]
    assert np.array_equal(*same)
    assert file.covariance_of("blk.0.ffn_up.weight") is None
    same = [file.covariance_of(f"blk.0.ffn_{part}_exps.weight", matrix).matrix for part, matrix in (("gate_up", 2), ("up", 0))]
    assert np.array_equal(*same)
    with pytest.raises(FormatError, match="has 3 matrices, and no number 3"):
        file.covariance_of("blk.0.ffn_down_exps.weight", 3)


@pytest.mark.parametrize("columns", [1, 2, 63, 64, 65, 200])
def test_triangles(columns):
    matrix = covariance(columns, 5).matrix
    assert np.array_equal(unfold(*fold(matrix, DTYPES["f32"])), matrix)
    triangle, mean_squares = fold(matrix, DTYPES["i16"])
    rows, cols = np.triu_indices(columns)
    roots = np.sqrt(mean_squares)
    inverses = np.divide(1, roots, out=np.zeros_like(roots), where=roots > 0)
    correlations = (matrix * inverses[:, None] * inverses)[rows, cols]
    assert np.array_equal(triangle, np.rint(np.clip(correlations, -1, 1) * np.float32(32767)).astype(np.int16))


def test_it_is_a_gguf_file(tmp_path):
    written(tmp_path / "m.cov")
    file = open_gguf(tmp_path / "m.cov")
    assert file.tensors["blk.0.ffn_down_exps.weight.covariance"].shape == (210, 3)
    assert is_covariance(tmp_path / "m.cov")
    (tmp_path / "text").write_text("GGUF")
    assert not is_covariance(tmp_path / "text")


def test_every_damaged_byte_is_found(tmp_path):
    """A flipped bit in each of a part's four tensors; other parts can still be read."""
    written(tmp_path / "m.cov")
    for suffix in (".covariance", ".mean_squares", ".tokens", ".xxh3"):
        shutil.copy(tmp_path / "m.cov", tmp_path / "damaged.cov")
        tensor = open_gguf(tmp_path / "m.cov").tensors["blk.0.ffn_down_exps.weight" + suffix]
        with (tmp_path / "damaged.cov").open("r+b") as file:
            at = tensor.offset + tensor.nbytes // 3  # of matrix 1
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 64]))
        file = open_covariance(tmp_path / "damaged.cov")
        with pytest.raises(FormatError, match=r"the part of blk\.0\.ffn_down_exps\.weight, matrix 1 is damaged"):
            file.covariance_of("blk.0.ffn_down_exps.weight", 1)
        assert file.covariance_of("blk.0.ffn_down_exps.weight", 0) is not None


def test_truncated_and_other_files(tmp_path):
    written(tmp_path / "m.cov")
    data = (tmp_path / "m.cov").read_bytes()
    for size in (10, 200, len(data) // 2, len(data) - 100):
        (tmp_path / "cut.cov").write_bytes(data[:size])
        with pytest.raises(FormatError):
            open_covariance(tmp_path / "cut.cov")
    (tmp_path / "other").write_bytes(data.replace(b"general.type", b"general.typo"))
    with pytest.raises(FormatError, match="no covariance"):
        open_covariance(tmp_path / "other")
    (tmp_path / "other").write_bytes(data.replace(b"covariance.tensor_inputs", b"covariance.tensor_output"))
    with pytest.raises(FormatError, match=r"its covariance\.\* keys are missing"):
        open_covariance(tmp_path / "other")
    (tmp_path / "other").write_bytes(data.replace(b"attn_q.weight.tokens", b"attn_q.weight.tokenz"))
    with pytest.raises(FormatError, match=r"blk\.0\.attn_q\.weight lacks one of its four tensors"):
        open_covariance(tmp_path / "other")


def source(**shapes):
    tensors = {name: SourceTensor(name, shape, "f32", lambda a, b: np.zeros((b - a, 1))) for name, shape in shapes.items()}
    return TensorSource("a.gguf", {}, tensors, "a")


def test_another_model_is_refused(tmp_path):
    written(tmp_path / "m.cov")
    file = open_covariance(tmp_path / "m.cov")
    file.check(source(**{"blk.0.attn_q.weight": (48, 30), "blk.0.ffn_down_exps.weight": (20, 8, 3)}))
    for shapes, message in (
        ({"blk.1.attn_q.weight": (48, 30)}, "none of its 6 tensors .* is in a.gguf: the covariance of another model"),
        ({"blk.0.attn_k.weight": (49, 30)}, r"the input of blk\.0\.attn_k\.weight is 48 columns x 1 matrices, .* is 49 x 1"),
        ({"blk.0.ffn_down_exps.weight": (20, 8, 4)}, "is 20 columns x 3 matrices, .* is 20 x 4: the covariance of another"),
    ):
        with pytest.raises(MillError, match=message):
            file.check(source(**shapes))


def test_too_little_disk_space(tmp_path, monkeypatch):
    writer = CovarianceWriter(tmp_path / "m.cov", INPUTS, ORIGIN)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=writer.nbytes + 99))
    writer.check_space(99)
    with pytest.raises(
        PlanError, match=r"takes 10,\d+ bytes, and 100 for the state that --resume needs, .* 1 bytes too few free"
    ):
        writer.check_space(100)


def test_metadata_for_the_quantised_file(tmp_path):
    written(tmp_path / "m.cov")
    assert open_covariance(tmp_path / "m.cov").metadata() == {
        "quantize.covariance.file": "m.cov",
        "quantize.covariance.dataset": "a.txt, b.txt",
        "quantize.covariance.entries_count": 6,
        "quantize.covariance.chunks_count": 7,
    }
    assert replace(ORIGIN, datasets=()).datasets == ()


HEADS = PlannedInput(("blk.0.attn_k_b.weight.outputs",), 17, 9, RowBlocks(150, 50, 17))  # three heads, each three blocks
EXPERTS = PlannedInput(("blk.0.ffn_up_exps.weight.outputs",), 5, 6, RowBlocks(15, 15, 5))


def test_rows_are_divided_into_equal_blocks():
    for rows, run, limit, size, per_run in ((1024, 1024, 1024, 1024, 1), (1536, 1536, 1024, 768, 2), (150, 50, 24, 32, 2)):
        blocks = row_blocks(rows, run, limit)
        assert (blocks.size, blocks.per_run, blocks.count) == (size, per_run, rows // run * per_run)
        spans = [blocks.span(i) for i in range(blocks.count)]
        assert [row for span in spans for row in range(span.start, span.stop)] == list(range(rows))
        assert all(span.start // run == (span.stop - 1) // run for span in spans)
    with pytest.raises(PlanError, match="blocks of 0 rows"):
        row_blocks(8, 8, 0)


def test_outputs_are_read_by_tensor_matrix_and_block(tmp_path):
    heads, experts = HEADS, EXPERTS
    parts = written(tmp_path / "m.curv", "f32", [*INPUTS, heads, experts])
    file = open_covariance(tmp_path / "m.curv")
    assert [one.name for one in file.inputs.values()] == [one.name for one in INPUTS]
    assert set(file.tensors) == {name for one in INPUTS for name in one.tensors}
    stored = file.output_of("blk.0.attn_k_b.weight")
    assert (stored.rows, stored.matrices, stored.blocks) == (150, 1, RowBlocks(150, 50, 17))
    assert stored.tokens.tolist() == [[parts[heads.name, i].tokens for i in range(9)]]
    for block, rows in enumerate([17, 17, 16] * 3):  # without what the last block of a head is filled up with
        found = file.gradient_of("blk.0.attn_k_b.weight", 0, block)
        np.testing.assert_array_equal(found.matrix, parts[heads.name, block].matrix[:rows, :rows])
        assert found.tokens == parts[heads.name, block].tokens
    for expert, block in np.ndindex(2, 3):
        found = file.gradient_of("blk.0.ffn_up_exps.weight", expert, block)
        np.testing.assert_array_equal(found.matrix, parts[experts.name, 3 * expert + block].matrix)
    assert file.output_of("blk.0.attn_q.weight") is None
    assert file.gradient_of("blk.0.attn_q.weight", 0, 0) is None
    for matrix, block in ((0, 3), (2, 0)):
        with pytest.raises(FormatError, match="has .* and no number"):
            file.gradient_of("blk.0.ffn_up_exps.weight", matrix, block)


def test_outputs_of_heads_serve_both_layouts(tmp_path):
    """attn_k_b as one matrix of all heads, or as one for each."""
    parts = written(tmp_path / "m.curv", "f32", [QKV, HEADS])
    file = open_covariance(tmp_path / "m.curv")
    name = "blk.0.attn_k_b.weight"
    stack = file.output_of(name, 3)
    assert (stack.rows, stack.matrices, stack.blocks.count) == (50, 3, 3)
    assert stack.tokens.shape == (3, 3)
    for head, block in np.ndindex(3, 3):
        found = file.gradient_of(name, head, block, 3)
        span = stack.blocks.span(block)
        rows = span.stop - span.start
        np.testing.assert_array_equal(found.matrix, parts[HEADS.name, 3 * head + block].matrix[:rows, :rows])
    assert file.output_of(name, 7) is None
    assert file.output_of(name, 6) is None

    def source(*shape):
        tensors = {"blk.0.attn_q.weight": (48, 8), name: shape}
        return TensorSource("m.gguf", {}, {n: SourceTensor(n, s, "f32", None) for n, s in tensors.items()}, "test")

    file.check(source(64, 150))
    file.check(source(64, 50, 3))
    for shape in ((64, 149), (64, 50, 4)):
        with pytest.raises(
            MillError, match="the outputs of blk.0.attn_k_b.weight are 150 rows x 1 matrices, the tensor in m.gguf"
        ):
            file.check(source(*shape))


def test_blocks_that_do_not_fit_are_refused(tmp_path):
    written(tmp_path / "m.curv", inputs=[*INPUTS, replace(EXPERTS, matrices=4)])
    with pytest.raises(
        FormatError, match=r"the blocks of blk\.0\.ffn_up_exps\.weight\.outputs do not fit its 15 rows in runs of 15"
    ):
        open_covariance(tmp_path / "m.curv")
