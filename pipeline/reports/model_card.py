"""The draft of a model card, README.md: to be completed, and uploaded with the file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...formats.loaders import IK_LLAMA_CPP, LLAMA_CPP, OLLAMA, PROGRAMS
from ..common.checksums import NAME as CHECKSUMS
from ..common.figures import bits_per_weight_text, bits_text, size_text
from .markdown import (
    COMPARISON,
    FAILED,
    ROLES,
    comparison,
    markdown,
    measured,
    measured_on,
    recipe_shown,
    role_rows,
    texts_shown,
)
from .multi_output import headings, rows

_TAGS = ("gguf", "quantized")
# tasks of models that give vectors or scores: the option of llama-server for them
_SERVER_OPTIONS = dict.fromkeys(("feature-extraction", "sentence-similarity", "fill-mask"), "--embedding")
_SERVER_OPTIONS |= {"text-ranking": "--reranking"}
NOT_FIT = "**Not fit to be published.**"
REPOSITORY = "OWNER/NAME"  # of the repository that the card is in, which nobody knows before it is sent
_WHERE = re.compile(rf"(-hf |hf\.co/|huggingface\.co/){REPOSITORY}\b")
_WHERE_IT_IS = f"{REPOSITORY} is the repository on the Hub that this card is in."
_TAGS_LEFT_OUT = ("safetensors", "pytorch", "transformers", "fp8", "bf16")  # of the source's tags: no longer true


def card_text(data: dict[str, Any]) -> str:
    """YAML front matter and Markdown. What is unknown is left open, with a comment; nothing is guessed.

    data: the report of a run (`report_json`).
    """
    name = Path(data["files"][0]).name
    bits = f"{bits_per_weight_text(data['bits_per_weight'])}, {size_text(data['file_bytes'])} in {len(data['files'])} file"
    lines = _head(data)
    lines += [f"A GGUF quantisation of {_origin(data)}: {bits}{'s' * (len(data['files']) > 1)}."]
    v = data["validation"]
    if v is not None:
        baseline, result = comparison(data)
        rows = [baseline, (name, *result[1:])]
        lines += ["", "## Quality", "", *markdown(COMPARISON, rows), "", measured(v)]
        lines += [f"Compared with the same model in {v['baseline']}, token by token."]
    else:
        row = (name, size_text(data["file_bytes"]), bits_text(data["bits_per_weight"]))
        lines += ["", "## Size", "", *markdown(COMPARISON[:3], [row])]
    lines += ["", "## What is in it", "", *markdown(ROLES, role_rows(data))]
    lines += _imatrix(data)
    lines += ["", "## Use", "", *_use(data["card"], [data])]
    return "\n".join([*lines, *_how(data), ""])


def multi_card(data: dict[str, Any]) -> str:
    """The same for a repository of several files. data: the report of a run of several (`multi_json`)."""
    quants = data["quants"]
    lines = _head(data)
    lines += [f"GGUF quantisations of {_origin(data)}.", "", "## Files", ""]
    lines += markdown((*headings(data), "loads in"), [(*row, _loads_in(q)) for row, q in zip(rows(data), quants, strict=True)])
    v = quants[0]["validation"]
    if v is not None:
        lines += ["", f"{measured_on(v)} Compared with the same model in {v['baseline']}, token by token."]
    lines += [*_imatrix(data), "", f"sha256 of all files: `{CHECKSUMS}` (`sha256sum -c {CHECKSUMS}`)."]
    lines += ["", "## Use", "", *_choice(quants), *_use(data["card"], quants)]
    return "\n".join([*lines, *_how(data), ""])


def for_repository(text: str, repo: str) -> str:
    """A card with the repository that it is sent to in its commands."""
    return _WHERE.sub(rf"\g<1>{repo}", text).replace(f"\n\n{_WHERE_IT_IS}", "")


def _head(data: dict[str, Any]) -> list[str]:
    """Front matter, title, and what stands against publishing."""
    lines = [*_front(data), "", f"# {data['name']} GGUF", ""]
    if data["failures"]:
        lines += [f"> {NOT_FIT} {FAILED} {'; '.join(data['failures'])}.", ""]
    return lines


def _origin(data: dict[str, Any]) -> str:
    base = data["card"].get("base_model")
    origin = f"[{base}](https://huggingface.co/{base})" if base else f"`{data['source_name']}`"
    return f"{origin} ({data['architecture']})"


def _imatrix(data: dict[str, Any]) -> list[str]:
    if not data["imatrix"]:
        return []
    tokens = f" ({data['imatrix_tokens']:,} tokens)" if data["imatrix_tokens"] else ""
    without = [q["label"] for q in data.get("quants", []) if not q["imatrix"]]
    but = f", all but {', '.join(without)}" if without else ""
    return ["", f"Quantised with an importance matrix from {texts_shown(data)}{tokens}{but}."]


def _loads_in(data: dict[str, Any]) -> str:
    return ", ".join(program for program, why in data["loaders"].items() if not why) or "ggufmill only"


def _how(data: dict[str, Any]) -> list[str]:
    """How it was made: the recipe, and the rules that were searched for."""
    lines = ["", "## How it was made", "", f"With ggufmill {data['version']}. The recipe, `{data['recipe']}`:", ""]
    lines += ["```toml", recipe_shown(data), "```", "", "```sh", f"ggufmill run {data['recipe']}", "```", ""]
    for one in data.get("quants", [data]):
        if one["search"] is not None:
            what = f"The rules that it found{' for ' + one['label'] if one['label'] else ''}:"
            lines += [what, "", "```", one["search"]["recipe"].rstrip(), "```", ""]
    return [
        *lines,
        f"The same recipe, source and version give the same bytes. More figures and plots: `{Path(data['report']).name}`.",
    ]


def _choice(quants: Sequence[dict[str, Any]]) -> list[str]:
    """Which file to take: the largest that fits, and what the smallest costs, where that was measured."""
    by_size = sorted(quants, key=lambda data: data["file_bytes"])
    small, large = by_size[0], by_size[-1]
    if len(quants) < 2 or small["file_bytes"] == large["file_bytes"]:
        return []

    def named(data: dict[str, Any]) -> str:
        return f"`{Path(data['files'][0]).name}` ({size_text(data['file_bytes'])})"

    text = f"Take the largest file that fits your memory with room for the context: from {named(large)} down to {named(small)}"
    least, most = ((data["validation"] or {}).get("kld_mean") or 0.0 for data in (large, small))
    if most > least > 0:
        text += f", whose KL divergence from the baseline is {most / least:.1f} times as large"
    return [f"{text}.", ""]


def _use(card: dict[str, Any], files: Sequence[dict[str, Any]]) -> list[str]:
    """What runs the files, and what does not load them, as far as `loader_problems` knows. files: the report of each."""
    several, refused = len(files) > 1, files[0]["loaders"]
    loads = {program: [data for data in files if not data["loaders"][program]] for program in PROGRAMS}
    if several:  # the table of the files says which
        lines = [f"{program} loads none of them." for program in (LLAMA_CPP, IK_LLAMA_CPP) if not loads[program]]
    else:
        lines = [f"{p} does not load it: {'; '.join(refused[p])}." for p in (LLAMA_CPP, IK_LLAMA_CPP) if refused[p]]
    if not loads[LLAMA_CPP]:
        lines.append("Neither do Ollama and LM Studio, which run models with llama.cpp.")
    elif not several and refused[OLLAMA]:
        lines.append(f"Ollama does not load it: {'; '.join(refused[OLLAMA])}.")
    option = _SERVER_OPTIONS.get(card.get("pipeline_tag", ""))
    serve = f"llama-server {option}" if option else "llama-server"

    def name(data: dict[str, Any]) -> str:
        return Path(data["files"][0]).name

    def tag(data: dict[str, Any]) -> str:
        return f":{data['label']}" if data["label"] else ""

    uses = []
    if loads[LLAMA_CPP]:
        one = loads[LLAMA_CPP][0]
        uses.append((LLAMA_CPP, [f"{serve} -hf {REPOSITORY}{tag(one)}", f"{serve} -m {name(one)}"]))
    if loads[IK_LLAMA_CPP]:
        uses.append((IK_LLAMA_CPP, [f"{serve} -m {name(loads[IK_LLAMA_CPP][0])}"]))
    if loads[OLLAMA]:
        uses.append(("Ollama", [f"ollama run hf.co/{REPOSITORY}{tag(loads[OLLAMA][0])}"]))
    if loads[LLAMA_CPP]:
        uses.append(("LM Studio", [f"lms get https://huggingface.co/{REPOSITORY}"]))
    file = name(files[0])
    own = [f'ggufmill embed {file} -p "..."'] if option else [f'ggufmill generate {file} -p "..."', f"ggufmill serve {file}"]
    for program, commands in [*uses, ("ggufmill", own)]:
        lines += ["", f"{program}:", "", "```sh", *commands, "```"]
    if loads[LLAMA_CPP]:
        lines += ["", _WHERE_IT_IS]
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
