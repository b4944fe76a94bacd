"""`ggufmill evaluate`: many quants of a model against a baseline, in one table and one picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...errors import CheckFailed, MillError, PlanError, UsageError
from ...formats.file_range import read_file
from ...imatrix.texts import decode_text
from ...jobs.atomic_write import write_text
from ...quantize.recipes.mixes import file_type_name
from ...runtime import Model
from ...runtime.evaluate.logits_file import scored
from ...runtime.evaluate.open_logits import open_logits
from ...runtime.evaluate.provenance import describe_text
from ...runtime.evaluate.tasks.questions import compile_answer
from ..common.arguments import as_bytes, as_paths, check_folder, read_template, refuse_unused
from ..common.baseline import stored_tokens
from ..common.figures import windows_text
from ..common.forecast import Forecast, Planned, free_space
from ..common.importance import load_importance
from ..common.messages import note, warn
from ..common.models import CHECKPOINT_OPTIONS, model_name, note_micro_batch, open_model, settings_of_each, window_settings
from ..common.progress import OnProgress, reporting
from ..common.reading import most_together, reading_forecast, reading_memory, reading_seconds
from ..common.shown import shown
from ..judging.answered import Answered, Questioner, against_baseline, open_questions
from ..judging.candidates import find_models, stock_mix
from ..judging.domains import JudgedText, parse_domains, read_domains
from ..judging.judge import Judge
from ..judging.results import Result, ResultsFile, is_same_model, read_results, why_not_comparable
from ..judging.verdict import NoiseFloor, PairedTest, compare_neighbours, verdict
from ..reports.evaluation import EvaluationRow, evaluation_text, judgement_lines, plot_evaluation, row_of
from ..reports.style import check_picture, missing_matplotlib
from ..requests.measure import EvaluateRequest
from ..requests.running import settings_of
from ..requests.verb import verb

N_CTX = 512
RESULTS, TABLE, PLOT = "results.json", "table.md", "plot.png"


@shown
@dataclass(frozen=True)
class Evaluation:
    """A row per model, smallest first, and where they are kept.

    results   what `perplexity` would give for each, in the order of the rows
    failed    model -> why it could not be measured
    baseline  path or name, perplexity and its error
    files     the files written, by what they are: results, table, plot
    noise_floor  figures of the baseline with rounded activations; None: not measured
    paired    each model, by rising KL divergence, against the next: by windows
    verdict   all of it in one sentence
    answered  what each model, the baseline first, has right of questions
    """

    rows: list[EvaluationRow]
    results: list[Result]
    failed: dict[str, str]
    baseline: dict[str, Any]
    files: dict[str, str]
    noise_floor: NoiseFloor | None = None
    paired: list[PairedTest] = field(default_factory=list)
    verdict: str = ""
    answered: list[Answered] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """What --json prints: rows (with `domains` of several texts), results, failed, baseline, files, noise_floor, paired,
        verdict, answered."""
        return asdict(self)


@verb(EvaluateRequest)
def evaluate_models(request: EvaluateRequest) -> Evaluation | Planned:
    """Size, perplexity, KL divergence, same top token and speed of many quants of a model, in one table and one picture.

    What was measured is kept in a file in `out`, model by model: another call resumes from there, and measures a model again
    only when its file, the text, the baseline or a setting that decides figures has changed. The baseline runs once; its
    outputs are kept there, too.

    Returns an `Evaluation`, with dry_run a `Planned`, which does not time answers. Raises PlanError for a text that does not
    fill a window and for results that are of something else, CheckFailed when a model could not be measured, after all others.

    Example:
        >>> from ggufmill import evaluate_models
        >>> from ggufmill.recipes import FOLDER
        >>> result = evaluate_models([], FOLDER / "demo" / "heldout.txt", against=FOLDER / "demo", out="judged",
        ...     stock="q4_0,q8_0", n_ctx=64, chunks=4, no_plot=True)
        >>> [(row.name, row.kld < 0.1) for row in result.rows]
        [('Q4_0', True), ('Q8_0', True)]
    """
    settings, memory = settings_of(request, "n_ctx"), as_bytes(request.memory)
    folder, joined = Path(request.out), [(path, read_results(path)) for path in as_paths(request.join)]
    mixes = _file_types(request.stock)
    paths = find_models(as_paths(request.models))
    paths = [path for path in paths if path.resolve() != Path(request.against).resolve()]
    if not paths and not mixes:
        raise UsageError("there is nothing to judge but the baseline: name models, or file types with --stock")
    if request.imatrix is not None and not mixes:
        raise UsageError("--imatrix does nothing without --stock")
    stored = open_logits(Path(request.against)) if Path(request.against).exists() else None
    if stored is not None and mixes:
        raise UsageError("--stock is made of the baseline's weights: give the model with --against, not its predictions")
    domains = parse_domains(request.text)
    tasks = parse_domains(request.tasks, "--tasks")
    if not domains and stored is None and not tasks:
        raise UsageError("a text is missing (-f), or questions to be answered (--tasks)")
    if not tasks:
        refuse_unused(request, "--tasks", "task_questions", "task_answer", "n_predict", "template")
    pattern, template = compile_answer(request.task_answer), read_template(request.template)
    questions = open_questions(tasks, request.task_questions, request.n_predict, template)
    if len(domains) > 1 and stored is not None:
        raise UsageError("a file of predictions is of one text: leave out -f, or give the baseline as a model")
    if not request.dry_run:
        folder.mkdir(exist_ok=True)
        check_folder(folder / RESULTS)
    if request.plot is not None and request.no_plot:
        raise UsageError("--plot and --no-plot cannot be given together")
    picture = Path(request.plot) if request.plot is not None else folder / PLOT
    missing = None if request.no_plot or request.plot is not None else missing_matplotlib()
    if missing is not None:
        note(f"no picture is drawn, which needs {missing}")
    draws = not request.no_plot and missing is None
    if draws and not request.dry_run:
        check_picture(picture)

    def answered(report: OnProgress) -> list[Answered]:
        asked = Questioner(folder, questions, request.n_predict, template, pattern, report)
        return _answered(asked, request.against if stored is None else None, paths, mixes, request.imatrix, settings)

    work = {"models": len(paths) + len(mixes)}
    work |= {"questions": sum(len(file.questions) for file in questions)} if questions else {}
    if not domains and stored is None:
        if request.dry_run:
            return Planned(work, Forecast(0, free_space(folder)))
        with reporting(request.progress) as report:
            rows = answered(report)
        return Evaluation([], [], {}, {"path": model_name(request.against)}, _answer_files(rows), answered=rows)
    kept = ResultsFile(folder / RESULTS)
    window = stored.n_ctx if stored is not None else request.n_ctx or N_CTX
    note_micro_batch(window, settings)
    *own, of_base = (
        window_settings(request.against, window, each) for each in settings_of_each([*paths, request.against], settings)
    )
    base = open_model(request.against, of_base) if stored is None else None
    first = base or open_model(paths[0], own[0])
    if base is None:
        assert stored is not None
        data = read_file(domains[0].path, pipes=True) if domains else None
        content = decode_text(data, domains[0].path) if data is not None else None
        tokens = stored_tokens(stored, first, content, request.n_ctx, request.chunks).reshape(-1, window)
        about = describe_text(data, domains[0].path.name) if data is not None else None
        text = JudgedText(tokens, {"": slice(0, len(tokens))}, about)
    else:
        text = read_domains(first, domains, window, request.chunks)
    if request.dry_run:
        measured = [open_model(path, of_model) for path, of_model in zip(paths, own, strict=True)]
        measured += [base] * (len(mixes) + request.noise_floor) if base is not None else []
        return _planned(work, measured, base, text.tokens, folder, memory)
    judge = Judge(folder, kept, text.tokens, first if stored is None else stored, text.about, memory)
    failed: dict[str, str] = {}
    with reporting(request.progress) as report:
        chosen: list[Result] = []
        for path, of_model in zip(paths, own, strict=True):
            try:
                chosen.append(judge.measure(path, of_model, report))
            except (MillError, OSError) as error:
                failed[str(path)] = str(error)
                warn([f"{path} is left out: {error}"])
        importance = (
            load_importance(Path(request.imatrix), base.stored) if request.imatrix is not None and base is not None else None
        )
        for name in mixes:
            assert base is not None
            chosen.append(judge.measure(stock_mix(base.stored, name, importance), of_base, report))
        noise = judge.noise_floor(of_base, report) if request.noise_floor and chosen else None
        task_rows = answered(report) if questions else []
    reference = chosen[0] if chosen else None
    others: list[Result] = []
    for path, results in joined:
        for result in results:
            reference = reference or result
            reason = why_not_comparable(result, reference)
            if reason:
                raise PlanError(f"--join {path}: {result.get('model')} was measured {reason}")
            if not any(is_same_model(result, other) for other in [*chosen, *others]):
                others.append(result)
    evaluation = _summary(folder, chosen, others, failed, model_name(request.against), picture if draws else None, text, noise)
    evaluation = replace(evaluation, answered=task_rows, files=evaluation.files | _answer_files(task_rows))
    if failed:
        raise CheckFailed(f"{len(failed)} of {len(paths)} models could not be measured: {', '.join(failed)}", evaluation)
    return evaluation


def _answered(
    asked: Questioner,
    baseline: Any,
    paths: Sequence[Path],
    mixes: Sequence[str],
    imatrix: str | Path | None,
    settings: dict[str, Any],
) -> list[Answered]:
    """What the baseline (None: a file of predictions, which answers nothing), the models and the stock mixes have right."""
    *own, of_base = settings_of_each([*paths, baseline], settings)
    rows: list[Answered] = []
    name = ""
    if baseline is not None:
        base, name = open_model(baseline, of_base), Path(model_name(baseline)).name.removesuffix(".gguf")
        rows += asked.ask(name, base)
        importance = load_importance(Path(imatrix), base.stored) if imatrix is not None else None
        given = {key: value for key, value in of_base.items() if key not in CHECKPOINT_OPTIONS}
        for mix in mixes:
            rows += asked.ask(mix, open_model(stock_mix(base.stored, mix, importance).source, given), of_mix=mix)
    names = [path.name.removesuffix(".gguf") for path in paths]
    for path, of_model, short in zip(paths, own, names, strict=True):
        is_taken = short == name or names.count(short) > 1
        rows += asked.ask(f"{path.resolve().parent.name}/{short}" if is_taken else short, open_model(path, of_model))
    return against_baseline(rows, name)


def _answer_files(rows: Sequence[Answered]) -> dict[str, str]:
    return {f"answers of {row.model} ({row.task})": row.answers for row in rows}


def _file_types(stock: str | Sequence[str]) -> list[str]:
    """Raises UsageError for what is no file type."""
    given = stock.split(",") if isinstance(stock, str) else list(stock)
    names = {name: file_type_name(name.strip()) for name in given if name.strip()}
    for name, found in names.items():
        if found is None:
            raise UsageError(f"--stock: {name!r} is no file type such as Q4_K_M")
    return [found for found in dict.fromkeys(names.values()) if found is not None]


def _planned(
    work: dict[str, int], models: list[Model], base: Model | None, tokens: np.ndarray, folder: Path, memory: int | None
) -> Planned:
    """models: that are measured one after the other, of mixes and the noise floor the baseline; tokens: of all windows; memory:
    bytes of --memory."""
    windows, n_ctx = tokens.shape
    seconds = {"models": sum(reading_seconds(model, tokens.size, n_ctx, base) for model in models)}
    needed = 0
    if base is not None:
        seconds["baseline"] = reading_seconds(base, tokens.size, n_ctx, is_scored=False)
        needed = 4 * windows * scored(n_ctx) * base.graph.n_embd
    each = [reading_memory([m], n_ctx, most_together([m], n_ctx, windows, base, memory), base) for m in models]
    most = max(nbytes for nbytes in each if nbytes is not None) if None not in each else None
    return Planned({**work, "windows": windows}, reading_forecast(seconds, most, [*models[:1]], folder, needed))


def _summary(
    folder: Path,
    results: list[Result],
    joined: list[Result],
    failed: dict[str, str],
    baseline: str,
    picture: Path | None,
    judged: JudgedText,
    noise: Result | None,
) -> Evaluation:
    """Sorts the results by size, and writes table and picture."""
    rows = [(row_of(result, result in joined, judged.figures(result)), result) for result in [*results, *joined]]
    rows = _told_apart(sorted(rows, key=lambda pair: pair[0].nbytes))
    floor = NoiseFloor.of(noise) if noise is not None else None
    named = [(row.name, result) for row, result in rows]
    comparisons, sentence = compare_neighbours(named), verdict(named, floor)
    files = {"results": str(folder / RESULTS)}
    reference: dict[str, Any] = {"path": baseline}
    if rows:
        some = rows[0][1]
        reference |= {"perplexity": some["baseline_perplexity"], "error": some.get("baseline_error")}
        text = some.get("text_digest")
        name = f"{text['name']}, " if text else ""
        about = [
            f"Baseline: {Path(baseline).name}, perplexity {some['baseline_perplexity']:.4f}.",
            f"Text: {name}{windows_text(some['chunks'], some['n_ctx'], some['tokens_scored'])}.",
        ]
        files["table"] = str(folder / TABLE)
        write_text(
            folder / TABLE, evaluation_text([row for row, _ in rows], [*about, *judgement_lines(floor, comparisons), sentence])
        )
        if picture is not None:
            files["plot"] = str(picture)
            title = f"{some['about'].get('name') or Path(baseline).stem}: {about[1].removeprefix('Text: ').rstrip('.')}"
            plot_evaluation([row for row, _ in rows], some["baseline_perplexity"], title, picture)
    of_all = [row for row, _ in rows], [result for _, result in rows], failed, reference, files
    return Evaluation(*of_all, floor, comparisons, sentence)


def _told_apart(rows: list[tuple[EvaluationRow, Result]]) -> list[tuple[EvaluationRow, Result]]:
    """The rows, those of one name with the folders of their files."""
    counts = Counter(row.name for row, _ in rows)
    folders = [Path(str(result.get("model"))).resolve().parent.name for _, result in rows]
    return [
        (
            replace(row, name=f"{folder}/{row.name}") if counts[row.name] > 1 and not result["about"].get("stock") else row,
            result,
        )
        for (row, result), folder in zip(rows, folders, strict=True)
    ]
