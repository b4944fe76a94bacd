"""Where a figure comes from, shown in short; and an earlier result beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import byte_progress, gib, table

if TYPE_CHECKING:
    from ...runtime import Model


def origin(model: Model, full: bool) -> dict[str, Any]:
    """`describe_model`, with a bar over what is read of large files."""
    from ...runtime.evaluate.provenance import describe_model

    total = sum(path.stat().st_size for path in model.source.files)
    with byte_progress(total if full else 0, "checksum", quiet=not full or total < 1 << 30) as progress:
        return describe_model(model, full, progress)


def origin_lines(about: dict[str, Any], label: str) -> list[tuple[str, str]]:
    """Rows of a table: what a person needs to see of a model's origin."""
    digests = [f["digest"] for f in about["files"] if not f["name"].endswith(".json")]
    shown = digests[0] if len(digests) == 1 else f"{len(digests)} files, the first {digests[0]}" if digests else "none"
    types = ", ".join(f"{name} {size / about['nbytes']:.0%}" for name, size in list(about["types"].items())[:3])
    rows = [
        (label, f"{about['path']}"),
        ("", f"{gib(about['nbytes'])}, {about['bits_per_weight']:.3f} bits per weight: {types}"),
        ("", f"digest {shown}"),
    ]
    recipe = [line for line in (about["recipe"] or "").splitlines() if line.strip()]
    if recipe:
        rows.append(("", f"recipe: {recipe[0]}" + (f" and {len(recipe) - 1} more lines" if len(recipe) > 1 else "")))
    if about["imatrix"]:
        rows.append(("", "imatrix: " + ", ".join(f"{key} {value}" for key, value in about["imatrix"].items())))
    return rows


def setting_text(settings: dict[str, Any]) -> str:
    keys = ("threads", "batch", "ubatch", "cache_k", "cache_v", "flash", "mla", "repack", "expert_reduction", "exact")
    return ", ".join(f"{key} {_setting(settings[key])}" for key in keys if settings.get(key) is not None)


def _setting(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def read_result(path: Path) -> dict[str, Any]:
    """An earlier result as `perplexity --json` wrote it. Raises PlanError for anything else."""
    from ...formats import PlanError

    try:
        found: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    losses = found.get("window_losses") if isinstance(found, dict) else None
    numbers = [found.get("perplexity"), *(losses or [])] if isinstance(found, dict) and isinstance(losses or [], list) else []
    fits = all(type(number) in (int, float) and abs(number) < 1e300 for number in numbers)
    if not numbers or not fits or "tokens_xxh3" not in found:
        raise PlanError(f"{path} is not a result of `ggufmill perplexity --json`")
    return found


def comparison_text(ours: dict[str, Any], other: dict[str, Any], verdict: dict[str, Any]) -> str:
    """Whether the two can be compared, the ratio if so, and what else differs."""
    if not verdict["comparable"]:
        return "not comparable with the earlier result: " + "; ".join(verdict["obstacles"])
    lines = [f"earlier result: perplexity {other['perplexity']:.4f}, this one {ours['perplexity']:.4f}: the same predictions"]
    if "ratio" in verdict:
        error = verdict["ratio_error"]
        lines[0] += f", ratio {verdict['ratio']:.6f}" + (f" ± {error:.6f}" if error is not None else "")
    known = {name: pair for name, pair in verdict["differences"].items() if not name.startswith("about.recipe")}
    rows = [(name, _brief(a), _brief(b)) for name, (a, b) in known.items()]
    return "\n".join([*lines, "", table(("differs", "here", "there"), rows)] if rows else [*lines, "nothing else differs"])


def _brief(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 50 else text[:47] + "..."
