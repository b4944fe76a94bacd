"""Where figures come from, as rows of a table; a result beside an earlier one."""

from __future__ import annotations

import json
from typing import Any

from ...pipeline.common.figures import bits_per_weight_text, error_text, file_bytes_of, share_text, size_text
from ...runtime.settings import CACHE_SETTINGS
from .console import table


def origin_rows(about: dict[str, Any], label: str) -> list[tuple[str, str]]:
    """A model's path, size, types, digest, recipe and imatrix, under a label."""
    digests = [f["digest"] for f in about["files"] if not f["name"].endswith(".json")]
    shown = digests[0] if len(digests) == 1 else f"{len(digests)} files, the first {digests[0]}" if digests else "none"
    types = ", ".join(f"{name} {share_text(size / about['nbytes'], 0)}" for name, size in list(about["types"].items())[:3])
    rows = [
        (label, f"{about['path']}"),
        ("", f"{size_text(file_bytes_of(about))}, {bits_per_weight_text(about['bits_per_weight'])}: {types}"),
        ("", f"digest {shown}"),
    ]
    recipe = [line for line in (about["recipe"] or "").splitlines() if line.strip()]
    if recipe:
        rows.append(("", f"recipe: {recipe[0]}" + (f" and {len(recipe) - 1} more lines" if len(recipe) > 1 else "")))
    if about["imatrix"]:
        rows.append(("", "imatrix: " + ", ".join(f"{key} {value}" for key, value in about["imatrix"].items())))
    return rows


def stored_rows(about: dict[str, Any], label: str) -> list[tuple[str, str]]:
    """A file of predictions under a label, and the model that it is of if it says so."""
    rows = [
        (label, f"{about['path']}"),
        ("", f"{about['logits']}, {about['windows']} windows, {size_text(about['files'][0]['nbytes'])}"),
        ("", f"digest {about['files'][0]['digest']}"),
    ]
    return rows + (origin_rows(about["model"], "  of") if "model" in about else [])


def settings_text(settings: dict[str, Any]) -> str:
    """'threads 2, batch 2048, ...'."""
    keys = ("threads", "batch", "ubatch", *CACHE_SETTINGS, "flash", "mla", "repack", "expert_reduction", "exact", "lora")
    return ", ".join(f"{key} {_setting(settings[key])}" for key in keys if settings.get(key) is not None)


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def comparison_text(ours: dict[str, Any], other: dict[str, Any], verdict: dict[str, Any]) -> str:
    """Whether the two can be compared, the ratio if so, and what else differs."""
    if not verdict["comparable"]:
        return "not comparable with the earlier result: " + "; ".join(verdict["obstacles"])
    lines = [f"earlier result: perplexity {other['perplexity']:.4f}, this one {ours['perplexity']:.4f}: the same predictions"]
    if "ratio" in verdict:
        error = verdict["ratio_error"]
        lines[0] += f", ratio {error_text(verdict['ratio'], error, 6)}"
    differences = {name: pair for name, pair in verdict["differences"].items() if not name.startswith("about.recipe")}
    rows = [(name, _brief(a), _brief(b)) for name, (a, b) in differences.items()]
    return "\n".join([*lines, "", table(("differs", "here", "there"), rows)] if rows else [*lines, "nothing else differs"])


def _brief(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 50 else text[:47] + "..."
