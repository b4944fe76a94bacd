"""All figures of a run as one JSON object, which its reports are drawn from."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...formats.loader_facts import LoaderTensor
from ...formats.loaders import PROGRAMS, loader_problems
from ...formats.metadata_values import text_of
from ...formats.string_array import StringArray
from ...imatrix.coverage import covered_layers, layer_and_role, remarks
from ...jobs.outputs import Output
from ...jobs.plan import Plan
from ...operating_system.process import system_text
from ...request_fields import values_of
from ...version import __version__
from ..requests.recipe import GivenRecipe, merged
from ..requests.stages import ReportRequest

if TYPE_CHECKING:
    from ...imatrix import Imatrix
    from ...quantize.verify import Verification
    from ..stages.quant import Quant
    from ..stages.run import Run

# keys of [quantize] of a file whose types are those of its file type
_STOCK_KEYS = {"type", "name", "imatrix", "for", "split_max_size"}
# tensors are added up by the first role whose pattern is in their name
_ROLES = (
    ("routed experts", r"_exps\b"),
    ("shared experts", r"_shexp\b"),
    ("router", r"ffn_gate_inp|exp_probs_b"),
    ("norms", r"norm"),
    ("attention", r"\.(attn|ssm)_"),
    ("feed forward", r"\.ffn_"),
    ("embeddings", r"^(token_embd|per_layer_token_embd)"),
    ("output", r"^output"),
)
# general.* keys that a card repeats, by their names there
_CARD_KEYS = {"license": "license", "license_name": "license.name", "license_link": "license.link"}
# tasks of the Hub (pipeline_tag) that models which are converted here have
_TASKS = {
    *("text-generation", "text2text-generation", "translation", "summarization", "image-text-to-text", "audio-text-to-text"),
    *("any-to-any", "feature-extraction", "sentence-similarity", "text-ranking", "fill-mask"),
}


def report_json(
    run: Run,
    quant: Quant,
    plan: Plan,
    imatrix: Imatrix | None,
    validation: dict[str, Any] | None,
    verification: Verification,
    quantized: Plan | None = None,
    search: dict[str, Any] | None = None,
    stock: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """plan: of the final file; quantized: of the one before it was repacked, if it was; search: what `Quant.search` gave;
    stock: what `Run.stock` gave."""
    imatrix = imatrix if quant.with_imatrix else None
    errors = {t.name: t.error for t in verification.tensors}
    before = quantized or plan
    return {
        "recipe": run.recipe.name,
        "label": quant.recipe.label,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "machine": f"{system_text()}, Python {'.'.join(map(str, sys.version_info[:3]))}",
        "source": run.source_line,
        "source_name": Path(run.source.path).resolve().name,
        "name": " ".join((text_of(plan.metadata, "general.name") or Path(run.source.path).resolve().name).split()),
        "architecture": plan.metadata.get("general.architecture", ""),
        "files": [str(f.path.resolve()) for f in plan.files],
        "imatrix": str(run.imatrix_path.resolve()) if run.imatrix_path is not None and quant.with_imatrix else None,
        "imatrix_entries": len(imatrix.entries) if imatrix is not None else 0,
        "imatrix_starved": imatrix.unseen_experts() if imatrix is not None else {},
        "imatrix_texts": imatrix.datasets if imatrix is not None else [],
        "imatrix_tokens": imatrix.chunk_count * imatrix.chunk_size if imatrix is not None else 0,
        "coverage": _coverage(run, imatrix) if imatrix is not None else None,
        "report": str(run.folder.reports[2].resolve()),
        "tensors": len(plan.outputs),
        "total_bytes": plan.total_bytes,
        "file_bytes": plan.file_bytes,
        "quantized_file_bytes": before.file_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "weights": sum(o.n_elements for o in plan.outputs),
        "types": {name: {"tensors": n, "nbytes": size} for name, (n, size) in plan.histogram().items()},
        "roles": _sizes_by_role(plan.outputs),
        "table": [
            {
                "name": o.name,
                "layer": layer_and_role(o.name)[0],
                "kind": layer_and_role(o.name)[1],
                "role": _role(o.name),
                "shape": list(o.shape),
                "type": o.type.name,
                "rule": first.rule,
                "nbytes": o.nbytes,
                "bits": 8 * o.nbytes / o.n_elements,
                "error": errors.get(o.name),
            }
            for o, first in zip(plan.outputs, before.outputs, strict=True)
        ],
        "warnings": before.warnings,
        "validation": validation,
        "stock": list(stock),
        "is_stock": quant.recipe.stages.get("quantize", {}).keys() <= _STOCK_KEYS,
        "failures": run.failures(validation),
        "limits": run.limits,
        "seconds": _seconds(quant),
        "rules": quant.recipe.text,
        "search": search and {**search, "path": str(quant.folder.recipe.resolve()), "recipe": quant.final_recipe.text},
        "card": _card(run, plan),
        "loaders": {p: loader_problems(plan.metadata, _headers(plan), p, len(plan.files)) for p in PROGRAMS},
    }


def _seconds(quant: Quant) -> dict[str, float]:
    """Stage -> seconds, of the stages of a quant and of those that it shares."""
    label, seconds = quant.recipe.label, quant.run.cache.seconds
    own = {
        stage.removesuffix(f" {label}"): t for stage, t in seconds.items() if " " not in stage or stage.endswith(f" {label}")
    }
    return own if label else dict(seconds)


def _role(name: str) -> str:
    """The first role whose pattern matches; 'other' if none does."""
    return next((label for label, pattern in _ROLES if re.search(pattern, name)), "other")


def _sizes_by_role(outputs: Iterable[Output]) -> dict[str, dict[str, int]]:
    """role -> type name -> bytes, the largest role and type first."""
    by_role: dict[str, dict[str, int]] = {}
    for o in outputs:
        types = by_role.setdefault(_role(o.name), {})
        types[o.type.name] = types.get(o.type.name, 0) + o.nbytes
    order = sorted(by_role, key=lambda r: -sum(by_role[r].values()))
    return {r: dict(sorted(by_role[r].items(), key=lambda item: -item[1])) for r in order}


def _coverage(run: Run, imatrix: Imatrix) -> dict[str, Any]:
    """Layers with what they lack, and how many tokens their experts saw."""
    covered = covered_layers(imatrix, run.source)
    layers = [
        {
            "layer": row.layer,
            "tensors": row.tensors,
            "without": list(row.without_data),
            "experts": row.experts,
            "none": len(row.unseen),
            "few": len(row.undersampled),
            "tokens": [int(f(row.tokens)) for f in (np.min, np.median, np.max)] if row.experts else None,
        }
        for row in covered
    ]
    return {"layers": layers, "remarks": remarks(covered)}


def _headers(plan: Plan) -> dict[str, LoaderTensor]:
    return {o.name: LoaderTensor(tuple(o.shape), o.type) for o in plan.outputs}


def _card(run: Run, plan: Plan) -> dict[str, Any]:
    """What goes to the head of a model card, as far as it is known: never guessed."""
    asked = values_of(merged(ReportRequest(), GivenRecipe(run.path, run.recipe)))
    wanted, metadata = {name: value for name, value in asked.items() if value is not None}, plan.metadata
    known: dict[str, Any] = {
        name: str(metadata[f"general.{key}"]) for name, key in _CARD_KEYS.items() if f"general.{key}" in metadata
    }
    for name in ("languages", "tags"):
        value = metadata.get(f"general.{name}")
        if isinstance(value, list | StringArray | np.ndarray) and len(value):
            known[name] = [str(v) for v in value]
    known["pipeline_tag"] = _pipeline_tag(metadata, known.get("tags", []))
    model = str(run.model)
    if model.startswith("hf:"):
        known["base_model"] = model.removeprefix("hf:").split("@")[0]
    return {**known, **wanted}


def _pipeline_tag(metadata: Mapping[str, Any], tags: Iterable[str]) -> str:
    """The task as the Hub names it: of the source's card, whose tag gguf puts among the tags; else by what the model gives."""
    pooled = f"{metadata.get('general.architecture')}.pooling_type" in metadata
    return next((tag for tag in tags if tag in _TASKS), "feature-extraction" if pooled else "text-generation")
