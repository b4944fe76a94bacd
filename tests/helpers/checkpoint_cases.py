"""Tiny random models of transformers for every architecture: each a row of CASES, a class of transformers and what its config
has besides COMMON."""

import dataclasses
import math

import numpy as np
from model_cases import CASES
from model_cases.common import COMMON
from recorded_models import LENGTH as LENGTH
from recorded_models import layout_of, new_config, oracle, record_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ggufmill.convert import open_source
from ggufmill.formats import TYPES, open_gguf
from ggufmill.jobs.execute import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.quantize import decode, encode

TOLERANCE = 1e-4  # of float32 against float32; logits have a standard deviation of about 1
EXACT = {"exact": True}


def randomise(model, seed=1):
    """Weights of a size that makes logits of order 1, so that a tolerance means something; norms and biases differ."""
    torch, _ = oracle()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            parts = ("inv_freq", "embed_scale", "mup_vector", "_input_scale", "projection_scale")
            if name.endswith("tid2eid"):  # the experts of each token: any, but none twice
                order = torch.rand(len(tensor), model.config.n_routed_experts, generator=generator).argsort(dim=1)
                tensor.copy_(order[:, : tensor.shape[1]])
            if any(part in name for part in parts) or not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "bias" in name:
                tensor.copy_(0.2 * noise)
            elif tensor.dim() <= 1:
                tensor.copy_(tensor.mean() + 0.2 * noise)  # around 1, or 0 where 1 + weight is what counts
            else:
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
    return model.float().eval()


def write_gguf(source, path, types=None):
    """The source as a GGUF of f32, or of other types by name; returns the path and the values that the file holds."""
    outputs, held = [], {}
    for name, tensor in source.tensors.items():
        if tensor.stored is not None and tensor.source_type == tensor.stored.name and tensor.source_type.startswith("i"):
            outputs.append(Output(name, tensor.shape, tensor.source_type, tensor.stored, "test", tensor.raw))  # whole numbers
            held[name] = tensor
            continue
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1  # of one matrix: a run must not go beyond
        values = np.concatenate([tensor.read(at, at + rows) for at in range(0, tensor.n_rows, rows)])
        kind = TYPES[(types or {}).get(name, "f32")]
        packed = encode(values, kind.name)
        outputs.append(Output(name, tensor.shape, "f32", kind, "test", lambda start, stop, q=packed: q[start:stop]))
        back = decode(packed, kind.name, tensor.shape[0])
        assert np.array_equal(back, values) != (name in (types or {}))
        held[name] = dataclasses.replace(tensor, read=lambda start, stop, x=back: x[start:stop])
    execute(make_plan(outputs, source.metadata, path), threads=1)
    return path, dataclasses.replace(source, tensors=held)


def save_tokenizer(path):
    """Of single bytes, for llama.cpp, which opens no model without."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["hello"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(path))


def file_differences(first, second):
    """Names of keys and tensors in which two files differ."""
    one, other = open_gguf(first), open_gguf(second)
    keys = [k for k in {*one.metadata, *other.metadata} if str(one.metadata.get(k)) != str(other.metadata.get(k))]
    names = {*one.tensors} ^ {*other.tensors}
    return [*keys, *names, *(n for n in one.tensors if not np.array_equal(one.tensors[n].data, other.tensors[n].data))]


def convert_record(case, folder, changes=None):
    """(record, path of the GGUF) of a case's random model; changes: of its config."""
    record = record_of(case, changes)
    record.write(folder)
    save_tokenizer(folder / "tokenizer.json")
    return record, write_gguf(open_source(folder, mla_layout=layout_of(case)), folder / "model.gguf")[0]


def convert_case(case, folder, changes=None):
    """(tokens, logits of transformers for them, path of the GGUF), with the logits of the whole vocabulary."""
    oracle()
    record, path = convert_record(case, folder, changes)
    return record.tokens, record.logits, path


def saved_model(case, folder):
    """The model of transformers whose checkpoint a record has written into a folder."""
    torch, transformers = oracle()
    architecture, _ = new_config(transformers, CASES[case][0], COMMON | CASES[case][1])
    return architecture.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
