"""Compiles the kernels that a wheel brings, at the level that GGUFMILL_CPU names, into the folder that GGUFMILL_CACHE names.

    GGUFMILL_CPU=avx2 GGUFMILL_CACHE=kernels python docs/fill_kernels.py [TYPE ...]

Compiled are encoders and decoders of the types (all by default), the products of all of them, every part of the runtime, and
whatever else the demo's run and a dense model need. docs/release.py calls this with the package that it has installed.
"""

from __future__ import annotations

import gc
import json
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

import ggufmill
from ggufmill.formats import TYPES
from ggufmill.quantize import can_encode
from ggufmill.recipes import FOLDER
from ggufmill.runtime.backends.cpu import kernels
from ggufmill.runtime.backends.cpu.kernels.gemm import gemm
from ggufmill.runtime.backends.cpu.kernels.gemm.gemm import gemm_unit
from ggufmill.runtime.backends.cpu.kernels.gemv.gemv import gemv_unit, several_unit
from ggufmill.runtime.backends.cpu.kernels.task_kernel import OperandKernel
from ggufmill.runtime.backends.cpu.lower import SLOW_KERNELS

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float16",
    "tie_word_embeddings": True,
}


def main() -> None:
    names = sys.argv[1:] or [name for name in TYPES if can_encode(TYPES[name])]
    ggufmill.warm_up(types=names)
    for name in names:
        products(name)
    parts()
    with TemporaryDirectory() as folder:
        demo(Path(folder))
        dense(Path(folder))


def products(name: str) -> None:
    """The products of a type with one token, with several, and with a prompt."""
    stored = TYPES[name]
    for unit in (gemv_unit(name), several_unit(name)):
        unit.compile()
        unit.mark()
    for fast in (False, True):
        gemm_unit(name, fast).mark()
    columns = int(np.lcm(512, stored.block))
    packed = np.zeros((stored.rows, stored.row_bytes(columns)), np.uint8)
    for settings in ({}, {"exact": True}, {"fast": True}):
        gemm.plan_gemm(packed, stored, columns, **settings)


def parts() -> None:
    """Every part of programs that has operands; what others need of the processor, the runs below compile."""
    for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        import_module(module.name)
    slow = [part for several in SLOW_KERNELS.values() for part in several]
    for part in {*slow, *(each for each in gc.get_objects() if isinstance(each, OperandKernel))}:
        assert part.address
        part.unit.mark()


def demo(folder: Path) -> None:
    """Converts, collects, quantises, validates and generates as `ggufmill run demo` does, with a window in place of all."""
    text = (FOLDER / "demo.toml").read_text("utf-8").replace('"demo', f'"{FOLDER.as_posix()}/demo')
    recipe = folder / "recipe.toml"
    recipe.write_text(text.replace("chunks = 80", "chunks = 1").replace("n = 48", "n = 4\nchunks = 1"), "utf-8")
    ggufmill.run_recipe(recipe, out=folder / "out")


def dense(folder: Path) -> None:
    """A model with grouped heads: converted to f16, quantised to q4_K and q8_0, and run as these, with and without `fast`, with
    caches of f16 and of q8_0."""
    checkpoint = folder / "dense"
    checkpoint.mkdir()
    for source in (FOLDER / "demo").glob("tokenizer*.json"):
        (checkpoint / source.name).write_bytes(source.read_bytes())
    vocabulary = json.loads((FOLDER / "demo" / "config.json").read_text("utf-8"))["vocab_size"]
    (checkpoint / "config.json").write_text(json.dumps(DENSE | {"vocab_size": vocabulary}), "utf-8")
    hidden, inner, layer = DENSE["hidden_size"], DENSE["intermediate_size"], "model.layers.0"
    shapes = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,), f"{layer}.mlp.down_proj": (hidden, inner)}
    shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
    shapes |= {f"{layer}.self_attn.{name}_proj": (hidden // 2, hidden) for name in "kv"}
    shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    draw = np.random.default_rng(0)
    tensors = {f"{name}.weight": (draw.standard_normal(shape) / 16).astype(np.float16) for name, shape in shapes.items()}
    save_file(tensors, checkpoint / "model.safetensors")
    model, prompt = folder / "dense.gguf", (FOLDER / "demo" / "heldout.txt").read_text("utf-8")[:400]
    ggufmill.convert_model(checkpoint, model)
    for name in ("q4_K", "q8_0"):
        ggufmill.quantize_model(model, folder / f"{name}.gguf", name)
        ggufmill.perplexity(folder / f"{name}.gguf", FOLDER / "demo" / "heldout.txt", n_ctx=64, chunks=1)
        caches = {"cache_k": "q8_0", "cache_v": "q8_0"}
        for settings in ({}, {"fast": True}, caches, caches | {"fast": True}):
            list(ggufmill.runtime.load_model(folder / f"{name}.gguf", **settings).generate(prompt, 4))


if __name__ == "__main__":
    main()
