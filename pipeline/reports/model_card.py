"""The draft of a model card, README.md: whoever uploads the file completes it and puts it beside the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...formats import TYPES
from ..common.messages import gib
from .markdown import COMPARISON, FAILED, ROLES, comparison, markdown, measured, recipe_shown, role_rows, texts_shown

_LAST_SHARED = 40  # type ids up to here are llama.cpp's; those of ik_llama.cpp are above (docs/formats/types.md)
_TAGS = ("gguf", "quantized")
_TAGS_LEFT_OUT = ("safetensors", "pytorch", "transformers", "fp8", "bf16")  # of the source's tags: no longer true


def card_text(data: dict[str, Any]) -> str:
    """YAML front matter and Markdown. What is unknown is left open, with a comment; nothing is guessed.

    data: the report of a run (`report_json`).
    """
    card = data["card"]
    name = Path(data["files"][0]).name
    base = card.get("base_model")
    lines = [*_front(data), "", f"# {Path(data['recipe']).stem}", ""]
    if data["failures"]:
        lines += [f"> **Not fit to be published.** {FAILED} {'; '.join(data['failures'])}.", ""]
    origin = f"[{base}](https://huggingface.co/{base})" if base else f"`{data['source_name']}`"
    bits = f"{data['bits_per_weight']:.3f} bits per weight, {gib(data['file_bytes'])} in {len(data['files'])} file"
    lines += [f"A GGUF quantisation of {origin} ({data['architecture']}): {bits}{'s' * (len(data['files']) > 1)}."]
    v = data["validation"]
    if v is not None:
        lines += ["", "## Quality", "", *markdown(COMPARISON, comparison(data)), "", measured(v)]
        lines += [f"Compared with the same model in {v['baseline']}, token by token."]
    lines += ["", "## What is in it", "", *markdown(ROLES, role_rows(data))]
    if data["imatrix"]:
        tokens = f" ({data['imatrix_tokens']:,} tokens)" if data["imatrix_tokens"] else ""
        lines += ["", f"Quantised with an importance matrix from {texts_shown(data)}{tokens}."]
    fork_types = [name for name in data["types"] if TYPES[name].id > _LAST_SHARED]
    if fork_types:
        lines += ["", f"{', '.join(fork_types)}: known to ik_llama.cpp and ggufmill, not to llama.cpp."]
    lines += ["", "## Use", "", "```sh", f'ggufmill generate {name} -p "..."', f"ggufmill serve {name}", "```"]
    lines += ["", "## How it was made", "", f"With ggufmill {data['version']}. The recipe, `{data['recipe']}`:", ""]
    lines += ["```toml", recipe_shown(data), "```", "", "```sh", f"ggufmill run {data['recipe']}", "```", ""]
    if data["search"] is not None:
        lines += ["The rules that it found:", "", "```", data["search"]["recipe"].rstrip(), "```", ""]
    lines += [
        f"The same recipe, source and version give the same bytes. More figures and plots: `{Path(data['report']).name}`.",
        "",
    ]
    return "\n".join(lines)


def _front(data: dict[str, Any]) -> list[str]:
    """The lines of the front matter; strings are written as JSON, which is valid YAML."""
    card = data["card"]
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
    other_tags = [tag for tag in card.get("tags", []) if tag.lower() not in (*_TAGS_LEFT_OUT, *_TAGS)]
    imatrix = ["imatrix"] if data["imatrix"] else []
    lines += ["library_name: ggufmill", "tags:", *(f"- {json.dumps(tag)}" for tag in [*_TAGS, *imatrix, *other_tags]), "---"]
    return lines
