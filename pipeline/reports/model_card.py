"""The draft of a model card: what a person who uploads the file edits and puts beside it as README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...formats import TYPES
from ..common.formatting import gib
from .markdown import COMPARISON, FAILED, ROLES, comparison, markdown, measured, recipe_shown, role_rows, texts_shown

_LAST_SHARED = 40  # type ids up to here are those of llama.cpp, the fork's own begin above (FORMATS A)
_TAGS = ("gguf", "quantized")
_NOT_OURS = ("safetensors", "pytorch", "transformers", "fp8", "bf16")  # of the source's tags: no longer true


def card_text(found: dict[str, Any]) -> str:
    """YAML front matter and Markdown. What is not known is left for the uploader, in words; nothing is guessed."""
    card = found["card"]
    name = Path(found["files"][0]).name
    base = card.get("base_model")
    lines = [*_front(found), "", f"# {Path(found['recipe']).stem}", ""]
    if found["failures"]:
        lines += [f"> **Not fit to be published.** {FAILED} {'; '.join(found['failures'])}.", ""]
    origin = f"[{base}](https://huggingface.co/{base})" if base else f"`{found['source_name']}`"
    bits = f"{found['bits_per_weight']:.3f} bits per weight, {gib(found['file_bytes'])} in {len(found['files'])} file"
    lines += [f"A GGUF quantisation of {origin} ({found['architecture']}): {bits}{'s' * (len(found['files']) > 1)}."]
    v = found["validation"]
    if v is not None:
        lines += ["", "## Quality", "", *markdown(COMPARISON, comparison(found)), "", measured(v)]
        lines += [f"Compared with the same model in {v['baseline']}, token by token."]
    lines += ["", "## What is in it", "", *markdown(ROLES, role_rows(found))]
    if found["imatrix"]:
        tokens = f" ({found['imatrix_tokens']:,} tokens)" if found["imatrix_tokens"] else ""
        lines += ["", f"Quantised with an importance matrix from {texts_shown(found)}{tokens}."]
    ours = [name for name in found["types"] if TYPES[name].id > _LAST_SHARED]
    if ours:
        lines += ["", f"{', '.join(ours)}: known to ik_llama.cpp and ggufmill, not to llama.cpp."]
    lines += ["", "## Use", "", "```sh", f'ggufmill generate {name} -p "..."', f"ggufmill serve {name}", "```"]
    lines += ["", "## How it was made", "", f"With ggufmill {found['version']}. The recipe, `{found['recipe']}`:", ""]
    lines += ["```toml", recipe_shown(found), "```", "", "```sh", f"ggufmill run {found['recipe']}", "```", ""]
    if found["search"] is not None:
        lines += ["The rules that it found:", "", "```", found["search"]["recipe"].rstrip(), "```", ""]
    lines += [
        f"The same recipe, source and version give the same bytes. More figures and plots: `{Path(found['report']).name}`.",
        "",
    ]
    return "\n".join(lines)


def _front(found: dict[str, Any]) -> list[str]:
    """Strings are written as JSON, which YAML reads as they are meant."""
    card = found["card"]
    lines = ["---"]
    if card.get("base_model"):
        lines += [f"base_model: {json.dumps(card['base_model'])}", "base_model_relation: quantized"]
    else:
        lines += ["# base_model: OWNER/NAME   ([report] base_model in the recipe)"]
    if card.get("license"):
        lines += [f"{key}: {json.dumps(card[key])}" for key in ("license", "license_name", "license_link") if key in card]
    else:
        lines += ["# license: the base model's card has it, this program did not find it"]
    if card.get("languages"):
        lines += ["language:", *(f"- {json.dumps(tag)}" for tag in card["languages"])]
    if card.get("quantized_by"):
        lines += [f"quantized_by: {json.dumps(card['quantized_by'])}"]
    kept = [tag for tag in card.get("tags", []) if tag.lower() not in (*_NOT_OURS, *_TAGS)]
    imatrix = ["imatrix"] if found["imatrix"] else []
    lines += ["library_name: ggufmill", "tags:", *(f"- {json.dumps(tag)}" for tag in [*_TAGS, *imatrix, *kept]), "---"]
    return lines
