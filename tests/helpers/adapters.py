"""LoRA adapters as peft saves them, and what they make of a model's weights, computed from the definition in float64."""

import json

import numpy as np
from safetensors.numpy import save_file

CONFIG = {"peft_type": "LORA", "lora_alpha": 6, "r": 4}


def random_factors(shapes, rank=4, seed=1):
    """Module -> (a [rank, columns], b [rows, rank]) for module -> (rows, columns)."""
    draw = np.random.default_rng(seed)
    sizes = {name: (rank, columns, rows) for name, (rows, columns) in shapes.items()}
    return {
        name: tuple((0.3 * draw.standard_normal(shape)).astype(np.float32) for shape in ((r, columns), (rows, r)))
        for name, (r, columns, rows) in sizes.items()
    }


def write_adapter(folder, factors, extra=None, **config):
    """A folder of peft. factors: module -> (a, b); extra: other tensors by name; config: keys of adapter_config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    parts = {"A.weight": 0, "B.weight": 1}
    tensors = {f"base_model.model.{m}.lora_{p}": ab[i] for m, ab in factors.items() for p, i in parts.items()}
    save_file(tensors | (extra or {}), folder / "adapter_model.safetensors")
    return folder


def merged(tensors, factors, scale):
    """The tensors with scale * b @ a added to each module's weight."""
    changed = {f"{m}.weight": scale * (b.astype(np.float64) @ a) for m, (a, b) in factors.items()}
    return {name: (x.astype(np.float64) + changed.get(name, 0)).astype(x.dtype) for name, x in tensors.items()}


def values(source):
    """Tensor name -> float32 rows of all matrices."""
    out = {}
    for name, tensor in source.tensors.items():
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
        out[name] = np.concatenate([tensor.read(at, at + rows) for at in range(0, tensor.n_rows, rows)])
    return out
