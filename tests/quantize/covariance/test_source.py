"""Covariances in a quantise job: prepared once, what falls back to the diagonal, what the file and the journal say."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from ggufmill.errors import MillError, PlanError
from ggufmill.formats import TYPES, SourceTensor, TensorSource, open_gguf
from ggufmill.jobs.execute import execute
from ggufmill.quantize import encode
from ggufmill.quantize.covariance import source as source_module
from ggufmill.quantize.covariance.coupling import couple
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance
from ggufmill.quantize.covariance.matrix.prepared import prepared_bytes
from ggufmill.quantize.covariance.row_blocks import RowBlocks, row_blocks
from ggufmill.quantize.covariance.source import (
    CollectedInput,
    CollectedOutput,
    Covariances,
    Curvature,
    PreparedCache,
)
from ggufmill.quantize.planning import plan_quantize

SHAPES = {
    "token_embd.weight": (256, 32),
    "blk.0.attn_q.weight": (256, 32),
    "blk.0.ffn_up_exps.weight": (256, 16, 3),
    "blk.0.ffn_down_exps.weight": (64, 16, 3),
    "blk.0.attn_norm.weight": (256,),
    "output.weight": (256, 32),
}


def model() -> TensorSource:
    def tensor(name, shape):
        data = np.random.default_rng(len(name)).standard_normal((int(np.prod(shape[1:])), shape[0])).astype(np.float32)
        return SourceTensor(name, shape, "f32", lambda start, stop: data[start:stop], None, None)

    return TensorSource("model", {"general.architecture": "llama"}, {n: tensor(n, s) for n, s in SHAPES.items()}, "id")


def covariance(n: int, tokens: int, seed: int = 0) -> Covariance:
    x = np.random.default_rng(seed).standard_normal((600, n)) @ np.random.default_rng(9).standard_normal((n, n))
    h = (x.T @ x / 600).astype(np.float32)
    return Covariance((h + h.T) / np.float32(2), tokens)


class Collected:
    """Covariances of q, of up (one for all experts) and of each expert's down; counts how often they are read."""

    def __init__(self, tokens=4096, down=(4096, 10, 4096)):
        shared = covariance(256, tokens)
        self.parts = {"blk.0.attn_q.weight": [shared], "blk.0.ffn_up_exps.weight": [shared]}
        self.parts["blk.0.ffn_down_exps.weight"] = [covariance(64, n, i) for i, n in enumerate(down)]

    def covariance_of(self, name: str, matrix: int) -> Covariance | None:
        parts = self.parts.get(name)
        return parts[matrix if len(parts) > 1 else 0] if parts is not None else None

    def input_of(self, name: str) -> CollectedInput | None:
        parts = self.parts.get(name)
        return CollectedInput(parts[0].columns, np.array([p.tokens for p in parts])) if parts is not None else None

    def covariances(self, effort=1, identity="one") -> Covariances:
        metadata = {"quantize.covariance.file": "m.cov"}
        return Covariances(self.input_of, PreparedCache(self.covariance_of), identity, metadata, effort)


def plan(tmp_path, covariances, type_name="q4_0", **more):
    return plan_quantize(model(), tmp_path / "out.gguf", type=TYPES[type_name], covariances=covariances, **more)


def test_bytes_and_metadata(tmp_path):
    collected = Collected()
    result = execute(plan(tmp_path, collected.covariances()), threads=2)
    file = open_gguf(result.paths[0])
    for name, matrix_rows in (
        ("blk.0.attn_q.weight", 32),
        ("blk.0.ffn_up_exps.weight", 16),
        ("blk.0.ffn_down_exps.weight", 16),
    ):
        x = model().tensors[name].read(0, 1000)
        expected = [
            encode(x[i : i + matrix_rows], "q4_0", covariance=collected.covariance_of(name, i // matrix_rows))
            for i in range(0, len(x), matrix_rows)
        ]
        assert np.array_equal(file.tensors[name].read(0, len(x)), np.concatenate(expected))
    assert file.metadata["quantize.covariance.file"] == "m.cov"
    assert file.metadata["quantize.covariance.effort"] == 1
    assert file.metadata["quantize.covariance.tensors_count"] == 2
    again = plan_quantize(
        replace(model(), metadata=dict(file.metadata)), tmp_path / "again.gguf", type=TYPES["q4_0"], allow_requantize=True
    )
    assert not any(key.startswith("quantize.covariance") for key in again.metadata)
    hidden = plan(tmp_path, collected.covariances(), hide_imatrix=True).metadata
    assert hidden["quantize.covariance.file"] == "top_secret"


def test_fallbacks_are_told_and_refused(tmp_path):
    few = plan(tmp_path, Collected().covariances()).warnings
    assert any("blk.0.ffn_down_exps.weight: too few tokens were seen by 1 of 3 matrices" in line for line in few)
    collected = Collected(down=(4096,) * 3)
    assert not plan(tmp_path, collected.covariances(), strict=True).warnings
    del collected.parts["blk.0.attn_q.weight"]
    with pytest.raises(PlanError, match="--strict: the covariance is not used for blk.0.attn_q.weight: none was collected"):
        plan(tmp_path, collected.covariances(), strict=True)


def test_another_model(tmp_path):
    collected = Collected()
    collected.parts["blk.0.attn_q.weight"] = [covariance(64, 4096)]
    with pytest.raises(PlanError, match="attn_q.weight is of 64 columns .* collected from another model"):
        plan(tmp_path, collected.covariances())


def test_journal_notices_other_data_and_effort(tmp_path):
    fingerprints = {
        plan(tmp_path, None).fingerprint,
        plan(tmp_path, Collected().covariances()).fingerprint,
        plan(tmp_path, Collected().covariances(effort=2)).fingerprint,
        plan(tmp_path, Collected().covariances(identity="other")).fingerprint,
    }
    assert len(fingerprints) == 4


def test_resume(tmp_path):
    collected = Collected()
    expected = execute(plan(tmp_path / "whole", collected.covariances())).paths[0].read_bytes()
    broken = Collected()
    damaged = broken.parts["blk.0.ffn_down_exps.weight"][2]
    damaged.matrix[1, 2] = np.nan
    with pytest.raises(MillError, match="NaN.*resume continues"):
        execute(plan(tmp_path, broken.covariances()), threads=1)
    result = execute(plan(tmp_path, collected.covariances()), resume=True)
    assert result.resumed > 0
    assert result.paths[0].read_bytes() == expected


def test_prepared_once_for_all_threads(monkeypatch):
    collected, calls = Collected(), []

    def counting(covariance, *more):
        calls.append(threading.get_ident())
        return prepare(covariance, *more)

    prepare = source_module.prepare
    monkeypatch.setattr(source_module, "prepare", counting)
    names = ["blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"] * 8
    cache = PreparedCache(collected.covariance_of, 0, key_of=lambda name, matrix: (id(collected.covariance_of(name, matrix)),))
    with ThreadPoolExecutor(4) as pool:
        prepared = list(pool.map(lambda name: cache.get(name, 0), names))
    assert len(calls) == 1
    assert all(p is prepared[0] for p in prepared)
    assert cache.get("output.weight", 0) is None


def test_prepared_covariances_keep_to_the_memory():
    """However many threads ask for however many: they wait for each other, and what is used is prepared once."""
    parts, most, in_use, lock = {str(i): covariance(256, 4096, i) for i in range(6)}, 0, {}, threading.Lock()
    cache = PreparedCache(lambda name, matrix: parts[name], 2 * prepared_bytes(256), threads=2)

    def use(name):
        nonlocal most
        prepared = cache.get(name, 0)
        with lock:
            in_use[id(prepared)] = in_use.get(id(prepared), 0) + 1
            most = max(most, len(in_use))
        assert np.array_equal(prepared.importance, parts[name].diagonal)
        with lock:
            in_use[id(prepared)] -= 1
            if not in_use[id(prepared)]:
                del in_use[id(prepared)]
        return None

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, [str(i % 6) for i in range(48)]))
    assert 1 <= most <= 2


class Outputs:
    """Second moments of gradients at the outputs of q, in two blocks of rows, and of each expert's down."""

    def __init__(self, tokens=4096):
        self.blocks = {"blk.0.attn_q.weight": row_blocks(32, 32, 16), "blk.0.ffn_down_exps.weight": row_blocks(16, 16, 16)}
        self.tokens = tokens

    def output_of(self, name: str) -> CollectedOutput | None:
        blocks = self.blocks.get(name)
        matrices = 3 if "exps" in name else 1
        return CollectedOutput(blocks, np.full((matrices, blocks.count), self.tokens)) if blocks is not None else None

    def gradient_of(self, name: str, matrix: int, block: int) -> Covariance:
        span = self.blocks[name].span(block)
        return covariance(span.stop - span.start, self.tokens, 10 * matrix + block)

    def covariances(self, down=(4096,) * 3, **changed) -> Covariances:
        curvature = Curvature(self.output_of, self.gradient_of, 5000)
        return replace(Collected(down=down).covariances(), curvature=curvature, **changed)


def bytes_of(path) -> dict[str, bytes]:
    return {name: tensor.data.tobytes() for name, tensor in open_gguf(path).tensors.items()}


def test_rows_are_encoded_together_in_blocks(tmp_path):
    outputs = Outputs()
    whole = execute(plan(tmp_path / "one", outputs.covariances()), threads=1).paths[0]
    again = execute(plan(tmp_path / "three", outputs.covariances()), threads=3).paths[0]
    assert whole.read_bytes() == again.read_bytes()
    alone = execute(plan(tmp_path / "alone", Collected(down=(4096,) * 3).covariances())).paths[0]
    different = {name for name, data in bytes_of(whole).items() if data != bytes_of(alone)[name]}
    assert different == {"blk.0.attn_q.weight", "blk.0.ffn_down_exps.weight"}
    assert open_gguf(whole).metadata["quantize.covariance.curvature"]
    tensor = model().tensors["blk.0.attn_q.weight"]
    stored = open_gguf(whole).tensors["blk.0.attn_q.weight"]
    prepared = Collected().covariances().of(tensor)(0)
    coupled = couple(outputs.gradient_of(tensor.name, 0, 1))
    expected = encode(tensor.read(16, 32), stored.type.name, covariance=prepared, coupled=coupled)
    assert stored.data[16:].tobytes() == expected.tobytes()


def test_any_rows_can_be_asked_for(tmp_path):
    outputs = plan(tmp_path, Outputs().covariances()).outputs
    output = next(one for one in outputs if one.name == "blk.0.ffn_down_exps.weight")
    assert output.cuts == (0,)
    whole = np.concatenate([output.produce(first, first + 16) for first in (0, 16, 32)])
    assert np.array_equal(output.produce(20, 29), whole[20:29])
    of_q = next(one for one in outputs if one.name == "blk.0.attn_q.weight")
    assert np.array_equal(of_q.produce(7, 30)[3:5], of_q.produce(10, 12))


def test_rows_without_curvature_are_encoded_by_themselves(tmp_path):
    few = plan(tmp_path, Outputs(tokens=4).covariances()).warnings
    assert any("encoded by themselves, without curvature: too few tokens were seen by" in line for line in few)
    none = Outputs()
    del none.blocks["blk.0.attn_q.weight"]
    told = plan(tmp_path, none.covariances()).warnings
    assert any("blk.0.attn_q.weight" in line and "none was collected" in line for line in told)


DOWN = "blk.0.ffn_down_exps.weight"


@pytest.mark.parametrize(("down", "tokens"), [((10, 10, 10), 4096), ((4096, 4096, 4096), 4)])
def test_rows_that_nothing_couples_are_not_cut_into_blocks(tmp_path, down, tokens):
    """Too few tokens were seen of inputs or of gradients; where weights follow others, a text decides on the inputs."""
    outputs, tensor = Outputs(tokens), model().tensors[DOWN]
    covariances = outputs.covariances(down)
    assert covariances.row_coupling(tensor) is None
    assert covariances.gradients(tensor) is not None  # which a search weighs errors by
    assert (covariances.following("text", "").row_coupling(tensor) is None) == (tokens == 4)
    planned = plan(tmp_path, covariances)
    assert next(one for one in planned.outputs if one.name == DOWN).cuts == ()
    alone = execute(plan(tmp_path / "alone", Collected(down=down).covariances())).paths[0]
    assert bytes_of(execute(planned).paths[0])[DOWN] == bytes_of(alone)[DOWN]


def test_gradients_of_matrices_that_nothing_couples_are_not_read(tmp_path):
    outputs, read = Outputs(), []
    gradient_of = outputs.gradient_of
    outputs.gradient_of = lambda name, matrix, block: read.append((name, matrix)) or gradient_of(name, matrix, block)
    few, all_seen = (execute(plan(tmp_path / str(n), outputs.covariances((4096, n, 4096)))).paths[0] for n in (10, 4096))
    assert read.count((DOWN, 1)) == 1
    assert read.count((DOWN, 0)) == 2
    ours, theirs = (open_gguf(path).tensors[DOWN].read(0, 48) for path in (few, all_seen))
    assert np.array_equal(np.delete(ours, slice(16, 32), 0), np.delete(theirs, slice(16, 32), 0))
    assert not np.array_equal(ours[16:32], theirs[16:32])


def test_the_memory_of_covariances_is_that_of_usable_ones(tmp_path):
    """One of three matrices has too few tokens: the others are prepared, one at a time by a thread."""
    nbytes = [Collected(down=down).covariances().memory_of(model().tensors[DOWN], TYPES["q4_0"])[1] for down in
              [(4096, 10, 4096), (10, 10, 10)]]  # fmt: skip
    assert nbytes == [prepared_bytes(64, 1), 0]


def test_curvature_of_another_model(tmp_path):
    outputs = Outputs()
    outputs.blocks["blk.0.attn_q.weight"] = row_blocks(64, 64, 16)
    with pytest.raises(PlanError, match="attn_q.weight is of 64 rows .* collected from another model"):
        plan(tmp_path, outputs.covariances())


def test_blocks_that_cut_interleaved_rows_are_not_used(tmp_path):
    outputs = Outputs()
    outputs.blocks["blk.0.attn_q.weight"] = RowBlocks(32, 32, 10)
    output = next(one for one in plan(tmp_path, outputs.covariances(), "q4_k_r4").outputs if one.name == "blk.0.attn_q.weight")
    assert output.cuts == ()


def test_a_plan_says_the_memory_of_covariances(tmp_path):
    """H and a triangle, 6 bytes a number, for types of single codes, with another one, 8, for those of vectors and fours; of a
    covariance for each matrix there is one for every thread; two that follow each other overlap."""
    scalar, fours = (plan(tmp_path, Collected().covariances(), name).covariance_bytes for name in ("q4_0", "iq4_kss"))
    assert scalar == 2 * 6 * 256 * 256
    assert fours == 2 * 8 * 256 * 256
    covariances = Collected().covariances()
    covariances.cache.memory = 1000
    small = plan(tmp_path, covariances, "q4_0")
    assert small.covariance_bytes == 6 * 256 * 256
    assert any("more than the 1,000 of --memory" in warning for warning in small.warnings)
