"""Tiny random models, as tensor sources."""

import dataclasses
import gc
import math
import weakref

import numpy as np
import pytest
from recorded_models import record_of

from ggufmill.convert import open_source
from ggufmill.formats import SourceTensor, TensorSource
from ggufmill.runtime.backends.cpu import weights
from ggufmill.runtime.graph import Observer, ops


class InputRecorder(Observer):
    """Keeps all inputs of linear ops: (name, matrix) -> [float32 [n, columns]], one per pass."""

    def __init__(self):
        self.seen = {}

    def wants_input(self, op):
        return isinstance(op, ops.Linear | ops.ExpertLinear | ops.LatentAttention)

    def on_input(self, op, weight, matrix, x):
        assert x.dtype == np.float32
        self.seen.setdefault((weight.name, matrix), []).append(x.copy())


@pytest.fixture
def input_recorder():
    return InputRecorder


def make_source(metadata, tensors):
    """tensors: name -> array in numpy order (ne order reversed)."""

    def source_tensor(name, array):
        array = np.ascontiguousarray(array, np.float32)
        flat = array.reshape(-1, array.shape[-1])
        return SourceTensor(name, array.shape[::-1], "f32", lambda start, stop: flat[start:stop])

    return TensorSource("test model", metadata, {name: source_tensor(name, t) for name, t in tensors.items()}, "test")


@pytest.fixture
def alive_stores(monkeypatch):
    """What has the weights of models that are alive, while no cycles are looked for."""
    alive, make = weakref.WeakSet(), weights.WeightStore.__init__

    def made(self, *arguments, **options):
        make(self, *arguments, **options)
        alive.add(self)

    monkeypatch.setattr(weights.WeightStore, "__init__", made)
    gc.collect()
    gc.disable()
    yield alive
    gc.enable()


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(case, layout='ik') -> tensor source of a case's random model, without a vocabulary, to be read as float32."""
    made = {}

    def get(case, layout="ik"):
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            record_of(case).write(made[case])
        source = open_source(made[case], mla_layout=layout, vocab=False)
        tensors = {n: dataclasses.replace(t, raw=None, stored=None, mapped=None) for n, t in source.tensors.items()}
        return dataclasses.replace(source, path="test model", tensors=tensors)

    return get


@pytest.fixture(scope="session")
def tokens():
    """200 token ids below 96."""
    return np.random.default_rng(3).integers(0, 96, 200)


@pytest.fixture(scope="session")
def tiny():
    """A llama of one layer with a vocabulary of single bytes, made without torch: ids 0 BOS, 1 EOS, 2.. the bytes 0 .. 255."""
    random = np.random.default_rng(5)
    n_embd, n_ff, n_head, n_kv, n_vocab = 32, 48, 4, 2, 258
    width = n_embd // n_head

    def matrix(rows, columns):
        return random.standard_normal((rows, columns), np.float32) / math.sqrt(columns)

    tensors = {
        "token_embd.weight": matrix(n_vocab, n_embd) * 4,
        "output_norm.weight": np.ones(n_embd),
        "output.weight": matrix(n_vocab, n_embd) * 2,
        "blk.0.attn_norm.weight": np.ones(n_embd),
        "blk.0.attn_q.weight": matrix(n_embd, n_embd),
        "blk.0.attn_k.weight": matrix(n_kv * width, n_embd),
        "blk.0.attn_v.weight": matrix(n_kv * width, n_embd),
        "blk.0.attn_output.weight": matrix(n_embd, n_embd),
        "blk.0.ffn_norm.weight": np.ones(n_embd),
        "blk.0.ffn_gate.weight": matrix(n_ff, n_embd),
        "blk.0.ffn_up.weight": matrix(n_ff, n_embd),
        "blk.0.ffn_down.weight": matrix(n_embd, n_ff),
    }
    byte_level = [chr(b) if chr(b).isprintable() and b not in (32, 160, 173) else None for b in range(256)]
    others = iter(range(256, 512))
    characters = [c if c is not None else chr(next(others)) for c in byte_level]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": n_head,
        "llama.attention.head_count_kv": n_kv,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", *characters],
        "tokenizer.ggml.token_type": np.array([3, 3] + [1] * 256, np.int32),
        "tokenizer.ggml.merges": ["zz zz"],  # not usable: its parts are no tokens
        "tokenizer.ggml.bos_token_id": np.uint32(0),
        "tokenizer.ggml.eos_token_id": np.uint32(1),
        "tokenizer.ggml.add_bos_token": True,
    }
    return make_source(metadata, tensors)
