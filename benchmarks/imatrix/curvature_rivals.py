"""Files of other quantisers for curvature.py --made: equal types, calibration text and windows, on the processor.

\\b
    git clone https://github.com/IST-DASLab/gptq-gguf-toolkit
    python benchmarks/imatrix/curvature_rivals.py second/ q4_K q4_K.gguf gptq.gguf --gptq gptq-gguf-toolkit
    python benchmarks/imatrix/curvature_rivals.py second/ q2_K q2_K.gguf rounded.gguf --autoround 200
    python benchmarks/imatrix/curvature.py --model second/ --types q4_K --made q4_K/GPTQ=gptq.gguf --out second.json

A dense Llama in MODEL. TEMPLATE is a file of ours in which the layers' matrices are of TYPE: OUT is its copy with the other
program's blocks. Both run with their defaults, in float32. AutoRound (pip install auto-round, with llama.cpp's gguf-py,
newer than PyPI's) makes mixes alone: its q4_K_S gives attn_v another type, and is refused.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from ggufmill.formats import open_gguf

WINDOWS, N_CTX = 80, 512
NAMES = {  # of the checkpoint -> of the GGUF
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def windows(folder: Path) -> torch.Tensor:
    """int64 [WINDOWS, N_CTX]: those of the calibration text that an importance matrix is made from, each begun with BOS."""
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode((folder / "calibration.txt").read_text("utf-8")).ids
    out = torch.tensor(tokens[: WINDOWS * N_CTX]).reshape(WINDOWS, N_CTX)
    out[:, 0] = tokens[0]
    return out


def split_heads(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as a GGUF of the llama architecture has them: those that are rotated together stand together."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def transplant(template: Path, out: Path, blocks: dict[str, np.ndarray]) -> None:
    """A copy of a file with other blocks: name -> uint8 [rows, row_bytes]."""
    shutil.copy(template, out)
    tensors = open_gguf(template).tensors
    with out.open("r+b") as file:
        for name, rows in blocks.items():
            assert rows.nbytes == tensors[name].nbytes, name
            file.seek(tensors[name].offset)
            file.write(np.ascontiguousarray(rows).tobytes())


def gptq_blocks(checkout: Path, folder: Path, kind: str) -> dict[str, np.ndarray]:
    """What gptq-gguf-toolkit makes of the layers' matrices: name in the checkpoint -> uint8 [rows, row_bytes]."""
    sys.path.insert(0, str(checkout / "quant" / "gptq"))
    from src import packing_utils  # pyright: ignore[reportMissingImports]
    from src.quant_utils import GGMLQuantizationType  # pyright: ignore[reportMissingImports]
    from src.quantizer import Quantizer  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    pack = getattr(packing_utils, f"pack_{kind.upper().replace('_', '')}")
    with tempfile.TemporaryDirectory() as work:
        Quantizer(
            model,
            data_loader=[([], {"input_ids": window[None]}) for window in windows(folder)],
            quantizable_modules=r".*layers.*((q|k|v|o|gate|up|down)_proj)$",
            quantizer_kwargs={"rel_damp": 0.01, "block_size": 128, "rmin": -1.0, "rdelta": 0.1, "nstep": 20},
            pre_block_modules=["model.embed_tokens"],
            block_modules="model.layers",
            post_block_modules=["lm_head"],
            save_dir=work,
            device="cpu",
        ).quantize(dict.fromkeys(modules, GGMLQuantizationType[kind.upper()]))
        found = {}
        for path in Path(work).iterdir():
            data = torch.load(path / "data.pth", weights_only=True)
            parts = [data["qweight"], data["super_group_scale"], data["group_scale_quant"]]
            if kind not in ("q3_K", "q6_K"):
                parts += [data["super_group_zero"], data["group_zero_quant"]]
            found[path.name] = pack(*parts)
    return found


def autoround_blocks(folder: Path, kind: str, iterations: int) -> dict[str, np.ndarray]:
    """The same of AutoRound's export, whose file has the names and the order of rows of a GGUF already."""
    from auto_round import AutoRound  # pyright: ignore[reportMissingImports]
    from auto_round.export.export_to_gguf.llama_cpp_conversion import get_conversion  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer

    # It knows pre-tokenizers by hashes of published ones; blocks alone are used here.
    get_conversion(folder).module.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    with tempfile.TemporaryDirectory() as work:
        rounded: Any = AutoRound(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            AutoTokenizer.from_pretrained(folder),
            scheme=f"gguf:{kind.lower()}_s",
            iters=iterations,
            nsamples=WINDOWS,
            seqlen=N_CTX,
            dataset=[window[None] for window in windows(folder)],
            device_map="cpu",
        )
        rounded.quantize_and_save(work, format=f"gguf:{kind.lower()}_s")
        (path,) = Path(work).rglob("*.gguf")
        return {name: np.array(t.data) for name, t in open_gguf(path).tensors.items() if t.type.name == kind}


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.argument("kind")
@click.argument("template", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--gptq", type=click.Path(exists=True, path_type=Path), help="A checkout of gptq-gguf-toolkit.")
@click.option("--autoround", type=int, help="Steps of AutoRound for each block.")
def main(folder: Path, kind: str, template: Path, out: Path, gptq: Path | None, autoround: int | None) -> None:
    torch.set_num_threads(1)
    began = time.process_time()
    if autoround is not None:
        blocks = autoround_blocks(folder, kind, autoround)
    else:
        assert gptq is not None, "--gptq or --autoround"
        config, blocks = json.loads((folder / "config.json").read_text("utf-8")), {}
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        for name, rows in gptq_blocks(gptq, folder, kind).items():
            layer, _, part = name.removeprefix("model.layers.").partition(".")
            part = NAMES[part]
            blocks[f"blk.{layer}.{part}.weight"] = split_heads(rows, heads[part]) if part in heads else rows
    tensors = open_gguf(template).tensors
    same = {name: rows for name, rows in blocks.items() if name in tensors and tensors[name].type.name == kind}
    missing = [name for name, t in tensors.items() if t.type.name == kind and name not in same]
    if missing:
        raise click.ClickException(f"it made no {kind} of {', '.join(missing)}")
    transplant(template, out, same)
    click.echo(f"{len(same)} matrices, {time.process_time() - began:.0f} s", err=True)


if __name__ == "__main__":
    main()
