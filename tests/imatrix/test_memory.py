"""A model is read through its file: the anonymous memory of a collection does not grow with the model."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.formats.gguf_header import header_bytes

N_EMBD, N_FF, VOCABULARY = 1024, 4096, 256
LAYER = {
    "attn_norm": (N_EMBD,),
    "attn_q": (N_EMBD, N_EMBD),
    "attn_k": (N_EMBD, N_EMBD // 2),
    "attn_v": (N_EMBD, N_EMBD // 2),
    "attn_output": (N_EMBD, N_EMBD),
    "ffn_norm": (N_EMBD,),
    "ffn_gate": (N_EMBD, N_FF),
    "ffn_up": (N_EMBD, N_FF),
    "ffn_down": (N_FF, N_EMBD),
}
COLLECT = """
import sys
import numpy as np
from ggufmill.imatrix.collect import collect
from ggufmill.runtime import load_model
from ggufmill.runtime.graph import Observer

class Memory(Observer):
    def __init__(self, model):
        self.layers = model.graph.layers

    def wants_output(self, op):
        return op.out in self.layers

    def on_output(self, op, out):
        global most
        lines = open("/proc/self/status").read().splitlines()
        most = max(most, next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))

most = 0
for path in sys.argv[1:]:
    model = load_model(path, threads=1)
    with model.observing(Memory(model)):
        collect(model, np.arange(128) % 256, n_ctx=64)
    assert most > 0
    print(most)
"""


def write(path, type_name, layers):
    """A Llama with weights of zero, which are a hole in the file."""
    shapes = {"token_embd.weight": (N_EMBD, VOCABULARY), "output_norm.weight": (N_EMBD,), "output.weight": (N_EMBD, VOCABULARY)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(layers) for name, shape in LAYER.items()}
    numbers = {"block_count": layers, "context_length": 512, "embedding_length": N_EMBD, "feed_forward_length": N_FF}
    numbers |= {"attention.head_count": 8, "attention.head_count_kv": 4, "rope.dimension_count": N_EMBD // 8}
    metadata = {"general.architecture": "llama", **{f"llama.{key}": np.uint32(value) for key, value in numbers.items()}}
    metadata["llama.attention.layer_norm_rms_epsilon"] = np.float32(1e-5)
    tensors = [(n, shape, TYPES[type_name if len(shape) > 1 else "f32"]) for n, shape in shapes.items()]
    header, _, size = header_bytes(metadata, tensors, 32)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(size)
    return size


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_anonymous_memory_does_not_grow_with_the_model(tmp_path):
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    grown = write(large, "q8_0", 20) - write(small, "q8_0", 2)
    assert grown > 280 << 20
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(small), str(large)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert (after - before) << 10 < 48 << 20
