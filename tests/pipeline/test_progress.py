"""Progress: who gets reports, and what bars make of them."""

import io
import sys
import threading
import types
from types import SimpleNamespace
from typing import ClassVar

import pytest
from numba.core.event import trigger_event
from tqdm import tqdm

import ggufmill
from ggufmill.pipeline import tune
from ggufmill.pipeline.common.progress import COMPILE, Bars, Progress, Stage, reporting
from ggufmill.pipeline.requests.files import HashRequest
from ggufmill.pipeline.requests.verb import verb
from ggufmill.pipeline.writing import sequential
from ggufmill.recipes import FOLDER
from ggufmill.simd.compile import compile_time
from ggufmill.simd.compile.compile_time import compiling_for, listen


class Bar:
    """Takes the place of a bar; `made` has all of them."""

    made: ClassVar[list] = []

    def __init__(self, **options):
        self.options, self.n, self.total, self.leave, self.item = options, 0, options["total"], True, ""
        self.start_t = self.last_print_t = 100.0
        self.disable = False
        Bar.made.append(self)

    def set_postfix_str(self, text, refresh):
        self.item = text

    def update(self, count):
        self.n += count

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(Bar, "made", [])
    return Bar.made


def test_a_bar_for_each_stage(made):
    bars = Bars(Bar, {"small": 1.0})
    stage = Stage(bars, "copy", 10)
    stage.advance(4, "a\x1b[31m")
    stage.advance(6)
    Stage(bars, "small", 99)
    Stage(bars, "windows", unit="chunk").reach(3, 7)
    bars.close()
    assert [(bar.options["desc"], bar.n, bar.total) for bar in made] == [("copy", 10, 10), ("small", 0, 99), ("windows", 3, 7)]
    assert made[0].item == r"a\x1b[31m"
    assert [bar.options["unit_scale"] for bar in made] == [True, True, False]
    assert [bar.options["delay"] for bar in made] == [0.0, 1.0, 0.0]
    assert [bar.closed and bar.leave for bar in made] == [True, False, True]


def test_the_clock_of_a_bar_stands_still_while_kernels_are_compiled(made, monkeypatch):
    seconds = [7.0]
    monkeypatch.setattr("ggufmill.pipeline.common.progress.compilation_seconds", lambda: seconds[0])
    bars = Bars(Bar)
    stage = Stage(bars, "quantize", 10)
    stage.advance(1)
    assert (made[0].start_t, made[0].last_print_t) == (100.0, 100.0)
    seconds[0] += 40
    stage.advance(1)
    stage.advance(1)
    assert (made[0].start_t, made[0].last_print_t) == (140.0, 140.0)


def test_a_bar_that_never_moved_leaves_nothing(made):
    bars = Bars(Bar)
    Stage(bars, "copy", 10)
    bars.close()
    assert made[0].leave is False


def test_a_stage_that_comes_again_has_a_bar_of_its_own(made):
    bars = Bars(Bar)
    for total in (3, 5):
        Stage(bars, "checksum", total).advance(total)
    bars.close()
    assert [bar.n for bar in made] == [3, 5]


def reported(progress):
    with reporting(progress) as report:
        report(Progress("copy", 0, 1, "B"))
        report(Progress("copy", 1, 1, "B"))


def test_a_callable_gets_the_reports():
    reports = []
    reported(reports.append)
    assert [report.done for report in reports] == [0, 1]


@pytest.fixture
def compiles(monkeypatch):
    """compiles(type): what numba says when it compiles a kernel, within which a second passes."""
    listen()
    monkeypatch.setattr(compile_time, "_announce", lambda: None)
    monkeypatch.setattr(compile_time, "_HEARD_EVERY", 0.0)
    kernel = {"module": "ggufmill.quantize.encode"}

    def compile_for(subject):
        with compiling_for(subject), trigger_event("numba:compiler_lock"):
            for _ in range(2):
                with trigger_event("numba:run_pass", kernel):
                    pass

    return compile_for


def calling(compile_for):
    """A verb that is about to report, when it needs a kernel, on a thread of its own."""

    @verb(HashRequest)
    def called(request: HashRequest) -> None:
        thread = threading.Thread(target=compile_for, args=("iq3_k",))
        thread.start()
        thread.join()
        with reporting(request.progress) as report:
            Stage(report, "hash", 1)
            compile_for("q4_K")

    return called


def test_a_callable_hears_what_kernels_are_compiled_for(compiles):
    reports = []
    calling(compiles)("a.gguf", progress=reports.append)
    told = [(report.stage, report.done, report.item) for report in reports]
    compiled = [(COMPILE, n, kind) for n, kind in enumerate(("iq3_k", "iq3_k", "q4_K", "q4_K"), 1)]
    assert told == [*compiled[:2], ("hash", 0, ""), *compiled[2:]]
    compiles("q4_K")
    assert len(reports) == len(told)


def test_a_verb_within_another_says_it_once(compiles):
    outer, reports = calling(compiles), []

    @verb(HashRequest)
    def called(request: HashRequest) -> None:
        outer(request.file, progress=request.progress)

    called("a.gguf", progress=reports.append)
    assert [report.stage for report in reports] == [COMPILE, COMPILE, "hash", COMPILE, COMPILE]


def test_a_callable_that_needs_a_kernel_itself_is_not_called_meanwhile(compiles):
    """Else it would wait for itself: who compiles holds the compiler while it tells."""
    reports = []

    def progress(report):
        reports.append(report.stage)
        if report.stage == "hash":
            thread = threading.Thread(target=compiles, args=("f16",))
            thread.start()
            thread.join()

    calling(compiles)("a.gguf", progress=progress)
    assert reports == [COMPILE, COMPILE, "hash", COMPILE, COMPILE]


def test_bars_leave_kernels_to_their_lines(made, compiles):
    calling(compiles)("a.gguf", progress=Bars(Bar))
    assert [bar.options["desc"] for bar in made] == ["hash"]
    Bars(Bar)(Progress(COMPILE, 1, None, "report", "q4_K"))
    assert len(made) == 1


def test_true_draws_bars_and_nothing_else_does(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("tqdm.auto.tqdm", lambda **options: tqdm(file=stderr, **options))
    reported(None)
    reported(False)
    assert stderr.getvalue() == ""
    reported(True)
    assert "copy: 100%" in stderr.getvalue()


def test_a_notebook_has_bars_by_default(monkeypatch, made):
    shell = type("ZMQInteractiveShell", (), {"__module__": "ipykernel.zmqshell"})()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    reported(None)
    reported(False)
    assert [bar.n for bar in made] == [1]


DEMO, TEXT = FOLDER / "demo", FOLDER / "demo" / "calibration.txt"
SHORT = {"n_ctx": 256, "chunks": 2}


@pytest.fixture(scope="module")
def made_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    ggufmill.quantize_model(DEMO, folder / "q.gguf", "q4_0")
    ggufmill.compute_imatrix(DEMO, TEXT, folder / "q.imatrix", covariance=folder / "q.cov", n_ctx=64, chunks=1)
    recipe = f"""
        [source]
        model = "{DEMO}"
        [quantize]
        type = "q4_0"
        [validate]
        text = "{TEXT}"
        ctx = 256
        chunks = 2
        prompt = "One"
        n = 8
    """
    (folder / "r.toml").write_text(recipe)
    return folder


@pytest.fixture(scope="module")
def curvature(made_files):
    """Beside the others; it needs torch."""
    ggufmill.compute_imatrix(DEMO, TEXT, made_files / "c.imatrix", curvature=made_files / "q.curv", n_ctx=256, chunks=2)


# verb -> what calls it with a folder for outputs, one that has a file of q4_0 and covariances, and where reports go
VERBS = {
    "convert": lambda out, at, to: ggufmill.convert_model(DEMO, out / "a.gguf", verify=True, progress=to),
    "quantize": lambda out, at, to: ggufmill.quantize_model(DEMO, out / "a.gguf", "q4_0", verify=True, progress=to),
    "quantize --covariance": lambda out, at, to: ggufmill.quantize_model(
        DEMO, out / "a.gguf", "q4_0", covariance=at / "q.cov", effort=0, progress=to
    ),
    "quantize --curvature": lambda out, at, to: ggufmill.quantize_model(
        DEMO, out / "a.gguf", "q4_0", curvature=at / "q.curv", effort=0, progress=to
    ),
    "quantize --sequential": lambda out, at, to: ggufmill.quantize_model(
        DEMO, out / "a.gguf", "q4_0", curvature=at / "q.curv", effort=0, sequential=TEXT, sequential_chunks=2, progress=to
    ),
    "repack": lambda out, at, to: ggufmill.repack_model(at / "q.gguf", out / "a.gguf", progress=to),
    "split": lambda out, at, to: ggufmill.split_model(at / "q.gguf", out / "a", split_max_tensors=40, progress=to),
    "export": lambda out, at, to: ggufmill.export_model(at / "q.gguf", out / "a", progress=to),
    "imatrix show": lambda out, at, to: ggufmill.show_covariance(at / "q.cov", progress=to),
    "imatrix merge": lambda out, at, to: ggufmill.merge_covariance([at / "q.cov"] * 2, out / "a.cov", progress=to),
    "hash": lambda out, at, to: ggufmill.hash_model(at / "q.gguf", progress=to),
}
# those that run a text through a model, and the stages that do
PASSES = {
    "perplexity": ({"perplexity"}, lambda out, at, to: ggufmill.perplexity(DEMO, TEXT, **SHORT, progress=to)),
    "perplexity --kl-divergence": (
        {"perplexity"},
        lambda out, at, to: ggufmill.perplexity(at / "q.gguf", TEXT, kl_divergence=DEMO, **SHORT, progress=to),
    ),
    "imatrix": ({"imatrix"}, lambda out, at, to: ggufmill.compute_imatrix(DEMO, TEXT, **SHORT, progress=to)),
    "imatrix --curvature": (
        {"imatrix"},
        lambda out, at, to: ggufmill.compute_imatrix(
            DEMO, TEXT, out / "a.imatrix", curvature=out / "a.curv", **SHORT, progress=to
        ),
    ),
    "search": (
        {"sensitivity", "divergence"},
        lambda out, at, to: ggufmill.search_recipe(
            DEMO, out / "a.txt", target_bpw=5, text=TEXT, types="q4_K,q6_K", rows=8, **SHORT, progress=to
        ),
    ),
    "evaluate": (
        {"baseline", "q.gguf", "noise floor"},
        lambda out, at, to: ggufmill.evaluate_models(
            [at / "q.gguf"], TEXT, against=DEMO, out=out / "a", no_plot=True, **SHORT, progress=to
        ),
    ),
    "tune": (
        {"original"},
        lambda out, at, to: ggufmill.tune_model(
            DEMO, at / "q.gguf", out / "a.gguf", text=TEXT, chunks=8, epochs=1, progress=to
        ),
    ),
    "run": (
        {"validate", "noise floor", "layers", "texts"},
        lambda out, at, to: ggufmill.run_recipe(at / "r.toml", out=out / "run", progress=to),
    ),
    "embed": ({"embed"}, lambda out, at, to: ggufmill.embed_texts(DEMO, ["a list of words " * 80] * 2, progress=to)),
    "compare": ({"layers"}, lambda out, at, to: ggufmill.compare_models(DEMO, at / "q.gguf", TEXT, **SHORT, progress=to)),
}


def stages_of(reports):
    """stage -> its reports; one that comes again has a number behind its name."""
    found, times = {}, {}
    for report in reports:
        name = report.stage
        if name == COMPILE:
            continue  # it comes within any other
        begins = (report.done, report.share) == (0, 0) and found.get((name, times.get(name, 1)), [report])[-1].done > 0
        times[name] = times.get(name, 1) + begins
        found.setdefault((name, times[name]), []).append(report)
    return {name if number == 1 else f"{name} {number}": told for (name, number), told in found.items()}


NEED_CURVATURE = {"quantize --curvature", "quantize --sequential"}
NEED_TORCH = {"imatrix --curvature", "tune", *NEED_CURVATURE}


@pytest.fixture(scope="module")
def reports_of(made_files, tmp_path_factory, request):
    """reports_of(verb): those of one call, made once."""
    found = {}

    def get(verb):
        if verb in NEED_CURVATURE:
            request.getfixturevalue("curvature")
        if verb not in found:
            found[verb] = []
            with pytest.MonkeyPatch.context() as patch:  # windows of fewer tokens
                patch.setattr(tune, "N_CTX", 128)
                patch.setattr(sequential, "N_CTX", 128)
                if verb in NEED_TORCH:
                    patch.setattr("ggufmill.runtime.backends.torch.two_streams.GROUP_TOKENS", 256)
                (VERBS.get(verb) or PASSES[verb][1])(tmp_path_factory.mktemp("out"), made_files, found[verb].append)
        return found[verb]

    return get


@pytest.mark.slow(keep=["[!s]*", "sp*"])  # but search
@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=pytest.mark.oracle if verb in NEED_TORCH else ()) for verb in (*VERBS, *PASSES)]
)
def test_every_stage_says_first_that_nothing_is_done_and_last_that_all_is(verb, reports_of):
    stages = stages_of(reports_of(verb))
    assert stages.keys() >= (PASSES[verb][0] if verb in PASSES else set())
    for name, told in stages.items():
        assert (told[0].done, told[0].share) == (0, 0), name
        assert told[-1].done == told[-1].total, name
        assert [report.done for report in told] == sorted(report.done for report in told), name
    for name in PASSES[verb][0] if verb in PASSES else ():
        shares = [report.share for report in stages[name] if report.done == 0]
        assert len([share for share in shares if 0 < share < stages[name][0].total]) >= 4, name


def test_steps_within_rows_that_are_encoded_together_are_said(made_files, tmp_path, monkeypatch):
    """Between two runs of rows of a matrix of true width half a minute passes."""
    monkeypatch.setattr("ggufmill.jobs.steps._EVERY", 0.0)
    reports = []
    VERBS["quantize --covariance"](tmp_path, made_files, reports.append)
    items = [report.item for report in reports if ": " in report.item]
    steps = {item.split(": ")[1] for item in items}
    assert {"sweep 1", "sweep 2", "covariance of 256 columns"} <= steps
    assert any(item.startswith("blk.0.attn_q_b.weight, rows 0 to ") for item in items)
    before = [report.done for report in reports if report.stage == "quantize"]
    assert before == sorted(before)


@pytest.mark.oracle
def test_a_step_of_tuning_is_reported_as_it_is_computed(reports_of):
    """Two steps, and two times that a window judges, of a thousandth each of which many are reported."""
    assert len({report.done + report.share for report in stages_of(reports_of("tune"))["tune"]}) >= 20


@pytest.mark.oracle
def test_what_both_streams_compute_is_said_while_nothing_is_written(reports_of):
    said = [report.item for report in reports_of("quantize --sequential") if "activations of window" in report.item]
    assert {item.rsplit(" window ")[1] for item in said} == {"2 of 4", "4 of 4"}
    assert len({item.split(":")[0] for item in said}) >= 10


def test_passes_of_several_models_are_shares_of_one_window():
    reports, models = [], [SimpleNamespace(on_windows=None), SimpleNamespace(on_windows=None)]
    stage = Stage(reports.append, "perplexity", 2, "chunk")
    with stage.watching(*models):
        for _ in range(2):
            for model in models:
                model.on_windows(0.5)
                model.on_windows(1.0)
            stage.advance()
    assert [(report.done, report.share) for report in reports] == [
        (0, 0), (0, 0.25), (0, 0.5), (0, 0.75), (0, 1), (1, 0), (1, 0.25), (1, 0.5), (1, 0.75), (1, 1), (2, 0)
    ]  # fmt: skip
    assert models[0].on_windows is models[1].on_windows is None


def test_remaining_time_of_units_that_take_different_times(monkeypatch):
    """The second takes nine times as long as the first."""
    now = [100.0]
    monkeypatch.setattr("ggufmill.pipeline.common.progress.seconds_without_compilation", lambda: now[0])
    reports = []
    stage = Stage(reports.append, "imatrix", 2, "chunk")
    stage.time_share = lambda units: 0.1 * min(units, 1) + 0.9 * max(0, units - 1)
    now[0] += 3
    stage.reach(1)
    assert reports[-1].remaining == pytest.approx(27)
    stage.time_from(1)  # its own speed counts from here on
    stage.within(0)
    assert reports[-1].remaining is None
    now[0] += 10
    stage.within(0.5)
    assert reports[-1].remaining == pytest.approx(10)


def test_a_bar_never_falls(monkeypatch):
    monkeypatch.setattr(Bar, "made", [])
    stage, seen = Stage(Bars(Bar), "perplexity", 3, "chunk"), []
    for share in (0.5, 2.0):
        stage.within(share)
        seen.append(Bar.made[0].n)
    for _ in range(3):
        stage.advance()
        seen.append(Bar.made[0].n)
    assert seen == [0.5, 2, 2, 2, 3]
    assert len(Bar.made) == 1
