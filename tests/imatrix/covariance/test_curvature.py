"""Second moments of gradients in a file: against the direct formula, and the same bytes however they are collected."""

import numpy as np
import pytest
from killed_collections import STEPS, Killed, collect_though_killed

pytest.importorskip("torch")
from ggufmill import compute_imatrix, merge_covariance, show_covariance
from ggufmill.convert import open_source
from ggufmill.errors import MillError, PlanError, UsageError
from ggufmill.imatrix.calibration import Calibration, TextSegment, cut_windows
from ggufmill.imatrix.covariance import open_covariance
from ggufmill.imatrix.covariance.gradient_run import GradientRun
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.torch import gradient_cost
from ggufmill.runtime.backends.torch import gradients as gradients_module
from ggufmill.runtime.graph import ops
from ggufmill.runtime.output_gradients import gradients_of

pytestmark = pytest.mark.oracle

DEMO, TEXT = FOLDER / "demo", FOLDER / "demo/calibration.txt"
N_CTX, CHUNKS = 96, 6
RUN = {"n_ctx": N_CTX, "chunks": CHUNKS, "threads": 2, "output_frequency": 2, "progress": False}
MEMORY = 28 << 20  # several passes over gradients
# At which a state or the file gets sums of gradients. The other steps are those of test_job.
STEPS_OF_GRADIENTS = [(owner, step) for owner, step in STEPS if step in ("prepare_state", "commit_state", "write")]


def collect(folder, **options):
    return compute_imatrix(DEMO, TEXT, folder / "a.imatrix", curvature=folder / "a.curv", **(RUN | options))


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Groups of two windows, so that the text has several."""
    monkeypatch.setattr(gradients_module, "GROUP_TOKENS", 2 * N_CTX)


@pytest.fixture(scope="module", autouse=True)
def costs_are_counted_once():
    """What gradients of the demo take, which a collection counts op by op before it begins."""
    known, count_cost = {}, gradient_cost.count_cost

    def count_once(gradients, count, n_ctx):
        windows = min(count, gradients.windows_of_group(n_ctx))
        if (windows, n_ctx) not in known:
            known[windows, n_ctx] = count_cost(gradients, count, n_ctx)
        return known[windows, n_ctx]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_cost, "count_cost", count_once)
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The bytes of both files after one pass over inputs and one over gradients, by two threads."""
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients_module, "GROUP_TOKENS", 2 * N_CTX)
        collect(folder, memory="1G")
    assert sorted(path.name for path in folder.iterdir()) == ["a.curv", "a.imatrix"]
    return {name: (folder / name).read_bytes() for name in ("a.curv", "a.imatrix")}


@pytest.fixture
def file(expected, tmp_path):
    path = tmp_path / "expected.curv"
    path.write_bytes(expected["a.curv"])
    return open_covariance(path)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def all_gradients(**options):
    """Tensor and matrix (or head) -> float64 [tokens, rows], by autograd over the whole graph at once."""
    model = load_model(open_source(DEMO), threads=1, **options)
    tokens = model.tokenizer.encode(TEXT.read_text("utf-8")[:8000])
    windows, rows = cut_windows(model, [TextSegment(tokens)], N_CTX, chunks=CHUNKS).windows, {}

    def keep(found):
        for group in range(found.g.shape[1]):
            if found.matrices is None:
                rows.setdefault((found.weight.name, group), []).append(found.g[:, group])
                continue
            for expert in np.unique(found.matrices[:, group]):
                chosen = found.matrices[:, group] == expert
                rows.setdefault((found.weight.name, int(expert)), []).append(found.g[chosen, group])

    gradients_of(model, is_whole=True).run(windows, 0, model.stored.tensors.keys(), keep)
    return {key: np.concatenate(parts).astype(np.float64) for key, parts in rows.items()}


def test_every_matrix_has_the_second_moments_of_its_gradients(tmp_path):
    collect(tmp_path, curvature_rows=100, covariance_bits=32)
    file, rows = open_covariance(tmp_path / "a.curv"), all_gradients()
    kinds = {name.split(".")[-2] for name in file.outputs}
    assert {
        "output",
        "attn_q_a",
        "attn_kv_b",
        "attn_k_b",
        "attn_v_b",
        "ffn_gate_exps",
        "ffn_down_exps",
        "ffn_gate_inp",
    } <= kinds
    assert {name for name, _ in rows} == file.outputs.keys()
    for name, stored in file.outputs.items():
        heads = {group for other, group in rows if other == name}
        is_one = stored.matrices == 1
        for matrix in [0] if is_one else sorted(heads):
            g = np.concatenate([rows[name, head] for head in sorted(heads)], axis=1) if is_one else rows[name, matrix]
            assert g.shape[1] == stored.rows
            for block in range(stored.blocks.count):
                span = stored.blocks.span(block)
                direct = g[:, span].T @ g[:, span] / len(g)
                found = file.gradient_of(name, matrix, block)
                assert found.tokens == stored.tokens[matrix, block] == len(g)
                assert found.matrix.shape == direct.shape
                assert span.stop - span.start <= 100
                assert np.linalg.norm(found.matrix - direct) < 0.02 * np.linalg.norm(direct), (name, matrix, block)
                assert np.trace(found.matrix) == pytest.approx(np.trace(direct), rel=2e-3)
    heads = file.output_of("blk.0.attn_k_b.weight").blocks  # a head has 256 rows
    assert (heads.rows, heads.run, heads.size, heads.count) == (1024, 256, 96, 12)


def test_inputs_are_those_of_a_covariance(file, tmp_path):
    options = {"covariance": tmp_path / "a.cov", "covariance_experts": True}
    compute_imatrix(DEMO, TEXT, tmp_path / "b.imatrix", **options, **RUN)
    plain = open_covariance(tmp_path / "a.cov")
    assert plain.inputs.keys() == file.inputs.keys()
    assert not plain.outputs
    for name, stored in plain.inputs.items():
        for matrix in range(stored.matrices):
            assert np.array_equal(plain.covariance_of(name, matrix).matrix, file.covariance_of(name, matrix).matrix)


@pytest.mark.parametrize("options", [{"threads": 1, "memory": "1G"}, {"threads": 3, "memory": MEMORY}], ids=str)
def test_the_same_bytes(expected, tmp_path, options):
    """For any number of threads, and for passes that memory asks for."""
    reports = []
    collect(tmp_path, **{**options, "progress": lambda report: reports.append((report.done, report.total))})
    assert (tmp_path / "a.curv").read_bytes() == expected["a.curv"]
    passes, rest = divmod(reports[-1][1], CHUNKS)
    assert rest == 0
    assert passes > 3 if options.get("memory") == MEMORY else passes == 2
    assert reports[-1] == (passes * CHUNKS, passes * CHUNKS)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


@pytest.mark.slow(keep=["CovarianceJob-commit_state"])
@pytest.mark.parametrize(("owner", "step"), STEPS_OF_GRADIENTS, ids=lambda value: getattr(value, "__name__", value))
def test_killed_at_any_step(expected, tmp_path, monkeypatch, owner, step):
    """Killed before the first call of a step, after the third, and before the sixth, and resumed each time; a batch of
    gradients is one group, so that states are written within their passes."""
    monkeypatch.setattr("ggufmill.imatrix.covariance.gradient_run._VALUES_SHARE", 1 << 20)
    monkeypatch.setattr("ggufmill.imatrix.covariance.job._SAVING_SHARE", 0)
    collect_though_killed(
        monkeypatch, owner, step, tmp_path / "a.curv", lambda resume: collect(tmp_path, memory=2 * MEMORY, resume=resume)
    )
    assert contents(tmp_path) == expected


def test_killed_within_a_pass_over_gradients(expected, tmp_path, monkeypatch):
    """And resumed with other memory, so that other windows are computed at a time."""
    monkeypatch.setattr("ggufmill.imatrix.covariance.gradient_run._VALUES_SHARE", 1 << 20)
    monkeypatch.setattr("ggufmill.imatrix.covariance.job._SAVING_SHARE", 0)
    original, windows = gradients_module.Gradients.run, []

    def run(self, batch, *arguments):
        windows.append(len(batch))
        if len(windows) == 3:
            raise Killed
        original(self, batch, *arguments)

    monkeypatch.setattr(gradients_module.Gradients, "run", run)
    with pytest.raises(Killed):
        collect(tmp_path, memory="1G")
    assert windows == [2, 2, 2]
    monkeypatch.undo()
    monkeypatch.setattr(gradients_module, "GROUP_TOKENS", 2 * N_CTX)
    again = []
    monkeypatch.setattr(
        gradients_module.Gradients, "run", lambda *arguments: again.append(arguments[1]) or original(*arguments)
    )
    collect(tmp_path, resume=True)
    assert [len(batch) for batch in again] == [2]  # the first four windows are in the state
    assert contents(tmp_path) == expected


def test_labels_depend_on_the_seed(file, tmp_path):
    collect(tmp_path, curvature_seed=1)
    other = open_covariance(tmp_path / "a.curv")
    name = "blk.1.attn_output.weight"
    a, b = (each.gradient_of(name, 0, 0).matrix for each in (file, other))
    assert not np.array_equal(a, b)
    assert 0.5 < np.trace(a) / np.trace(b) < 2
    assert np.array_equal(file.covariance_of(name).matrix, other.covariance_of(name).matrix)
    with pytest.raises(PlanError, match="exists"):
        collect(tmp_path, curvature_seed=2)


def test_parts_of_a_text_are_merged(file, tmp_path):
    parts = []
    for start in (0, 3):
        parts.append(tmp_path / f"{start}.curv")
        options = {**RUN, "chunks": 3, "from_chunk": start}
        compute_imatrix(DEMO, TEXT, tmp_path / f"{start}.imatrix", curvature=parts[-1], **options)
    result = merge_covariance(parts, tmp_path / "both.curv")
    assert result.as_json()["outputs"] == len(file.outputs) == 53
    both = open_covariance(tmp_path / "both.curv")
    assert list(both.outputs) == list(file.outputs)
    for name, stored in file.outputs.items():
        assert np.array_equal(both.output_of(name).tokens, stored.tokens), name
        a, b = (each.gradient_of(name, stored.matrices - 1, 0).matrix for each in (file, both))
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(a), name
    compute_imatrix(
        DEMO, TEXT, tmp_path / "c.imatrix", curvature=tmp_path / "c.curv", curvature_rows=64, **(RUN | {"chunks": 1})
    )
    with pytest.raises(MillError, match=r"output\.weight has other blocks of rows .*--curvature-rows"):
        merge_covariance([parts[0], tmp_path / "c.curv"], tmp_path / "d.curv")


def test_tokens_count_as_often_as_their_text(tmp_path):
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    words = TEXT.read_text("utf-8")
    texts[0].write_text(words[:1000])
    texts[1].write_text(words[1000:2000])
    options = {**RUN, "chunks": None}
    compute_imatrix(DEMO, [str(texts[0]), f"{texts[1]}:3"], tmp_path / "a.imatrix", curvature=tmp_path / "a.curv", **options)
    found, parts = open_covariance(tmp_path / "a.curv"), []
    for i, text in enumerate(texts):
        path = tmp_path / f"{i}.curv"
        compute_imatrix(DEMO, text, tmp_path / f"{i}.imatrix", curvature=path, **options)
        parts.append(open_covariance(path).gradient_of("blk.2.ffn_up_shexp.weight", 0, 0))
    both = found.gradient_of("blk.2.ffn_up_shexp.weight", 0, 0)
    assert both.tokens == parts[0].tokens + 3 * parts[1].tokens
    mean = (parts[0].tokens * parts[0].matrix + 3 * parts[1].tokens * parts[1].matrix) / both.tokens
    assert np.linalg.norm(both.matrix - mean) < 0.02 * np.linalg.norm(mean)


def test_statistics_of_both_sides(file, tmp_path):
    rows = show_covariance(file.path).as_json()["inputs"]
    assert [row["side"] for row in rows] == ["input"] * len(file.inputs) + ["output"] * len(file.outputs)
    row = next(row for row in rows if row["side"] == "output" and row["name"] == "output.weight")
    assert (row["columns"], row["matrices"], row["most"]) == (768, 2, CHUNKS * N_CTX)
    traces = []
    for block in range(2):
        a = file.gradient_of("output.weight", 0, block).matrix.astype(np.float64)
        traces.append(np.trace(a) ** 2 / np.sum(a * a))
    assert row["effective_rank"] == pytest.approx(np.mean(traces))


def test_what_it_takes_is_said(expected, tmp_path):
    forecast = collect(tmp_path, dry_run=True, memory=MEMORY).as_json()
    assert list(tmp_path.iterdir()) == []
    covariance = forecast["covariance"]
    gradients = covariance["gradients"]
    assert (covariance["inputs"], gradients["outputs"]) == (36, 53)
    assert 2 <= gradients["passes"] < covariance["passes"]
    assert covariance["sums_bytes"] + gradients["kept_bytes"] <= MEMORY
    assert gradients["weights_bytes"] > 8 << 20
    assert gradients["working_bytes"] > 0
    assert forecast["predicted"]["seconds"] > 0
    assert len(expected["a.curv"]) == covariance["file_bytes"]


def test_attention_is_among_what_is_said(monkeypatch):
    """A token of longer windows takes longer."""
    monkeypatch.setattr(gradients_module.Gradients, "products_per_second", lambda self, pieces: 1e9)
    model, said = load_model(DEMO, threads=1), []
    for count, n_ctx in ((64, 64), (8, 512)):
        windows = Calibration(np.zeros((count, n_ctx), np.int64), np.ones(count, np.int64))
        said.append(GradientRun(model, windows, 1 << 30, 0).expected_seconds(1)[0])
    assert said[1] > 1.5 * said[0]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"covariance": "a.cov"}, UsageError, "--curvature writes the covariances of inputs too: leave out --covariance"),
        ({"curvature": None, "curvature_rows": 64}, UsageError, "--curvature-rows does nothing without --curvature"),
        ({"curvature": None, "curvature_seed": 1}, UsageError, "--curvature-seed does nothing without --curvature"),
        ({"memory": "100K"}, PlanError, "more than the .* of --memory"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_misuse(tmp_path, options, error, words):
    given = {"curvature": tmp_path / "a.curv", **options}
    with pytest.raises(error, match=words):
        compute_imatrix(DEMO, TEXT, tmp_path / "a.imatrix", **RUN, **given)
    assert list(tmp_path.iterdir()) == []


def test_the_derivative_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gradients_module, "SUPPORT", {k: v for k, v in gradients_module.SUPPORT.items() if k is not ops.Norm})
    with pytest.raises(PlanError, match="gradients need a derivative of every op, and op Norm has none"):
        collect(tmp_path)


def test_a_gradient_that_is_not_finite_names_its_matrix(tmp_path, monkeypatch):
    original = gradients_module.loss_gradient
    monkeypatch.setattr(gradients_module, "loss_gradient", lambda *arguments: original(*arguments) * float("nan"))
    with pytest.raises(MillError, match=r"the gradient at the outputs of output\.weight is not finite"):
        collect(tmp_path)
    assert not (tmp_path / "a.curv").exists()
