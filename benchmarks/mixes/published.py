"""Mixes of types that others have published, at equal size against those that `search` finds.

\b
    python benchmarks/mixes/published.py --out benchmarks/results/published.json
    python benchmarks/mixes/published.py --model out/slice --by covariance --windows 4 --chunks 4 --skip text --out slice.json

A published mix says which type each tensor of a large model has. Here it is applied to a model at hand: a tensor gets the type
that the tensor of its kind has at the same relative depth among the layers with that kind (of 58 layers with experts, layer 1
of 3 stands for the first 19, and gets the type of the middle one). Interleaved types stand as the plain ones that have
their values. For the size that the file then has, `search` chooses types by the importance matrix (with and without
measured sensitivities) and by the curvature or the covariances. Everything is encoded with the same importance matrix, the
published mix and what the curvature chose also with the curvature, and judged on held-out text against bf16. Needs torch for
the curvature. One file at a time is on the disk beside bf16 and the statistics, so that a slice of a large model can be judged
(`benchmarks/slices.py`).

OUT.json keeps what was measured: the same command again measures what is missing.

Sources: Thireus' recipes are files of github.com/Thireus/GGUF-Tool-Suite (recipe_examples), whose ranges of layers are given
here. Unsloth's DeepSeek-R1 files were logged with how many tensors have which type (gpustack issue 1107, ik_llama.cpp pull
request 259); which tensors these are follows from the counts and from what their authors said of dense layers, shared experts
and the first down-projections. ubergarm's is the recipe `deepseek-r1-0528-iq2_k_r4` of this program.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

import ggufmill
from ggufmill.formats import open_gguf
from ggufmill.recipes import FOLDER


class Mix(NamedTuple):
    """A published mix.

    layers  of its model, of which the first `dense` have no experts
    types   regular expression of a kind of tensor -> its type, or types with their layers ('iq3_k:32-33,35 iq2_k:24 iq1_m', the
            last one for all other layers); the first that matches counts
    """

    source: str
    layers: int
    dense: int
    types: Mapping[str, str]


_SHARED_8 = {"output|token_embd": "q8_0", "attn_k_b": "q8_0"}
MIXES = {
    "Thireus R1 2.12": Mix(
        "DeepSeek-R1-0528, 2.1169 bits, perplexity 4.0294",
        61,
        3,
        {
            **_SHARED_8,
            "attn_.*": "iq5_ks",
            "ffn_down_exps": "iq3_k:32-33,35-36,39-41,44,48 iq2_k:24,34,37-38,42-43,45-47,49-51,53,55 iq1_m",
            "ffn_(up|gate)_exps": "iq2_k:35,39-40,42-48,50-51,53-55 iq1_m",
            "ffn_.*": "q8_0",
        },
    ),
    "Thireus R1 3.10": Mix(
        "DeepSeek-R1-0528, 3.0999 bits, perplexity 3.3467",
        61,
        3,
        {
            **_SHARED_8,
            "attn_.*": "iq4_xs",
            "ffn_down_shexp": "q8_0:11,17,19-24,26-27,29-31,33-34,36,39,44,60 iq5_k:9,13,18,59 iq6_k",
            "ffn_up_shexp": "q8_0:6,15,18,21-24,26-30,32-34,37,39,41,50,54,60 iq5_k:7,57,59 iq6_k",
            "ffn_gate_shexp": "q8_0:16,18-20,23-26,29,33-34,41-42,44-52,54,56-58,60 iq5_k:6,10,22,59 iq6_k",
            "ffn_down_exps": "iq4_ks:32-42,44-49,51 iq3_k:11-12,14,18,20-31,43,50,52-58,60 iq2_k:10,16,19,59 iq1_m",
            "ffn_(up|gate)_exps": (
                "iq4_ks:44,47,55 iq3_k:24-25,27,31-43,45-46,48-54,56-58,60 iq2_k:5,12-16,18,20-22,26,28-30,59 iq1_m"
            ),
            "ffn_down": "q8_0:0 iq6_k:1 iq5_k",
            "ffn_gate": "q8_0:2 iq6_k",
            "ffn_up": "iq5_k:1 iq6_k",
        },
    ),
    "Thireus R1 4.51": Mix(
        "DeepSeek-R1-0528, 4.5065 bits, perplexity 3.2350",
        61,
        3,
        {
            **_SHARED_8,
            "attn_.*": "iq5_ks",
            "ffn_down_exps": "iq5_ks:32-49,51 iq4_ks",
            "ffn_(up|gate)_exps": "iq5_ks:43-44,47-48,50-51,53,55 iq4_ks",
            "ffn_.*": "q8_0",
        },
    ),
    "Unsloth R1 UD-IQ1_S": Mix(
        "DeepSeek-R1, 130.6 GiB, 1.67 bits",
        61,
        3,
        {
            "token_embd": "q4_K",
            "output": "q6_K",
            "attn_kv_.*|attn_k_b|attn_v_b": "q6_K",
            "attn_.*": "q4_K",
            "ffn_down_exps": "iq2_xxs:3-8 iq1_s",
            "ffn_(up|gate)_exps": "iq1_s",
            "ffn_down.*": "q6_K",
            "ffn_.*_shexp": "q5_K",
            "ffn_.*": "q4_K",
        },
    ),
    "Unsloth R1 UD-Q2_K_XL": Mix(
        "DeepSeek-R1, 212 GB, 2.51 bits",
        61,
        3,
        {
            "token_embd": "q4_K",
            "output": "q6_K",
            "attn_kv_.*|attn_k_b|attn_v_b": "q6_K",
            "attn_.*": "q4_K",
            "ffn_down_exps": "q3_K:3-5 q2_K",
            "ffn_(up|gate)_exps": "q2_K",
            "ffn_down.*": "q6_K",
            "ffn_.*": "q4_K",
        },
    ),
    "ubergarm R1 IQ2_K": Mix(
        "DeepSeek-R1-0528, 219 GiB, 2.80 bits",
        61,
        3,
        {
            "attn_k_b": "q5_0",
            "ffn_down_exps": "iq3_k",
            "ffn_(up|gate)_exps": "iq2_k",
            "ffn_(up|gate)_shexp": "iq4_ks",
            ".*": "iq5_ks",
        },
    ),
}


def _layers(text: str) -> Iterator[int]:
    """'3-5,7' -> 3, 4, 5, 7."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def type_at(mix: Mix, kind: str, depth: float) -> str:
    """The type of a kind of tensor ('ffn_down_exps') at a relative depth, from 0 to 1, among the layers that have that kind."""
    text = next(types for pattern, types in mix.types.items() if re.fullmatch(pattern, kind))
    has_experts = "exp" in kind
    is_dense = kind.startswith("ffn_") and not has_experts
    start, stop = (mix.dense, mix.layers) if has_experts else (0, mix.dense) if is_dense else (0, mix.layers)
    layer = min(start + int(depth * (stop - start)), stop - 1)
    for part in text.split():
        name, _, layers = part.partition(":")
        if not layers or layer in _layers(layers):
            return name
    raise AssertionError(text)


def recipe_of(mix: Mix, tensors: Mapping[str, Any]) -> str:
    """The mix as a recipe for these tensors, of which those that are quantised have more than one dimension."""
    by_kind: dict[str, list[tuple[int, str]]] = {}
    lines = []
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if len(tensor.shape) < 2 or "ffn_gate_inp" in name:
            continue
        if match:
            by_kind.setdefault(match[2], []).append((int(match[1]), name))
        elif name in ("token_embd.weight", "output.weight"):
            lines.append(f"^{re.escape(name)}$={type_at(mix, name.removesuffix('.weight'), 0)}")
    for kind, found in by_kind.items():
        for i, (_, name) in enumerate(sorted(found)):
            lines.append(f"^{re.escape(name)}$={type_at(mix, kind, (i + 0.5) / len(found))}")
    return "\n".join(lines) + "\n"


class Work:
    """What is made for one model, in a folder. by: 'curvature' or 'covariance'; effort: in encoding with it."""

    def __init__(self, model: Path, folder: Path, by: str, effort: int, windows: int, chunks: int):
        self.text, self.folder, self.chunks = model / "calibration.txt", folder, chunks
        self.heldout = model / "heldout.txt"
        self.bf16, self.imatrix, statistics = folder / "bf16.gguf", folder / "all.imatrix", folder / f"all.{by}"
        if not self.bf16.exists():
            ggufmill.convert_model(model, self.bf16)
        if not statistics.exists():
            ggufmill.compute_imatrix(self.bf16, self.text, self.imatrix, chunks=windows, force=True, **{by: statistics})
        self.tensors, self.moments = open_gguf(self.bf16).tensors, {by: statistics, "effort": effort}

    def judged(self, name: str, recipe: Path, **how: Any) -> dict[str, Any]:
        """KL divergence of the file that a recipe makes, encoded with the importance matrix, and what else is given."""
        path = self.folder / f"{name}.gguf"
        plan = ggufmill.quantize_model(self.bf16, path, recipe=recipe, imatrix=self.imatrix, force=True, **how).plan
        row = ggufmill.evaluate_models(
            [path],
            self.heldout,
            against=self.bf16,
            out=self.folder / "judged",
            chunks=self.chunks,
            noise_floor=False,
            no_plot=True,
        ).rows[0]
        nbytes = path.stat().st_size
        if nbytes != plan.files[0].nbytes:
            raise AssertionError(f"{path} has {nbytes} bytes, and {plan.files[0].nbytes} were said")
        path.unlink()
        return {"kld": row.kld, "error": row.kld_error, "nbytes": nbytes}

    def searched(self, name: str, nbytes: int, **how: Any) -> Path:
        """The recipe for a file of at most this size that `search` finds."""
        recipe = self.folder / f"{name}.txt"
        label = "-".join(sorted(how)) or "importance"
        state = self.folder / f"{label}.json"
        ggufmill.search_recipe(self.bf16, recipe, target_size=nbytes, imatrix=self.imatrix, state=state, force=True, **how)
        return recipe


def compare(work: Work, by: str, name: str, mix: Mix, skip: str | None, rows: dict[str, Any]) -> None:
    """Adds to `rows` what is missing: a mix, and the searched recipes of its size, without labels that `skip` matches."""
    short = re.sub(r"\W+", "-", name.lower())
    published = work.folder / f"{short}.txt"
    published.write_text(recipe_of(mix, work.tensors), encoding="utf-8")

    def is_wanted(label: str) -> bool:
        return label not in rows and not (skip and re.search(skip, label))

    if is_wanted("published"):
        rows["published"] = work.judged(short, published)
    ways: dict[str, dict[str, Any]] = {"importance": {}, "importance and text": {"text": work.text}, by: work.moments}
    encoded = {label: f"{label}, encoded with the {by}" for label in ("published", by)}
    recipes = {"published": published}
    for label, how in ways.items():
        if is_wanted(label) or is_wanted(encoded.get(label, label)):
            of = f"{short}-{re.sub(r'[^a-z]+', '-', label)}"
            recipes[label] = work.searched(of, rows["published"]["nbytes"], **how)
            if is_wanted(label):
                rows[label] = work.judged(of, recipes[label])
    for of, label in encoded.items():
        if is_wanted(label):
            rows[label] = work.judged(f"{short}-{of}-encoded", recipes[of], **work.moments)


@click.command(help=__doc__)
@click.option("--model", type=click.Path(exists=True, path_type=Path), default=FOLDER / "demo", help="Model with experts.")
@click.option("--work", type=click.Path(path_type=Path), default=None, help="Keep bf16, statistics and recipes in this folder.")
@click.option(
    "--by", type=click.Choice(["curvature", "covariance"]), default="curvature", help="The statistic beside importance."
)
@click.option("--effort", default=1, help="In encoding with it.")
@click.option("--windows", default=40, help="Windows of 512 tokens for statistics.")
@click.option("--chunks", default=48, help="Windows of held-out text.")
@click.option("--mix", "chosen", type=click.Choice(list(MIXES)), multiple=True, help="Only these mixes.")
@click.option("--skip", metavar="REGEX", help="Leave out what has a match of this in its label, such as 'text|encoded'.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    model: Path,
    work: Path | None,
    by: str,
    effort: int,
    windows: int,
    chunks: int,
    chosen: tuple[str, ...],
    skip: str | None,
    out: Path,
) -> None:
    kept: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        at_hand = Work(model, folder, by, effort, windows, chunks)
        weights = sum(math.prod(each.shape) for each in at_hand.tensors.values())
        for name in chosen or MIXES:
            rows = kept.setdefault(name, {}).setdefault("rows", {})
            compare(at_hand, by, name, MIXES[name], skip, rows)
            kept[name]["bits"] = 8 * rows["published"]["nbytes"] / weights
            out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            figures = ", ".join(f"{label} {row['kld']:.4f} ± {row['error']:.4f}" for label, row in rows.items())
            click.echo(f"{name}, {kept[name]['bits']:.2f} bits here: {figures}")


if __name__ == "__main__":
    main()
