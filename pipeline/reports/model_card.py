"""The draft of a model card, README.md: whoever uploads the file completes it and puts it beside the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...formats.loaders import IK_LLAMA_CPP, LLAMA_CPP
from ..common.messages import gib
from .markdown import COMPARISON, FAILED, ROLES, comparison, markdown, measured, recipe_shown, role_rows, texts_shown

_TAGS = ("gguf", "quantized")
# tasks of models that give vectors or scores: the option of llama-server for them
_SERVER_OPTIONS = dict.fromkeys(("feature-extraction", "sentence-similarity", "fill-mask"), "--embedding")
_SERVER_OPTIONS |= {"text-ranking": "--reranking"}
_TAGS_LEFT_OUT = ("safetensors", "pytorch", "transformers", "fp8", "bf16")  # of the source's tags: no longer true


def card_text(data: dict[str, Any]) -> str:
    """YAML front matter and Markdown. What is unknown is left open, with a comment; nothing is guessed.

    data: the report of a run (`report_json`).
    """
    card = data["card"]
    name = Path(data["files"][0]).name
    base = card.get("base_model")
    lines = [*_front(data), "", f"# {data['name']} GGUF", ""]
    if data["failures"]:
        lines += [f"> **Not fit to be published.** {FAILED} {'; '.join(data['failures'])}.", ""]
    origin = f"[{base}](https://huggingface.co/{base})" if base else f"`{data['source_name']}`"
    bits = f"{data['bits_per_weight']:.3f} bits per weight, {gib(data['file_bytes'])} in {len(data['files'])} file"
    lines += [f"A GGUF quantisation of {origin} ({data['architecture']}): {bits}{'s' * (len(data['files']) > 1)}."]
    v = data["validation"]
    if v is not None:
        baseline, result = comparison(data)
        rows = [baseline, (name, *result[1:])]
        lines += ["", "## Quality", "", *markdown(COMPARISON, rows), "", measured(v)]
        lines += [f"Compared with the same model in {v['baseline']}, token by token."]
    else:
        row = (name, gib(data["file_bytes"]), f"{data['bits_per_weight']:.3f}")
        lines += ["", "## Size", "", *markdown(COMPARISON[:3], [row])]
    lines += ["", "## What is in it", "", *markdown(ROLES, role_rows(data))]
    if data["imatrix"]:
        tokens = f" ({data['imatrix_tokens']:,} tokens)" if data["imatrix_tokens"] else ""
        lines += ["", f"Quantised with an importance matrix from {texts_shown(data)}{tokens}."]
    lines += ["", "## Use", "", *_use(data)]
    lines += ["", "## How it was made", "", f"With ggufmill {data['version']}. The recipe, `{data['recipe']}`:", ""]
    lines += ["```toml", recipe_shown(data), "```", "", "```sh", f"ggufmill run {data['recipe']}", "```", ""]
    if data["search"] is not None:
        lines += ["The rules that it found:", "", "```", data["search"]["recipe"].rstrip(), "```", ""]
    lines += [
        f"The same recipe, source and version give the same bytes. More figures and plots: `{Path(data['report']).name}`.",
        "",
    ]
    return "\n".join(lines)


def _use(data: dict[str, Any]) -> list[str]:
    """What runs the files, and what does not load them, as far as `loader_problems` knows."""
    name, refused = Path(data["files"][0]).name, data["loaders"]
    lines = [f"{program} does not load it: {'; '.join(why)}." for program, why in refused.items() if why]
    if refused[LLAMA_CPP]:
        lines.append("Neither do Ollama and LM Studio, which run models with llama.cpp.")
    option = _SERVER_OPTIONS.get(data["card"].get("pipeline_tag", ""))
    serve = f"llama-server {option}" if option else "llama-server"
    uses = []
    if not refused[LLAMA_CPP]:
        uses.append((LLAMA_CPP, [f"{serve} -hf OWNER/NAME", f"{serve} -m {name}"]))
    if not refused[IK_LLAMA_CPP]:
        uses.append((IK_LLAMA_CPP, [f"{serve} -m {name}"]))
    if not refused[LLAMA_CPP]:
        if len(data["files"]) == 1:  # Ollama takes no split models from the Hub
            uses.append(("Ollama", ["ollama run hf.co/OWNER/NAME"]))
        uses.append(("LM Studio", ["lms get https://huggingface.co/OWNER/NAME"]))
    own = [f'ggufmill embed {name} -p "..."'] if option else [f'ggufmill generate {name} -p "..."', f"ggufmill serve {name}"]
    for program, commands in [*uses, ("ggufmill", own)]:
        lines += ["", f"{program}:", "", "```sh", *commands, "```"]
    if not refused[LLAMA_CPP]:
        lines += ["", "OWNER/NAME is the repository on the Hub that this card is in."]
    return lines if lines[0] else lines[1:]


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
    other_tags = [tag for tag in card.get("tags", []) if tag.lower() not in (*_TAGS_LEFT_OUT, *_TAGS, card.get("pipeline_tag"))]
    imatrix = ["imatrix"] if data["imatrix"] else []
    task = card.get("pipeline_tag")
    lines += [f"pipeline_tag: {json.dumps(task)}"] if task else []
    lines += ["library_name: gguf", "tags:", *(f"- {json.dumps(tag)}" for tag in [*_TAGS, *imatrix, *other_tags]), "---"]
    return lines
