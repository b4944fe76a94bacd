"""`ggufmill run` goes through all the stages of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.common.figures import BITS, bits_per_weight_text, bits_text, size_text, windows_text
from ..pipeline.requests.run import RunRequest
from .command import Verb
from .display.console import call, table
from .display.plans import plan_text
from .options.fields import options_of

if TYPE_CHECKING:
    from ..pipeline.run import RunResult


@click.command(cls=Verb)
@options_of(RunRequest)
def command(**options: Any) -> None:
    """Run every stage that the TOML file RECIPE names (imatrix, search, quantise, repack, validate) and write a report.

    The folder then holds, with the model: report.html (one page with plots, which loads nothing from elsewhere), report.md,
    report.json, and README.md, the draft of a model card.

    Files, types, exact sizes and disk space are checked first. An interrupted run resumes where it was when the same command
    is given again; a stage whose inputs have not changed is not repeated. With [repack] the file before repacking is kept too,
    so that there has to be room for both. One run at a time works in a folder.

    With target_size = "180G", target_bpw or max_kld under [quantize], types for the tensors that no rule takes are searched for
    as `ggufmill search` does it; [search] has its options: text, ctx, chunks, types, repacked, gpu, gpu_size, rows, seed,
    measurements, refine. The recipe that is found is next to the model, as RECIPE.recipe.txt.

    With type = ["Q4_K_M", "IQ3_K"] under [quantize], or several tables [[quantize]], a file is made of each, named
    MODEL-TYPE.gguf: a repository of quants with one imatrix, one report, one model card, and SHA256SUMS. `ggufmill upload`
    sends it.

    \b
    Examples:
      ggufmill run demo
      ggufmill run demo-quants
      ggufmill run my-model.toml -o results --dry-run
    """
    from ..pipeline.run import run_recipe

    call(run_recipe, show=_text, **options)


def _text(result: RunResult) -> str:
    if result.forecast is not None:
        return _forecast_text(result)
    return _multi_text(result.report) if "quants" in result.report else report_lines(result.report)


def _forecast_text(result: RunResult) -> str:
    """The plan of the only file, or a table of all files; of types that have to be searched for only how large they may be."""
    assert result.forecast is not None
    parts, rows = [], []
    for quant in result.quants:
        if quant.found:
            files = [(file.path.name, f"{file.nbytes:,}") for file in quant.plan.files]
            bits = bits_text(quant.plan.bits_per_weight)
        else:
            files = [(quant.plan.files[0].path.name, f"at most {quant.most_bytes:,}")]
            bits = f"to be searched for: {quant.target}"
        if quant.repacked is not None:
            name, nbytes = quant.repacked
            files.append((name, f"{'' if quant.found else 'at most '}{nbytes:,}"))
        rows += [(file, nbytes, bits) for file, nbytes in files]
    if not result.quants[0].label and result.quants[0].found:
        parts.append(plan_text(result.quants[0].plan))
    else:
        parts.append(table(("file", "bytes", BITS), rows))
    return "\n\n".join([*parts, result.forecast.text])


def _multi_text(data: dict[str, Any]) -> str:
    """The table of all files, and where the results are."""
    from ..pipeline.reports.markdown import stock_rows
    from ..pipeline.reports.multi_output import baseline_row, headings, rows

    places = [("folder", str(Path(data["report"]).parent)), ("report", data["report"]), ("sha256", data["checksums"])]
    total = f"{len(data['quants'])} models, {size_text(data['file_bytes'])} in {len(data['files'])} files"
    files = table(headings(data), [*baseline_row(data), *rows(data), *stock_rows(data)])
    return "\n\n".join([files, total, "\n".join(f"{n:8} {path}" for n, path in places)])


def report_lines(data: dict[str, Any]) -> str:
    """The figures that count, and where the results are."""
    from ..pipeline.reports.markdown import COMPARISON, SEARCH, comparison, ratio, search_rows, stock_rows

    parts, v = [], data["validation"]
    if v is not None:
        parts.append(table(COMPARISON, [*comparison(data), *stock_rows(data)]))
        noise = f"; noise floor of the KL divergence {v['noise_floor']['kld_mean']:.5f}" if v.get("noise_floor") else ""
        parts.append(f"perplexity over {windows_text(v['chunks'], v['n_ctx'])}, ratio {ratio(v)}{noise}")
        parts += [f"note: {note}" for note in v.get("notes", [])]
        for one in v["texts"]:
            parts += [f"after {one['prompt']!r}, {v['baseline']}: {one['baseline']!r}", f"result: {one['result']!r}"]
    else:
        parts.append(f"{size_text(data['file_bytes'])}, {bits_per_weight_text(data['bits_per_weight'])}")
    if data["search"] is not None:
        parts.append(table(SEARCH, search_rows(data)))
    places = [("model", f) for f in data["files"]] + [("imatrix", data["imatrix"])] * bool(data["imatrix"])
    places += [("recipe", data["search"]["path"])] if data["search"] is not None else []
    parts.append("\n".join(f"{name:8} {path}" for name, path in [*places, ("report", data["report"])]))
    parts.append(", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in data["seconds"].items()))
    return "\n\n".join(parts)
